"""One contract for every `Comm`: what the module docstring of `fsdp2.comm.base` draws, on real data where the backend
moves data, and as calls that are accepted where it does not (NCCL's coalesced calls on a fake group). And what else
`fsdp2.comm` has to do with process groups."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp2.comm import comm_for
from fsdp2.comm.base import Comm, Operand
from fsdp2.comm.flat import FlatComm, NcclComm
from fsdp2.comm.gloo import GlooComm
from fsdp2.extras.groups import separate_group
from fsdp2.extras.narrow import NarrowComm
from fsdp2.extras.smaller import smaller as smaller_roles
from fsdp2.mesh import roles_of
from tests.helpers.collectives import Scatter, all_gather, all_reduce, reduce_scatter
from tests.helpers.ranks import on_ranks
from tests.helpers.threads import fake_world, run_threads

COMMS = {"flat": FlatComm, "gloo": GlooComm}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NARROW = {"flat": FlatComm, "gloo": GlooComm, "nccl": NcclComm}  # NcclComm's exchange runs on any backend


def bounds_of(sizes: list[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes) + 1)]


def check_all_gather(comm: Comm, rank: int, world_size: int, dtype: torch.dtype, sizes: list[list[int]]) -> None:
    group = dist.group.WORLD
    assert group is not None
    expected = [torch.arange(sum(each)).to(dtype) + index for index, each in enumerate(sizes)]
    operands = []
    for whole, each in zip(expected, sizes, strict=True):
        operand = Operand(torch.full_like(whole, -1), bounds_of(each))
        operand.row(rank).copy_(Operand(whole, bounds_of(each)).row(rank))
        operands.append(operand)
    all_gather(comm, operands, group)()
    for operand, whole in zip(operands, expected, strict=True):
        assert torch.equal(operand.full, whole)


def check_reduce_scatter(comm: Comm, rank: int, world_size: int, dtype: torch.dtype, sizes: list[list[int]]) -> None:
    """The result is the sum in rank order, bit for bit, in the dtype on the wire."""
    group = dist.group.WORLD
    assert group is not None
    for average in (False, True)[: 1 + comm.has_average]:
        scatters, expected = [], []
        for index, each in enumerate(sizes):
            generator = torch.Generator().manual_seed(index)
            everyone = [torch.randn(sum(each), generator=generator).to(dtype) for _ in range(world_size)]
            total = everyone[0].clone()
            for other in everyone[1:]:
                total += other
            if average:
                total /= world_size
            source = Operand(everyone[rank].clone(), bounds_of(each))
            scatters.append(Scatter(source, torch.full((each[rank],), -1, dtype=dtype)))
            expected.append(Operand(total, bounds_of(each)).row(rank))
        reduce_scatter(comm, scatters, group, average)()
        for scatter, want in zip(scatters, expected, strict=True):
            if isinstance(comm, GlooComm) or world_size == 2:
                assert torch.equal(scatter.output, want)
            else:
                # Another order of the same sum: a few roundings of a value below 8.
                torch.testing.assert_close(scatter.output, want, rtol=0, atol=16 * torch.finfo(dtype).eps)


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COMMS)
def test_even_operands(rank: int, world_size: int, name: str, dtype: torch.dtype) -> None:
    for numel in (3, 1, 1000):
        check_all_gather(COMMS[name](), rank, world_size, dtype, [[numel] * world_size])
        check_reduce_scatter(COMMS[name](), rank, world_size, dtype, [[numel] * world_size])


@on_ranks(2, 4)
def test_uneven_and_empty_ranges(rank: int, world_size: int) -> None:
    """Only point-to-point can; it says so."""
    comm = GlooComm()
    assert comm.direct_allows_uneven
    sizes = [[5, 3, 1, 0][:world_size], [0] * world_size, [0] * (world_size - 1) + [7]]
    check_all_gather(comm, rank, world_size, torch.float32, sizes)
    check_reduce_scatter(comm, rank, world_size, torch.float32, sizes)


@on_ranks(4, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_in_messages(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """The sum runs in rank order; of two that are under way at once each gets its own, in whatever order they are
    begun."""
    group = dist.group.WORLD
    assert group is not None
    comm = GlooComm()
    numels = [0, 1, 7, 40_001]
    flats, sums = [], []
    for index, numel in enumerate(numels):
        generator = torch.Generator().manual_seed(index)
        everyone = [torch.randn(numel, generator=generator).to(dtype) for _ in range(world_size)]
        total = everyone[0].clone()
        for other in everyone[1:]:
            total += other
        flats.append(everyone[rank].clone())
        sums.append(total)
    order = range(len(numels)) if rank % 2 else reversed(range(len(numels)))
    pending = {index: all_reduce(comm, flats[index], group, False, str(index)) for index in order}
    for index in range(len(numels)):
        pending[index]()
        assert torch.equal(flats[index], sums[index])


def narrow_scatters(
    rank: int, world_size: int, dtypes: tuple[torch.dtype, torch.dtype], sizes: list[list[int]]
) -> tuple[list[Scatter], list[list[torch.Tensor]]]:
    """Scatters of random rows, and what each rank has for this rank's range, in rank order."""
    narrow, wide = dtypes  # of what travels, of sources and outputs
    scatters, rows = [], []
    for index, each in enumerate(sizes):
        generator = torch.Generator().manual_seed(index)
        everyone = [torch.randn(sum(each), generator=generator).to(narrow) for _ in range(world_size)]
        scatters.append(
            Scatter(Operand(everyone[rank].to(wide), bounds_of(each)), torch.full((each[rank],), -1, dtype=wide))
        )
        rows.append([Operand(whole, bounds_of(each)).row(rank) for whole in everyone])
    return scatters, rows


def check_narrow(
    comm: Comm, rank: int, world_size: int, dtypes: tuple[torch.dtype, torch.dtype], sizes: list[list[int]]
) -> None:
    """The rows are summed in rank order in the output's dtype, bit for bit; sources are only read."""
    group = dist.group.WORLD
    assert group is not None
    scatters, rows = narrow_scatters(rank, world_size, dtypes, sizes)
    before = [scatter.source.full.clone() for scatter in scatters]
    reduce_scatter(NarrowComm(dtypes[0], comm), scatters, group, False)()
    for scatter, source, each in zip(scatters, before, rows, strict=True):
        want, exact = each[0].to(dtypes[1]), each[0].double()
        for row in each[1:]:
            want, exact = want + row.to(dtypes[1]), exact + row.double()
        assert scatter.output.dtype == dtypes[1]
        assert torch.equal(scatter.output, want)
        error = scatter.output.double() - exact
        assert not error.numel() or error.abs().max() <= 32 * torch.finfo(dtypes[1]).eps
        assert torch.equal(scatter.source.full, source)


@on_ranks(2, 4)
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_rows_are_summed_in_fp32(rank: int, world_size: int, name: str, narrow: torch.dtype) -> None:
    """bf16 on the wire with fp32 accumulation. Odd sizes, empty ones, more than a block of `sum_rows`."""
    comm, dtypes = NARROW[name](), (narrow, torch.float32)
    check_narrow(comm, rank, world_size, dtypes, [[3] * world_size, [0] * world_size, [66_001] * world_size])
    check_narrow(comm, rank, world_size, (torch.float32, torch.float64), [[5] * world_size])


@on_ranks(2, 4)
def test_narrow_rows_of_uneven_ranges(rank: int, world_size: int) -> None:
    sizes = [[5, 3, 1, 0][:world_size], [0] * world_size, [0] * (world_size - 1) + [7]]
    check_narrow(GlooComm(), rank, world_size, (torch.bfloat16, torch.float32), sizes)


@on_ranks(4)
@pytest.mark.parametrize("name", NARROW)
def test_narrow_rows_lose_little(rank: int, world_size: int, name: str) -> None:
    """The error is far below that of a reduce-scatter which sums in bf16, with the same bytes sent."""
    group = dist.group.WORLD
    assert group is not None
    errors = {}
    for wide in (torch.bfloat16, torch.float32):
        scatters, rows = narrow_scatters(rank, world_size, (torch.bfloat16, wide), [[5000] * world_size])
        # NCCL's own reduce-scatter does not run here; any in bf16 will do for comparison.
        comm = GlooComm() if wide == torch.bfloat16 else NarrowComm(torch.bfloat16, NARROW[name]())
        reduce_scatter(comm, scatters, group, False)()
        exact = torch.stack(rows[0]).double().sum(0)
        errors[wide] = (scatters[0].output.double() - exact).abs().mean()
    assert errors[torch.float32] < errors[torch.bfloat16] / 1000


@on_ranks(2, 4)
@pytest.mark.parametrize("name", COMMS)
def test_all_reduce(rank: int, world_size: int, name: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    tensor = torch.full((5,), float(rank + 1))
    all_reduce(COMMS[name](), tensor, group, False)()
    assert tensor.tolist() == [sum(range(1, world_size + 1))] * 5


@on_ranks(2)
def test_many_under_way_at_once(rank: int, world_size: int) -> None:
    """Gathers and scatters are issued in one order everywhere, and may be waited for in another."""
    group = dist.group.WORLD
    assert group is not None
    comm = GlooComm()
    gathers, scatters = [], []
    for index in range(6):
        operand = Operand(torch.full((2000,), float(index)), [0, 1000, 2000])
        operand.row(rank).fill_(10 * index + rank)
        gathers.append((operand, all_gather(comm, [operand], group)))
        scatter = Scatter(Operand(torch.full((2000,), float(index + rank)), [0, 1000, 2000]), torch.empty(1000))
        scatters.append((scatter, reduce_scatter(comm, [scatter], group, False)))
    for index, (operand, pending) in reversed(list(enumerate(gathers))):
        pending()
        assert [operand.row(r).unique().tolist() for r in (0, 1)] == [[10.0 * index], [10.0 * index + 1]]
    for index, (scatter, pending) in enumerate(scatters):
        pending()
        assert scatter.output.unique().tolist() == [2.0 * index + 1]


@on_ranks(2)
def test_choice_follows_the_backend(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    assert isinstance(comm_for(group, torch.device("cpu")), GlooComm)
    assert isinstance(comm_for(group, torch.device("cuda")), FlatComm)  # gloo's point-to-point wants host memory


def test_no_coalesced_calls_where_torch_looks_at_each() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around groups, which in torch 2.11 has no coalesced collectives."""
    with fake_world(0, 2), pytest.MonkeyPatch.context() as patch:
        group = dist.group.WORLD
        assert group is not None
        patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        assert isinstance(comm_for(group, torch.device("cuda")), NcclComm)
        before = dist.get_debug_level()
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        try:
            assert isinstance(comm_for(group, torch.device("cuda")), FlatComm)
        finally:
            dist.set_debug_level(before)


@pytest.mark.parametrize("world_size", [3, 8, 16])
def test_flat_on_many_threads(world_size: int) -> None:
    def body(rank: int, world_size: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        assert isinstance(comm_for(group, torch.device("cpu")), FlatComm)
        check_all_gather(FlatComm(), rank, world_size, torch.float32, [[2] * world_size])
        check_reduce_scatter(FlatComm(), rank, world_size, torch.float32, [[2] * world_size])
        check_narrow(
            FlatComm(), rank, world_size, (torch.bfloat16, torch.float32), [[2] * world_size, [30] * world_size]
        )

    run_threads(world_size, body)


def test_nccl_calls_on_a_fake_group() -> None:
    """Nothing moves, but the coalesced calls take what we hand them, and the average stays the backend's."""
    with fake_world(1, 4):
        group = dist.group.WORLD
        assert group is not None
        comm = NcclComm()
        assert comm.has_average
        operands = [Operand(torch.zeros(8), [0, 2, 4, 6, 8]), Operand(torch.zeros(4), [0, 1, 2, 3, 4])]
        all_gather(comm, operands, group)()
        scatters = [Scatter(operand, torch.zeros(operand.bounds[1])) for operand in operands]
        for average in (False, True):
            reduce_scatter(comm, scatters, group, average)()
        halves = [Scatter(Operand(torch.zeros(8).bfloat16(), [0, 2, 4, 6, 8]), torch.zeros(2))]
        reduce_scatter(comm, halves, group, True)()
        all_reduce(comm, torch.zeros(3), group, True)()


@on_ranks(2, 4)
def test_separate_group(rank: int, world_size: int) -> None:
    """Behaviour 140: one group for each distinct set of ranks, the same at every call, with messages of its own."""
    group = dist.group.WORLD
    assert group is not None
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
def test_complex_rows_are_gathered(rank: int, world_size: int) -> None:
    """`torch.distributed` views them as real ones for the backend; the group's own method does not."""
    group = dist.group.WORLD
    assert group is not None
    operand = Operand(torch.zeros(4, dtype=torch.complex64), range(0, 5, 2))
    operand.row(rank).fill_(complex(rank, 1))
    all_gather(FlatComm(), [operand], group)()
    assert operand.full.tolist() == [1j, 1j, 1 + 1j, 1 + 1j]


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
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int16])
def test_nccl_moves_what_it_has_no_type_for(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Nor has gloo."""
    group = dist.group.WORLD
    assert group is not None
    operand = Operand(torch.zeros(4, dtype=dtype), range(0, 5, 2))
    operand.row(rank).fill_(rank + 1)
    all_gather(NcclComm(), [operand], group)()
    assert operand.full.tolist() == [1, 1, 2, 2]
    if dtype.is_complex:
        scatter = Scatter(
            Operand(torch.full((4,), rank + 2j, dtype=dtype), range(0, 5, 2)), torch.zeros(2, dtype=dtype)
        )
        reduce_scatter(NcclComm(), [scatter], group, average=False)()
        assert scatter.output.tolist() == [1 + 4j, 1 + 4j]


@on_ranks(4)
def test_smaller_meshes_of_parts_of_a_mesh(rank: int, world_size: int) -> None:
    """Pipeline stages, or ranks of a tensor-parallel group, reshard to smaller meshes of their own. Groups of different
    ranks had one name, so that they read each other's keys in the store."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))["shard"]
    smaller = smaller_roles(roles_of(mesh), 1)
    assert smaller.replicate_size == 2 and smaller.shard_size == 1
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=smaller.replicate_group)
    assert total.item() == sum(mesh.mesh.tolist())
