"""`safety`: what is watched, and after how long. Layer: watch."""

from dataclasses import dataclass

from fsdp2.errors import ArgumentError


@dataclass(frozen=True)
class Settings:
    """See `safety`."""

    is_on: bool = True
    stall_after_s: float = 3.0
    answer_within_s: float = 30.0


_settings = [Settings()]


def settings() -> Settings:
    """The settings in force."""
    return _settings[0]


def safety(is_on: bool = True, *, stall_after_s: float = 3.0, answer_within_s: float = 30.0) -> None:
    """Set how ranks that differ are found: ranks that run units in another order, and waits that cannot end.

    Call it on all ranks with the same arguments, before the first forward. Without a call the defaults apply. See
    docs/safety.md for what is found, and after how many seconds.

    Args:
        is_on: False switches everything off but the list of what was done and the marks on gloo's messages, which cost
            next to nothing.
        stall_after_s: seconds that a wait for other ranks may take before they are asked what they do.
        answer_within_s: seconds within which a process answers on another machine than that of the rank which compares
            the answers. One that does not is taken to be dead. On the same machine the kernel tells what has become of
            a process, and this matters only if it is shorter than 3 seconds.

    Raises:
        ArgumentError: a time is not above zero.

    Example::

        fsdp2.safety(stall_after_s=30.0)
    """
    for name, value in (("stall_after_s", stall_after_s), ("answer_within_s", answer_within_s)):
        if not value > 0:
            raise ArgumentError(f"safety: expected {name} > 0, got {value}")
    _settings[0] = Settings(is_on, stall_after_s, answer_within_s)
