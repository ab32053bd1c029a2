"""`set_all_reduce_hook`: the user's function that changes reduced gradients. Layer: extras."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.errors import ArgumentError
from fsdp2.runtime import hooks
from fsdp2.runtime.streams import Streams
from fsdp2.settings import change_settings, groups_of


class _OnStream:
    """Calls the hook on the user's stream."""

    def __init__(self, hook: Callable[[torch.Tensor, DeviceMesh], None], stream: Any):
        self._hook, self._stream = hook, stream

    def __call__(self, flat: torch.Tensor, mesh: DeviceMesh, streams: Streams) -> None:
        if self._stream is None or streams.lazy:
            return self._hook(flat, mesh)
        # The current stream owns `flat`, and waits until the hook's stream has finished with it.
        ready = streams.record()
        with self._stream:
            streams.wait(ready)
            self._hook(flat, mesh)
            done = streams.record()
        streams.wait(done)


def _set_hook(module: object, hook: Callable[..., None] | None, stream: torch.Stream | None) -> None:
    groups = groups_of(module)
    if stream is not None and any(group.roles.replicate_group is not None for group in groups):
        raise ArgumentError(
            "set_all_reduce_hook: stream= is for a mesh without a replicate axis; here the hook runs on the stream "
            "of the all-reduce. Pass stream=None."
        )
    meshes = {group.roles.mesh for group in groups}
    if len(meshes) > 1 and hook is not None and not _takes_mesh(hook):
        raise ArgumentError(
            f"set_all_reduce_hook: the unit's parameters are on the meshes {sorted(map(str, meshes))}; expected a hook "
            "that is called as hook(flat, mesh)"
        )
    with_mesh = hook if hook is None or len(meshes) > 1 else lambda flat, _mesh: hook(flat)
    change_settings(module, False, all_reduce_hook=None if with_mesh is None else _OnStream(with_mesh, stream))


def _takes_mesh(hook: Callable[..., Any]) -> bool:
    try:
        inspect.signature(hook).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # compiled code may have no signature
        pass
    return True


hooks.setters["set_all_reduce_hook"] = _set_hook
