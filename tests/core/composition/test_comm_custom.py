"""Collectives of the user's own behind a `Comm`, and the ready-made ones whose buffers are the backend's: what is
called with what, in which order, and that the numbers are those of the `Comm` below."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2 import fully_shard
from fsdp2._torch.extras import all_gather_flat, reduce_scatter_flat
from fsdp2.comm.base import Operand
from fsdp2.comm.flat import FlatComm, NcclComm
from fsdp2.comm.gloo import GlooComm
from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.extras.comm_memory import FlatAllGather, FlatReduceScatter, GroupMemory
from fsdp2.extras.custom_comm import AllGather, CustomComm, ReduceScatter
from fsdp2.layout import Lane, ShardLayout
from tests.helpers.collectives import Scatter, all_gather, all_reduce, reduce_scatter, world
from tests.helpers.ranks import on_ranks
from tests.helpers.threads import fake_world


class Recorder:
    """Allocates; content that was not written shows."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.tensors.append(torch.full(tuple(size), -5, dtype=dtype, device=device))
        return self.tensors[-1]


class Gathers(Recorder, AllGather):
    """The backend's flat all-gather."""

    def __call__(self, **arguments: Any) -> dist.Work | None:
        return all_gather_flat(arguments["output_tensor"], arguments["input_tensor"], arguments["group"])


class Scatters(Recorder, ReduceScatter):
    """The backend's flat reduce-scatter."""

    def __call__(self, **arguments: Any) -> None:
        tensors = arguments["output_tensor"], arguments["input_tensor"]
        reduce_scatter_flat(*tensors, arguments["op"], arguments["group"]).wait()


def filled_operand(rank: int, world_size: int, numel: int, dtype: torch.dtype) -> Operand:
    """One that waits for an all-gather: rank r's range holds r + 1, the others -1."""
    operand = Operand(torch.full((numel * world_size,), -1, dtype=dtype), range(0, numel * world_size + 1, numel))
    operand.row(rank).fill_(rank + 1)
    return operand


@on_ranks(2)
def test_what_is_not_replaced_stays(rank: int, world_size: int) -> None:
    """The direct lane is off for the replaced kind only; the other kind and all-reduces are the base's."""
    base = GlooComm()
    gathers, scatters = Gathers(), Scatters()
    only_gather, only_scatter = CustomComm(base, all_gather=gathers), CustomComm(base, reduce_scatter=scatters)
    layout, lanes = ShardLayout((2**20,), 0, 2), (Lane.DIRECT, Lane.PACKED)
    assert (only_scatter.gather_lane(layout, 4), only_scatter.scatter_lane(layout, 4)) == lanes
    assert (only_gather.scatter_lane(layout, 4), only_gather.gather_lane(layout, 4)) == lanes
    assert CustomComm(NcclComm()).has_average and only_scatter.has_average and not only_gather.has_average

    operand = filled_operand(rank, world_size, 4, torch.float32)
    all_gather(only_scatter, [operand], world())()
    assert operand.full.tolist() == [1] * 4 + [2] * 4
    halves = Scatter(Operand(torch.full((4,), rank + 1.0).bfloat16(), [0, 2, 4]), torch.empty(2))
    reduce_scatter(only_gather, [halves], world(), False)()
    assert halves.output.tolist() == [3.0, 3.0]
    tensor = torch.full((2,), float(rank))
    all_reduce(only_gather, tensor, world(), False)()
    assert tensor.tolist() == [1, 1]
    assert not gathers.tensors and not scatters.tensors


def test_buffers_are_dropped_at_the_wait() -> None:
    """Memory: between two collectives the unit holds nothing of what the user allocated."""
    with fake_world(0, 2):
        gathers, scatters = Gathers(), Scatters()
        comm = CustomComm(FlatComm(), gathers, scatters)
        gathering = [all_gather(comm, [filled_operand(0, 2, 4, torch.float32)], world())]
        source = Operand(torch.ones(4), [0, 2, 4])
        scattering = [reduce_scatter(comm, [Scatter(source, torch.empty(2))], world(), False)]
        for pending, recorder in ((gathering, gathers), (scattering, scatters)):
            references = [torch._C._WeakTensorRef(tensor) for tensor in recorder.tensors]
            recorder.tensors.clear()
            assert not any(reference.expired() for reference in references)
            pending.pop()()
            assert all(reference.expired() for reference in references)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda size, dtype, device: torch.empty(size[0] + 1, dtype=dtype), r"got \(9,\)"),
        (lambda size, dtype, device: torch.empty(size, dtype=torch.float64), "float64"),
        (lambda size, dtype, device: torch.empty(2 * size[0], dtype=dtype)[::2], r"strides \(2,\)"),
    ],
)
def test_a_wrong_allocation_is_named(wrong: Any, named: str) -> None:
    class Wrong(Gathers):
        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return wrong(size, dtype, device)

    with fake_world(0, 2):
        comm = CustomComm(FlatComm(), Wrong())
        with pytest.raises(ArgumentError, match=r"Wrong\.allocate: expected .* size \(8,\), torch\.float32") as raised:
            all_gather(comm, [filled_operand(0, 2, 4, torch.float32)], world())
        raised.match(named)


# --- the backend's own memory -----------------------------------------------------------------------------------------


class CpuMemory:
    """Stands where the backend's memory would: notes what is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, torch.dtype, torch.device]] = []

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.asked.append((numel, dtype, device))
        return torch.empty(numel, dtype=dtype, device=device)


@on_ranks(2, 4)
def test_flat_collectives_in_given_memory(rank: int, world_size: int) -> None:
    """Behaviour 136: the ready-made pair moves what the backend moves, in the memory that it was given."""
    memory, cpu = CpuMemory(), torch.device("cpu")
    comm = CustomComm(GlooComm(), FlatAllGather(memory), FlatReduceScatter(memory))
    operand = filled_operand(rank, world_size, 3, torch.bfloat16)
    all_gather(comm, [operand], world())()
    assert operand.full[::3].tolist() == list(range(1, world_size + 1))
    source = Operand(torch.full((2 * world_size,), float(rank)), range(0, 2 * world_size + 1, 2))
    scatter = Scatter(source, torch.empty(2))
    reduce_scatter(comm, [scatter], world(), True)()
    assert scatter.output.tolist() == [(world_size - 1) / 2] * 2
    assert memory.asked == [
        (3 * world_size, torch.bfloat16, cpu),
        (2 * world_size, torch.float32, cpu),
        (2, torch.float32, cpu),
    ]


@on_ranks(2)
def test_gloo_has_no_memory_of_its_own(rank: int, world_size: int) -> None:
    """Behaviour 136: a clear error instead of a silent fallback, also for a device that the group does not serve."""
    with pytest.raises(UnsupportedError, match=r"cpu tensors in this group has no such memory \(.*gloo.*NCCL has"):
        GroupMemory(world(), torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="xpu tensors"):
        GroupMemory(world(), torch.device("xpu"))


@on_ranks(2)
def test_an_error_of_the_device_is_not_the_backends(rank: int, world_size: int) -> None:
    """A kernel of the user's has failed. It was a CollectiveError: "another rank died, or did something else"."""

    class Breaks(Gathers):
        def __call__(self, **arguments: Any) -> dist.Work | None:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    model: Any = fully_shard(torch.nn.Linear(4, 4))
    model.set_custom_all_gather(Breaks())
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        model(torch.ones(1, 4))
