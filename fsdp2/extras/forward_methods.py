"""Methods other than `forward` that drive a unit. Layer: extras."""

from functools import wraps
from types import MethodType
from typing import Any

from torch import nn

from fsdp2.errors import ArgumentError
from fsdp2.module import FSDPModule
from fsdp2.runtime.forward import post_forward, pre_forward
from fsdp2.runtime.state import entries


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method other than `forward` an entry point: calling it unshards, and backward may start from its output.
    Does nothing on a module that is not sharded, so model code may call it unconditionally. Raises `ArgumentError` if
    the module has no such method.

    Example::

        register_fsdp_forward_method(model, "generate")
        model.generate(tokens)
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ArgumentError(f"register_fsdp_forward_method: {type(module)} has no method '{method_name}'")
    function = getattr(method, "__func__", None)

    def entry(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            args, kwargs = pre_forward(self, args, kwargs)
            # Prefer the class's function to the bound method, because a copy of the module must not run the original's.
            output = method(*args, **kwargs) if function is None else function(self, *args, **kwargs)
        except BaseException:
            post_forward(self, args, None)  # while the exception is handled: the forward raised
            raise
        return post_forward(self, args, output)

    entries.add(entry.__code__)
    setattr(module, method_name, MethodType(wraps(method)(entry), module))
