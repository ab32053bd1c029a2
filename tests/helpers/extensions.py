"""Tensors with an all-gather extension: they say themselves what is gathered and what becomes of it."""

from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor

from fsdp2 import fully_shard

aten = torch.ops.aten
keep_version = torch.autograd._unsafe_preserve_version_counter
Gathered = tuple[Tensor, ...]


class Wrapped(torch.Tensor):
    """A tensor around a plain one, which keeps its class through the operations that such subclasses know (those of
    torchao's float8 weights), and in all others becomes plain.

    Attributes:
        seen: what the extension's functions were called with, shared by all tensors made from one another.
    """

    KEEPS = (
        *(aten.empty_like.default, aten.new_zeros.default, aten.slice.Tensor, aten.copy_.default, aten.view.default),
        *(aten.as_strided.default, aten._to_copy.default, aten._pin_memory.default, aten.split.Tensor),
        *(aten.clone.default, aten.detach.default),
    )
    plain: Tensor
    seen: dict[str, list[Any]]

    @staticmethod
    def __new__(cls, plain: Tensor, seen: dict[str, list[Any]]) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            plain.shape,
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=plain.device,
            requires_grad=plain.requires_grad,
        )

    def __init__(self, plain: Tensor, seen: dict[str, list[Any]]) -> None:
        self.plain = plain
        self.seen = seen

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["plain"], self.seen

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], seen: Any, size: Any, stride: Any) -> Any:
        return cls(inner["plain"], seen)

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({self.plain})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen: dict[str, list[Any]] | None = None

        def unwrap(tensor: Wrapped) -> Tensor:
            nonlocal seen
            seen = tensor.seen if seen is None else seen
            return tensor.plain

        args, kwargs = torch.utils._pytree.tree_map_only(Wrapped, unwrap, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func not in cls.KEEPS:
            return result
        assert seen is not None
        return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: cls(tensor, seen), result)

    def note(self, what: str, value: Any) -> None:
        self.seen.setdefault(what, []).append(value)

    def padded(self, mesh: DeviceMesh, outer_size: torch.Size) -> Tensor:
        """This rank's rows and as many zeros as make all ranks' shares equal."""
        rows = -(-outer_size[0] // mesh.size())
        return nn.functional.pad(self.plain, [0, 0] * (self.plain.ndim - 1) + [0, rows - self.plain.shape[0]])


class InPieces(Wrapped):
    """Gathers the rounded values and the rest as two tensors of two dtypes; together they are exact."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[Gathered, Any]:
        self.note("pre", (mesh, outer_size, outer_stride, module, mp_policy))
        padded = self.padded(mesh, outer_size)
        rounded = padded.bfloat16()
        return (rounded, padded - rounded.float()), {"rows": outer_size[0]}

    def fsdp_post_all_gather(
        self, all_gather_outputs: Gathered, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, Gathered] | None:
        rounded, rest = all_gather_outputs
        self.note("post", ([tuple(each.shape) for each in all_gather_outputs], metadata, param_dtype, out))
        assert (rounded.dtype, rest.dtype) == (torch.bfloat16, self.plain.dtype)
        value = (rounded.float() + rest)[: metadata["rows"]].to(param_dtype)
        if out is None:
            value = value.contiguous()
            return value, (value,)
        assert out.untyped_storage().nbytes() >= value.nbytes, "its memory is there again"
        with torch.no_grad(), keep_version(out):
            out.copy_(value)
        return None


def layers_in_pieces(**options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for layer in model:
        layer.weight = nn.Parameter(InPieces(layer.weight.detach().clone(), {}))
        fully_shard(layer, **options)
    return fully_shard(model, **options)


class GatheredTwice(Wrapped):
    """Gathers two tensors of one shape, and computes with torch's own subclass of two."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[Gathered, Any]:
        weight = self.padded(mesh, outer_size)
        return (weight, 2 * weight), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: Gathered, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, Gathered] | None:
        return None if out is not None else (TwoTensor(*all_gather_outputs), all_gather_outputs)
