"""One contract for every `Comm`: what the module docstring of `fsdp2.comm.base` draws, on real data where the backend
moves data, and as calls that are accepted where it does not (NCCL's coalesced calls on a fake group)."""

import pytest
import torch
import torch.distributed as dist

from fsdp2.comm import comm_for
from fsdp2.comm.base import Comm, Operand, Scatter
from fsdp2.comm.flat import FlatComm
from fsdp2.comm.gloo import GlooComm
from fsdp2.comm.nccl import NcclComm
from tests.ranks import on_ranks
from tests.threads import fake_world, run_threads

COMMS = {"flat": FlatComm, "gloo": GlooComm}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


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
    comm.all_gather(operands, group).wait()
    for operand, whole in zip(operands, expected, strict=True):
        assert torch.equal(operand.full, whole)


def check_reduce_scatter(comm: Comm, rank: int, world_size: int, dtype: torch.dtype, sizes: list[list[int]]) -> None:
    """The result is the sum in rank order, bit for bit, in the dtype on the wire."""
    group = dist.group.WORLD
    assert group is not None
    for average in (False, True):
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
        comm.reduce_scatter(scatters, group, average).wait()
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
    sizes = [[3] * world_size, [1] * world_size, [1000] * world_size]
    check_all_gather(COMMS[name](), rank, world_size, dtype, sizes)
    check_reduce_scatter(COMMS[name](), rank, world_size, dtype, sizes)


@on_ranks(2, 4)
def test_uneven_and_empty_ranges(rank: int, world_size: int) -> None:
    """Only point-to-point can; it says so."""
    comm = GlooComm()
    assert comm.direct_allows_uneven
    sizes = [[5, 3, 1, 0][:world_size], [0] * world_size, [0] * (world_size - 1) + [7]]
    check_all_gather(comm, rank, world_size, torch.float32, sizes)
    check_reduce_scatter(comm, rank, world_size, torch.float32, sizes)


@on_ranks(2, 4)
@pytest.mark.parametrize("name", COMMS)
def test_all_reduce(rank: int, world_size: int, name: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    for average in (False, True):
        tensor = torch.full((5,), float(rank + 1))
        COMMS[name]().all_reduce(tensor, group, average).wait()
        total = sum(range(1, world_size + 1))
        assert tensor.tolist() == [total / world_size if average else total] * 5


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
        gathers.append((operand, comm.all_gather([operand], group)))
        scatter = Scatter(Operand(torch.full((2000,), float(index + rank)), [0, 1000, 2000]), torch.empty(1000))
        scatters.append((scatter, comm.reduce_scatter([scatter], group, False)))
    for index, (operand, pending) in reversed(list(enumerate(gathers))):
        pending.wait()
        assert [operand.row(r).unique().tolist() for r in (0, 1)] == [[10.0 * index], [10.0 * index + 1]]
    for index, (scatter, pending) in enumerate(scatters):
        pending.wait()
        assert scatter.output.unique().tolist() == [2.0 * index + 1]


@on_ranks(2)
def test_choice_follows_the_backend(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    assert isinstance(comm_for(group, torch.device("cpu")), GlooComm)
    assert isinstance(comm_for(group, torch.device("cuda")), FlatComm)  # gloo's point-to-point wants host memory


@pytest.mark.parametrize("world_size", [3, 8, 16])
def test_flat_on_many_threads(world_size: int) -> None:
    def body(rank: int, world_size: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        assert isinstance(comm_for(group, torch.device("cpu")), FlatComm)
        check_all_gather(FlatComm(), rank, world_size, torch.float32, [[2] * world_size])
        check_reduce_scatter(FlatComm(), rank, world_size, torch.float32, [[2] * world_size])

    run_threads(world_size, body)


def test_nccl_calls_on_a_fake_group() -> None:
    """Nothing moves, but the coalesced calls take what we hand them, and the average stays the backend's."""
    with fake_world(1, 4):
        group = dist.group.WORLD
        assert group is not None
        comm = NcclComm()
        assert comm.has_average
        operands = [Operand(torch.zeros(8), [0, 2, 4, 6, 8]), Operand(torch.zeros(4), [0, 1, 2, 3, 4])]
        comm.all_gather(operands, group).wait()
        scatters = [Scatter(operand, torch.zeros(operand.bounds[1])) for operand in operands]
        for average in (False, True):
            comm.reduce_scatter(scatters, group, average).wait()
        comm.all_reduce(torch.zeros(3), group, True).wait()
