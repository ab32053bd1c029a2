"""Why a program ended with "got mixed torch.Tensor and DTensor". Layer: surface, below `api`.

Code computed with sharded parameters although no hook had gathered them. None of our code runs before torch raises, so
the explanation is added where the error ends the program: Python then calls `sys.excepthook` with the traceback, and
its frames hold the modules. A step costs nothing more.
"""

import sys
from collections.abc import Iterator
from traceback import walk_tb
from types import TracebackType

from torch import nn

from fsdp2.runtime.attach import owners_of
from fsdp2.runtime.unit import Unit, unit_of

_MIXED = "got mixed torch.Tensor and DTensor"
_CALLS = ("_call_impl", "_wrapped_call_impl")  # of nn.Module: what runs the hooks
_GENERAL = (
    "fsdp2: sharded parameters were used together with plain tensors, although no hook had gathered them. Call the "
    "sharded module, or use its parameters within fsdp2.full_params(module)."
)


def explain_mixed_tensors() -> None:
    """Add an explanation to this error of torch when it ends the program. Whatever `sys.excepthook` was runs then."""
    if getattr(sys.excepthook, "explains_mixed_tensors", False):
        return
    earlier = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (note := explanation(error)) is not None:
            error.add_note(note)
        earlier(kind, error, trace)

    hook.explains_mixed_tensors = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def explanation(error: BaseException) -> str | None:
    """Which module was not called, and what to write; None for another error."""
    if not isinstance(error, RuntimeError) or _MIXED not in str(error):
        return None
    frames = list(_module_frames(error.__traceback__))
    found = ((module, unit) for _, module in reversed(frames) for unit in (*owners_of(module), unit_of(module)) if unit)
    holder, unit = next(found, (None, None))
    if holder is None or unit is None:
        return _GENERAL
    of_unit = [name for name, module in frames if any(module is each for each in unit.modules)]
    if any(name in _CALLS for name in of_unit):  # the hooks ran; something else is wrong
        return _GENERAL
    needs = f"fsdp2: {_named(holder)} needs parameters of unit {_unit_named(unit)}"
    if not of_unit:
        return (
            f"{needs}, which were sharded, since that module was not called. Call it, or make the {_named(holder)} "
            "a unit of its own: fully_shard(...) on it, before the modules around it."
        )
    if of_unit[0] == "forward":
        return f"{needs}, which were sharded, since .forward(...) runs no hooks. Call the module itself: module(...)."
    return (
        f"{needs}, which were sharded, since its method '{of_unit[0]}' runs no hooks. Register it, once, after "
        f"fully_shard: fsdp2.register_fsdp_forward_method(module, '{of_unit[0]}')."
    )


def _module_frames(trace: TracebackType | None) -> Iterator[tuple[str, nn.Module]]:
    """The methods of modules on the stack where the error was raised, outermost first."""
    for frame, _ in walk_tb(trace):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield frame.f_code.co_name, owner


def _named(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")


def _unit_named(unit: Unit) -> str:
    classes = ", ".join(_named(module) for module in unit.modules)
    return f"'{unit.fqn}' ({classes})" if unit.fqn else f"({classes})"
