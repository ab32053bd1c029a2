"""What the cases of docs/migration.md share: the tables, how a row gets its case, models and observations.

A row is known by its section and its left column. `case` registers what runs for it on the ranks of a pool: our side of
the row, beside torch's DDP, FSDP1 or FSDP2 where these run on the CPU; DeepSpeed and Accelerate are not installed, so
there the effect is asserted that they document. `none` registers rows that begin with "none" or "not yet": the reason
must be there, and what is said to be missing must be missing still.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as torch_wrap
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

import fsdp2
from fsdp2 import (
    ArgumentError,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    ZeroPolicy,
    auto_shard,
    events,
    full_params,
    fully_shard,
)
from tests.helpers.parity_models import TORCH_VERSION, batch, full
from tests.helpers.source_tree import ROOT

DIM, LAYERS = 8, 3
MICROBATCHES = 5
BF16 = torch.bfloat16
TORCH_HAS_2_15 = TORCH_VERSION >= (2, 15)

# --- the tables -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    section: str
    left: str
    ours: str


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(path: Path) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(heading of level 2, header, rows) of each table."""
    section, lines = "", [*path.read_text(encoding="utf-8").splitlines(), ""]
    for index, line in enumerate(lines):
        if line.startswith("## "):
            section = line[3:]
        if re.fullmatch(r"\|(-+:?\|)+", line):
            rows = itertools.takewhile(lambda row: row.startswith("|"), lines[index + 1 :])
            yield section, cells(lines[index - 1]), [cells(row) for row in rows]


SECTIONS = {
    "From `torch.distributed.fsdp.fully_shard`": "FSDP2",
    "From DDP": "DDP",
    "From FSDP1 (`FullyShardedDataParallel`)": "FSDP1",
    "From DeepSpeed": "DeepSpeed",
    "From Accelerate": "Accelerate",
}
ROWS = [
    Row(SECTIONS[section], row[0], row[header.index("fsdp2")])
    for section, header, rows in tables(ROOT / "docs" / "migration.md")
    for row in rows
]


@dataclass(frozen=True)
class Case:
    """What runs for a row: on how many ranks, and whether we have what the row is about."""

    body: Callable[[int, int], None]
    ranks: int
    missing: bool = False


CASES: dict[tuple[str, str], Case] = {}
Body = Callable[[int, int], None]


def case(section: str, *lefts: str, ranks: int = 2) -> Callable[[Body], Body]:
    """Register `body(rank, world_size)` for these rows of a section."""

    def register(body: Body) -> Body:
        for left in lefts:
            assert (section, left) not in CASES, left
            CASES[section, left] = Case(body, ranks)
        return body

    return register


def public_words() -> set[str]:
    """All public names, arguments and fields that a user of fsdp2 can set or call, in lower case."""
    callables = [fully_shard, auto_shard, full_params, fsdp2.local_optimizer, fsdp2.clip_grad_norm_]
    policies = [MixedPrecisionPolicy, CPUOffloadPolicy, ZeroPolicy, fsdp2.DataParallelMeshDims]
    names = [name for each in callables for name in inspect.signature(each).parameters]
    names += [field.name for policy in policies for field in fields(policy)]
    names += [name for name in dir(FSDPModule) if not name.startswith("_") and name not in dir(nn.Module)]
    return {name.lower() for name in [*names, *fsdp2.__all__]}


def none(section: str, left: str, *absent: str) -> Callable[[Body], Body]:
    """Register a row that says that something is missing: no public name contains any of these words. As a decorator,
    what happens instead is tested too."""

    def body(rank: int, world_size: int, more: Body | None = None) -> None:
        found = [name for name in public_words() for word in absent if word in name]
        assert absent, left
        assert not found, f"{left}: there is {found} now, so the row is wrong"
        if more is not None:
            more(rank, world_size)

    def register(more: Body) -> Body:
        CASES[section, left] = Case(partial(body, more=more), 2, missing=True)
        return more

    assert (section, left) not in CASES, left
    CASES[section, left] = Case(body, 0, missing=True)
    return register


# --- models and observations ------------------------------------------------------------------------------------------


def stack(dim: int = DIM) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(LAYERS)))


def shard(model: nn.Module | None = None, **options: Any) -> Any:
    """Each child is a unit, and then the root; of `stack()` without a model."""
    model = stack() if model is None else model
    for child in model.children():
        fully_shard(child, **options)
    return fully_shard(model, **options)


def run(model: nn.Module, rank: int, index: int = 0) -> Tensor:
    """Forward and backward of one batch."""
    loss = model(batch(index, rank)).float().square().mean()
    loss.backward()
    return loss.detach()


def step_with_flag(model: Any, rank: int) -> None:
    """The microbatches of a step under a `ZeroPolicy`."""
    for index in range(MICROBATCHES):
        model.set_is_last_backward(index == MICROBATCHES - 1)
        run(model, rank, index)


def counts(log: list[events.Event]) -> dict[str, int]:
    return dict(Counter(event.kind for event in log if event.group_size))


def torch_counts(mode: CommDebugMode) -> dict[str, int]:
    """The same from torch's own count."""
    found: Counter[str] = Counter()
    for operation, times in mode.get_comm_counts().items():
        name = str(operation).replace("_", "")
        kind = next(kind for kind in ("all_gather", "reduce_scatter", "all_reduce") if kind.replace("_", "") in name)
        found[kind] += times
    return dict(found)


@contextmanager
def quiet() -> Iterator[None]:
    """torch's FSDP1 warns of itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fsdp1(model: nn.Module | None = None, **options: Any) -> Any:
    options.setdefault("auto_wrap_policy", torch_wrap.ModuleWrapPolicy({nn.Linear}))
    options.setdefault("use_orig_params", True)
    with quiet():
        return FullyShardedDataParallel(stack() if model is None else model, device_id=torch.device("cpu"), **options)


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Whole gradients in the order of the parameters, of ours, DDP's or FSDP1's."""
    sharded1 = isinstance(model, FullyShardedDataParallel)
    if not sharded1 or model.sharding_strategy is ShardingStrategy.NO_SHARD:
        return [None if param.grad is None else full(param.grad) for param in model.parameters()]
    with quiet(), FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(param).detach() for name, param in model.named_parameters()}


def same(rank: int, ours: Any, theirs: Any, *, collectives: bool = True, tolerance: float = 1e-5) -> None:
    """One batch: the loss, the gradients with their dtypes, and how many collectives of each kind."""
    with events.record() as log:
        loss = run(ours, rank)
    mode = CommDebugMode()
    with quiet(), mode if collectives else nullcontext():
        their_loss = run(theirs, rank)
    assert_close(loss, their_loss, rtol=tolerance, atol=tolerance)
    for mine, other in zip(gradients(ours), gradients(theirs), strict=True):
        assert_close(mine, other, rtol=tolerance, atol=tolerance)
    if collectives:
        assert counts(log) == torch_counts(mode)


def averaged(rank: int, world_size: int, model: Any, plain: nn.Module, index: int = 0, tolerance: float = 1e-5) -> None:
    """The gradients of a sharded model that ran batch `index` are the mean of the plain model's over the ranks."""
    plain = copy.deepcopy(plain)
    for each in range(world_size):
        (plain(batch(index, each)).float().square().mean() / world_size).backward()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(full(mine.grad).to(theirs.grad.dtype), theirs.grad, rtol=tolerance, atol=tolerance, msg=name)


def trains(rank: int, world_size: int, **options: Any) -> Any:
    """`stack` with these options, after a batch whose gradients are right."""
    model = shard(**options)
    run(model, rank)
    averaged(rank, world_size, model, stack())
    return model


def units_of(report: fsdp2.WrapReport) -> list[str]:
    return [unit.fqn for unit in report.units]


class Net(nn.Module):
    """Two blocks of a small and a large layer."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(DIM, DIM), nn.Linear(DIM, 4 * DIM)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.large(self.small(x))).chunk(4, -1)[0]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Net.Block() for _ in range(2))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def their_units(policy: Any) -> list[str]:
    """The modules that FSDP1 wraps in `Net`, without its root."""
    model = fsdp1(Net(), auto_wrap_policy=policy)
    names = [name for name, module in model.named_modules() if isinstance(module, FullyShardedDataParallel)]
    return sorted(name.replace("_fsdp_wrapped_module.", "").replace("._fsdp_wrapped_module", "") for name in names[1:])


def our_units(policy: Any) -> list[str]:
    return sorted(units_of(auto_shard(Net(), policy, dry_run=True)))[1:]


def order_of_gathers(log: list[events.Event], *kinds: str) -> list[str]:
    return [f"{event.kind} {event.unit}" for event in log if event.kind in kinds and event.unit]


# --- cases of several tables ------------------------------------------------------------------------------------------


@case("DeepSpeed", "`zero_quantized_weights`")
def quantised_weights(rank: int, world_size: int) -> None:
    dim = 64
    model = fully_shard(nn.Linear(dim, dim, bias=False), mp_policy=MixedPrecisionPolicy(all_gather_dtype=torch.int8))
    before = model.weight.full_tensor()
    with events.record() as log:
        model.unshard()
    gathered = next(event for event in log if event.kind == "all_gather")
    assert gathered.nbytes == dim * dim + 4 * dim * dim // 256
    error = (model.weight.detach() - before).abs().max()
    assert 0 < error <= before.abs().max() / 254 * 1.001
    model.reshard()
    assert torch.equal(model.weight.full_tensor(), before), "the shards stay exact"


@none("DeepSpeed", "`zero_quantized_gradients`", "quantized_grad", "int4")
def narrow_wire(rank: int, world_size: int) -> None:
    with pytest.raises(ArgumentError, match="floating-point"):
        MixedPrecisionPolicy(reduce_scatter_dtype=torch.int8)
    model = shard(mp_policy=MixedPrecisionPolicy(reduce_scatter_dtype=BF16))
    with events.record() as log:
        run(model, rank)
    assert {event.dtype for event in log if event.kind == "reduce_scatter"} == {BF16}
    averaged(rank, world_size, model, stack(), tolerance=1e-2)
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}


@case("FSDP1", "`forward_prefetch=True`")
@case("Accelerate", "`forward_prefetch=`")
@case("DeepSpeed", "`stage3_prefetch_bucket_size`")
def forward_prefetch(rank: int, world_size: int) -> None:
    def forward(model: Any) -> list[str]:
        with events.record() as log:
            run(model, rank)
        return order_of_gathers(log, "all_gather", "post_forward")[: 2 * LAYERS]

    plain, listed, auto = shard(), shard(), shard()
    listed[0].set_modules_to_forward_prefetch([listed[1]])
    listed[1].set_modules_to_forward_prefetch([listed[2]])
    auto.set_auto_forward_prefetch(True)
    for _ in range(2):
        forward(auto)
    ahead = ["all_gather 0", "all_gather 1", "post_forward 0", "all_gather 2", "post_forward 1", "post_forward 2"]
    assert forward(listed) == forward(auto) == ahead
    assert forward(plain)[:3] == ["all_gather 0", "post_forward 0", "all_gather 1"]
    same(rank, shard(), fsdp1(forward_prefetch=True))
