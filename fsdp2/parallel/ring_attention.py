"""`ring_attention`: attention over a sequence that is cut over ranks. Layer: parallel.

Every rank keeps its queries; keys and values go round a ring. While a rank computes with one block, the next one is
being sent::

    step            0              1              2                    n ranks, here 3; rank r's block is K_r
    rank 0     q0 x K_0       q0 x K_2       q0 x K_1                  forward: n - 1 messages of one K and V
    rank 1     q1 x K_1       q1 x K_0       q1 x K_2
    rank 2     q2 x K_2       q2 x K_1       q2 x K_0

The backward goes round once more. The gradients of a block's keys and values travel one step behind it, and each rank
adds its part. After n messages they are back at the owner. While they travel they are float32 (float64 for float64), as
are all sums over blocks.

Memory: a rank holds its own keys and values, the current block and the one that is arriving; backward needs as much
again for gradients. Nothing has the whole sequence's length.

Messages are `batch_isend_irecv` on the group of the context axis, in the same order on every rank. On NCCL the kernels
of a step are launched after the messages of the step and run concurrently. A received buffer is used after `wait`, and
a sent one is kept until the message has completed. On gloo `wait` blocks.

These are two torch operators (``fsdp2::ring_attention`` and its backward), so that `torch.compile` and policies of
selective checkpointing see one node each.

Source: Ring Attention with Blockwise Transformers, https://arxiv.org/abs/2310.01889.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention as one_rank_attention

from fsdp2._torch import group_named
from fsdp2.comm.unwaited import finish_unwaited, keep_unwaited
from fsdp2.errors import ArgumentError, CollectiveError, UnsupportedError
from fsdp2.parallel.context_agreement import agree, tell_refusal
from fsdp2.parallel.context_layout import Block, rank_blocks
from fsdp2.parallel.ring_attention_blocks import Merged, accumulation_dtype, block_forward, block_gradients

__all__ = ["context_group", "num_ring_attentions", "refuse", "ring_attention", "ring_attention_over"]

_KEYS_TAG = 0x46530003  # unlikely to be a tag of the user's messages in this group
_GRADIENTS_TAG = 0x46530004
_ADVICE = (
    "All ranks of a context group work on the same batch, cut by shard_sequence, with the same model and dtypes; ranks "
    "with batches of their own belong on the data axes of the mesh."
)

_num_ring_attentions: dict[str, int] = {}  # by the name of the group


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mesh: DeviceMesh,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` of sequences that are cut over the ranks of `mesh` by `shard_sequence`.

    Collective: every rank of `mesh` must call it, and its backward, in the same order. The first call with new shapes,
    dtypes or options compares them across the ranks.

    Args:
        query: ``[batch, query heads, rows, head dim]``, this rank's rows of the whole sequence, on the device of the
            mesh. Floating point.
        key: ``[batch, key heads, key rows, head dim]``; as many rows as `query` if `is_causal`.
        value: ``[batch, key heads, key rows, value head dim]``.
        mesh: the 1-D context axis, such as ``mesh["cp"]``.
        is_causal: a row of the *whole* sequence only sees the rows up to itself.
        scale: of the scores; None for ``1 / sqrt(head dim)``.
        enable_gqa: allow fewer key heads than query heads; their number must divide that of the query heads.

    Returns:
        ``[batch, query heads, rows, value head dim]``, this rank's rows of the whole result, in the queries' dtype.
        Sums over blocks are computed in float32, or float64 for float64.

    Raises:
        ArgumentError: shapes or dtypes do not fit each other, or differ between the ranks.
        UnsupportedError: DTensors. Pass `to_local()` of heads that tensor parallelism shards.
        CollectiveError: communication failed.

    Example::

        q, k, v = (project(x).unflatten(-1, (heads, -1)).transpose(1, 2) for project in (self.q, self.k, self.v))
        x = ring_attention(q, k, v, mesh=mesh["cp"], is_causal=True)
    """
    return ring_attention_over(context_group(mesh), query, key, value, is_causal, scale, enable_gqa)


def context_group(mesh: DeviceMesh) -> str:
    """The name of the group of a context axis for `ring_attention_over`; "" for one rank. No communication.

    Raises:
        ArgumentError: `mesh` has several axes.
    """
    if mesh.ndim != 1:
        raise ArgumentError(f"context parallelism needs the context axis alone, such as mesh['cp']; got {mesh}")
    if mesh.size() == 1:
        return ""
    name: str = mesh.get_group().group_name
    return name


def num_ring_attentions(group_name: str) -> int:
    """The number of ring attentions that have run over a group."""
    return _num_ring_attentions.get(group_name, 0)


def ring_attention_over(
    group_name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """`ring_attention` over a group by its name (see `context_group`)."""
    if isinstance(query, DTensor) or isinstance(key, DTensor) or isinstance(value, DTensor):
        raise UnsupportedError(
            "ring_attention: got DTensors. Tensor parallelism that shards heads should give attention local tensors: "
            "leave use_local_output=True in ColwiseParallel, or call to_local()"
        )
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    try:
        _check(query, key, value, is_causal, enable_gqa)
    except ArgumentError as error:
        refuse(group_name, str(error))
        raise
    if not group_name:
        return one_rank_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    output: torch.Tensor = _ring_attention(query, key, value, is_causal, scale, group_name)[0]
    return output


def refuse(group_name: str, reason: str) -> None:
    """Call before raising for an invalid call: other ranks may be about to start the ring, and then raise too."""
    if group_name:
        tell_refusal(group_named(group_name), "ring_attention", reason)


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, enable_gqa: bool) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ArgumentError(f"ring_attention: expected [batch, heads, rows, head dim], got {shapes}")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise ArgumentError(
            f"ring_attention: expected one floating dtype, got query {query.dtype}, key {key.dtype}, value "
            f"{value.dtype}; cast them, or run under torch.autocast"
        )
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        raise ArgumentError(f"ring_attention: batches, key rows or head dims do not fit: {shapes}")
    heads, key_heads = query.shape[1], key.shape[1]
    if heads != key_heads and not (enable_gqa and heads % key_heads == 0):
        more = "which must divide the former" if enable_gqa else "or pass enable_gqa=True"
        raise ArgumentError(f"ring_attention: {heads} query heads and {key_heads} key heads, {more}: {shapes}")
    if is_causal and (query.shape[2] != key.shape[2] or query.shape[2] % 2 != 0):
        raise ArgumentError(
            "ring_attention: a causal sequence that shard_sequence cut has two chunks on every rank, so an even number "
            f"of rows, the same for queries and keys: {shapes}. (Decoding with a cache of keys is not supported.)"
        )


# --- the ring ---------------------------------------------------------------------------------------------------------


class _Message:
    """A tensor being sent to the next rank, while one like it is received from the previous rank."""

    def __init__(self, sent: torch.Tensor, group: dist.ProcessGroup, tag: int):
        self.sent = sent  # kept until the message has completed
        self.received = torch.empty_like(sent)
        self.group = group
        self.works: list[dist.Work] = []
        rank, size = group.rank(), group.size()
        finish_unwaited(group)
        send = dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=(rank + 1) % size)
        receive = dist.P2POp(dist.irecv, self.received, group=group, tag=tag, group_peer=(rank - 1) % size)
        try:
            self.works = dist.batch_isend_irecv([send, receive])
        except RuntimeError as error:
            raise self.failed(error) from error

    def wait(self) -> torch.Tensor:
        """The received tensor. On NCCL the stream waits, not the CPU."""
        try:
            works, self.works = self.works, []
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.failed(error) from error
        return self.received

    def __del__(self) -> None:
        if self.works:
            keep_unwaited(self.works, self.group)

    def failed(self, error: RuntimeError) -> CollectiveError:
        """An error that names this rank and its neighbours."""
        ranks = dist.get_process_group_ranks(self.group)
        rank = self.group.rank()
        after, before = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
        return CollectiveError(
            f"ring_attention: rank {ranks[rank]} could not send to rank {after} or receive from rank {before}: {error}"
        )


def _pack(key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One flat tensor of both, to be sent as one message."""
    return torch.cat([key.to(dtype).reshape(-1), value.to(dtype).reshape(-1)])


def _unpack(flat: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a tensor from `_pack`, given tensors of the original shapes."""
    first, second = flat.split([key.numel(), value.numel()])
    return first.view(key.shape), second.view(value.shape)


def _rows_first(query: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Memory for a result that is ``[batch, rows, heads, head dim]`` in memory, because models transpose it to that."""
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, rows, heads, head_dim).transpose(1, 2)


def _parts(block: Block, query: torch.Tensor, keys: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The parts of this rank's queries, and of the current keys and values, that take part in the block."""
    seen = block.keys.rows(keys[0].shape[2])
    return query[:, :, block.queries.rows(query.shape[2])], *(each[:, :, seen] for each in keys)


def ring_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and log-sum-exp ``[batch, heads, rows, 1]``, of this rank's rows over all ranks' keys. Collective."""
    blocks = rank_blocks(group.rank(), group.size(), is_causal)
    flat = _pack(key, value, key.dtype)
    merged = Merged(query, value.shape[-1])
    for block in blocks:
        message = _Message(flat, group, _KEYS_TAG) if block is not blocks[-1] else None
        # The result gets no name, so that only two blocks are alive, not three.
        output, lse = block_forward(_parts(block, query, _unpack(flat, key, value)), block.is_causal, scale)
        merged.add(block.queries.rows(query.shape[2]), output, lse)
        del output, lse
        if message is not None:
            flat, message = message.wait(), None
    return _rows_first(query, value.shape[-1]).copy_(merged.output), merged.lse


def ring_backward(
    grad: torch.Tensor, saved: Sequence[torch.Tensor], is_causal: bool, scale: float, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of this rank's query, key and value. Collective.

    Args:
        grad: of the output.
        saved: query, key, value, output and log-sum-exp of the forward.
    """
    query, key, value, output, lse = saved
    blocks = rank_blocks(group.rank(), group.size(), is_causal)
    dtype = accumulation_dtype(query.dtype)
    grad, flat = grad.contiguous(), _pack(key, value, key.dtype)
    dq = torch.zeros(query.shape, dtype=dtype, device=query.device)
    total = torch.zeros_like(flat, dtype=dtype)
    gradients: _Message | None = None  # `total` of the current block, coming from the rank that had it before
    for block in blocks:
        message = _Message(flat, group, _KEYS_TAG) if block is not blocks[-1] else None
        mine, seen = block.queries.rows(query.shape[2]), block.keys.rows(key.shape[2])
        rows = tuple(each[:, :, mine] for each in (grad, output, lse))
        part = block_gradients(rows, _parts(block, query, _unpack(flat, key, value)), block.is_causal, scale)
        if gradients is not None:
            total, gradients = gradients.wait(), None
        dq[:, :, mine] += part[0]
        for sums, each in zip(_unpack(total, key, value), part[1:], strict=True):
            sums[:, :, seen] += each
        del part, sums, each
        gradients = _Message(total, group, _GRADIENTS_TAG)
        if message is not None:
            flat, message = message.wait(), None
    assert gradients is not None
    dk, dv = _unpack(gradients.wait(), key, value)  # this rank's own, after a full round
    return dq.to(query.dtype), dk.to(key.dtype, copy=True), dv.to(value.dtype, copy=True)


# --- operators --------------------------------------------------------------------------------------------------------


def _facts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> dict[str, str]:
    """What must be the same on all ranks."""
    tensors = {"query": query, "key": key, "value": value}
    shown = {name: f"{list(tensor.shape)} {str(tensor.dtype)[6:]}" for name, tensor in tensors.items()}
    return {**shown, "is_causal": str(is_causal), "scale": f"{scale:.9g}"}


@torch.library.custom_op("fsdp2::ring_attention", mutates_args=())
def _ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp. The latter has a dim more than that of `F.scaled_dot_product_attention`. Activation
    checkpointing compares the shapes of what forward and recomputation save, so it notices if only one of them was
    within `context_parallel`."""
    group = group_named(group_name)
    agree(group, "ring_attention", _facts(query, key, value, is_causal, scale), _ADVICE)
    _num_ring_attentions[group_name] = num_ring_attentions(group_name) + 1
    return ring_forward(query, key, value, is_causal, scale, group)


@_ring_attention.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = query.new_empty((*query.shape[:-1], 1), dtype=accumulation_dtype(query.dtype))
    return _rows_first(query, value.shape[-1]), lse


@torch.library.custom_op("fsdp2::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    grad: torch.Tensor, saved: Sequence[torch.Tensor], is_causal: bool, scale: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return ring_backward(grad, saved, is_causal, scale, group_named(group_name))


@_ring_attention_backward.register_fake
def _(
    grad: torch.Tensor, saved: Sequence[torch.Tensor], is_causal: bool, scale: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (each.new_empty(each.shape) for each in saved[:3])
    return query, key, value


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ctx.is_causal, ctx.scale, ctx.group_name = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor | None, _lse: None) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    saved = list(ctx.saved_tensors)
    return *_ring_attention_backward(grad, saved, ctx.is_causal, ctx.scale, ctx.group_name), None, None, None


_ring_attention.register_autograd(_backward, setup_context=_save)
