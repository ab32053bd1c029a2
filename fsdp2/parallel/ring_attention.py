"""`ring_attention`: attention over a sequence that is split over ranks. Layer: parallel.

Every rank keeps its queries; keys and values travel around a ring. While a rank computes with one block, the next one
is in flight::

    step            0              1              2                    n ranks, here 3; rank r's block is K_r
    rank 0     q0 x K_0       q0 x K_2       q0 x K_1                  forward: n - 1 messages of one K and V
    rank 1     q1 x K_1       q1 x K_0       q1 x K_2
    rank 2     q2 x K_2       q2 x K_1       q2 x K_0

The backward goes around once more. The gradients of a block's keys and values follow one step behind it, and each rank
adds its part; after n messages they are back at the owner. They and all sums over blocks are float32 (float64 for
float64). A rank holds its own keys and values, the current block and the arriving one.

The *head-tail* layout: a sequence is split into ``2 n`` equal chunks, and rank r has chunks r and ``2 n - 1 - r``.
Under a causal mask, early rows see few keys and late rows many. With one chunk of each kind, every rank has the same
work. With 2 ranks (a row is a rank's query chunk, ``.`` is masked, ``\\`` half masked)::

                    k0   k3  | k1   k2
    rank 0   q0     \\    .   | .    .         step 0: own keys, causal       step 1: second half of the queries
             q3     #    \\   | #    #                                                sees all keys of rank 1
    rank 1   q1     #    .   | \\    .         step 1: all queries see the    step 0: own keys, causal
             q2     #    .   | #    \\                 first half of the keys of rank 0

Every step is half a full block, on every rank. Without a mask the layout is the same, and each step is a full block.
Messages use `batch_isend_irecv`, in the same order on every rank; on NCCL a step's kernels run concurrently with them.
There are two torch operators (``fsdp2::ring_attention`` and its backward), so that `torch.compile` and selective
checkpointing policies see one node each.

Sources: Ring Attention with Blockwise Transformers, https://arxiv.org/abs/2310.01889; the layout is that of "Striped
Attention" (https://arxiv.org/abs/2311.09431) coarsened to two chunks, as in Llama 3 (https://arxiv.org/abs/2407.21783,
3.3.2).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention as one_rank_attention

from fsdp2._torch.shared import group_named
from fsdp2.comm.gloo import finish_unwaited, keep_unwaited
from fsdp2.errors import ArgumentError, CollectiveError, UnsupportedError
from fsdp2.parallel.agreement import agree
from fsdp2.parallel.ring_attention_blocks import accumulation_dtype, block_forward, block_gradients, merge

__all__ = ["context_group", "num_ring_attentions", "rank_slices", "ring_attention", "ring_attention_over"]

_ONE_BATCH = (
    "All ranks of a context group work on the same batch, cut by shard_sequence, with the same model and dtypes; ranks "
    "with different batches belong on the data axes of the mesh."
)
_KEYS_TAG = 0x46530003  # unlikely to be a tag of the user's messages in this group
_GRADIENTS_TAG = 0x46530004

num_ring_attentions: Counter[str] = Counter()  # how many have run, by the name of the group


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mesh: DeviceMesh,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of sequences that `shard_sequence` has split over the ranks of `mesh`.

    Collective: every rank of `mesh` must call it, and its backward, in the same order. The first call with new shapes,
    dtypes or options compares them across the ranks.

    Args:
        query: ``[batch, query heads, rows, head dim]``, this rank's rows of the whole sequence, on the device of the
            mesh. Floating point.
        key: ``[batch, key heads, key rows, head dim]``; if `is_causal`, with as many rows as `query`.
        value: ``[batch, key heads, key rows, value head dim]``.
        mesh: the 1-D context axis, such as ``mesh["cp"]``.
        is_causal: each row of the *whole* sequence only sees rows up to itself.
        scale: scale of the scores; None for ``1 / sqrt(head dim)``.
        enable_gqa: allow fewer key heads than query heads; their number must divide that of the query heads.

    Returns:
        ``[batch, query heads, rows, value head dim]``, this rank's rows of the whole result, in the queries' dtype.
        Sums over blocks are computed in float32, or float64 for float64.

    Raises:
        ArgumentError: shapes or dtypes do not match, or differ between the ranks.
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
    return str(mesh.get_group().group_name) if mesh.size() > 1 else ""


def ring_attention_over(
    group_name: str, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Tensor:
    """`ring_attention` over a group by its name (see `context_group`)."""
    if any(isinstance(each, DTensor) for each in (query, key, value)):
        raise UnsupportedError(
            "ring_attention: got DTensors. Tensor parallelism that shards heads should give attention local tensors: "
            "leave use_local_output=True in ColwiseParallel, or call to_local()"
        )
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    _check(query, key, value, is_causal, enable_gqa)
    if not group_name:
        return one_rank_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    output: Tensor = ring_forward(query, key, value, is_causal, scale, group_name)[0]
    return output


def _check(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> None:
    tensors = {"query": query, "key": key, "value": value}
    shown = ", ".join(f"{name} {list(each.shape)} {each.dtype}" for name, each in tensors.items())
    fits = query.dtype == key.dtype == value.dtype and query.is_floating_point()
    fits = fits and query.ndim == key.ndim == value.ndim == 4 and key.shape[:3] == value.shape[:3]
    fits = fits and query.shape[0] == key.shape[0] and query.shape[-1] == key.shape[-1]
    if not fits or (query.shape[1] != key.shape[1] and not (enable_gqa and query.shape[1] % key.shape[1] == 0)):
        raise ArgumentError(
            "ring_attention: expected [batch, heads, rows, head dim] of one float dtype, with equal batches, heads, "
            f"key rows and head dims (with enable_gqa=True, key heads may divide query heads), got {shown}"
        )
    if is_causal and (query.shape[2] != key.shape[2] or query.shape[2] % 2 != 0):
        raise ArgumentError(
            "ring_attention: a causal sequence that shard_sequence cut has two chunks on every rank, so an even number "
            f"of rows, the same for queries and keys: {shown}. (Decoding with a cache of keys is not supported.)"
        )


# --- the layout -------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """One step of a rank's ring: its rows `queries` attend to the rows `keys` of rank `source`: to all of them, or, if
    `is_causal`, row i to rows up to i."""

    source: int
    queries: slice
    keys: slice
    is_causal: bool


def rank_blocks(rank: int, size: int, is_causal: bool, num_queries: int, num_keys: int) -> list[Block]:
    """The blocks that `rank` of `size` computes, in the order in which keys arrive. The numbers of rows are per rank.

    >>> [(block.source, block.queries.start, block.keys.stop) for block in rank_blocks(1, 3, True, 8, 8)]
    [(1, 0, 8), (0, 0, 4), (2, 4, 8)]
    """
    everyone, seen = slice(0, num_queries), slice(0, num_keys)
    blocks = [Block(rank, everyone, seen, is_causal)]
    for source in ((rank - step) % size for step in range(1, size)):
        keys = slice(0, num_keys // 2) if is_causal and source < rank else seen
        queries = slice(num_queries // 2, num_queries) if is_causal and source > rank else everyone
        blocks.append(Block(source, queries, keys, False))
    return blocks


def rank_slices(length: int, rank: int, size: int) -> list[slice]:
    """The rows of a sequence of `length` that `rank` of `size` has, in its order.

    Raises:
        ArgumentError: it cannot be split into equal chunks; the message says to what length to pad it.

    >>> rank_slices(16, 1, 2)
    [slice(4, 8, None), slice(8, 12, None)]
    """
    if size == 1:
        return [slice(0, length)]
    chunk, rest = divmod(length, 2 * size)
    if rest:
        raise ArgumentError(
            f"a sequence of {length} rows cannot be cut into 2 x {size} = {2 * size} equal chunks for {size} context "
            f"ranks: pad it to {(chunk + 1) * 2 * size}"
        )
    return [slice(first * chunk, (first + 1) * chunk) for first in (rank, 2 * size - 1 - rank)]


# --- the ring ---------------------------------------------------------------------------------------------------------


class _Message:
    """A tensor in flight to the next rank, while one like it arrives from the previous rank."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup, tag: int):
        self.sent, self.received, self.group = sent, torch.empty_like(sent), group  # kept alive until it has completed
        self.works: list[dist.Work] = []
        rank, size = group.rank(), group.size()
        finish_unwaited(group)
        send = dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=(rank + 1) % size)
        receive = dist.P2POp(dist.irecv, self.received, group=group, tag=tag, group_peer=(rank - 1) % size)
        self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """The received tensor. On NCCL the stream waits, not the CPU."""
        works, self.works = self.works, []
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            ranks = dist.get_process_group_ranks(self.group)
            raise CollectiveError(f"ring_attention: a neighbour in the ring of {ranks} failed: {error}") from error
        return self.received

    def __del__(self) -> None:
        if self.works:  # the computation of a block raised
            keep_unwaited(self.works, self.group)


@torch.library.custom_op("fsdp2::ring_attention", mutates_args=())
def ring_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float, group_name: str
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp ``[batch, heads, rows, 1]``, of this rank's rows over all ranks' keys. Collective."""
    group = group_named(group_name)
    tensors = {"query": query, "key": key, "value": value}
    facts = {name: f"{list(each.shape)} {each.dtype}" for name, each in tensors.items()}
    agree(group, "ring_attention", facts | {"is_causal": is_causal, "scale": f"{scale:.9g}"}, _ONE_BATCH)
    num_ring_attentions[group_name] += 1
    blocks = rank_blocks(group.rank(), group.size(), is_causal, query.shape[2], key.shape[2])
    both, sizes = torch.cat([key, value], -1), [key.shape[-1], value.shape[-1]]  # sent as one message
    total = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=accumulation_dtype(query.dtype))
    lse = total.new_full((*query.shape[:-1], 1), float("-inf"))
    for block in blocks:
        message = _Message(both, group, _KEYS_TAG) if block is not blocks[-1] else None
        inputs = query[:, :, block.queries], *both[:, :, block.keys].split(sizes, -1)
        merge(total[:, :, block.queries], lse[:, :, block.queries], *block_forward(inputs, block.is_causal, scale))
        del inputs  # so that only two blocks are alive, not three
        if message is not None:
            both, message = message.wait(), None
    return total.to(query.dtype), lse


@ring_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = query.new_empty((*query.shape[:-1], 1), dtype=accumulation_dtype(query.dtype))
    return query.new_empty((*query.shape[:-1], value.shape[-1])), lse


@torch.library.custom_op("fsdp2::ring_attention_backward", mutates_args=())
def ring_backward(
    grad: Tensor, saved: Sequence[Tensor], is_causal: bool, scale: float, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's query, key and value. Collective.

    Args:
        grad: the gradient of the output.
        saved: query, key, value, output and log-sum-exp of the forward.
    """
    group = group_named(group_name)
    query, key, value, output, lse = saved
    blocks = rank_blocks(group.rank(), group.size(), is_causal, query.shape[2], key.shape[2])
    both, sizes = torch.cat([key, value], -1), [key.shape[-1], value.shape[-1]]
    grad, total = grad.contiguous(), torch.zeros_like(both, dtype=accumulation_dtype(query.dtype))
    dq = torch.zeros(query.shape, dtype=total.dtype, device=query.device)
    gradients: _Message | None = None  # `total` of the current block, from the rank that had the block before
    for block in blocks:
        message = _Message(both, group, _KEYS_TAG) if block is not blocks[-1] else None
        rows = tuple(each[:, :, block.queries] for each in (grad, output, lse))
        inputs = query[:, :, block.queries], *both[:, :, block.keys].split(sizes, -1)
        part = block_gradients(rows, inputs, block.is_causal, scale)
        if gradients is not None:
            total, gradients = gradients.wait(), None
        dq[:, :, block.queries] += part[0]
        for sums, each in zip(total[:, :, block.keys].split(sizes, -1), part[1:], strict=True):
            sums += each
        del inputs, part, sums, each
        gradients = _Message(total, group, _GRADIENTS_TAG)
        if message is not None:
            both, message = message.wait(), None
    assert gradients is not None
    own = gradients.wait().to(key.dtype).split(sizes, -1)  # after a full round
    dk, dv = (each.clone(memory_format=torch.contiguous_format) for each in own)
    return dq.to(query.dtype), dk, dv


@ring_backward.register_fake
def _(grad: Tensor, saved: Sequence[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (each.new_empty(each.shape) for each in saved[:3])
    return query, key, value


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.is_causal, ctx.scale, ctx.group_name = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _lse: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    saved = list(ctx.saved_tensors)
    return *ring_backward(grad, saved, ctx.is_causal, ctx.scale, ctx.group_name), None, None, None


ring_forward.register_autograd(_backward, setup_context=_save)
