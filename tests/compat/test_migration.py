"""What docs/migration.md says of FSDP1 and DDP, where our side needs more than another name: the same losses, gradients
and numbers of collectives as theirs."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as torch_wrap
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fsdp2 import (
    MixedPrecisionPolicy,
    ZeroPolicy,
    by_class,
    by_predicate,
    by_size,
    events,
    full_params,
    fully_shard,
    transformer_blocks,
)
from tests.helpers.migration_cases import (
    DIM,
    LAYERS,
    MICROBATCHES,
    Net,
    counts,
    fsdp1,
    gradients,
    our_units,
    quiet,
    run,
    same,
    shard,
    stack,
    their_units,
)
from tests.helpers.parity_models import batch, mesh_2d
from tests.helpers.ranks import on_ranks

BF16 = torch.bfloat16


# --- FSDP1 ------------------------------------------------------------------------------------------------------------

STRATEGIES: dict[str, list[dict[str, Any]]] = {
    "FULL_SHARD": [{"reshard_after_forward": True}, {"zero": ZeroPolicy(3)}],
    "SHARD_GRAD_OP": [{"reshard_after_forward": False}, {"zero": ZeroPolicy(2)}],
    "NO_SHARD": [{"zero": ZeroPolicy(0)}],
}


@on_ranks(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies(rank: int, world_size: int, name: str) -> None:
    for options in STRATEGIES[name]:
        same(rank, shard(**options), fsdp1(sharding_strategy=ShardingStrategy[name]))


@on_ranks(4)
@pytest.mark.parametrize(("name", "stage"), [("HYBRID_SHARD", 3), ("_HYBRID_SHARD_ZERO2", 2)])
def test_hybrid_strategies(rank: int, world_size: int, name: str, stage: int) -> None:
    for options in (
        {"mesh": mesh_2d(2, 2), "reshard_after_forward": stage == 3},
        {"zero": ZeroPolicy(stage, shard_size=2)},
    ):
        theirs = fsdp1(sharding_strategy=ShardingStrategy[name], device_mesh=mesh_2d(2, 2))
        same(rank, shard(**options), theirs)


@on_ranks(2)
def test_ignored_modules(rank: int, world_size: int) -> None:
    ours, theirs = stack(), stack()
    fully_shard(ours, ignored_params=set(ours[1].parameters()))
    same(rank, ours, fsdp1(theirs, ignored_modules=[theirs[1]], auto_wrap_policy=None))
    assert type(ours[1].weight) is nn.Parameter


@on_ranks(2)
@pytest.mark.parametrize("dtypes", [(BF16, torch.float32), (None, BF16)])
def test_mixed_precision(rank: int, world_size: int, dtypes: tuple[Any, Any]) -> None:
    """Equal up to rounding; layers see inputs and weights of the same dtypes."""
    seen: list[list[Any]] = [[], []]
    models = shard(mp_policy=MixedPrecisionPolicy(*dtypes)), fsdp1(mixed_precision=MixedPrecision(*dtypes))
    for model, found in zip(models, seen, strict=True):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(
                    lambda module, args, found=found: found.append((args[0].dtype, module.weight.dtype))
                )
    same(rank, *models, collectives=False, tolerance=3e-2)
    assert seen[0] == seen[1]


class Sees(nn.Module):
    """Notes the dtype of its input."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.dtypes, self.weight = dtypes, nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes.append(x.dtype)
        return x.float() * self.weight.float()


@on_ranks(2)
def test_casts_of_inputs(rank: int, world_size: int) -> None:
    for root_casts, inner_casts in itertools.product([True, False], repeat=2):
        dtypes: list[torch.dtype] = []
        ours, theirs = (nn.Sequential(Sees(dtypes), Sees(dtypes)) for _ in range(2))
        for child in ours:
            fully_shard(child, mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=inner_casts))
        fully_shard(ours, mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=root_casts))
        precision = MixedPrecision(BF16, cast_forward_inputs=inner_casts, cast_root_forward_inputs=root_casts)
        ours(batch(0, rank))
        with quiet():
            policy = torch_wrap.ModuleWrapPolicy({Sees})
            fsdp1(theirs, mixed_precision=precision, auto_wrap_policy=policy)(batch(0, rank))
        assert dtypes[:2] == dtypes[2:], (root_casts, inner_casts)


@on_ranks(2)
def test_wrap_policies(rank: int, world_size: int) -> None:
    def is_block(fqn: str, module: nn.Module) -> bool:
        return isinstance(module, Net.Block)

    by_function = partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Net.Block))
    transformer = partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Net.Block})
    blocks = their_units(torch_wrap.ModuleWrapPolicy({Net.Block}))
    assert blocks == their_units(by_function) == their_units(transformer) == ["blocks.0", "blocks.1"]
    for policy in (by_class(Net.Block), by_class("Block"), by_predicate(is_block), transformer_blocks()):
        assert our_units(policy) == blocks
    large = partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=4 * DIM * DIM)
    assert our_units(by_size(4 * DIM * DIM)) == their_units(large)


@on_ranks(2)
def test_whole_parameters(rank: int, world_size: int) -> None:
    ours, theirs = shard(), fsdp1()
    with full_params(ours), quiet(), FullyShardedDataParallel.summon_full_params(theirs):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)
            for each in (mine, other):
                each.data[0] = 3
    same(rank, ours, theirs, collectives=False)


@on_ranks(2)
@pytest.mark.parametrize("other", ["FSDP1", "DDP"])
def test_no_sync(rank: int, world_size: int, other: str) -> None:
    """The same gradients, and one reduction a unit."""
    ours, theirs = shard(), fsdp1() if other == "FSDP1" else DistributedDataParallel(stack())
    with events.record() as log:
        for index in range(MICROBATCHES):
            ours.set_requires_gradient_sync(index == MICROBATCHES - 1)
            run(ours, rank, index)
    with quiet():
        with theirs.no_sync():
            for index in range(MICROBATCHES - 1):
                run(theirs, rank, index)
        run(theirs, rank, MICROBATCHES - 1)
    assert counts(log)["reduce_scatter"] == LAYERS
    for mine, other_grad in zip(gradients(ours), gradients(theirs), strict=True):
        assert_close(mine, other_grad)


# --- DDP --------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_ddp(rank: int, world_size: int) -> None:
    """Sharded; and replicated, with one all-reduce for one unit, as DDP has one bucket of so few parameters."""
    same(rank, shard(), DistributedDataParallel(stack()), collectives=False)
    ours = fully_shard(stack(), zero=ZeroPolicy(0))
    with events.record() as log:
        same(rank, ours, DistributedDataParallel(stack()), collectives=False)
    assert counts(log) == {"all_reduce": 1}


class Branches(nn.Module):
    """Every rank uses another layer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rank, self.layers = rank, nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers[self.rank](x)
        return out


@on_ranks(2)
def test_unused_parameters(rank: int, world_size: int) -> None:
    model: Any = fully_shard(Branches(rank))
    model.set_reduce_scatter_unused_params(True)
    same(rank, model, DistributedDataParallel(Branches(rank), find_unused_parameters=True), collectives=False)


class Reuses(nn.Module):
    """A layer twice, each under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack()

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@on_ranks(2)
def test_a_static_graph(rank: int, world_size: int) -> None:
    ours = Reuses()
    shard(ours.layers)
    with quiet():
        same(rank, fully_shard(ours), DistributedDataParallel(Reuses(), static_graph=True), collectives=False)


@on_ranks(2)
def test_narrow_reductions(rank: int, world_size: int) -> None:
    """DDP's bf16 hook needs NCCL; its fp16 hook is the same with another dtype."""
    theirs = DistributedDataParallel(stack())
    theirs.register_comm_hook(None, fp16_compress_hook)
    ours = shard(mp_policy=MixedPrecisionPolicy(reduce_scatter_dtype=BF16))
    with events.record() as log:
        same(rank, ours, theirs, collectives=False, tolerance=1e-2)
    assert {event.dtype for event in log if event.kind == "reduce_scatter"} == {BF16}
