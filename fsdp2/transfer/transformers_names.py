"""The tensors that `save_pretrained` of transformers writes, as pieces of the model's tensors. Layer: transfer.

transformers' own code makes them from stand-ins without memory, which it slices and transposes like tensors. Each
stand-in has its own range of one long tensor, and its own strides. So the offset and strides of a result identify the
rectangle and the tensor from which it comes.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import accumulate
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn

from fsdp2._torch.shared import storage_key
from fsdp2.checkpoint.formats.transformers_weights import skeleton
from fsdp2.checkpoint.ranks.world import Entry
from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.layout import strides
from fsdp2.placement.box import Box
from fsdp2.transfer.items import Item, Meta, Piece

# Attributes of transformers models: names that are not written, and the conversions that `from_pretrained` has done.
IGNORED, CONVERSIONS = "_keys_to_ignore_on_save", "_weight_conversions"


class _Traced(torch.Tensor):
    """A stand-in. A copy is the stand-in itself. A concatenation has `joined`: where each part begins."""

    joined: tuple[tuple[tuple[int, ...], torch.Tensor], ...] = ()
    _COPIES: ClassVar[tuple[Any, ...]] = (torch.Tensor.contiguous, torch.Tensor.clone)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls._COPIES:
            return args[0]
        found: Any = super().__torch_function__(  # type: ignore[no-untyped-call]
            func, types, args, kwargs or {}
        )
        if func is torch.cat:
            parts = args[0]
            dim = (kwargs or {}).get("dim", args[1] if len(args) > 1 else 0)
            starts = accumulate((part.shape[dim] for part in parts), initial=0)
            corners = [tuple(start if d == dim % found.ndim else 0 for d in range(found.ndim)) for start in starts]
            found.joined = tuple(zip(corners, parts, strict=False))
        return found


def published(model: nn.Module, entries: Mapping[str, Entry]) -> Iterator[Item]:
    """What `save_pretrained` would write for a transformers model, in its order.

    Raises:
        ArgumentError: the model is not from transformers.
        UnsupportedError: a tensor is not made of rectangles of the model's tensors.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        raise ArgumentError(f"weights: names='transformers' needs a model of transformers, got {type(model).__name__}")
    loading = import_module("transformers.core_model_loading")
    ignored = getattr(model, IGNORED, None) or ()
    kept = [entry for entry in entries.values() if entry.name not in ignored]
    arena = _Arena(kept)
    for name, made in loading.revert_weight_conversion(_empty(model, kept), dict(arena.tensors)).items():
        parts = made.joined or (((0,) * made.ndim, made),)
        pieces = [piece for piece in (arena.piece(part, at) for at, part in parts) if piece is not None]
        if len(pieces) < len(parts):
            raise UnsupportedError(
                f"weights: transformers writes '{name}' in a way that is more than cutting, transposing and joining. "
                "Publish the model's own names, with a function as names="
            )
        yield Item(Meta(name, entries[pieces[0].key].local.dtype, tuple(made.shape)), tuple(pieces))


def _empty(model: Any, entries: list[Entry]) -> Any:
    """The model without memory, with its classes from before sharding."""
    found = skeleton(model, import_module("transformers.modeling_utils").PreTrainedModel)
    for entry in entries:
        path, _, leaf = entry.name.rpartition(".")
        shape = torch.empty(entry.tiling.shape, device="meta")
        found.get_submodule(path).register_parameter(leaf, nn.Parameter(shape, requires_grad=False))
    setattr(found, CONVERSIONS, getattr(model, CONVERSIONS, None))
    return found


class _Arena:
    """The stand-ins of a model's tensors.

    Attributes:
        tensors: the stand-ins by name.
    """

    def __init__(self, entries: list[Entry]):
        self._entries = entries
        self._strides = [strides([size + 2 for size in entry.tiling.shape]) for entry in entries]
        sizes = [prod(size + 2 for size in entry.tiling.shape) for entry in entries]
        self._starts = [*accumulate(sizes, initial=0)]
        self._memory = torch.empty(self._starts[-1], dtype=torch.int8, device="meta")
        self.tensors: dict[str, torch.Tensor] = {}
        for entry, steps, start in zip(entries, self._strides, self._starts, strict=False):
            self.tensors[entry.name] = self._memory.as_strided(entry.tiling.shape, steps, start).as_subclass(_Traced)

    def piece(self, part: torch.Tensor, at: tuple[int, ...]) -> Piece | None:
        """The part of the model's tensor that `part` is; None if it is the result of other operations."""
        if storage_key(part)[0] != storage_key(self._memory)[0]:
            return None
        index = bisect_right(self._starts, part.storage_offset()) - 1
        entry, steps = self._entries[index], self._strides[index]
        if any(step not in steps for step in part.stride()):
            return None
        rest, start = part.storage_offset() - self._starts[index], []
        for step in steps:
            start.append(rest // step)
            rest %= step
        dims = tuple(steps.index(step) for step in part.stride())
        sizes = [1] * len(steps)
        for dim, size in zip(dims, part.shape, strict=True):
            sizes[dim] = size
        return Piece(entry.name, entry.tiling, Box(tuple(start), tuple(sizes)), dims, at)
