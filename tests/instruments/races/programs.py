"""Programs for the detector: small trainings, each with a feature that has streams, memory or messages of its own.

`run` runs one, under the detector or without it. What it returns must not depend on that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
import fsdp2.checkpoint.run.background as background
import fsdp2.comm
from fsdp2 import MixedPrecisionPolicy, ZeroPolicy, fully_shard
from fsdp2.comm import gloo
from fsdp2.comm.flat import NcclComm
from fsdp2.comm.gloo import GlooComm
from tests.helpers.extensions import InPieces
from tests.instruments.races.detector import Detector, detecting
from tests.instruments.races.nets import (
    Look,
    Recomputed,
    batch,
    customise,
    mesh_of,
    net,
    results,
    sharded,
    step,
    trained,
)
from tests.instruments.races.programs_of_offload import OF_OFFLOAD
from tests.instruments.races.staging import staged

__all__ = ["PROGRAMS", "num_ranks", "run"]


BF16 = torch.bfloat16
Program = tuple[int, Callable[[int, Look], list[Tensor]]]  # how many ranks, and what they do


class OverNccl(NcclComm):
    """The calls for NCCL, on gloo, which has no average and needs no large operands."""

    direct_min_bytes = 1024
    has_average = False


def of(
    ranks: int,
    change: Callable[[Any], object] = lambda model: None,
    prepare: Callable[[Any], object] = lambda model: None,
    **options: Any,
) -> Program:
    """The training of a model that is changed, sharded with these options of `fully_shard`, and prepared."""

    def program(rank: int, look: Look) -> list[Tensor]:
        model: Any = net()
        change(model)
        given = {**options, "mesh": mesh_of(2, 2)} if options.get("mesh") == "hsdp" else options
        model = sharded(model, **given)
        prepare(model)
        return trained(model, rank)

    return ranks, program


def freezes_first(model: Any) -> None:
    model[0].requires_grad_(False)


def tiles(model: Any) -> None:
    for block in model:
        fsdp2.tile(block[2], 3)


def in_pieces(model: Any) -> None:
    for block in model:
        block[0].weight = nn.Parameter(InPieces(block[0].weight.detach(), {}))


def three_buffers(model: Any) -> None:
    model.set_reduce_scatter_max_input_buffers(3)


def added(rank: int, look: Look) -> list[Tensor]:
    """Two backwards of one graph: reduced gradients are added to those of the first."""
    model = sharded(net())
    loss = model(batch(rank, 0)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [param.grad.to_local().clone() for param in model.parameters()]


def again(rank: int, look: Look) -> list[Tensor]:
    """A unit runs again in a forward, when another has run in between."""
    one, two = (fully_shard(block) for block in net(2))
    model = fully_shard(nn.Sequential(one, two, one))
    return trained(model, rank)


def partials(rank: int, look: Look) -> list[Tensor]:
    """Microbatches that are not all-reduced, and a reduction at the end only."""
    model = sharded(net(), mesh=mesh_of(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            model.set_is_last_backward(micro == 2)
            step(model, rank, 3 * number + micro)
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def frozen(rank: int, look: Look) -> list[Tensor]:
    """Frozen weights beside trained ones: gathered once, then copied from host memory until something changes them."""
    for block in (model := net()):
        block[0].requires_grad_(False)
    model = sharded(model, zero=ZeroPolicy(keep_frozen="host"))
    seen = trained(model, rank)
    with torch.no_grad():
        model[1][0].weight.mul_(0.5)
    return seen + trained(model, rank)


def evaluated(rank: int, look: Look) -> list[Tensor]:
    """Forwards without gradients, an average of the parameters, and prediction of the order."""
    model = sharded(net(4))
    model.set_auto_forward_prefetch(True)
    losses = []
    for number in range(3):
        step(model, rank, number)
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad, alpha=0.1)
                param.grad = None
            losses.append(model(batch(rank, number)).clone())
    return losses


def listed(rank: int, look: Look) -> list[Tensor]:
    """Prefetch lists, and checkpointed blocks."""
    blocks = [fully_shard(Recomputed(block)) for block in net(4)]
    model = fully_shard(nn.Sequential(*blocks))
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    for number in range(2):
        step(model, rank, number)
    return [param.grad.to_local().clone() for param in model.parameters()]


class SideStream:
    """A stream of the user's."""

    def __init__(self, look: Detector):
        self._on = lambda: look.streams.on("side")
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._on())

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def hooked(rank: int, look: Look) -> list[Tensor]:
    """An all-reduce hook on a stream of its own."""
    model = sharded(net())
    stream: Any = None if look is None else SideStream(look)
    for unit in (*model, model):
        unit.set_all_reduce_hook(lambda flat: flat.mul_(0.5), stream=stream)
    return trained(model, rank)


def optimized_aside(rank: int, look: Look) -> list[Tensor]:
    """The first step of the optimizer runs on a stream of its own, and the next forward waits for its event only."""
    model = sharded(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        step(model, rank, number)
        if look is None or number:
            optimizer.step()
        else:
            done = look.streams.record()
            with look.streams.on("side"):
                done.wait()
                optimizer.step()
                done = look.streams.record()
            model.set_post_optim_event(done)
        optimizer.zero_grad()
    return results(model)


def finalized(rank: int, look: Look) -> list[Tensor]:
    """Manual finalisation with a handle, other computation while gradients are reduced, a clip, and `fsdp2`'s
    optimizer."""
    model = sharded(net())
    model.set_manual_backward_finalization(True)
    optimizer = fsdp2.local_optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
    for number in range(2):
        step(model, rank, 2 * number)
        step(model, rank, 2 * number + 1)
        handle = model.finalize_backward(async_op=True)
        batch(rank, number).square()
        handle.wait()
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def over_nccl(rank: int, look: Look) -> list[Tensor]:
    """The calls that NCCL gets."""
    return with_comm(MixedPrecisionPolicy(BF16, torch.float32), rank)


def wire_over_nccl(rank: int, look: Look) -> list[Tensor]:
    return with_comm(MixedPrecisionPolicy(reduce_scatter_dtype=BF16), rank)


def with_comm(policy: MixedPrecisionPolicy, rank: int) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsdp2.comm.COMMS, "gloo", OverNccl())
        return trained(sharded(net(), mp_policy=policy), rank)


def matrices(rank: int, look: Look) -> list[Tensor]:
    """Whole matrices travel to their owners and back."""
    model = sharded(net())
    weights = [param for param in model.parameters() if param.ndim == 2]
    biases = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": weights}, {"params": biases, "kind": torch.optim.AdamW}]
    optimizer = fsdp2.optim.matrix_optimizer(torch.optim.Muon, groups, lr=0.02)
    for number in range(3):
        step(model, rank, number)
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def staging(rank: int, look: Look) -> list[Tensor]:
    """The values of two saves are copied to the host while training goes on."""
    model = sharded(net())
    seen: list[Tensor] = []
    for number in range(2):
        step(model, rank, number)
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad, alpha=0.1)
                param.grad = None
        values = [param.to_local() for param in model.parameters()]
        seen += staged(values, look)
    background._arena.clear()
    return seen


TO_16 = MixedPrecisionPolicy(BF16, BF16)
PROGRAMS: dict[str, Program] = {
    "plain": of(2),
    "mixed": of(2, mp_policy=TO_16),  # gradients are cast back
    "half": of(2, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16)),  # divided before they are summed
    "int8": of(2, mp_policy=MixedPrecisionPolicy(all_gather_dtype=torch.int8)),
    "wire": of(2, mp_policy=MixedPrecisionPolicy(reduce_scatter_dtype=BF16)),  # rows are narrower than in the sum
    "kept": of(2, freezes_first, lambda model: model.set_keep_unsharded_storage(True)),
    "tiled": of(2, tiles),
    "extension": of(2, in_pieces),
    "custom": of(2, prepare=customise),
    "smaller": of(4, reshard_after_forward=2),
    "hsdp": of(4, prepare=three_buffers, mesh="hsdp", mp_policy=TO_16),
    "inner": of(
        4,
        prepare=three_buffers,
        zero=ZeroPolicy(3, shard_size=2, shard_replicas=True),
        mp_policy=MixedPrecisionPolicy(BF16),
    ),
    "replicated": of(4, zero=ZeroPolicy(0)),  # an all-reduce that is a reduce-scatter and a gather
    "partials": (4, partials),
    **OF_OFFLOAD,
    **{each.__name__: (2, each) for each in (added, again, frozen, evaluated, listed, hooked, optimized_aside)},
    **{each.__name__: (2, each) for each in (finalized, over_nccl, wire_over_nccl, matrices, staging)},
}


def num_ranks(name: str) -> int:
    """How many ranks a program needs."""
    return PROGRAMS[name][0]


def run(name: str, rank: int, look: bool) -> list[Tensor]:
    """Run a program on this rank.

    Raises:
        AssertionError: the detector found races.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooComm, "direct_min_bytes", 1024)
        patch.setattr(gloo, "_WHOLE_BYTES", 1024)
        if not look:
            return PROGRAMS[name][1](rank, None)
        with detecting() as detector:
            return PROGRAMS[name][1](rank, detector)
