"""`set_auto_forward_prefetch`: prefetch in forward what ran next in the last two iterations. Layer: extras."""

from typing import Any
from weakref import ref

from fsdp2.events import profiler_range
from fsdp2.runtime import hooks
from fsdp2.runtime.unit import Unit, unit_for
from fsdp2.settings import change_settings


class Prediction:
    """Prefetches by the order in which the units of one root started before. An explicit list takes precedence."""

    def __init__(self, step: Any):
        self._step = ref(step)
        self._starts: list[ref[Unit]] = []  # of this forward
        self._last: list[ref[Unit]] = []  # of the one before
        self._follows = False  # the last two forwards had the same order, and this one has it so far
        self._guesses: list[ref[Unit]] = []

    def before_forward(self, *_: object) -> None:
        """The root's forward starts."""
        self._follows = bool(self._starts) and self._starts == self._last
        self._last, self._starts = self._starts, []
        self._guesses = []
        step: Any = self._step()
        is_on: bool = step.root().settings.features.get("auto_prefetch", False)
        is_called = self.started in step.hooks.unit_started
        if is_on and not is_called:
            step.hooks.unit_started.append(self.started)
        elif is_called and not is_on:
            step.hooks.unit_started.remove(self.started)

    def started(self, unit: Unit) -> None:
        """`unit` starts: prefetch the one that ran next."""
        step: Any = self._step()
        if step.order is None:
            return
        position = len(self._starts)
        self._starts.append(ref(unit))
        if not self._follows or position + 1 >= len(self._last) or self._last[position] != ref(unit):
            self._follows = False
            return
        self._guesses.append(self._last[position + 1])
        guess = self._last[position + 1]()
        if guess is not None and not unit.forward_prefetch:
            with profiler_range("FSDP::forward_prefetch for", guess.fqn):
                guess.unshard(prefetching=True)

    def after_forward(self) -> None:
        """Reshard what was prefetched and did not run."""
        for unit in [weak() for weak in self._guesses if weak not in self._starts]:
            if unit is not None and unit.settings.reshard_after_forward:
                unit.reshard()
        self._guesses = []


def _follow_root(step: Any) -> None:
    prediction = Prediction(step)
    step.hooks.before_forward.append(prediction.before_forward)
    step.hooks.after_forward.append(prediction.after_forward)


def _set(module: Any, enable: bool) -> None:
    unit = unit_for(module)
    change_settings(module, False, features={**unit.settings.features, "auto_prefetch": enable})


hooks.root_made.append(_follow_root)
hooks.setters["set_auto_forward_prefetch"] = _set
