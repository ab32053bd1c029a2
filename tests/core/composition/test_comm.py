"""One contract for every `Comm`: what the module docstring of `fsdp2.comm.base` draws, and as calls that are accepted
where nothing moves (NCCL's coalesced calls on a fake group). And what `fsdp2.comm` does with process groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.comm import comm_for
from fsdp2.comm.base import Comm, Operand
from fsdp2.comm.flat import FlatComm, NcclComm
from fsdp2.comm.gloo import GlooComm
from fsdp2.extras.groups import separate_group
from fsdp2.extras.narrow import NarrowComm
from fsdp2.extras.smaller import smaller as smaller_roles
from fsdp2.mesh import roles_of
from tests.helpers.collectives import Scatter, all_gather, all_reduce, reduce_scatter, world
from tests.helpers.models import mlp
from tests.helpers.one_process import in_units
from tests.helpers.parity_models import batch, mesh_2d
from tests.helpers.ranks import on_ranks
from tests.helpers.threads import fake_world

COMMS = {"flat": FlatComm, "gloo": GlooComm}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NARROW = {"flat": FlatComm, "gloo": GlooComm, "nccl": NcclComm}  # NcclComm's exchange runs on any backend


def bounds_of(sizes: list[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes) + 1)]


def everyones(seed: int, numel: int, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """A tensor of each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(world_size)]


def in_order(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum in rank order."""
    total = tensors[0].to(dtype, copy=True)
    for other in tensors[1:]:
        total += other.to(dtype)
    return total


def check_all_gather(comm: Comm, rank: int, dtype: torch.dtype, sizes: list[list[int]]) -> None:
    expected = [torch.arange(sum(each)).to(dtype) + index for index, each in enumerate(sizes)]
    operands = []
    for whole, each in zip(expected, sizes, strict=True):
        operand = Operand(torch.full_like(whole, -1), bounds_of(each))
        operand.row(rank).copy_(Operand(whole, bounds_of(each)).row(rank))
        operands.append(operand)
    all_gather(comm, operands, world())()
    for operand, whole in zip(operands, expected, strict=True):
        assert torch.equal(operand.full, whole)


def check_reduce_scatter(comm: Comm, rank: int, world_size: int, dtype: torch.dtype, sizes: list[list[int]]) -> None:
    """The result is the sum in rank order, bit for bit, in the dtype on the wire."""
    for average in (False, True)[: 1 + comm.has_average]:
        scatters, expected = [], []
        for index, each in enumerate(sizes):
            everyone = everyones(index, sum(each), world_size, dtype)
            total = in_order(everyone, dtype)
            if average:
                total /= world_size
            source = Operand(everyone[rank].clone(), bounds_of(each))
            scatters.append(Scatter(source, torch.full((each[rank],), -1, dtype=dtype)))
            expected.append(Operand(total, bounds_of(each)).row(rank))
        reduce_scatter(comm, scatters, world(), average)()
        # The backend's own may sum in another order: a few roundings of a value below 8.
        is_exact = isinstance(comm, GlooComm) or world_size == 2
        atol = 0 if is_exact else 16 * torch.finfo(dtype).eps
        for scatter, want in zip(scatters, expected, strict=True):
            torch.testing.assert_close(scatter.output, want, rtol=0, atol=atol)


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COMMS)
def test_even_operands(rank: int, world_size: int, name: str, dtype: torch.dtype) -> None:
    for numel in (3, 1, 1000):
        check_all_gather(COMMS[name](), rank, dtype, [[numel] * world_size])
        check_reduce_scatter(COMMS[name](), rank, world_size, dtype, [[numel] * world_size])


@on_ranks(2, 4)
def test_uneven_and_empty_ranges(rank: int, world_size: int) -> None:
    """Only point-to-point can; it says so."""
    comm = GlooComm()
    assert comm.direct_allows_uneven
    sizes = [[5, 3, 1, 0][:world_size], [0] * world_size, [0] * (world_size - 1) + [7]]
    check_all_gather(comm, rank, torch.float32, sizes)
    check_reduce_scatter(comm, rank, world_size, torch.float32, sizes)
    check_narrow(comm, rank, world_size, torch.bfloat16, torch.float32, sizes)


@on_ranks(4, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_in_messages(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """In rank order; of two that are under way at once each gets its own, in whatever order they are begun."""
    numels = [0, 1, 7, 40_001]
    everyone = [everyones(index, numel, world_size, dtype) for index, numel in enumerate(numels)]
    flats, sums = [each[rank].clone() for each in everyone], [in_order(each, dtype) for each in everyone]
    order = range(len(numels)) if rank % 2 else reversed(range(len(numels)))
    pending = {index: all_reduce(GlooComm(), flats[index], world(), False, str(index)) for index in order}
    for index in range(len(numels)):
        pending[index]()
        assert torch.equal(flats[index], sums[index])


def check_narrow(
    comm: Comm, rank: int, world_size: int, narrow: torch.dtype, wide: torch.dtype, sizes: list[list[int]]
) -> None:
    """The rows are summed in rank order in the output's dtype, bit for bit; sources are only read."""
    everyone = [everyones(index, sum(each), world_size, narrow) for index, each in enumerate(sizes)]
    scatters = [
        Scatter(Operand(tensors[rank].to(wide), bounds_of(each)), torch.full((each[rank],), -1, dtype=wide))
        for tensors, each in zip(everyone, sizes, strict=True)
    ]
    before = [scatter.source.full.clone() for scatter in scatters]
    reduce_scatter(NarrowComm(narrow, comm), scatters, world(), False)()
    for scatter, source, tensors, each in zip(scatters, before, everyone, sizes, strict=True):
        rows = [Operand(whole, bounds_of(each)).row(rank) for whole in tensors]
        assert scatter.output.dtype == wide and torch.equal(scatter.output, in_order(rows, wide))
        assert torch.equal(scatter.source.full, source)


@on_ranks(2, 4)
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_rows_are_summed_in_fp32(rank: int, world_size: int, name: str, narrow: torch.dtype) -> None:
    """bf16 on the wire with fp32 accumulation. Odd sizes, empty ones, more than a block of `sum_rows`."""
    sizes = [[numel] * world_size for numel in (3, 0, 66_001)]
    check_narrow(NARROW[name](), rank, world_size, narrow, torch.float32, sizes)
    check_narrow(NARROW[name](), rank, world_size, torch.float32, torch.float64, [[5] * world_size])


@on_ranks(2)
def test_many_under_way_at_once(rank: int, world_size: int) -> None:
    """Gathers and scatters are issued in one order everywhere, and may be waited for in another."""
    comm = GlooComm()
    gathers, scatters = [], []
    for index in range(6):
        operand = Operand(torch.full((2000,), float(index)), [0, 1000, 2000])
        operand.row(rank).fill_(10 * index + rank)
        gathers.append((operand, all_gather(comm, [operand], world())))
        scatter = Scatter(Operand(torch.full((2000,), float(index + rank)), [0, 1000, 2000]), torch.empty(1000))
        scatters.append((scatter, reduce_scatter(comm, [scatter], world(), False)))
    for index, (operand, pending) in reversed(list(enumerate(gathers))):
        pending()
        assert [operand.row(r).unique().tolist() for r in (0, 1)] == [[10.0 * index], [10.0 * index + 1]]
    for index, (scatter, pending) in enumerate(scatters):
        pending()
        assert scatter.output.unique().tolist() == [2.0 * index + 1]


def test_no_coalesced_calls_where_torch_looks_at_each() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around groups, which in torch 2.11 has no coalesced collectives."""
    with fake_world(0, 2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        assert isinstance(comm_for(world(), torch.device("cuda")), NcclComm)
        before = dist.get_debug_level()
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        try:
            assert isinstance(comm_for(world(), torch.device("cuda")), FlatComm)
        finally:
            dist.set_debug_level(before)


def test_nccl_calls_on_a_fake_group() -> None:
    """Nothing moves, but the coalesced calls take what we hand them, and the average stays the backend's."""
    with fake_world(1, 4):
        comm = NcclComm()
        assert comm.has_average
        operands = [Operand(torch.zeros(8), [0, 2, 4, 6, 8]), Operand(torch.zeros(4), [0, 1, 2, 3, 4])]
        all_gather(comm, operands, world())()
        scatters = [Scatter(operand, torch.zeros(operand.bounds[1])) for operand in operands]
        for average in (False, True):
            reduce_scatter(comm, scatters, world(), average)()
        halves = [Scatter(Operand(torch.zeros(8).bfloat16(), [0, 2, 4, 6, 8]), torch.zeros(2))]
        reduce_scatter(comm, halves, world(), True)()
        all_reduce(comm, torch.zeros(3), world(), True)()


@on_ranks(2, 4)
def test_separate_group(rank: int, world_size: int) -> None:
    """Behaviour 140: one group for each distinct set of ranks, the same at every call, with messages of its own."""
    group = world()
    other = separate_group(group)
    assert other is not group and other.group_name != group.group_name
    assert dist.get_process_group_ranks(other) == dist.get_process_group_ranks(group)
    assert dist.get_backend_config(other) == dist.get_backend_config(group)
    again = dist.new_group(list(range(world_size)))
    assert separate_group(again) is other and separate_group(group) is other
    comm = comm_for(other, torch.device("cpu"))
    assert isinstance(comm, GlooComm)
    operands = [Operand(torch.zeros(world_size), range(world_size + 1)) for _ in range(2)]
    for value, operand in zip((1.0, 2.0), operands, strict=True):
        operand.row(rank).fill_(value)
    # The same tags in two groups, issued in another order on each rank: they must not meet.
    order = [0, 1] if rank % 2 else [1, 0]
    pending = {index: all_gather(comm, [operands[index]], (group, other)[index]) for index in order}
    for each in pending.values():
        each()
    assert [operand.full.unique().tolist() for operand in operands] == [[1.0], [2.0]]


@on_ranks(4)
def test_separate_groups_of_a_hybrid_mesh(rank: int, world_size: int) -> None:
    """Behaviour 140: each shard group makes its own, the second one after the first one is done."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard = mesh.get_group("shard")
    if rank >= 2:
        dist.barrier()
    other = separate_group(shard)
    if rank < 2:
        dist.barrier()
    assert other is separate_group(shard) and other is not shard
    mates = [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(other) == mates
    names: list[str] = [""] * world_size
    dist.all_gather_object(names, other.group_name)
    assert names[0] == names[1] != names[2] == names[3]  # in the store, groups of one name would read each other's keys
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=other)
    assert total.item() == sum(mates)
    assert separate_group(mesh.get_group("replicate")) is not other


@on_ranks(2)
def test_a_group_of_one(rank: int, world_size: int) -> None:
    """Sharded replicas of which one is left: nothing travels, and nothing is summed."""
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    assert isinstance(alone, dist.ProcessGroup)
    output = torch.empty(3)
    source = Operand(torch.arange(3.0), [0, 3])
    reduce_scatter(GlooComm(), [Scatter(source, output)], alone, average=False)()
    assert output.tolist() == [0, 1, 2]


@on_ranks(2)
@pytest.mark.parametrize("comm", [FlatComm, NcclComm])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int16])
def test_types_that_backends_do_not_have(rank: int, world_size: int, comm: type[Comm], dtype: torch.dtype) -> None:
    """Bytes are moved, and real numbers summed; `torch.distributed` does that, the group's own methods do not."""
    if comm is FlatComm and dtype == torch.int16:
        return
    operand = Operand(torch.zeros(4, dtype=dtype), range(0, 5, 2))
    operand.row(rank).fill_(rank + 1)
    all_gather(comm(), [operand], world())()
    assert operand.full.tolist() == [1, 1, 2, 2]
    if comm is NcclComm and dtype.is_complex:
        source = Operand(torch.full((4,), rank + 2j, dtype=dtype), range(0, 5, 2))
        scatter = Scatter(source, torch.zeros(2, dtype=dtype))
        reduce_scatter(NcclComm(), [scatter], world(), average=False)()
        assert scatter.output.tolist() == [1 + 4j, 1 + 4j]


@on_ranks(4)
def test_smaller_meshes_of_parts_of_a_mesh(rank: int, world_size: int) -> None:
    """Groups of different ranks had one name, so that they read each other's keys in the store."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))["shard"]
    smaller = smaller_roles(roles_of(mesh), 1)
    assert smaller.replicate_size == 2 and smaller.shard_size == 1
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=smaller.replicate_group)
    assert total.item() == sum(mesh.mesh.tolist())


# --- lanes ------------------------------------------------------------------------------------------------------------


@contextmanager
def lanes(which: str) -> Iterator[None]:
    """``direct``: whatever can; ``packed``: nothing is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooComm, "direct_min_bytes", 0 if which == "direct" else None)
        yield


def train(rank: int, which: str, plain: nn.Module, **options: Any) -> list[torch.Tensor]:
    """Uneven, even and empty shards, frozen and trainable, accumulation and partial all-reduce."""
    with lanes(which):
        model = in_units(plain, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            model.set_requires_gradient_sync(step % 3 != 0)
            model.set_requires_all_reduce(step % 3 != 1)
            model(batch(step, rank, 16)).float().square().mean().backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return [param.full_tensor() for param in model.parameters()]


@on_ranks(2, 4)
@pytest.mark.parametrize("hsdp", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_direct_and_packed_are_bitwise_equal(rank: int, world_size: int, hsdp: bool, dtype: torch.dtype | None) -> None:
    """The same sums in the same order, whichever way the bytes went."""
    plain = mlp(16, 15, 3, 8)
    plain[2].bias.requires_grad_(False)
    policy = MixedPrecisionPolicy(dtype, torch.float32)
    mesh = mesh_2d(2, world_size // 2) if hsdp else None
    found = [train(rank, which, plain, mesh=mesh, mp_policy=policy) for which in ("direct", "packed")]
    assert all(map(torch.equal, *found))


@on_ranks(2)
def test_large_parameters_take_the_direct_lane_by_default(rank: int, world_size: int) -> None:
    """And then no byte of them is packed: the group has one operand for each, and one for the rest."""
    model = fully_shard(nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 1024)))
    model.unshard()
    gather = fully_shard.state(model).groups[0].source.base.gather
    weights = [param.unsharded.data_ptr() for param in fully_shard.state(model).params if param.unsharded.ndim == 2]
    assert [operand.full.data_ptr() for operand in gather.operands[:2]] == weights
    assert len(gather.operands) == 3
