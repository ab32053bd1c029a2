"""`safety`: the settings of the watchdog. Layer: watch."""

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
    """Configure the detection of ranks that run units in different orders, and of waits that cannot end.

    Call it on all ranks with the same arguments, before the first forward. Without a call the defaults apply. See
    docs/launching.md for what is detected, and after how many seconds.

    Args:
        is_on: False switches everything off except the trail of exchanges and the tags on gloo's messages, which cost
            almost nothing.
        stall_after_s: how many seconds a wait for other ranks may take before they are asked what they are doing.
        answer_within_s: how many seconds a process has to answer a rank on another machine; after that it counts as
            dead. For processes on the same machine the kernel reports their state, and this setting only matters if it
            is shorter than 3 seconds.

    Raises:
        ArgumentError: a time is not above zero.

    Example::

        fsdp2.safety(stall_after_s=30.0)
    """
    for name, value in (("stall_after_s", stall_after_s), ("answer_within_s", answer_within_s)):
        if not value > 0:
            raise ArgumentError(f"safety: expected {name} > 0, got {value}")
    _settings[0] = Settings(is_on, stall_after_s, answer_within_s)
