"""Ring attention against one process: values, gradients, work, messages, memory; and what happens when ranks differ."""

import gc
import time
from datetime import timedelta
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.errors import ArgumentError, CollectiveError, UnsupportedError
from fsdp2.parallel import agreement, ring_attention_blocks
from fsdp2.parallel.context_sharding import shard_sequence, unshard_sequence
from fsdp2.parallel.ring_attention import rank_blocks, rank_slices, ring_attention, ring_backward, ring_forward
from fsdp2.parallel.ring_attention_blocks import block_forward, block_gradients, merge
from tests.helpers.meshes import shared_mesh
from tests.helpers.models import error_of
from tests.helpers.ranks import on_ranks

every_mask = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])


def context_mesh(world_size: int) -> DeviceMesh:
    return shared_mesh((world_size,), ("cp",))


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(
    rows: int, *, heads: int = 4, key_heads: int = 4, dim: int = 8, value_dim: int | None = None, **options: Any
) -> list[Tensor]:
    """Query, key, value, and the gradient of the output, of a whole sequence."""
    sizes = [(heads, dim), (key_heads, dim), (key_heads, value_dim or dim), (heads, value_dim or dim)]
    return [random(seed, 2, each, rows, last, **options) for seed, (each, last) in enumerate(sizes)]


def with_gradients(attention: Any, tensors: list[Tensor]) -> list[Tensor]:
    """The output of ``attention(query, key, value)`` and the gradients of these."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors[:3]]
    output = attention(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, tensors[3])]


def check_parity(whole: list[Tensor], mesh: DeviceMesh, atol: float = 1e-12, **options: Any) -> None:
    """Ring attention over `mesh` gives the rows that one process gives, in value and gradients."""
    wanted = with_gradients(lambda *qkv: F.scaled_dot_product_attention(*qkv, **options), whole)
    mine = [shard_sequence(tensor, mesh, 2) for tensor in whole]
    found = with_gradients(lambda *qkv: ring_attention(*qkv, mesh=mesh, **options), mine)
    assert all(each.dtype == whole[0].dtype for each in found)
    assert_close([unshard_sequence(each, mesh, 2) for each in found], wanted, rtol=1e-10, atol=atol)


# --- layout: pure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 8))
@every_mask
def test_blocks_cover_the_mask_once(size: int, is_causal: bool) -> None:
    """Over the ranks' steps each pair of rows that may see each other is computed once, and no other."""
    length = 2 * size * 3
    rows = [torch.cat([torch.arange(length)[cut] for cut in rank_slices(length, r, size)]) for r in range(size)]
    assert sorted(torch.cat(rows).tolist()) == list(range(length))
    seen = torch.zeros(length, length)
    for rank in range(size):
        for block in rank_blocks(rank, size, is_causal, len(rows[rank]), len(rows[rank])):
            queries, keys = rows[rank][block.queries], rows[block.source][block.keys]
            pairs = torch.ones(len(queries), len(keys))
            seen[queries[:, None], keys] += pairs.tril() if block.is_causal else pairs
    assert torch.equal(seen, torch.ones(length, length).tril() if is_causal else torch.ones(length, length))


# --- blocks: one process ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["flash_cpu", "math"])
@every_mask
@pytest.mark.parametrize("key_heads", [4, 2])
def test_blocks_merge_to_the_whole(kind: str, is_causal: bool, key_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in two blocks, the second seen by the second half of the queries only; in small pieces for `math`."""
    monkeypatch.setattr(ring_attention_blocks, "_kernel", lambda *_: kind)
    monkeypatch.setattr(ring_attention_blocks, "_MATH_SCORES", 1)
    query, key, value, grad = inputs(12, key_heads=key_heads)
    first, second = slice(0, 6), slice(6, 12)
    blocks = [(first, first, is_causal), (second, first, False), (second, second, is_causal)]
    if not is_causal:
        blocks.append((first, second, False))
    output, lse = torch.zeros_like(query), query.new_full((*query.shape[:-1], 1), -torch.inf)
    for rows, keys, causal in blocks:
        block = query[:, :, rows], key[:, :, keys], value[:, :, keys]
        merge(output[:, :, rows], lse[:, :, rows], *block_forward(block, causal, 0.3))
    grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for rows, keys, causal in blocks:
        block = query[:, :, rows], key[:, :, keys], value[:, :, keys]
        part = block_gradients(tuple(each[:, :, rows] for each in (grad, output, lse)), block, causal, 0.3)
        for total, where, each in zip(grads, (rows, keys, keys), part, strict=True):
            total[:, :, where] += each
    options = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": True}
    wanted = with_gradients(lambda *qkv: F.scaled_dot_product_attention(*qkv, **options), [query, key, value, grad])
    assert_close([output, *grads], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "dim", "kind"),
    [(torch.bfloat16, 256, "flash"), (torch.bfloat16, 264, "math"), (torch.float32, 64, "math")],
)
def test_kernels_of_cuda_fit_their_arguments(dtype: torch.dtype, dim: int, kind: str) -> None:
    """Meta tensors take the way of CUDA ones: operators accept what they are given, and shapes are right."""
    query = torch.empty(2, 4, 50, dim, dtype=dtype, device="meta")
    key = value = torch.empty(2, 2, 40, dim, dtype=dtype, device="meta")
    assert ring_attention_blocks._kernel(query, key, value) == kind
    output, lse = block_forward((query, key, value), False, 0.3)
    assert (output.shape, output.dtype) == (query.shape, dtype)
    assert lse.shape == (2, 4, 50, 1)
    assert lse.dtype == torch.float32
    grads = block_gradients((torch.empty_like(query), output, lse), (query, key, value), False, 0.3)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


# --- parity -----------------------------------------------------------------------------------------------------------


@on_ranks(2, 3, 4)
@every_mask
def test_long_sequences(rank: int, world_size: int, is_causal: bool) -> None:
    """float64, to rounding."""
    whole = inputs(3072, heads=1, key_heads=1)
    check_parity(whole, context_mesh(world_size), is_causal=is_causal)


@on_ranks(4)
@every_mask
@pytest.mark.parametrize(
    "shape",
    [{"key_heads": 2}, {"key_heads": 1, "dim": 5}, {"value_dim": 4}, {"key_heads": 2, "value_dim": 12}],
    ids=["grouped", "one_key_head", "narrow_values", "grouped_wide_values"],
)
def test_heads_dims_and_scale(rank: int, world_size: int, is_causal: bool, shape: dict[str, int]) -> None:
    options = {"is_causal": is_causal, "scale": 0.4, "enable_gqa": "key_heads" in shape}
    check_parity(inputs(64, **shape), context_mesh(world_size), **options)


@on_ranks(4)
@every_mask
def test_bfloat16(rank: int, world_size: int, is_causal: bool) -> None:
    """Against float64: not further from it than one process in bfloat16 is, up to the rounding of a block's output."""
    mesh, exact = context_mesh(world_size), inputs(1024, heads=2, key_heads=2)
    whole = [tensor.bfloat16() for tensor in exact]
    exact = [tensor.double() for tensor in whole]
    one_process = lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=is_causal)  # noqa: E731
    wanted, single = with_gradients(one_process, exact), with_gradients(one_process, whole)
    mine = [shard_sequence(tensor, mesh, 2) for tensor in whole]
    ring = with_gradients(lambda *qkv: ring_attention(*qkv, mesh=mesh, is_causal=is_causal), mine)
    for found, alone, target in zip(ring, single, wanted, strict=True):
        error = (unshard_sequence(found, mesh, 2) - target).norm() / target.norm()
        assert error < 1.25 * (alone - target).norm() / target.norm() < 0.01


def test_one_rank_is_no_ring() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        query, key, value = inputs(7)[:3]  # 7 rows need not divide
        wanted = F.scaled_dot_product_attention(query, key, value)
        assert torch.equal(ring_attention(query, key, value, mesh=mesh), wanted)
    finally:
        dist.destroy_process_group()


@on_ranks(2, timeout_s=150)
@every_mask
def test_compiled(rank: int, world_size: int, is_causal: bool) -> None:
    """One node of a whole graph: nothing of it is traced, and values are the same bit by bit."""
    mesh = context_mesh(world_size)
    mine = [shard_sequence(tensor, mesh, 2) for tensor in inputs(16, key_heads=2)]

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ring_attention(query * 2, key, value, mesh=mesh, is_causal=is_causal, enable_gqa=True).transpose(1, 2)

    eager = with_gradients(lambda *qkv: attention(*qkv).transpose(1, 2), mine)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    found = with_gradients(lambda *qkv: compiled(*qkv).transpose(1, 2), mine)
    assert all(torch.equal(one, other) for one, other in zip(found, eager, strict=True))


# --- messages and memory ----------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Notes the messages sent, in bytes, and the most bytes of what was made inside that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []
        self.alive: dict[int, tuple[Any, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d.send" in str(func):
            self.sent += [tensor.nbytes for tensor in args[0]]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (ref(storage), storage.nbytes())
        self.alive = {key: entry for key, entry in self.alive.items() if entry[0]() is not None}
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self.alive.values()))
        return result


@on_ranks(2, 4)
def test_messages_and_memory(rank: int, world_size: int) -> None:
    """n - 1 messages of one K and V forward; backward as many, and n of their gradients. Nothing whole is ever alive:
    with the batch's rows per rank fixed, what a rank holds does not grow with the number of ranks."""
    mesh, rows = context_mesh(world_size), 256
    mine = [random(seed, 1, 2, rows, 16, dtype=torch.float32) for seed in range(4)]
    tensor_bytes = mine[0].nbytes
    with Watch() as forward:
        output, lse = ring_forward._init_fn(*mine[:3], True, 0.25, mesh.get_group().group_name)
    assert forward.sent == [2 * tensor_bytes] * (world_size - 1)
    with Watch() as backward:
        ring_backward._init_fn(mine[3], [*mine[:3], output, lse], True, 0.25, mesh.get_group().group_name)
    assert sorted(backward.sent) == [2 * tensor_bytes] * (2 * world_size - 1)
    # In tensors of [rows, head dim], of which log-sum-exps are 1 / 16. Forward: the inputs, two blocks of K and V, the
    # merged output, a block's output. Backward: the saved ones and the output's gradient, two blocks of K and V, two of
    # their gradients, dq, a block's part of that. What kernels allocate for themselves is not seen.
    assert 7 * tensor_bytes <= forward.peak_bytes <= 7.5 * tensor_bytes
    assert 13 * tensor_bytes <= backward.peak_bytes <= 15 * tensor_bytes


# --- mistakes ---------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("difference", ["rows", "dtype", "mask", "scale"])
def test_ranks_that_differ_all_raise(rank: int, world_size: int, difference: str) -> None:
    """The last rank is wrong; every rank says so; and the right call works afterwards."""
    mesh, last = context_mesh(world_size), rank == world_size - 1
    heads = {"rows": 3, "dtype": 5, "mask": 7, "scale": 9}[difference]  # shapes that nothing else has
    rows = 14 if difference == "rows" and last else 18
    dtype = torch.float32 if difference == "dtype" and last else torch.float64
    options: dict[str, Any] = {"is_causal": difference != "mask" or not last}
    options["scale"] = 0.5 if difference == "scale" and last else 0.7
    tensors = [random(seed, 1, heads, rows, 4, dtype=dtype) for seed in range(3)]
    message = error_of(ArgumentError, lambda: ring_attention(*tensors, mesh=mesh, **options))
    assert "the ranks must agree" in message
    wanted = {"rows": "[1, 3, 14, 4]", "dtype": "float32", "mask": "is_causal=False", "scale": "scale=0.5"}
    assert wanted[difference] in message.split(f"rank {world_size - 1}: ")[1]
    right = [random(seed, 1, heads, 18, 4) for seed in range(3)]
    ring_attention(*right, mesh=mesh, is_causal=True, scale=0.7)


@on_ranks(2, 4)
def test_an_error_while_messages_are_under_way(rank: int, world_size: int) -> None:
    """Out of memory in the computation of a block: the next keys were on their way, and a message that nobody waits for
    stopped all that came after it."""
    mesh = context_mesh(world_size)
    whole = inputs(48)
    mine = [shard_sequence(tensor, mesh, 2) for tensor in whole]

    def out_of_memory(*_: Any) -> str:
        raise torch.OutOfMemoryError("of the test")

    chosen, ring_attention_blocks._kernel = ring_attention_blocks._kernel, out_of_memory
    time.sleep(0.2 * rank)  # so that some have given up before others begin to send
    try:
        error_of(
            torch.OutOfMemoryError, lambda: ring_forward._init_fn(*mine[:3], True, 0.25, mesh.get_group().group_name)
        )
    finally:
        ring_attention_blocks._kernel = chosen
    gc.collect()
    dist.barrier()
    check_parity(whole, mesh, 1e-10, is_causal=True)


@on_ranks(2)
def test_a_rank_that_changes_alone_gives_up(rank: int, world_size: int) -> None:
    """Both know the first shape; then rank 0 alone has a new one, and rank 1 does nothing: rank 0 names it."""
    mesh = context_mesh(world_size)
    tensors = [random(seed, 1, 1, 22, 4) for seed in range(3)]
    ring_attention(*tensors, mesh=mesh)
    before, agreement.TIMEOUT = agreement.TIMEOUT, timedelta(seconds=0.5)
    try:
        if rank == 0:
            other = [tensor[:, :, :10] for tensor in tensors]
            message = error_of(CollectiveError, lambda: ring_attention(*other, mesh=mesh))
            assert "for ranks [1] to publish theirs" in message and "query=[1, 1, 10, 4] torch.float64" in message
        dist.barrier()
        if rank == 1:  # it was asked once less; catch up, so that later questions of this process mean the same
            error_of(ArgumentError, lambda: ring_attention(*tensors, mesh=mesh, scale=9.0))
    finally:
        agreement.TIMEOUT = before


@on_ranks(2)
def test_shapes_that_do_not_fit(rank: int, world_size: int) -> None:
    """Found before anything is sent."""
    mesh = context_mesh(world_size)
    query, key, value = (tensor[:, :, :6] for tensor in inputs(8)[:3])

    def error(*tensors: Tensor, **options: Any) -> str:
        return error_of(ArgumentError, lambda: ring_attention(*tensors, mesh=mesh, **options))

    assert "expected [batch, heads, rows, head dim]" in error(query[0], key[0], value[0])
    assert "of one float dtype" in error(query, key.float(), value)
    assert "equal batches" in error(query, key[:, :, :4], value)
    assert "equal batches" in error(query, key[..., :4], value)
    assert "with enable_gqa=True" in error(query, key[:, :2], value[:, :2])
    assert "with enable_gqa=True" in error(query, key[:, :3], value[:, :3], enable_gqa=True)
    assert "an even number of rows" in error(query[:, :, :3], key[:, :, :3], value[:, :, :3], is_causal=True)
    assert "the same for queries and keys" in error(query[:, :, :2], key, value, is_causal=True)
    distributed = DTensor.from_local(query, mesh, [Replicate()])
    assert "use_local_output" in error_of(UnsupportedError, lambda: ring_attention(distributed, key, value, mesh=mesh))
    both = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "cp"))
    assert "the context axis alone" in error_of(ArgumentError, lambda: ring_attention(query, key, value, mesh=both))
