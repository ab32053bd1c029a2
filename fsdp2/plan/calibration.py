"""`calibrate`: measure this machine, with all its ranks at once, as a `Machine`. Layer: plan.

Ranks share cores, memory and links, so all of them measure the same thing at the same time. Everything is measured in
rounds, and the median counts, because others may use the machine.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2.api import fully_shard
from fsdp2.comm import comm_for
from fsdp2.comm.base import Operand, Pending
from fsdp2.plan.cost import Call, Like
from fsdp2.plan.machine import Machine
from fsdp2.policies import HOST

__all__ = ["calibrate"]

WINDOW_S = 0.02  # how long one thing is repeated in one round
_MESSAGES_S = 0.2  # and one of `_MESSAGES`, which vary more
_TURNS_S, _MAX_TURNS = 0.2, 20  # how long all operators are, in turn
_DTYPES = (torch.float32, torch.bfloat16)
_PRODUCT = 768  # rows and columns
_ELEMENTS = 2**24
_SMALL, _LARGE = 2**12, 2**23  # bytes of messages
_UNITS = 16
_CHAIN, _CHAIN_OPS = 16, 3 * 16  # forward, and two operators in backward for each
_UPDATED, _UPDATES = 32, 4  # tensors that are updated in place, and operators for each
_OF = "operator: "
_MESSAGES = ("small message", "large message", "compute", "small message beside it", "large message beside it")


def calibrate(
    operators: Mapping[str, Call] | None = None,
    *,
    name: str = "this machine",
    memory: int | None = None,
    ranks_per_node: int | None = None,
    rounds: int = 5,
) -> Machine:
    """Measure FLOP/s by dtype, memory bandwidth, what the host takes for an operator and for a unit, and the latency,
    bandwidth and overlap of messages.

    Collective: every rank of the default process group must call it, with nothing else running. Without a process group
    messages are not measured. It takes about ten seconds, and 0.1 s more for each of `operators`.

    Args:
        operators: `Rehearsal.operators` of a plan: measure these too. Then plans of that workload know how
            long each takes, which matters on the CPU, where small and elementwise operators do not run at the rate of
            memory. Plan before `init_process_group`.
        name: what the machine is called.
        memory: bytes of each rank; None: that of the device, or of the host divided by the ranks.
        ranks_per_node: None: all ranks are on one node.
        rounds: how often each thing is measured.

    Returns:
        The machine; of times the slowest rank's, so it is the same on every rank.

    Example::

        plan = predict(workload, config, Machine.load("other.json"), world_size=2)
        dist.init_process_group()
        machine = calibrate(plan.rehearsal.operators)
        machine.save("machine.json")
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    world = dist.get_world_size() if dist.is_initialized() else 1
    node = Node(name, memory if memory is not None else _memory(device, world), ranks_per_node or world, world)
    times = times_of(things(device), calls_of(operators or {}, device), device, rounds)
    return machine_of(medians(times, device), node, device)


@dataclass(frozen=True)
class Node:
    """What is said of a machine, not measured. See `Machine`; `world` is the number of ranks that measured."""

    name: str
    memory: int
    ranks_per_node: int
    world: int


def machine_of(seconds: Mapping[str, float], node: Node, device: torch.device) -> Machine:
    """The machine on which `things` take these seconds."""
    found = Machine(
        node.name,
        node.memory,
        {str(dtype).removeprefix("torch."): 2 * _PRODUCT**3 / seconds[f"product {dtype}"] for dtype in _DTYPES},
        3 * 4 * _ELEMENTS / seconds["memory"],
        *(1e30, 1e30),
        host_memory_bandwidth=3 * 4 * _ELEMENTS / seconds["host memory"],
        ranks_per_node=node.ranks_per_node,
        link_latency=0.0,
        network_latency=0.0,
        op_seconds=max(0.0, seconds["chain"] / _CHAIN_OPS - seconds["operator"]),
        dtensor_seconds=max(0.0, (seconds["DTensors"] - seconds["tensors"]) / (_UPDATED * _UPDATES)),
        unit_seconds=max(0.0, (seconds["sharded"] - seconds["unsharded"]) / _UNITS),
        is_accelerator=device.type != "cpu",
        source=f"measured with {node.world} rank{'s' * (node.world > 1)}, torch {torch.__version__}",
        operators={key.removeprefix(_OF): each for key, each in seconds.items() if key.startswith(_OF)},
    )
    if node.world == 1:
        return found
    small, large, compute, *beside = (seconds[key] for key in _MESSAGES)
    small_more, large_more = (max(0.0, each - compute) for each in beside)
    # On the CPU a message takes longer beside compute, of which ranks are never through at the same time.
    small, large = max(small, small_more), max(large, large_more)
    # On a busy machine a small message may take as long as a large one. That does not make bytes free.
    rate = _LARGE * (node.world - 1) / node.world / max(large - small, large / 10)
    hidden = 1.0 - large_more / large
    return replace(found, link=rate, network=rate, link_latency=small / (node.world - 1), overlap=hidden)


# --- what is timed ----------------------------------------------------------------------------------------------------


def calls_of(operators: Mapping[str, Call], device: torch.device) -> dict[str, Callable[[], Any]]:
    """The operators that can be called on new tensors."""
    return {_OF + name: run for name, call in operators.items() if (run := _repeatable(call, device)) is not None}


def things(device: torch.device) -> dict[str, Callable[[], Any]]:
    """What else is timed, by name. Collective."""
    values = [torch.rand(8, device=device) for _ in range(_UPDATED)]
    found = _rates(device) | {"unsharded": _step_of(_units(device), device), "tensors": partial(_update, values)}
    if not dist.is_initialized():
        return found | {"sharded": found["unsharded"], "DTensors": found["tensors"]}
    sharded = _units(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("others", "own"))["own"]
    for unit in sharded:
        fully_shard(unit, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    found["sharded"] = _step_of(sharded, device)
    found["DTensors"] = partial(_update, [DTensor.from_local(value, mesh, [Shard(0)]) for value in values])
    return found | _messages(found["product torch.float32"], device)


def _rates(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Products, memory, and what surrounds an operator."""
    found: dict[str, Callable[[], Any]] = {}
    for dtype in _DTYPES:
        left, right = (torch.rand(_PRODUCT, _PRODUCT, device=device).to(dtype) for _ in range(2))
        found[f"product {dtype}"] = partial(torch.matmul, left, right)
    for name, where in (("memory", device), ("host memory", HOST)):
        one, other, out = (torch.rand(_ELEMENTS, device=where) for _ in range(3))
        found[name] = partial(torch.add, one, other, out=out)
    tiny, factor = torch.rand(8, device=device), torch.rand(8, device=device)
    found["operator"] = lambda: tiny * factor
    leaf, gains = torch.rand(8, device=device, requires_grad=True), torch.rand(8, device=device, requires_grad=True)

    def chain() -> None:
        value = leaf
        for _ in range(_CHAIN):
            value = value * gains
        torch.autograd.grad(value, (leaf, gains), torch.ones_like(value))

    found["chain"] = chain
    return found


def _update(values: Sequence[torch.Tensor]) -> None:
    """As optimizers do, in place."""
    for value in values:
        value.lerp_(value, 0.1)
        value.mul_(1.0)
        value.addcmul_(value, value, value=0.0)
        value.add_(0.0)


def _units(device: torch.device) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(_UNITS)]).to(device)


def _step_of(model: nn.Module, device: torch.device) -> Callable[[], None]:
    x = torch.rand(2, 8, device=device)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return step


def _messages(product: Callable[[], Any], device: torch.device) -> dict[str, Callable[[], Any]]:
    """All-gathers as units make them, alone and beside about as much compute as the large one takes."""
    group = dist.group.WORLD
    assert group is not None
    comm, world = comm_for(group, device), group.size()

    def gather(nbytes: int) -> Callable[[], Pending]:
        rows = nbytes // 4 // world
        operand = Operand(torch.zeros(rows * world, device=device), range(0, rows * world + 1, rows))
        return lambda: comm.all_gather([operand], group)

    small, large = gather(_SMALL), gather(_LARGE)
    took, once = (min(_time(run, 1, device).wall for _ in range(5)) for run in (lambda: large().wait(), product))
    repeat = torch.tensor(max(1, round(took / once)), device=device)
    dist.all_reduce(repeat, dist.ReduceOp.MAX)
    times = int(repeat)

    def compute() -> None:
        for _ in range(times):
            product()

    def beside(message: Callable[[], Pending]) -> None:
        pending = message()
        compute()
        pending.wait()

    runs = lambda: small().wait(), lambda: large().wait(), compute, partial(beside, small), partial(beside, large)
    return dict(zip(_MESSAGES, runs, strict=True))


# --- timing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Took:
    """Seconds of one run of something: on the wall, and of all processors together, which others hardly disturb."""

    wall: float
    processor: float


def times_of(
    timed: Mapping[str, Callable[[], Any]], calls: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int
) -> dict[str, list[Took]]:
    """What each takes on this rank, in each of some rounds, in which all are timed in turn. Each of `timed` is repeated
    as often as fits into a window. On the CPU `calls` are not, but all of them in turn are: in a step the caches hold
    what other operators have left there. All equally often on all ranks. Collective."""
    if device.type != "cpu":  # where one call is too short to be timed
        timed, calls = {**timed, **calls}, {}
    first = _slowest([_time(run, 2, device).wall for run in timed.values()], device)
    windows = [_MESSAGES_S if name in _MESSAGES else WINDOW_S for name in timed]
    times = [max(1, min(1000, int(window / each))) for window, each in zip(windows, first, strict=True)]
    once = _slowest([sum(_time(run, 1, device).wall for run in calls.values())], device)[0]
    turns = max(1, min(_MAX_TURNS, int(_TURNS_S / max(once, 1e-9))))
    found: dict[str, list[Took]] = {name: [] for name in (*timed, *calls)}
    for _ in range(rounds):
        _slowest([0.0], device)
        taken = [_in_turn(calls.values(), device) for _ in range(turns)]
        for name, each in zip(calls, zip(*taken, strict=True), strict=True):
            found[name].append(Took(fmean(took.wall for took in each), fmean(took.processor for took in each)))
        for (name, run), count in zip(timed.items(), times, strict=True):
            _slowest([0.0], device)  # all begin together
            found[name].append(_time(run, count, device))
    return found


def medians(times: Mapping[str, Sequence[Took]], device: torch.device, clock: str = "wall") -> dict[str, float]:
    """Of the slowest rank, by one clock of `Took`. Collective."""
    own = [median(getattr(took, clock) for took in each) for each in times.values()]
    return dict(zip(times, _slowest(own, device), strict=True))


def _in_turn(calls: Iterable[Callable[[], Any]], device: torch.device) -> list[Took]:
    """Each once. All results are kept until the end, as in a step, so that operators get new memory from the system."""
    kept: list[Any] = []

    def keep(run: Callable[[], Any]) -> None:
        kept.append(run())

    return [_time(partial(keep, run), 1, device) for run in calls]


def _time(run: Callable[[], Any], times: int, device: torch.device) -> Took:
    wall, processor = perf_counter(), process_time()
    for _ in range(times):
        run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return Took((perf_counter() - wall) / times, (process_time() - processor) / times)


def _slowest(values: list[float], device: torch.device) -> list[float]:
    """Each over all ranks."""
    if not dist.is_initialized():
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    result: list[float] = tensor.tolist()
    return result


def _memory(device: torch.device, world: int) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world
    return int(torch.accelerator.get_memory_info(device)[1])


def _repeatable(call: Call, device: torch.device) -> Callable[[], Any] | None:
    """The call on new tensors; None if it cannot be made on them."""
    packet, _, overload = call.operator.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload)
    try:
        args, kwargs = _made(call.args, device), _made(call.kwargs, device)
        function(*args, **kwargs)
    except (RuntimeError, IndexError, TypeError):  # it needs values that make sense
        return None
    return lambda: function(*args, **kwargs)


def _made(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, Like):
        shape = [1 if step == 0 else size for size, step in zip(tree.shape, tree.stride, strict=True)]
        made = torch.empty_strided(shape, tree.stride, dtype=tree.dtype, device=device)
        made = made.uniform_() if tree.dtype.is_floating_point else made.zero_()
        return made.expand(tree.shape)
    if isinstance(tree, tuple):
        return [_made(each, device) for each in tree]
    if isinstance(tree, dict):
        return {key: _made(each, device) for key, each in tree.items()}
    return tree
