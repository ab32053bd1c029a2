"""`Weights`: which tensors of a model are published, under which names and in which dtypes. Layer: transfer, top."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.errors import ArgumentError, OrderError
from fsdp2.transfer import boxes
from fsdp2.transfer.adapters import adapters_of
from fsdp2.transfer.boxes import Part, Place, Wanted
from fsdp2.transfer.buckets import Bucket, Pass
from fsdp2.transfer.changes import Change, Snapshot, changes_since
from fsdp2.transfer.items import Item, Meta, item_of
from fsdp2.transfer.local import Local
from fsdp2.transfer.route import Route

if TYPE_CHECKING:
    from fsdp2.checkpoint.ranks.world import Entry

Names: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None] | Literal["transformers"]
Dtypes: TypeAlias = torch.dtype | Callable[[str, torch.dtype], torch.dtype | None]

BUCKET_BYTES = 256 << 20


def weights(
    model: nn.Module,
    names: Names | None = None,
    dtype: Dtypes | None = None,
    *,
    buffers: bool = True,
    only: Callable[[str], bool] | None = None,
    patience_s: float = 60.0,
) -> "Weights":
    """A plan for publishing `model`: its parameters and persistent buffers, tied ones once. No communication; all ranks
    that share parameters must make the same plan.

    The model may be sharded by fsdp2 or by torch's own `fully_shard`, over any mesh, or not at all. Its parameters are
    read when a pass begins, so one plan serves for the whole training.

    LoRA adapters of peft are merged, as `merge_and_unload` would do. In this case everything that reads values is
    collective.

    Args:
        model: sharded or not. Names are those of its state dict, without the segments that wrappers add.
        names: a mapping or a function from names to published names; None leaves the tensor out. A name that a mapping
            lacks stays unchanged. "transformers": for a transformers model (5 and later), the tensors that its
            `save_pretrained` writes; fused weights and stacked experts are split into those of the Hugging Face
            checkpoint, which engines load.
        dtype: the dtype in which floating-point tensors are sent; or a function of (published name, dtype) that returns
            None for a tensor that stays as it is. Tensors are cast before they are sent.
        buffers: False leaves buffers out.
        only: called with each published name; tensors for which it returns False are left out.
        patience_s: how long a pass waits for a rank with a slow consumer before it is an error on all ranks.

    Raises:
        ArgumentError: two tensors get the same published name; a tensor cannot be published (sparse); or "transformers"
            names were requested for another model.
        UnsupportedError: transformers computes a written tensor in an unknown way; or an adapter is more than a product
            of two matrices.

    Example::

        plan = fsdp2.weights(model, dtype=torch.bfloat16)
        for name, tensor in plan:  # on every rank
            if dist.get_rank() == 0:
                engine.load(name, tensor)
    """
    return Weights(model, names, dtype, buffers, only, patience_s, merges=True)


class Weights:
    """The plan of a model's published tensors; see `weights`. It can be iterated any number of times: each pass yields
    (name, whole tensor) pairs in the order of `metadata`. Collective: every rank must iterate to the end.

    Attributes:
        version: the number of passes that have begun.
        checksum: the checksum of the last complete pass, equal on all ranks that got the same bytes; None before.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Names | None,
        dtype: Dtypes | None,
        buffers: bool,
        only: Callable[[str], bool] | None,
        patience_s: float,
        merges: bool,
    ):
        # Checkpoints are loaded on demand.
        self._state = import_module("fsdp2.checkpoint.state.model")
        self._model = self._state.unwrapped(model)
        self._adapters = adapters_of(self._model, self._state.clean_name) if merges else None
        ranks = tuple(range(dist.get_world_size())) if dist.is_initialized() else (0,)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world = import_module("fsdp2.checkpoint.ranks.world").World(self._rank, ranks)
        self._items: dict[str, Item] = {}
        self.patience_s = patience_s
        self.version = 0
        self.checksum: int | None = None
        entries = self._entries()
        for item in self._published(entries, names):
            name, own, shape = item.meta
            if not buffers and not all(isinstance(entries[each.key].outside, nn.Parameter) for each in item.pieces):
                continue
            if only is not None and not only(name):
                continue
            if name in self._items:
                raise ArgumentError(
                    f"weights: '{self._items[name].pieces[0].key}' and '{item.pieces[0].key}' would both be '{name}'"
                )
            self._items[name] = replace(item, meta=Meta(name, _wire(name, own, dtype), shape))

    def _published(self, entries: "Mapping[str, Entry]", names: Names | None) -> Iterator[Item]:
        """All tensors under their published names, in the model's dtypes."""
        if names == "transformers":
            model = self._adapters.model if self._adapters is not None else self._model
            yield from import_module("fsdp2.transfer.transformers_names").published(model, entries)
            return
        for entry in entries.values():
            name = _renamed(entry.name, names)
            if name is not None:
                yield item_of(Meta(name, entry.local.dtype, entry.tiling.shape), entry.name, entry.tiling)

    def _entries(self) -> "Mapping[str, Entry]":
        entries: Mapping[str, Entry] = self._state.model_state(self._model, self._world).entries
        return entries if self._adapters is None else self._adapters.renamed(entries)

    def metadata(self) -> list[Meta]:
        """(name, dtype, shape) of each tensor of a pass, in order. No communication."""
        return [item.meta for item in self._items.values()]

    def local(self, name: str) -> torch.Tensor:
        """This rank's part of a tensor, in the dtype in which it is sent: a view, or a copy if it must be cast. `boxes`
        has its place. No communication.

        Raises:
            ArgumentError: the tensor is made of several tensors of the model.
        """
        item = self._item(name)
        if len(item.pieces) > 1:
            parts = [piece.key for piece in item.pieces]
            raise ArgumentError(f"local: '{name}' is made of {parts}, so it is not one view; use send_boxes")
        return self._local([item])(0, 0)

    def _item(self, name: str) -> Item:
        if name not in self._items:
            raise ArgumentError(f"weights: the plan has no '{name}'; it has {[*self._items][:5]} and others")
        return self._items[name]

    def _local(self, items: Sequence[Item], cast: bool = True) -> Local:
        """What this rank holds now. Collective if adapters are merged.

        Raises:
            OrderError: the model's tensors have changed since the plan was made.
        """
        entries = self._entries()
        for piece in (piece for item in items for piece in item.pieces):
            entry = entries.get(piece.key)
            if entry is None or entry.tiling != piece.tiling:
                cuts = "" if entry is None else f"{entry.tiling.cuts} of {entry.tiling.shape}"
                raise OrderError(
                    f"weights: '{piece.key}' {'is now sharded as ' + cuts if entry else 'no longer exists'}. The "
                    "model has changed since the plan was made; make a new plan."
                )
        deltas = None
        if self._adapters is not None:
            own = Weights(self._model, None, None, False, self._adapters.is_needed, self.patience_s, merges=False)
            whole = {name: tensor.clone() for name, tensor in own}
            deltas = partial(self._adapters.deltas, whole=whole)
        return Local(items, entries, cast, deltas)

    # --- whole tensors -----------------------------------------------------------------------------------------------

    def full(
        self,
        bucket_bytes: int = BUCKET_BYTES,
        lookahead: int = 2,
        to: Literal["all", "first"] = "all",
        device: torch.device | str | None = None,
    ) -> Iterator[Bucket]:
        """One pass: whole tensors in buckets of about `bucket_bytes`. Collective over all ranks that hold parts: each
        must iterate to the end, with the same arguments. One collective per bucket.

        When a bucket is yielded it has arrived, and the next ones are in flight. So a rank with a slow consumer delays
        the others, but no two ranks wait for each other.

        Args:
            bucket_bytes: the size of a bucket. A larger tensor has a bucket of its own, in several collectives.
            lookahead: how many buckets are in flight while the consumer has one; at least 1. This rank needs memory for
                ``lookahead + 1`` buckets, or for `lookahead` buckets and the largest tensor.
            to: "first" sends everything only to the first rank; the others get buckets without memory.
            device: the device of the buckets; None: where they arrive.

        Raises:
            OrderError: another rank left the pass; or the model has changed since the plan was made.
            CollectiveError: another rank died, or its consumer was slower than `patience_s`.

        Example::

            for bucket in plan.full(bucket_bytes=1 << 28):
                send(bucket.flat, [(t.name, t.dtype, t.shape, t.offset) for t in bucket.tensors])
        """
        if to not in ("all", "first"):
            raise ArgumentError(f"full: expected to='all' or 'first', got {to!r}")
        if bucket_bytes < 1 or lookahead < 0:
            raise ArgumentError(f"full: expected bucket_bytes >= 1 and lookahead >= 0, got {bucket_bytes}, {lookahead}")
        items = [*self._items.values()]
        self.version += 1
        local = self._local(items, cast=False)
        one = Pass(items, local, Route(items, local.device, self._rank, self.patience_s), self.version)
        yield from one.buckets(bucket_bytes, max(lookahead, 1), to == "first", device)
        self.checksum = one.checksum

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self.full():
            yield from bucket

    def __len__(self) -> int:
        return len(self._items)

    # --- parts -------------------------------------------------------------------------------------------------------

    def boxes(self, rank: int | None = None) -> list[Place]:
        """The part of each tensor that a rank holds. No communication.

        Args:
            rank: the global rank; None for this one. There is no entry for a tensor of which the rank holds nothing.
        """
        return boxes.boxes_of(self._items.values(), self._rank if rank is None else rank)

    def send_boxes(self, wanted: Sequence[Wanted]) -> Iterator[Part]:
        """The parts that this rank must send to consumers, directly from its shards. No communication: send them in any
        way. Of several replicas only the first sends, so every wanted element comes from exactly one rank.

        Args:
            wanted: slices of whole tensors (for tensor- or expert-parallel consumers, uneven or not).

        Example::

            for part in plan.send_boxes([Wanted("lm_head.weight", consumer=7, start=(1024, 0), shape=(1024, 4096))]):
                dist.send(part.tensor.contiguous(), part.consumer)
        """
        sent = boxes.parts_for(wanted, {each.name: self._item(each.name) for each in wanted}, self._rank)
        local = self._local([self._item(each.name) for each in wanted])
        for each, of, piece, own, box in sent:
            start = box.within(boxes.box_of(each)).start
            yield Part(each.name, each.consumer, start, local(of, piece, box.within(own).slices()), of)

    # --- changes -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The current values of this rank's shards, as they would be sent; for `changes`. No communication."""
        items = [*self._items.values()]
        return Snapshot([each.clone() for each in self._local(items).all()])

    def changes(self, since: Snapshot) -> Iterator[Change]:
        """The bitwise changes since a snapshot, in the order of `metadata`; tensors without a change are left out.
        Afterwards `since` has the current values. Collective, like a pass.

        Yields:
            (name, indices, values, shape): ascending row-major positions in the whole tensor (int32, or int64 for
            tensors of more than 2**31 elements), and the current values there.

        Example::

            known = plan.snapshot()
            ...  # steps
            for name, indices, values, _ in plan.changes(known):
                engine_weights[name].view(-1)[indices] = values
        """
        items = [*self._items.values()]
        local = self._local(items)
        yield from changes_since(items, local, since, Route(items, local.device, self._rank, self.patience_s))


def _renamed(name: str, names: Names | None) -> str | None:
    if names is None:
        return name
    if not isinstance(names, Mapping) and not callable(names):
        raise ArgumentError(f"weights: expected names= as a mapping, a function or 'transformers', got {names!r}")
    return names.get(name, name) if isinstance(names, Mapping) else names(name)


def _wire(name: str, own: torch.dtype, dtype: Dtypes | None) -> torch.dtype:
    wanted = dtype if dtype is None or isinstance(dtype, torch.dtype) else dtype(name, own)
    return wanted if wanted is not None and own.is_floating_point else own
