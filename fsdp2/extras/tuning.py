"""`tune_lanes`: measure, on the actual process groups, from which size on a parameter should be sent by itself.

It compares what a unit does: all-gather and reduce-scatter of a few parameters on the direct lane, and the same on the
packed lane with its copies. Ranks measure different times but must choose the same lanes, so the slowest rank's times
are used.
"""

import json
import os
from collections.abc import Callable, Mapping
from math import log
from pathlib import Path
from statistics import median
from time import perf_counter
from uuid import uuid4
from warnings import warn

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.comm.base import Comm, Operand, Scatter
from fsdp2.errors import ArgumentError
from fsdp2.layout import ShardLayout
from fsdp2.mesh import MeshRoles
from fsdp2.runtime.channel import Channel
from fsdp2.runtime.gather import Gather
from fsdp2.runtime.packing import packed
from fsdp2.runtime.unit import unit_of

_SHARD_BYTES = [2**exponent for exponent in range(12, 24)]  # 4 KiB to 8 MiB
_MAX_BYTES = 128 * 2**20  # for the unsharded parameters of one measurement
_PARAMS = 4  # per measurement, where they fit
_ROUNDS = 5


def tune_lanes(model: nn.Module, *, file: str | os.PathLike[str] | None = None) -> dict[str, int | None]:
    """Measure which parameters should be sent by themselves and which should share a buffer, and apply the result.

    A parameter whose shard reaches the limit in bytes takes the *direct* lane: it is gathered in place, and its
    gradient is reduced in place. Smaller ones are copied into one buffer, since each message has a fixed cost. Without
    tuning a conservative limit for the backend applies. Results do not depend on it; only time and memory do.

    Every rank of the model's meshes must call it, between steps, after `fully_shard`. It takes a second or two and at
    most 0.5 GiB on each rank. All ranks get the same answer.

    Args:
        model: all units in it are tuned.
        file: a JSON file that stores the results. If every rank finds a result for its hardware, backend, number of
            ranks and torch version there, nothing is measured. Otherwise the first rank of each mesh adds the new
            result. If the file cannot be read or written, the ranks warn and measure.

    Returns:
        For each mesh, under a description that is also its key in `file`: the limit in bytes of a shard, or None if the
        packed lane was better at all sizes. Meshes whose backend has only one lane are left out.

    Raises:
        ArgumentError: nothing in `model` is sharded.

    Example::

        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        tune_lanes(model, file="lanes.json")
    """
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    if not units:
        raise ArgumentError(f"tune_lanes: nothing in this {type(model).__name__} is sharded; call fully_shard first")
    groups = [group for unit in units for group in unit.groups]
    for unit in units:
        unit.reshard_all()
    answers: dict[str, int | None] = {}
    limits: dict[MeshRoles, int | None] = {}
    for roles in dict.fromkeys(group.roles for group in groups):
        comm = Channel(roles).base
        if roles.shard_group is not None and roles.shard_size > 1 and comm.direct_min_bytes is not None:
            key = _description(roles)
            limits[roles] = answers[key] = _agreed(key, roles, comm, None if file is None else Path(file))
    for group in groups:
        if group.roles in limits:
            group.channel.set_direct_min_bytes(limits[group.roles])
            group.channel_changed()
    return answers


def best_limit(direct: Mapping[int, float], packed: Mapping[int, float]) -> int | None:
    """The smallest size for the direct lane. It minimises the product of all time ratios, so that one disturbed
    measurement does not decide. None if the packed lane is always better.

    >>> best_limit({1: 5.0, 2: 3.0, 4: 2.0}, {1: 1.0, 2: 3.5, 4: 6.0})
    2
    """
    best, best_sum, total = None, 0.0, 0.0
    for size in sorted(direct, reverse=True):
        total += log(direct[size] / packed[size])
        if total < best_sum:
            best, best_sum = size, total
    return best


def _description(roles: MeshRoles) -> str:
    """A description of everything that the measured times depend on."""
    device = roles.device
    hardware = "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    backend = dist.get_backend_config(roles.any_group)
    return f"{hardware}, {backend}, {roles.shard_size} x {roles.replicate_size} ranks, torch {torch.__version__}"


def _agreed(key: str, roles: MeshRoles, comm: Comm, file: Path | None) -> int | None:
    """The result in `file` if all ranks have the same one; otherwise a new measurement."""
    known = _read(file).get(key, -1) if file is not None else -1
    mine = -2 if known is None else known
    most, least = _over_ranks([mine, -mine], roles)
    if most == -least and mine != -1:
        return None if mine == -2 else mine
    times = [*_measure(roles, 0).items(), *_measure(roles, None).items()]
    slowest = _over_ranks([seconds for _, seconds in times], roles)
    half = len(times) // 2
    sizes = [size for size, _ in times[:half]]
    limit = best_limit(dict(zip(sizes, slowest, strict=False)), dict(zip(sizes, slowest[half:], strict=True)))
    comm.release()
    if file is not None and roles.shard_rank == 0 and roles.replicate_rank == 0:
        _write(file, {**_read(file), key: limit})
    return limit


def _write(file: Path, answers: Mapping[str, int | None]) -> None:
    """Replace the file atomically. An error is only a warning, because the other ranks have their result and go on."""
    new = file.with_name(f".{file.name}.{uuid4().hex}")
    try:
        new.write_text(json.dumps(answers, indent=1))
        new.replace(file)
    except OSError as error:
        warn(f"tune_lanes: {file} could not be written, and the next run will measure again: {error}", stacklevel=2)


def _read(file: Path) -> dict[str, int | None]:
    """The results in `file`; empty if it does not exist. If a rank raised here, the others would be left waiting."""
    try:
        found = json.loads(file.read_text())
        return {key: each if each is None else int(each) for key, each in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, OverflowError, TypeError, AttributeError) as error:
        warn(f"tune_lanes: {file} is not one of its files, and is written again: {error}", stacklevel=2)
        return {}


def _over_ranks(values: list[float], roles: MeshRoles) -> list[float]:
    """The maximum of each value over all ranks of the mesh, because replicas must take the same lanes too."""
    tensor = torch.tensor(values, dtype=torch.float64, device=roles.device)
    for group in (roles.shard_group, roles.replicate_group):
        if group is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    result: list[float] = tensor.tolist()
    return result


def _measure(roles: MeshRoles, direct_min_bytes: int | None) -> dict[int, float]:
    """Seconds of an all-gather and a reduce-scatter, by bytes of a shard, on one lane."""
    channel = Channel(roles)
    channel.fqn = "tune_lanes"
    channel.set_direct_min_bytes(direct_min_bytes)
    sizes = [size for size in _SHARD_BYTES if size * roles.shard_size <= _MAX_BYTES] or _SHARD_BYTES[:1]
    return {size: _time(roles, _exchange(channel, size)) for size in sizes}


def _exchange(channel: Channel, shard_bytes: int) -> Callable[[], None]:
    """A function that does what a unit with a few parameters of that size does in backward."""
    roles, comm = channel.roles, channel.comm
    num_params = max(1, min(_PARAMS, _MAX_BYTES // (shard_bytes * roles.shard_size)))
    layout = ShardLayout((shard_bytes // 4 * roles.shard_size,), 0, roles.shard_size)
    layouts = [layout] * num_params
    fulls = [torch.zeros(layout.shape, device=roles.device) for _ in layouts]
    shards = [torch.zeros(layout.local_shape(roles.shard_rank), device=roles.device) for _ in layouts]
    outputs = torch.zeros(num_params * layout.padded_numel, device=roles.device)
    gather, group = Gather(layouts, fulls, roles.shard, channel), roles.shard_group
    assert group is not None

    def run() -> None:
        gather.start(shards)()
        if comm.direct_min_bytes is None:
            buffer = packed(fulls, layouts, torch.float32).view(-1)
            bounds = range(0, buffer.numel() + 1, outputs.numel())
            scatters = [Scatter(Operand(buffer, bounds), outputs)]
        else:
            pieces = outputs.split(layout.padded_numel)
            operands = [Operand(full, layout.flat_bounds) for full in fulls]
            scatters = [Scatter(operand, piece) for operand, piece in zip(operands, pieces, strict=True)]
        comm.reduce_scatter(scatters, group, False).wait()

    return run


def _time(roles: MeshRoles, run: Callable[[], None]) -> float:
    """Seconds of one run: the median of several, each behind a barrier. The first is not counted."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        _over_ranks([0.0], roles)
        start = perf_counter()
        run()
        if roles.device.type != "cpu":
            torch.accelerator.synchronize(roles.device)  # the CPU must wait, because it measures the time
        seconds.append(perf_counter() - start)
    return median(seconds[1:])
