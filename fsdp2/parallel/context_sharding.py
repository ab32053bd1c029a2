"""Sequences over a context axis: batches, positions, labels, and the mean over all tokens. Layer: parallel.

Sequences are split as in `ring_attention`: each rank gets one chunk from the head and one from the tail. So a rank's
rows are not contiguous. Everything that depends on positions (rotary embeddings) or on the next token (labels) is
computed for the whole sequence and split like the tokens.

The *sum* of the parameter gradients over the context ranks is the gradient of the sum of their losses, as with
data-parallel ranks: ring attention sends the gradients of other ranks' keys and values to their owners. `fully_shard`
divides it by the number N of all data ranks (replicate x shard x context). So for the mean over all tokens each rank
uses the loss ``N * (sum of local losses) / (number of tokens of all ranks)``, which is `token_mean`.
"""

from collections.abc import Mapping
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.errors import ArgumentError
from fsdp2.parallel.agreement import agree
from fsdp2.parallel.ring_attention import context_group, rank_slices

__all__ = ["next_token_labels", "positions", "shard_sequence", "token_mean", "unshard_sequence"]

Batch = TypeVar("Batch", bound=torch.Tensor | Mapping[str, torch.Tensor])
Dims = int | Mapping[str, int | None]

_ONE_BATCH = (
    "The ranks of a context group share one batch: let the data loader go by the data-parallel rank (replicate x "
    "shard), not by the global one, and shuffle with the same seed."
)
_compared: WeakSet[dist.ProcessGroup] = WeakSet()  # groups whose batches' contents were compared once


def shard_sequence(batch: Batch, mesh: DeviceMesh, dims: Dims = 1) -> Batch:
    """This rank's rows of sequences: inputs, labels, position ids, masks of ones, rotary tables.

    Every rank of `mesh` must call it with the same batch. This is checked across ranks: names, shapes and dtypes once
    for each new combination, and in the first call also the contents. Otherwise it does not communicate.

    Args:
        batch: one tensor, or tensors by name. The length ``n`` along the sequence dim must be a multiple of twice the
            number of ranks.
        mesh: the 1-D context axis, such as ``mesh["cp"]``.
        dims: the sequence dim of all tensors, or one per name, with None (or no entry) for tensors that stay whole.

    Returns:
        The same with ``n / ranks`` rows along the sequence dim, contiguous. Tensors that stay whole are the same
        objects.

    Raises:
        ArgumentError: a length is not such a multiple, a tensor lacks the dim, `dims` has an unknown name, or ranks
            have different batches (raised on all of them).

    Example::

        batch = {"input_ids": ids, "labels": next_token_labels(ids), "position_ids": torch.arange(n).expand_as(ids)}
        batch = shard_sequence(batch, mesh["cp"])
    """
    named, wanted = _cut_along(batch, mesh, dims)
    if mesh.size() > 1:
        group, whole = mesh.get_group(), {name: named[name] for name in wanted}
        facts = {f"'{name}'": f"{list(each.shape)} {each.dtype} dim {wanted[name]}" for name, each in whole.items()}
        if group not in _compared:
            facts |= {f"contents of '{name}'": _digest(each) for name, each in whole.items()}
        agree(group, "shard_sequence", facts, _ONE_BATCH)
        _compared.add(group)
    cut = {name: _rows(named[name], dim, mesh) for name, dim in wanted.items()}
    return cast(Batch, cut[""] if isinstance(batch, torch.Tensor) else {**named, **cut})


def unshard_sequence(batch: Batch, mesh: DeviceMesh, dims: Dims = 1) -> Batch:
    """The whole sequences from each rank's part, which comes from `shard_sequence` or from a model; the same on every
    rank. Without gradients: to inspect logits or generated text, and for tests.

    Collective: every rank of `mesh` must call it; one all-gather per tensor.

    Arguments and errors are those of `shard_sequence`.
    """
    named, wanted = _cut_along(batch, mesh, dims)
    whole = {name: _gather(named[name].detach(), dim, mesh) for name, dim in wanted.items()}
    return cast(Batch, whole[""] if isinstance(batch, torch.Tensor) else {**named, **whole})


def positions(length: int, mesh: DeviceMesh, device: torch.device | str | None = None) -> torch.Tensor:
    """The positions of this rank's rows in a sequence of `length`: int64 ``[length / ranks]``, for `position_ids` or to
    select rows of a rotary table. No communication.

    Raises:
        ArgumentError: `length` is not a multiple of twice the number of ranks.

    Example:
        >>> positions(16, mesh["cp"])  # on rank 1 of 2  # doctest: +SKIP
        tensor([ 4,  5,  6,  7,  8,  9, 10, 11])
    """
    context_group(mesh)
    return _rows(torch.arange(length, device=device), 0, mesh)


def next_token_labels(labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """The label of each token of *whole* sequences ``[..., length]``: the next token, and `ignore_index` for the last.

    Call it before `shard_sequence`: afterwards the next token of a chunk's last row is on another rank.
    transformers' models accept the result as ``shift_labels``.

    >>> next_token_labels(torch.tensor([[7, 8, 9]]))
    tensor([[   8,    9, -100]])
    """
    last = labels.new_full((*labels.shape[:-1], 1), ignore_index)
    return torch.cat([labels[..., 1:], last], dim=-1)


def token_mean(loss_sum: torch.Tensor, num_tokens: int | torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The loss for `backward`, so that gradients are those of the mean over all tokens of all ranks.

    Collective: every rank of `mesh` must call it. One all-reduce of a number per axis.

    Args:
        loss_sum: the sum of this rank's token losses; 0-dim, with its graph.
        num_tokens: the number of these tokens, without ignored ones. With gradient accumulation: the number in all
            microbatches of the step, so that their losses add up to the mean.
        mesh: all axes over which gradients are averaged: replicate, shard and context, or one that flattens them.

    Returns:
        0-dim, ``loss_sum * ranks / (tokens of all ranks)``. Its mean over the ranks is the mean over all tokens.

    Example::

        losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
        token_mean(losses, (labels != -100).sum(), data_mesh).backward()
    """
    if isinstance(num_tokens, torch.Tensor) and num_tokens.device == loss_sum.device:
        total = num_tokens.to(torch.int64, copy=True)
    else:  # no copy: from memory that is not page-locked, the host would wait for the forward
        total = torch.full((), int(num_tokens), dtype=torch.int64, device=loss_sum.device)
    for axis in range(mesh.ndim):
        dist.all_reduce(total, group=mesh.get_group(axis))
    return (loss_sum * (mesh.size() / total.clamp(min=1).double())).to(loss_sum.dtype)


# --- pieces -----------------------------------------------------------------------------------------------------------


def _cut_along(batch: Any, mesh: DeviceMesh, dims: Dims) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The tensors by name, and the sequence dims by name."""
    context_group(mesh)  # raises unless 1-D
    named = {"": batch} if isinstance(batch, torch.Tensor) else dict(batch)
    given = dict.fromkeys(named, dims) if isinstance(dims, int) else dims
    if unknown := sorted(set(given) - set(named)):
        raise ArgumentError(f"sequence dims are given for {unknown}, but the batch has {sorted(named)}")
    wanted = {name: dim for name, dim in given.items() if dim is not None}
    for name, dim in wanted.items():
        if not -named[name].ndim <= dim < named[name].ndim:
            raise ArgumentError(
                f"'{name}' {list(named[name].shape)} has no dim {dim}. Give the sequence dims by name, and leave out "
                "what stays whole: dims={'input_ids': 1, ...}"
            )
    return named, wanted


def _digest(tensor: torch.Tensor) -> str:
    """A checksum of the contents: the bytes, weighted by their positions, modulo 2**64."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).to(torch.int64)
    places = torch.arange(1, flat.numel() + 1, device=flat.device) * 0x5851F42D4C957F2D
    return f"{int(((places ^ (places >> 29)) * (flat + 1)).sum()) & 0xFFFFFFFFFFFFFFFF:016x}"


def _rows(tensor: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of a whole tensor."""
    cuts = rank_slices(tensor.shape[dim], mesh.get_local_rank(), mesh.size())
    return torch.cat([tensor.narrow(dim, cut.start, cut.stop - cut.start) for cut in cuts], dim=dim)


def _gather(tensor: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """All ranks' rows, in the sequence's order."""
    if mesh.size() == 1:
        return tensor
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(mesh.size())]
    dist.all_gather(parts, tensor.contiguous(), group=mesh.get_group())
    chunks = [part.chunk(2, dim) for part in parts]
    return torch.cat([head for head, _ in chunks] + [tail for _, tail in reversed(chunks)], dim)
