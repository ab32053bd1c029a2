"""The hooks that change the all-gather of one parameter: `fsdp_pre_all_gather` and `fsdp_post_all_gather`. Layer:
runtime, below the parameter.

A sharded parameter's local tensor may be of a subclass with these methods (an fp8 or a quantised weight), or have them
as attributes. Then its all-gather sends the tensors that `pre` returns, and `post` makes the unsharded tensor from the
received ones::

    pre(mesh, outer_size, outer_stride, module, mp_policy) -> (tensors, metadata)
    post(gathered tensors, metadata, param_dtype)          -> (unsharded tensor, tensors that it keeps its data in)
    post(gathered tensors, metadata, param_dtype, out=unsharded tensor) -> None    from the second time on

The gathered tensors have dim 0 times the number of shards. The interface is that of torch's FSDP2.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.errors import MisuseError
from fsdp2.policies import MixedPrecisionPolicy

_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


class Extension(Protocol):
    """See the module's docstring."""

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., tuple[Sequence[torch.Tensor], Any]]:
        """Returns the tensors that this rank sends."""

    @property
    def fsdp_post_all_gather(self) -> Callable[..., Any]:
        """Makes the unsharded tensor from the received ones."""


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a local tensor is of a subclass, whose memory only its own operators may access."""
    return type(tensor) not in (torch.Tensor, nn.Parameter)


def extension_of(fqn: str, local: torch.Tensor) -> Extension | None:
    """The hooks that `local` has, if any. Raises `MisuseError` for one hook without the other, or one that cannot be
    called as described above."""
    found: Any = local
    pre, post = getattr(local, "fsdp_pre_all_gather", None), getattr(local, "fsdp_post_all_gather", None)
    if (pre is None) != (post is None):
        has, lacks = ("pre", "post") if post is None else ("post", "pre")
        raise MisuseError(f"'{fqn}' has fsdp_{has}_all_gather but no fsdp_{lacks}_all_gather; it needs both or none")
    if pre is None:
        if getattr(local, _RELEASE, None) is not None:
            raise MisuseError(f"'{fqn}' has {_RELEASE} but no fsdp_pre_all_gather and fsdp_post_all_gather")
        return None
    num_args = len(inspect.signature(pre).parameters)
    if num_args not in (1, 5):
        raise MisuseError(
            f"'{fqn}': fsdp_pre_all_gather takes {num_args} arguments; expected (mesh, outer_size, outer_stride, "
            "module, mp_policy), or (mesh)"
        )
    releases_outputs(fqn, found)
    return found  # type: ignore[no-any-return]


def releases_outputs(fqn: str, extension: Extension) -> bool:
    """Whether the gathered tensors may be freed once `post` has read them."""
    ask = getattr(extension, _RELEASE, None)
    answer = False if ask is None else ask()
    if not isinstance(answer, bool):
        raise MisuseError(f"'{fqn}': {_RELEASE} must return a bool, got {answer!r}")
    return answer


def call_pre(
    extension: Extension,
    mesh: DeviceMesh,
    size: Sequence[int],
    stride: Sequence[int],
    module: nn.Module | None,
    policy: MixedPrecisionPolicy,
) -> tuple[list[torch.Tensor], Any]:
    """The tensors that this rank sends, and the metadata for `post`."""
    pre = extension.fsdp_pre_all_gather
    if len(inspect.signature(pre).parameters) == 1:
        tensors, metadata = pre(mesh)
    else:
        tensors, metadata = pre(mesh, torch.Size(size), tuple(stride), module, policy)
    return list(tensors), metadata
