"""Private names of torch for `fsdp2.checks`. Ground layer."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn

# `Module._non_persistent_buffers_set`; the public way is to make a state dict.
non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")

_to_empty: Any = nn.Module.to_empty


def makes_empty(fn: Any) -> bool:
    """Whether `fn` is the function that `Module.to_empty` defines and passes to `Module._apply`. Nothing else shows
    that it leaves memory unfilled, and `to_empty` may have been called on a module above that is not sharded."""
    code = getattr(fn, "__code__", None)
    return code is not None and any(code is const for const in _to_empty.__code__.co_consts)


def captures(leaf_node: Any) -> bool:
    """Whether the running backward is `torch.autograd.grad` with respect to the leaf of `leaf_node`: in this case torch
    raises."""
    try:
        torch._C._will_engine_execute_node(leaf_node)
    except RuntimeError:
        return True
    return False
