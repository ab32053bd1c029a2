"""Every row of the tables of docs/migration.md, and of the table of costs in docs/zero.md, does what it says.

A row is known by its section and its left column. `case` registers what runs for it on the ranks of a pool: our side of
the row, beside torch's DDP, FSDP1 or FSDP2 where these run on the CPU; DeepSpeed and Accelerate are not installed, so
there the effect is asserted that they document. `none` registers rows that begin with "none" or "not yet": the reason
must be there, and what is said to be missing must be missing still. (Migration, DEMAND P4.)
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
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_wrap
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import (
    ArgumentError,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OrderError,
    ZeroPolicy,
    auto_shard,
    by_class,
    by_predicate,
    by_size,
    events,
    full_params,
    fully_shard,
    transformer_blocks,
)
from tests.parity_models import batch, full, mesh_2d
from tests.ranks import on_ranks, run_on_ranks
from tests.source_tree import ROOT
from tests.test_no_walls import Convolutions, Experts, PackedLinear, Scaled, Tied, shard_in_order

DIM, LAYERS = 8, 3
MICROBATCHES = 5
BF16 = torch.bfloat16
TORCH_HAS_2_15 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)

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


def run_row(rank: int, world_size: int, section: str, left: str) -> None:
    CASES[section, left].body(rank, world_size)


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


# --- from FSDP2 -------------------------------------------------------------------------------------------------------


@case("FSDP2", "`reduce_dtype=None`")
def reduce_dtype_none(rank: int, world_size: int) -> None:
    seen: list[torch.dtype] = []
    for api in (fsdp2, torch_fsdp):
        model = api.fully_shard(stack(), mp_policy=api.MixedPrecisionPolicy(param_dtype=BF16))
        model.set_all_reduce_hook(lambda grads: seen.append(grads.dtype))
        run(model, rank)
    assert seen == [torch.float32, torch.float32 if TORCH_HAS_2_15 else BF16]


@case("FSDP2", "when a unit's reduction starts")
def start_of_reductions(rank: int, world_size: int) -> None:
    model = shard()
    with events.record() as log:
        run(model, rank)
    order = [(event.kind, event.unit) for event in log]
    for unit in ("1", "2"):
        assert order.index(("reduce_scatter", unit)) < order.index(("post_backward", unit))


@case("FSDP2", "uneven `Shard(dim)` for dim > 0")
def uneven(rank: int, world_size: int) -> None:
    plain = nn.Linear(DIM - 3, DIM)
    with pytest.raises(NotImplementedError, match="uneven sharding"):
        torch_fsdp.fully_shard(copy.deepcopy(plain), shard_placement_fn=lambda param: Shard(param.ndim - 1))
    model = fully_shard(plain, shard_placement_fn=lambda param: Shard(param.ndim - 1))
    model(torch.ones(1, DIM - 3)).sum().backward()
    assert tuple(model.weight.to_local().shape) == (DIM, 3 - rank)
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(DIM, DIM - 3))


@case("FSDP2", "trainable parameters of several dtypes in a unit")
def several_dtypes(rank: int, world_size: int) -> None:
    plain = Experts(torch.float64, torch.float32)
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        torch_fsdp.fully_shard(copy.deepcopy(plain))(batch(0, rank))
    model = fully_shard(copy.deepcopy(plain))
    with events.record() as log:
        run(model, rank)
    assert sorted(str(e.dtype) for e in log if e.kind == "reduce_scatter") == ["torch.float32", "torch.float64"]
    averaged(rank, world_size, model, plain)


@case("FSDP2", "0-dim parameters")
def scalars(rank: int, world_size: int) -> None:
    plain = Scaled()
    with pytest.raises(ValueError, match="scalar"):
        torch_fsdp.fully_shard(copy.deepcopy(plain))
    model: Any = fully_shard(copy.deepcopy(plain))
    run(model, rank)
    assert model.scale.placements == (Replicate(),)
    averaged(rank, world_size, model, plain)


@case("FSDP2", "channels_last and transposed parameters")
def strides(rank: int, world_size: int) -> None:
    plain = Convolutions()
    with pytest.raises(NotImplementedError, match="non-contiguous"):
        torch_fsdp.fully_shard(copy.deepcopy(plain.second))
    model: Any = fully_shard(copy.deepcopy(plain))
    assert [param.stride() for param in model.parameters()] == [param.stride() for param in plain.parameters()]
    run(model, rank)
    averaged(rank, world_size, model, plain)


@case("FSDP2", "a weight tied over two units")
def ties(rank: int, world_size: int) -> None:
    plain: Any = Tied()
    theirs, model = copy.deepcopy(plain), copy.deepcopy(plain)
    shard_in_order(torch_fsdp, theirs, "embed_head")
    assert theirs.embed.weight is not theirs.head.weight
    with pytest.raises(ValueError, match=r"embed\.weight|head\.weight"):
        theirs(batch(0, rank))
    shard_in_order(fsdp2, model, "embed_head")
    assert model.embed.weight is model.head.weight
    run(model, rank)
    averaged(rank, world_size, model, plain)


@case("FSDP2", "packed parameters (a subclass with attributes, bitsandbytes)")
def packed(rank: int, world_size: int) -> None:
    plain = PackedLinear(torch.uint8)
    with pytest.raises(AttributeError, match="quant_state"):
        torch_fsdp.fully_shard(copy.deepcopy(plain))(batch(0, rank))
    model = fully_shard(copy.deepcopy(plain))
    assert torch.equal(model(batch(0, rank)), plain(batch(0, rank)))


@case("FSDP2", "`copy.deepcopy` of a sharded module")
def copies(rank: int, world_size: int) -> None:
    with pytest.raises(AssertionError):
        copy.deepcopy(torch_fsdp.fully_shard(nn.Linear(2, 2)))
    model = shard()
    with CommDebugMode() as mode:
        other = copy.deepcopy(model)
    assert mode.get_total_counts() == 0 and other[0].weight is not model[0].weight
    same(rank, other, shard(), collectives=False)


@case("FSDP2", "`set_gradient_divide_factor` on gloo")
def divide_factor(rank: int, world_size: int) -> None:
    found = []
    for factor in (float(world_size), 3.0):
        model = fully_shard(stack())
        model.set_gradient_divide_factor(factor)
        run(model, rank)
        found.append(model[0].weight.grad.full_tensor())
    assert_close(found[0] * world_size / 3, found[1])
    theirs = torch_fsdp.fully_shard(stack())
    theirs.set_gradient_divide_factor(3.0)
    with pytest.raises(RuntimeError, match="PREMUL_SUM"):
        run(theirs, rank)


@case("FSDP2", "`zero=ZeroPolicy(...)`")
def zero_argument(rank: int, world_size: int) -> None:
    assert "zero" not in inspect.signature(torch_fsdp.fully_shard).parameters
    model = shard(zero=ZeroPolicy(2))
    with events.record() as log:
        step_with_flag(model, rank)
    assert counts(log) == {"all_gather": LAYERS, "reduce_scatter": LAYERS * MICROBATCHES}


@case("FSDP2", "`MixedPrecisionPolicy(all_gather_dtype=torch.int8)`")
def int8_gather(rank: int, world_size: int) -> None:
    assert "all_gather_dtype" not in inspect.signature(torch_fsdp.MixedPrecisionPolicy).parameters
    quantised_weights(rank, world_size)


@case("FSDP2", "`MixedPrecisionPolicy(reduce_scatter_dtype=torch.bfloat16)`")
def narrow_reduction(rank: int, world_size: int) -> None:
    assert "reduce_scatter_dtype" not in inspect.signature(torch_fsdp.MixedPrecisionPolicy).parameters
    narrow_wire(rank, world_size)


@case("FSDP2", "`MixedPrecisionPolicy(param_dtype_override_fn=...)`")
def override(rank: int, world_size: int) -> None:
    has = "param_dtype_override_fn" in inspect.signature(torch_fsdp.MixedPrecisionPolicy).parameters
    assert has == TORCH_HAS_2_15
    keep = lambda param: torch.float32 if param.ndim == 1 else None  # noqa: E731
    model = fully_shard(
        nn.Linear(DIM, DIM), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=keep)
    )
    model.unshard()
    assert (model.weight.dtype, model.bias.dtype) == (BF16, torch.float32)


@case("FSDP2", "`set_manual_backward_finalization`, `finalize_backward`")
def manual(rank: int, world_size: int) -> None:
    assert ("finalize_backward" in dir(torch_fsdp.FSDPModule)) == TORCH_HAS_2_15
    model = shard()
    model.set_manual_backward_finalization(True)
    with events.record() as log:
        run(model, rank)
    assert "reduce_scatter" not in counts(log)
    with events.record() as log:
        model.finalize_backward()
    assert counts(log) == {"reduce_scatter": LAYERS}
    averaged(rank, world_size, model, stack())


@case("FSDP2", "`set_keep_unsharded_storage`")
def kept_storage(rank: int, world_size: int) -> None:
    assert ("set_keep_unsharded_storage" in dir(torch_fsdp.FSDPModule)) == TORCH_HAS_2_15
    model = fully_shard(stack())
    model.set_keep_unsharded_storage(True)
    model.unshard()
    weight = model[0].weight
    address = weight.data_ptr()
    model.reshard()
    assert isinstance(model[0].weight, DTensor) and weight.data_ptr() == address
    assert weight.untyped_storage().nbytes() >= weight.nbytes


@case("FSDP2", "`set_auto_forward_prefetch`")
def auto_prefetch(rank: int, world_size: int) -> None:
    assert not any("auto_forward_prefetch" in name for name in dir(torch_fsdp.FSDPModule))
    forward_prefetch(rank, world_size)


@case("FSDP2", "choosing the units")
def chosen_units(rank: int, world_size: int) -> None:
    model = Net()
    assert units_of(auto_shard(model, transformer_blocks())) == ["blocks.0", "blocks.1", ""]
    assert all(isinstance(block, FSDPModule) for block in model.blocks)


@case("FSDP2", "whole parameters for a while")
@case("FSDP1", "`summon_full_params(module)`")
def summon(rank: int, world_size: int) -> None:
    model = shard()
    with full_params(model), torch.no_grad():
        ours = [param.shape for param in model.parameters()]
        model[0].weight[3] = 7
    assert model[0].weight.full_tensor()[3].eq(7).all()
    theirs = fsdp1()
    with quiet(), FullyShardedDataParallel.summon_full_params(theirs), torch.no_grad():
        assert [param.shape for param in theirs.parameters()] == ours
        next(theirs.parameters())[3] = 7
    same(rank, model, theirs)


@case("FSDP2", "an optimizer made before `fully_shard`")
def early_optimizer(rank: int, world_size: int) -> None:
    found = []
    for api in (fsdp2, torch_fsdp):
        model = stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        api.fully_shard(model)
        run(model, rank)
        before = weights(model)
        if api is fsdp2:
            with pytest.warns(UserWarning, match="parameters that fully_shard has replaced"):
                optimizer.step()
        else:
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
        found.append((model, optimizer, before))
    model, optimizer, before = found[0]
    fsdp2.adopt_optimizer(optimizer)
    optimizer.step()
    assert not torch.equal(model[0].weight.full_tensor(), before["0.weight"])


@case("FSDP2", "`clip_grad_norm_`", ranks=4)
def clipping(rank: int, world_size: int) -> None:
    one, other = shard(mesh=mesh_2d(2, 2)), shard(mesh=mesh_2d(2, 2))
    for model in (one, other):
        run(model, rank)
    with CommDebugMode() as mode:
        norm = fsdp2.clip_grad_norm_(one.parameters(), 1e-3)
    assert torch_counts(mode) == {"all_reduce": 1}
    assert_close(norm, full(torch.nn.utils.clip_grad_norm_(other.parameters(), 1e-3)))
    assert_close(gradients(one), gradients(other))


@case("FSDP2", "the optimizer's step")
@case("DeepSpeed", "`optimizer`, `scheduler`")
def local_step(rank: int, world_size: int) -> None:
    one, other = shard(), shard()
    optimizer = fsdp2.local_optimizer(torch.optim.AdamW, one.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    their_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    for model, optim in ((one, optimizer), (other, their_optimizer)):
        run(model, rank)
        optim.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(other).values(), strict=True))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


@case("FSDP2", "`torch.distributed.pipelining`")
def pipelines(rank: int, world_size: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    found = []
    for api in (fsdp2, torch_fsdp):
        part = nn.Sequential(stack()[rank])
        api.fully_shard(part, mesh=mesh["dp"])
        stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
        x, losses = batch(0, 0).repeat(2, 1), []
        schedule.step(*([x] if rank == 0 else []), **({"target": x, "losses": losses} if rank else {}))
        found.append((part[0].weight.grad.full_tensor(), *losses))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@case("FSDP2", "forward after a backward that raised")
def failed_backward(rank: int, world_size: int) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise ArithmeticError

    model = shard()
    hook = model[1].register_forward_hook(lambda module, args, out: Fails.apply(out))
    with pytest.raises(ArithmeticError):
        run(model, rank)
    hook.remove()
    with pytest.raises(OrderError, match="reset_iter_state"):
        model(batch(0, rank))
    model.reset_iter_state()
    model.zero_grad()
    run(model, rank)
    averaged(rank, world_size, model, stack())


@case("FSDP2", "user mistakes")
def mistakes(rank: int, world_size: int) -> None:
    for name, base in (
        ("ArgumentError", ValueError),
        ("MisuseError", AssertionError),
        ("OrderError", RuntimeError),
        ("UnsupportedError", NotImplementedError),
    ):
        assert issubclass(getattr(fsdp2, name), fsdp2.FSDPError) and issubclass(getattr(fsdp2, name), base)
    for api in (fsdp2, torch_fsdp):
        with pytest.raises(ValueError, match="ModuleList"):
            api.fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ArgumentError):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]))


@none("FSDP2", "`module._get_fsdp_state()._fsdp_param_group`", "param_group")
def private_names(rank: int, world_size: int) -> None:
    assert "_fsdp_param_group" in dir(torch_fsdp.fully_shard(nn.Linear(2, 2))._get_fsdp_state())
    assert "_fsdp_param_group" not in dir(fully_shard(nn.Linear(2, 2))._get_fsdp_state())


# --- from DDP ---------------------------------------------------------------------------------------------------------


@case("DDP", "`model = DistributedDataParallel(model)`")
def ddp(rank: int, world_size: int) -> None:
    same(rank, shard(), DistributedDataParallel(stack()), collectives=False)


@case("DDP", "the same memory and communication as DDP")
def like_ddp(rank: int, world_size: int) -> None:
    ours = fully_shard(stack(), zero=ZeroPolicy(0))  # one unit, as DDP has one bucket of so few parameters
    same(rank, ours, DistributedDataParallel(stack()), collectives=False)
    with events.record() as log:
        run(ours, rank)
    assert counts(log) == {"all_reduce": 1}
    assert ours[0].weight.to_local().shape == ours[0].weight.shape


@case("DDP", "optimizer before or after")
def optimizer_after(rank: int, world_size: int) -> None:
    model = stack()
    before = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    assert model[0].weight is not before
    fsdp2.adopt_optimizer(optimizer)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


@none("DDP", "values are broadcast from rank 0", "broadcast", "sync_module")
def nothing_is_sent(rank: int, world_size: int) -> None:
    model = nn.Linear(DIM, DIM, bias=False)
    nn.init.constant_(model.weight, float(rank))
    with CommDebugMode() as mode:
        fully_shard(model)
    assert mode.get_total_counts() == 0 and model.weight.to_local().eq(rank).all()


@case("DDP", "`with model.no_sync():`")
def ddp_no_sync(rank: int, world_size: int) -> None:
    accumulate_like(rank, shard(), DistributedDataParallel(stack()))


def accumulate_like(rank: int, ours: Any, theirs: Any) -> None:
    """Microbatches without sync, and a last one with it: the same gradients, one reduction a unit."""
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
    for mine, other in zip(gradients(ours), gradients(theirs), strict=True):
        assert_close(mine, other)


class Branches(nn.Module):
    """Every rank uses another layer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rank, self.layers = rank, nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[self.rank](x)


@case("DDP", "`find_unused_parameters=True`")
@case("DeepSpeed", "`ignore_unused_parameters`")
def unused(rank: int, world_size: int) -> None:
    alike: Any = fully_shard(Branches(0))
    run(alike, rank)
    assert [param.grad is None for param in alike.parameters()] == [False, False, True, True]
    model: Any = fully_shard(Branches(rank))
    model.set_reduce_scatter_unused_params(True)
    theirs = DistributedDataParallel(Branches(rank), find_unused_parameters=True)
    same(rank, model, theirs, collectives=False)


@case("DDP", "`static_graph=True`")
def reused(rank: int, world_size: int) -> None:
    class Reuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack()

        def forward(self, x: Tensor) -> Tensor:
            for layer in (*self.layers, self.layers[0]):
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    ours = Reuses()
    shard(ours.layers)
    with quiet():
        same(rank, fully_shard(ours), DistributedDataParallel(Reuses(), static_graph=True), collectives=False)


@none("DDP", "`bucket_cap_mb=`, `gradient_as_bucket_view=`", "bucket")
def units_are_buckets(rank: int, world_size: int) -> None:
    report = auto_shard(Net(), by_size(4 * DIM * DIM))
    assert units_of(report) == ["blocks.0.large", "blocks.1.large", ""]


@none("DDP", "`broadcast_buffers=True`", "buffers_", "broadcast")
def buffers_stay(rank: int, world_size: int) -> None:
    model = fully_shard(nn.BatchNorm1d(DIM))
    with events.record() as log:
        run(model, rank)
    assert counts(log) == {"all_gather": 1, "reduce_scatter": 1}
    mean = model.running_mean.clone()
    dist.broadcast(mean, 0)
    assert torch.equal(mean, model.running_mean) == (rank == 0)


@case("DDP", "`register_comm_hook(state, bf16_compress_hook)`")
def compressed(rank: int, world_size: int) -> None:
    """DDP's bf16 hook needs NCCL; its fp16 hook is the same with another dtype."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    theirs = DistributedDataParallel(stack())
    theirs.register_comm_hook(None, fp16_compress_hook)
    ours = shard(mp_policy=MixedPrecisionPolicy(reduce_scatter_dtype=BF16))
    with events.record() as log:
        same(rank, ours, theirs, collectives=False, tolerance=1e-2)
    assert {event.dtype for event in log if event.kind == "reduce_scatter"} == {BF16}
    custom_reduction(rank, world_size)


def custom_reduction(rank: int, world_size: int) -> None:
    """A reduce-scatter of the user's own that sums and then doubles."""

    class Doubles:
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **_: Any) -> None:
            dist.all_reduce(input_tensor, group=group)
            output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()] * 2)
            if op == dist.ReduceOp.AVG:
                output_tensor.div_(group.size())

    ours = fully_shard(nn.Linear(DIM, DIM, bias=False))
    plain = copy.deepcopy(nn.Linear(DIM, DIM, bias=False))
    plain.load_state_dict(weights(ours))
    ours.set_custom_reduce_scatter(Doubles())
    run(ours, rank)
    averaged(rank, world_size, _halved(ours), plain)


def _halved(model: Any) -> Any:
    for param in model.parameters():
        param.grad = param.grad / 2
    return model


none("DDP", "`with model.join():`", "join")


@case("DDP", "`model.module`")
@case("FSDP1", "`module`")
@case("Accelerate", "`accelerator.unwrap_model(model)`")
def not_wrapped(rank: int, world_size: int) -> None:
    plain = stack()
    model = fully_shard(plain)
    assert model is plain and isinstance(model, nn.Sequential) and isinstance(model, FSDPModule)


@case("DDP", "`model.state_dict()` with `module.` in the keys")
@case("FSDP1", "`use_orig_params=True`")
@case("Accelerate", "`use_orig_params=`")
def plain_names(rank: int, world_size: int) -> None:
    model = shard()
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()] == list(stack().state_dict())
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


# --- from FSDP1: the constructor --------------------------------------------------------------------------------------


@case("FSDP1", "`module=`")
def in_place(rank: int, world_size: int) -> None:
    plain = stack()
    assert shard(plain) is plain
    same(rank, plain, fsdp1())


@case("FSDP1", "`process_group=`", "`device_mesh=`")
def groups(rank: int, world_size: int) -> None:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    same(rank, shard(mesh=mesh), fsdp1(process_group=dist.group.WORLD))
    same(rank, shard(mesh=mesh), fsdp1(device_mesh=mesh))
    pair = mesh_2d(1, 2)
    both = (pair.get_group("shard"), pair.get_group("replicate"))
    theirs = fsdp1(process_group=both, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    ours = shard(mesh=DeviceMesh.from_group([*both[::-1]], "cpu", pair.mesh, mesh_dim_names=("replicate", "shard")))
    same(rank, ours, theirs, collectives=False)


def strategy(rank: int, name: str, *ours: dict[str, Any], mesh: DeviceMesh | None = None) -> None:
    for options in ours:
        same(rank, shard(**options), fsdp1(sharding_strategy=ShardingStrategy[name], device_mesh=mesh))


@case("FSDP1", "`FULL_SHARD`")
def full_shard(rank: int, world_size: int) -> None:
    strategy(rank, "FULL_SHARD", {"reshard_after_forward": True}, {"zero": ZeroPolicy(3)})


@case("FSDP1", "`SHARD_GRAD_OP`")
def shard_grad_op(rank: int, world_size: int) -> None:
    strategy(rank, "SHARD_GRAD_OP", {"reshard_after_forward": False}, {"zero": ZeroPolicy(2)})
    zero_argument(rank, world_size)


@case("FSDP1", "`NO_SHARD`")
def no_shard(rank: int, world_size: int) -> None:
    strategy(rank, "NO_SHARD", {"zero": ZeroPolicy(0)})


@case("FSDP1", "`HYBRID_SHARD`", ranks=4)
def hybrid_shard(rank: int, world_size: int) -> None:
    options = {"mesh": mesh_2d(2, 2), "reshard_after_forward": True}
    strategy(rank, "HYBRID_SHARD", options, {"zero": ZeroPolicy(3, shard_size=2)}, mesh=mesh_2d(2, 2))


@case("FSDP1", "`_HYBRID_SHARD_ZERO2`", ranks=4)
def hybrid_shard_zero2(rank: int, world_size: int) -> None:
    options = {"mesh": mesh_2d(2, 2), "reshard_after_forward": False}
    strategy(rank, "_HYBRID_SHARD_ZERO2", options, {"zero": ZeroPolicy(2, shard_size=2)}, mesh=mesh_2d(2, 2))


@case("FSDP1", "`sharding_strategy=`")
@case("Accelerate", "`sharding_strategy=`")
def strategies(rank: int, world_size: int) -> None:
    full_shard(rank, world_size)
    shard_grad_op(rank, world_size)


@case("FSDP1", "`cpu_offload=CPUOffload(offload_params=True)`")
@case("Accelerate", "`cpu_offload=`")
@case("DeepSpeed", "`offload_param: {device: cpu}`", "`offload_optimizer: {device: cpu}`")
def offload(rank: int, world_size: int) -> None:
    """FSDP1 cannot offload without an accelerator; on the CPU what is checked is where things are, and the values."""
    model = trains(rank, world_size, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    states = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
    grads = [param.grad for param in model.parameters()]
    assert {tensor.to_local().device.type for tensor in [*model.parameters(), *grads, *states]} == {"cpu"}


@case("FSDP1", "`auto_wrap_policy=`")
@case("DeepSpeed", "`deepspeed.initialize(model=..., config=...)`")
def auto_wrapped(rank: int, world_size: int) -> None:
    ours = stack()
    assert units_of(auto_shard(ours, by_class(nn.Linear), reshard_after_forward=True)) == ["0", "1", "2", ""]
    same(rank, ours, fsdp1())


def order_of_gathers(log: list[events.Event], *kinds: str) -> list[str]:
    return [f"{event.kind} {event.unit}" for event in log if event.kind in kinds and event.unit]


@case("FSDP1", "`backward_prefetch=BACKWARD_PRE`", "`limit_all_gathers=True`")
@none("FSDP1", "`backward_prefetch=BACKWARD_POST`, `None`", "backward_post")
@case("Accelerate", "`backward_prefetch=`", "`limit_all_gathers=`")
@case("DeepSpeed", "`overlap_comm`")
def backward_prefetch(rank: int, world_size: int) -> None:
    """The next unit is gathered before this one computes, and no further one."""
    ours = shard(reshard_after_forward=True)
    loss = ours(batch(0, rank)).square().mean()
    with events.record() as log:
        loss.backward()
    found = order_of_gathers(log, "all_gather", "post_backward")
    assert found[:4] == ["all_gather 2", "all_gather 1", "post_backward 2", "all_gather 0"]
    ours[2].set_modules_to_backward_prefetch([ours[1], ours[0]])
    with events.record() as log:
        run(ours, rank)
    found = order_of_gathers(log, "all_gather", "post_backward")[LAYERS:]
    assert found[:4] == ["all_gather 2", "all_gather 1", "all_gather 0", "post_backward 2"]


@case("FSDP1", "`ignored_modules=`", "`ignored_states=`")
@case("Accelerate", "`ignored_modules=`")
def ignored(rank: int, world_size: int) -> None:
    theirs, ours = stack(), stack()
    params = {param for module in (ours[1],) for param in module.parameters()}
    fully_shard(ours, ignored_params=params)
    same(rank, ours, fsdp1(theirs, ignored_modules=[theirs[1]], auto_wrap_policy=None))
    assert type(ours[1].weight) is nn.Parameter and isinstance(ours[0].weight, DTensor)


@case("FSDP1", "`param_init_fn=`")
@case("Accelerate", "`param_init_fn=`")
@case("DeepSpeed", "`deepspeed.zero.Init()`")
def from_meta(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        ours = nn.Sequential(nn.Linear(DIM, DIM, bias=False))
    shard(ours)
    assert ours[0].weight.is_meta
    ours.to_empty(device="cpu")
    nn.init.constant_(ours[0].weight, 0.5)
    with torch.device("meta"):
        theirs = nn.Sequential(nn.Linear(DIM, DIM, bias=False))

    def initialise(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.5)

    same(rank, ours, fsdp1(theirs, param_init_fn=initialise))
    assert ours[0].weight.to_local().shape == (DIM // world_size, DIM)


@case("FSDP1", "`device_id=`")
def device(rank: int, world_size: int) -> None:
    model = shard(mesh=init_device_mesh("cpu", (world_size,)))
    assert {param.to_local().device.type for param in model.parameters()} == {"cpu"}
    assert model[0].weight.device_mesh.device_type == "cpu"


@none("FSDP1", "`sync_module_states=True`", "sync_module", "broadcast")
@none("Accelerate", "`sync_module_states=`", "sync_module", "broadcast")
@case("Accelerate", "`cpu_ram_efficient_loading=`")
def from_rank_0(rank: int, world_size: int) -> None:
    """Only rank 0 has values; after loading all ranks have their rows of them."""
    nothing_is_sent(rank, world_size)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS)))
    shard(model).to_empty(device="cpu")
    values = stack().state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(values) if rank == 0 else {}, options=options)
    assert all(torch.equal(value, values[name]) for name, value in weights(model).items())


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


@none("FSDP1", "`limit_all_gathers=False`", "limit")
@none("DeepSpeed", "`stage3_max_live_parameters`", "max_live", "live_param")
def two_units(rank: int, world_size: int) -> None:
    """Never more than two units are whole."""
    model = shard(reshard_after_forward=True)
    with events.record() as log:
        run(model, rank)
    alive, most = 0, 0
    for event in log:
        if event.unit:
            alive += {"unshard": 1, "reshard": -1}.get(event.kind, 0)
            most = max(most, alive)
    assert most == 2 and alive == 0


none("FSDP1", "`use_orig_params=False`", "orig_params", "flat")


# --- from FSDP1: mixed precision --------------------------------------------------------------------------------------


def mixed(rank: int, theirs: MixedPrecision, ours: MixedPrecisionPolicy) -> Any:
    """Both in mixed precision: equal up to rounding; returns ours, and how each layer's inputs looked in both."""
    found = []
    for model in (shard(mp_policy=ours), fsdp1(mixed_precision=theirs)):
        seen: list[Any] = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(
                    lambda module, args, seen=seen: seen.append((args[0].dtype, module.weight.dtype))
                )
        found.append((model, seen))
    (mine, mine_saw), (other, other_saw) = found
    same(rank, mine, other, collectives=False, tolerance=3e-2)
    assert mine_saw == other_saw
    assert {p.grad.dtype for p in mine.parameters()} == {p.grad.dtype for p in other.parameters() if p.grad is not None}
    return mine


@case("FSDP1", "`mixed_precision=`", "`MixedPrecision(param_dtype=...)`")
@case("Accelerate", "`mixed_precision_policy=`")
@case("DeepSpeed", "`bf16: {enabled: true}`")
def param_dtype(rank: int, world_size: int) -> None:
    theirs = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
    model = mixed(rank, theirs, MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    assert {param.dtype for param in model.parameters()} == {torch.float32}, "the master weights"
    with events.record() as log:
        run(model, rank)
    assert {event.dtype for event in log if event.kind == "all_gather"} == {BF16}


@case("FSDP1", "`MixedPrecision(reduce_dtype=...)`")
@case("DeepSpeed", "`communication_data_type`")
def reduce_dtype(rank: int, world_size: int) -> None:
    model = mixed(rank, MixedPrecision(reduce_dtype=BF16), MixedPrecisionPolicy(reduce_dtype=BF16))
    with events.record() as log:
        run(model, rank)
    assert {event.dtype for event in log if event.kind == "reduce_scatter"} == {BF16}
    model = shard(mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    with events.record() as log:
        run(model, rank)
    assert {event.dtype for event in log if event.kind == "reduce_scatter"} == {torch.float32}


@none("FSDP1", "`MixedPrecision(buffer_dtype=...)`", "buffer_dtype")
def buffer_dtypes(rank: int, world_size: int) -> None:
    model = fully_shard(nn.BatchNorm1d(DIM), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    model.running_mean = model.running_mean.to(BF16)
    model.unshard()
    assert (model.weight.dtype, model.running_mean.dtype, model.running_var.dtype) == (BF16, BF16, torch.float32)


@none("FSDP1", "`MixedPrecision(keep_low_precision_grads=True)`", "low_precision", "keep_grad")
def gradient_dtypes(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, BF16):
        model = shard(stack().to(dtype), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        run(model, rank)
        assert {param.grad.dtype for param in model.parameters()} == {dtype}


@case("FSDP1", "`MixedPrecision(cast_forward_inputs=...)`", "`MixedPrecision(cast_root_forward_inputs=...)`")
def input_casts(rank: int, world_size: int) -> None:
    class Sees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(DIM))

        def forward(self, x: Tensor) -> Tensor:
            dtypes.append(x.dtype)
            return x.float() * self.weight.float()

    for root_casts, inner_casts in itertools.product([True, False], repeat=2):
        dtypes: list[torch.dtype] = []
        ours, theirs = nn.Sequential(Sees(), Sees()), nn.Sequential(Sees(), Sees())
        for child in ours:
            fully_shard(child, mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=inner_casts))
        fully_shard(ours, mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=root_casts))
        precision = MixedPrecision(BF16, cast_forward_inputs=inner_casts, cast_root_forward_inputs=root_casts)
        policy = torch_wrap.ModuleWrapPolicy({Sees})
        ours(batch(0, rank))
        with quiet():
            fsdp1(theirs, mixed_precision=precision, auto_wrap_policy=policy)(batch(0, rank))
        assert dtypes[:2] == dtypes[2:], (root_casts, inner_casts)


@case("FSDP1", "`MixedPrecision(_module_classes_to_ignore=...)`")
def batch_norm_apart(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    model: Any = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
    fully_shard(model[1])
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model)
    seen: list[Any] = []
    model[1].register_forward_hook(lambda module, args, out: seen.append((module.weight.dtype, args[0].dtype)))
    run(model, rank)
    assert seen == [(torch.float32, BF16)] and model[1].weight.grad is not None
    override(rank, world_size)


# --- from FSDP1: wrapping ---------------------------------------------------------------------------------------------


@case("FSDP1", "`always_wrap_policy`")
def wrap_all(rank: int, world_size: int) -> None:
    ours = our_units(by_predicate(lambda fqn, module: True))
    theirs = their_units(torch_wrap.always_wrap_policy)
    assert "blocks" in theirs, "FSDP1 wraps a ModuleList, which has no forward"
    # FSDP1 also wraps modules whose parameters are all wrapped below.
    assert ours == [name for name in theirs if name not in ("blocks", "blocks.0", "blocks.1")]


@case("FSDP1", "`lambda_auto_wrap_policy`")
def wrap_by_function(rank: int, world_size: int) -> None:
    theirs = partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Net.Block))
    assert our_units(by_predicate(lambda fqn, module: isinstance(module, Net.Block))) == their_units(theirs)


@case("FSDP1", "`transformer_auto_wrap_policy`")
@case("Accelerate", '`auto_wrap_policy="transformer_based_wrap"`')
def wrap_transformers(rank: int, world_size: int) -> None:
    theirs = partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Net.Block})
    assert our_units(by_class(Net.Block)) == our_units(transformer_blocks()) == their_units(theirs)


@case("FSDP1", "`size_based_auto_wrap_policy`")
@case("Accelerate", '`auto_wrap_policy="size_based_wrap"`', "`min_num_params=`")
@case("DeepSpeed", "`stage3_module_granularity_threshold`, `leaf_module`, `set_z3_leaf_modules`")
def wrap_by_size(rank: int, world_size: int) -> None:
    theirs = partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=4 * DIM * DIM)
    assert our_units(by_size(4 * DIM * DIM)) == their_units(theirs) == ["blocks.0.large", "blocks.1.large"]
    leaf = Net()
    for block in leaf.blocks:  # one unit each, whatever is below
        fully_shard(block)
    fully_shard(leaf)
    with events.record() as log:
        run(leaf, rank)
    assert sum(event.kind == "all_gather" and "blocks" in event.unit for event in log) == 4


@case("FSDP1", "`ModuleWrapPolicy`")
@case("Accelerate", "`transformer_cls_names_to_wrap=`")
def wrap_by_class(rank: int, world_size: int) -> None:
    assert our_units(by_class(Net.Block)) == our_units(by_class("Block"))
    assert our_units(by_class(Net.Block)) == their_units(torch_wrap.ModuleWrapPolicy({Net.Block}))


@case("FSDP1", "`CustomPolicy`")
def wrap_with_options(rank: int, world_size: int) -> None:
    def ours(fqn: str, module: nn.Module) -> Any:
        return {"reshard_after_forward": False} if isinstance(module, Net.Block) else False

    def theirs(module: nn.Module) -> Any:
        return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if isinstance(module, Net.Block) else False

    assert our_units(by_predicate(ours)) == their_units(torch_wrap.CustomPolicy(theirs))
    model = Net()
    auto_shard(model, by_predicate(ours), reshard_after_forward=True)
    with events.record() as log:
        run(model, rank)
    found = Counter(event.unit for event in log if event.kind == "all_gather")
    assert found == {"blocks.0": 1, "blocks.1": 1, "": 2}


none("FSDP1", "`enable_wrap`", "enable_wrap")


@case("FSDP1", "`wrap`")
@case("Accelerate", '`auto_wrap_policy="no_wrap"`')
def wrap_one(rank: int, world_size: int) -> None:
    same(rank, fully_shard(stack()), fsdp1(auto_wrap_policy=None))


# --- from FSDP1: states -----------------------------------------------------------------------------------------------

FULL = StateDictOptions(full_state_dict=True)
FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)


def their_state(kind: str) -> dict[str, Any]:
    model = fsdp1()
    with quiet(), FullyShardedDataParallel.state_dict_type(model, torch_fsdp.StateDictType[kind]):
        return model.state_dict()


none("FSDP1", "`state_dict_type`, `set_state_dict_type`, `get_state_dict_type`", "state_dict_type")


@case("FSDP1", "`SHARDED_STATE_DICT`")
def sharded_states(rank: int, world_size: int) -> None:
    model, theirs = shard(), their_state("SHARDED_STATE_DICT")
    with CommDebugMode() as mode:
        ours = model.state_dict()
    assert mode.get_total_counts() == 0 and list(ours) == list(theirs)
    for name, value in ours.items():
        local = theirs[name].local_shards()[0].tensor
        assert torch.equal(value.to_local(), local)


@case("FSDP1", "`FULL_STATE_DICT`")
def full_states(rank: int, world_size: int) -> None:
    model, theirs = shard(), their_state("FULL_STATE_DICT")
    with full_params(model, write_back=False):
        inside = {name: value.clone() for name, value in model.state_dict().items()}
    for ours in (inside, get_model_state_dict(model, options=FULL)):
        assert list(ours) == list(theirs)
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@case("FSDP1", "`FullStateDictConfig(rank0_only=True, offload_to_cpu=True)`")
@case("Accelerate", "`accelerator.get_state_dict(model)`")
def full_states_on_rank_0(rank: int, world_size: int) -> None:
    """With this config FSDP1 of torch 2.13 crashes on CPU parameters, so it is not asked."""
    model, plain = shard(), stack().state_dict()
    ours = get_model_state_dict(model, options=FULL_ON_CPU)
    assert list(ours) == (list(plain) if rank == 0 else [])
    assert all(torch.equal(value, plain[name]) for name, value in ours.items())
    with full_params(model, write_back=False, rank0_only=True, offload_to_cpu=True):
        assert isinstance(model[0].weight, DTensor) == (rank != 0)


@case("FSDP1", "`LOCAL_STATE_DICT`")
def local_states(rank: int, world_size: int) -> None:
    ours = {name: value.to_local() for name, value in shard().state_dict().items()}
    theirs = their_state("LOCAL_STATE_DICT")
    for name, value in ours.items():  # one parameter a unit, so the flat ones are cut at the same places
        assert torch.equal(value.flatten(), theirs[name])


def trained(rank: int) -> tuple[Any, torch.optim.Optimizer]:
    model = shard()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    run(model, rank)
    optimizer.step()
    return model, optimizer


@case("FSDP1", "`optim_state_dict`, `sharded_optim_state_dict`")
@case("FSDP1", "`rekey_optim_state_dict`")
def optimizer_states(rank: int, world_size: int) -> None:
    model, optimizer = trained(rank)
    states = get_optimizer_state_dict(model, optimizer)["state"]
    assert list(states) == ["0.weight", "1.weight", "2.weight"]
    assert states["0.weight"]["exp_avg"].placements == (Shard(0),)


@case("FSDP1", "`full_optim_state_dict`")
@case(
    "FSDP1",
    "`optim_state_dict_to_load`, `shard_full_optim_state_dict`, `scatter_full_optim_state_dict`, "
    "`flatten_sharded_optim_state_dict`",
)
def full_optimizer_states(rank: int, world_size: int) -> None:
    """What FSDP1 of torch 2.13 makes of Adam's state on CPU parameters is wrong, so it is not asked."""
    model, optimizer = trained(rank)
    states = get_optimizer_state_dict(model, optimizer, options=FULL)
    for state, gradient in zip(states["state"].values(), gradients(model), strict=True):
        assert_close(state["exp_avg"], 0.1 * gradient)
    other = shard()
    fresh = torch.optim.Adam(other.parameters(), lr=0.1)
    set_optimizer_state_dict(other, fresh, states, options=FULL)
    assert torch.equal(
        fresh.state[other[0].weight]["exp_avg"].to_local(), optimizer.state[model[0].weight]["exp_avg"].to_local()
    )


@case("Accelerate", "`state_dict_type=`")
def state_dict_types(rank: int, world_size: int) -> None:
    sharded_states(rank, world_size)
    full_states(rank, world_size)


@case("Accelerate", "`state_dict_config=`, `optim_state_dict_config=`")
def state_dict_configs(rank: int, world_size: int) -> None:
    full_states_on_rank_0(rank, world_size)
    full_optimizer_states(rank, world_size)


# --- from FSDP1: methods ----------------------------------------------------------------------------------------------


def summon_both(rank: int, look: Callable[[Any], Any], ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[Any, Any]:
    """What `look` finds in both models in their contexts, after a backward."""
    found = []
    model, other = shard(), fsdp1()
    for each in (model, other):
        with quiet():
            run(each, rank)
    with full_params(model, **ours), torch.no_grad():
        found.append(look(list(model.parameters())))
    with quiet(), FullyShardedDataParallel.summon_full_params(other, **theirs), torch.no_grad():
        found.append(look(list(other.parameters())))
    assert found[0] == found[1]
    return model, other


@case("FSDP1", "`summon_full_params(recurse=False)`")
def summon_one(rank: int, world_size: int) -> None:
    """Theirs, when it is asked for the root alone, leaves the wrapped blocks sharded, too."""
    ours, theirs = Net(), fsdp1(Net(), auto_wrap_policy=torch_wrap.ModuleWrapPolicy({Net.Block}))
    auto_shard(ours, by_class(Net.Block))
    with full_params(ours, recurse=False):
        mine = {name: not isinstance(param, DTensor) for name, param in ours.named_parameters()}
    assert [name for name, whole in mine.items() if whole] == ["head.weight", "head.bias"]
    with quiet(), FullyShardedDataParallel.summon_full_params(theirs, recurse=False):
        for (name, whole), param, like in zip(mine.items(), theirs.parameters(), Net().parameters(), strict=True):
            if name in ("blocks.0.large.weight", "blocks.1.large.weight", "head.weight"):  # no rank has all of these
                assert whole == (param.shape == like.shape), name


@case("FSDP1", "`summon_full_params(writeback=False)`")
@case("DeepSpeed", "`deepspeed.zero.GatheredParameters(params)`")
def summon_without_writing(rank: int, world_size: int) -> None:
    fill = lambda params: params[0].fill_(3).shape  # noqa: E731
    model, _ = summon_both(rank, fill, {"write_back": False}, {"writeback": False})
    assert not model[0].weight.full_tensor().eq(3).any()
    assert torch.equal(weights(model)["0.weight"], stack()[0].weight)


@case("FSDP1", "`summon_full_params(rank0_only=True)`")
def summon_on_rank_0(rank: int, world_size: int) -> None:
    def look(params: list[Tensor]) -> bool:
        return not isinstance(params[0], DTensor) and params[0].shape == (DIM, DIM)

    options = {"rank0_only": True}
    summon_both(rank, look, {**options, "write_back": False}, {**options, "writeback": False})
    from_the_first(rank, world_size)


@case("DeepSpeed", "`deepspeed.zero.GatheredParameters(params, modifier_rank=0)`")
def from_the_first(rank: int, world_size: int) -> None:
    """What rank 0 writes goes to all ranks."""
    model = shard()
    with full_params(model, rank0_only=True), torch.no_grad():
        if rank == 0:
            model[0].weight.fill_(5)
    assert model[0].weight.to_local().eq(5).all() and not model[1].weight.to_local().eq(5).any()


@case("FSDP1", "`summon_full_params(offload_to_cpu=True)`")
def summon_in_host_memory(rank: int, world_size: int) -> None:
    devices = lambda params: [param.device.type for param in params]  # noqa: E731
    summon_both(rank, devices, {"offload_to_cpu": True}, {"offload_to_cpu": True})


@case("FSDP1", "`summon_full_params(with_grads=True)`")
def summon_gradients(rank: int, world_size: int) -> None:
    look = lambda params: [param.grad.shape for param in params]  # noqa: E731
    model, other = summon_both(rank, look, {"with_grads": True}, {"with_grads": True})
    for mine, theirs in zip(gradients(model), gradients(other), strict=True):
        assert_close(mine, theirs)


@case("FSDP1", "`model.clip_grad_norm_(max_norm)`")
@case("Accelerate", "`accelerator.clip_grad_norm_`")
@case("DeepSpeed", "`gradient_clipping`")
def clips(rank: int, world_size: int) -> None:
    model, other = shard(), fsdp1()
    run(model, rank)
    with quiet():
        run(other, rank)
        theirs = other.clip_grad_norm_(1e-3)
    assert_close(fsdp2.clip_grad_norm_(model.parameters(), 1e-3), theirs)
    for mine, clipped in zip(gradients(model), gradients(other), strict=True):
        assert_close(mine, clipped)


@case("FSDP1", "`with model.no_sync():`")
@case("Accelerate", "`accelerator.accumulate(model)`")
@case("DeepSpeed", "`engine.no_sync()`")
def no_sync(rank: int, world_size: int) -> None:
    accumulate_like(rank, shard(), fsdp1())


@case("FSDP1", "`register_comm_hook`")
def hooks(rank: int, world_size: int) -> None:
    model = shard()
    model[0].set_all_reduce_hook(lambda grads: grads.mul_(2))
    run(model, rank)
    plain = shard()
    run(plain, rank)
    assert_close(gradients(model)[0], 2 * gradients(plain)[0])
    assert_close(gradients(model)[1], gradients(plain)[1])
    custom_reduction(rank, world_size)
    reduce_dtype(rank, world_size)
    narrow_wire(rank, world_size)


@case("FSDP1", "`apply`")
def applies(rank: int, world_size: int) -> None:
    def centre(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            shapes.append(tuple(module.weight.shape))
            nn.init.orthogonal_(module.weight)

    shapes: list[Any] = []
    model, other = shard(), fsdp1()
    torch.manual_seed(1)
    with full_params(model):
        model.apply(centre)
    torch.manual_seed(1)
    with quiet():
        other.apply(centre)
    assert shapes == 2 * LAYERS * [(DIM, DIM)]
    same(rank, model, other)


@case("FSDP1", "`fsdp_modules`")
def list_of_units(rank: int, world_size: int) -> None:
    with quiet():
        theirs = FullyShardedDataParallel.fsdp_modules(fsdp1())
    assert len([m for m in shard().modules() if isinstance(m, FSDPModule)]) == len(theirs) == LAYERS + 1


none("FSDP1", "`check_is_root`", "is_root")


# --- from DeepSpeed ---------------------------------------------------------------------------------------------------


@case("DeepSpeed", "`engine.backward(loss)`, `engine.step()`")
def plain_loop(rank: int, world_size: int) -> None:
    model, plain = shard(), DistributedDataParallel(stack())
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for index in range(2):
            run(each, rank, index)
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(weights(model).values(), plain.parameters(), strict=True):
        assert_close(mine, theirs.detach())


@case("DeepSpeed", "`engine.save_checkpoint`, `engine.load_checkpoint`, universal checkpoints", ranks=4)
@case("Accelerate", "`accelerator.save_state`, `accelerator.load_state`", ranks=4)
def checkpoints(rank: int, world_size: int) -> None:
    """Saved from four shards, loaded into two replicas of two."""
    import tempfile

    from torch.distributed import checkpoint as dcp

    box: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    model, optimizer = trained(rank)
    other = shard(mesh=mesh_2d(2, 2))
    fresh = torch.optim.Adam(other.parameters(), lr=0.1)
    with quiet():
        states = [get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)]
        dcp.save({"model": states[0], "optim": states[1]}, checkpoint_id=box[0])
        target = {"model": get_model_state_dict(other), "optim": get_optimizer_state_dict(other, fresh)}
        dcp.load(target, checkpoint_id=box[0])
        set_model_state_dict(other, target["model"])
        set_optimizer_state_dict(other, fresh, target["optim"])
    assert all(torch.equal(value, weights(model)[name]) for name, value in weights(other).items())
    mine, theirs = optimizer.state[model[1].weight], fresh.state[other[1].weight]
    assert torch.equal(mine["exp_avg_sq"].full_tensor(), theirs["exp_avg_sq"].full_tensor())


@case("DeepSpeed", "`zero_to_fp32.py`")
def whole_fp32(rank: int, world_size: int) -> None:
    states = get_model_state_dict(shard(mp_policy=MixedPrecisionPolicy(param_dtype=BF16)), options=FULL)
    assert all(torch.equal(value, stack().state_dict()[name]) for name, value in states.items())


none("DeepSpeed", "reading a DeepSpeed checkpoint", "deepspeed", "convert", "load_zero")


def stage(rank: int, world_size: int, policy: ZeroPolicy, **wanted: int) -> None:
    model = shard(zero=policy)
    with events.record() as log:
        step_with_flag(model, rank)
    assert counts(log) == wanted
    reference = DistributedDataParallel(stack())
    with reference.no_sync():
        for index in range(MICROBATCHES - 1):
            run(reference, rank, index)
    run(reference, rank, MICROBATCHES - 1)
    for mine, theirs in zip(gradients(model), gradients(reference), strict=True):
        assert_close(mine, theirs)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    rows = DIM if policy.stage == 0 else DIM // (policy.shard_size or world_size)
    weight = model[0].weight
    for what in (weight, weight.grad, optimizer.state[weight]["exp_avg"]):
        assert tuple(what.to_local().shape) == (rows, DIM)


@case("DeepSpeed", "`stage: 0`")
def stage_0(rank: int, world_size: int) -> None:
    stage(rank, world_size, ZeroPolicy(0), all_reduce=LAYERS)


@case("DeepSpeed", "`stage: 1`")
def stage_1(rank: int, world_size: int) -> None:
    stage(rank, world_size, ZeroPolicy(1), all_gather=LAYERS, reduce_scatter=LAYERS)


@case("DeepSpeed", "`stage: 2`")
def stage_2(rank: int, world_size: int) -> None:
    stage(rank, world_size, ZeroPolicy(2), all_gather=LAYERS, reduce_scatter=LAYERS * MICROBATCHES)


@case("DeepSpeed", "`stage: 3`")
def stage_3(rank: int, world_size: int) -> None:
    times = LAYERS * MICROBATCHES
    stage(rank, world_size, ZeroPolicy(), all_gather=2 * times, reduce_scatter=times)


@case("DeepSpeed", "`offload_optimizer: {pin_memory: true}`, `offload_param: {pin_memory: true}`")
def pinned(rank: int, world_size: int) -> None:
    assert CPUOffloadPolicy().pin_memory and CPUOffloadPolicy(pin_memory=True) == CPUOffloadPolicy()


none("DeepSpeed", "`offload_optimizer: {ratio: ...}`", "ratio")
none("DeepSpeed", "`offload_param: {device: nvme}`, `offload_optimizer: {device: nvme}`", "nvme", "disk", "swap")


@case("DeepSpeed", "`reduce_scatter`", "`allgather_partitions`")
def kinds_of_collectives(rank: int, world_size: int) -> None:
    for number, expected in enumerate([{"all_reduce"}, *[{"all_gather", "reduce_scatter"}] * 3]):
        model = shard(zero=ZeroPolicy(number))
        with quiet(), CommDebugMode() as mode, events.record() as log:
            run(model, rank)
        assert set(counts(log)) == expected
        assert not any("broadcast" in str(operation) for operation in mode.get_comm_counts())


none("DeepSpeed", "`reduce_bucket_size`", "bucket")(units_are_buckets)
none("DeepSpeed", "`allgather_bucket_size`", "bucket")(units_are_buckets)


@none("DeepSpeed", "`contiguous_gradients`", "contiguous")
def gradients_go(rank: int, world_size: int) -> None:
    """When a unit's backward ends its whole gradients are freed, or on their way: two units' at most."""
    model = shard()
    whole: list[Tensor] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda module, args: whole.append(module.weight))
    held: list[int] = []
    loss = model(batch(0, rank)).square().mean()
    for weight in list(whole):
        weight.register_post_accumulate_grad_hook(lambda _: held.append(sum(w.grad is not None for w in whole)))
    loss.backward()
    assert len(held) == LAYERS and max(held) <= 2
    assert all(weight.grad is None for weight in whole)


@none("DeepSpeed", "`round_robin_gradients`", "round_robin")
@none("DeepSpeed", "`stage3_param_persistence_threshold`", "persist", "threshold")
@none("DeepSpeed", "`stage3_model_persistence_threshold`", "persist", "threshold")
def even_and_together(rank: int, world_size: int) -> None:
    """Every rank has its part of every parameter; small ones travel in the collective of their unit."""
    model = fully_shard(nn.Linear(DIM, DIM))
    assert [param.to_local().numel() * world_size for param in model.parameters()] == [DIM * DIM, DIM]
    with events.record() as log:
        run(model, rank)
    assert counts(log) == {"all_gather": 1, "reduce_scatter": 1}


none("DeepSpeed", "`sub_group_size`", "sub_group")(local_step)


@case("DeepSpeed", "`stage3_max_reuse_distance`")
def kept_for_reuse(rank: int, world_size: int) -> None:
    model = shard(reshard_after_forward=True)
    model[2].set_reshard_after_forward(False)
    with events.record() as log:
        run(model, rank)
    assert Counter(event.unit for event in log if event.kind == "all_gather") == {"0": 2, "1": 2, "2": 1}


@case("DeepSpeed", "`stage3_gather_16bit_weights_on_model_save`")
def whole_16_bit(rank: int, world_size: int) -> None:
    model = shard()
    with full_params(model, write_back=False, rank0_only=True, offload_to_cpu=True):
        if rank == 0:
            states = {name: value.bfloat16() for name, value in model.state_dict().items()}
            assert all(torch.equal(value, stack().state_dict()[name].bfloat16()) for name, value in states.items())


@case("DeepSpeed", "`zero_hpz_partition_size`", ranks=4)
def secondary(rank: int, world_size: int) -> None:
    model = shard(zero=ZeroPolicy(3, secondary_shard_size=2))
    with events.record() as log:
        run(model, rank)
    found = Counter((event.kind, event.group_size) for event in log if event.group_size)
    assert found == {("all_gather", 4): LAYERS, ("all_gather", 2): LAYERS, ("reduce_scatter", 4): LAYERS}
    averaged(rank, world_size, model, stack())


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


@none("DeepSpeed", "`zero_quantized_nontrainable_weights`", "nontrainable", "quantise", "quantize")
def packed_weights(rank: int, world_size: int) -> None:
    plain = PackedLinear(torch.uint8)
    model = fully_shard(copy.deepcopy(plain))
    with events.record() as log:
        model.unshard()
    assert any(event.kind == "all_gather" for event in log)
    assert torch.equal(model.weight.flatten(), plain.weight.flatten()) and model.weight.dtype == torch.uint8


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


none("DeepSpeed", "`zeropp_loco_param`", "loco", "error_feedback")


@case("DeepSpeed", "`mics_shard_size`", ranks=4)
def small_groups(rank: int, world_size: int) -> None:
    times = LAYERS * MICROBATCHES
    stage(rank, 2, ZeroPolicy(3, shard_size=2), all_gather=2 * times, reduce_scatter=times, all_reduce=LAYERS)


none("DeepSpeed", "`mics_hierarchical_params_gather`", "hierarchical")


@none("DeepSpeed", "`memory_efficient_linear`", "memory_efficient")
def saved_weights(rank: int, world_size: int) -> None:
    """What autograd saved of a weight has no memory between forward and backward."""
    model = shard(reshard_after_forward=True)
    kept: list[Tensor] = []
    model[0].register_forward_pre_hook(lambda module, args: kept.append(module.weight))
    loss = model(batch(0, rank)).square().mean()
    assert not isinstance(kept[0], DTensor) and kept[0].untyped_storage().nbytes() == 0
    loss.backward()


@case("DeepSpeed", "`elastic_checkpoint`, `load_from_fp32_weights`", ranks=4)
def elastic(rank: int, world_size: int) -> None:
    checkpoints(rank, world_size)


none("DeepSpeed", "`zenflow`", "zenflow", "async_step")


@case("DeepSpeed", "`fp16: {enabled: true}`")
def fp16(rank: int, world_size: int) -> None:
    model = shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    before = weights(model)
    loss = model(batch(0, rank)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    averaged(rank, world_size, model, stack(), tolerance=1e-2)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(weights(model)["0.weight"], before["0.weight"])
    model[0].weight.grad.to_local()[0, 0] = float("inf") if rank == 0 else 0.0
    stepped = weights(model)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weights(model)["0.weight"], stepped["0.weight"]) and scaler.get_scale() == 512


@case("DeepSpeed", "`data_types: {grad_accum_dtype: fp32}`")
def accumulation_dtype(rank: int, world_size: int) -> None:
    for reduce, wanted in ((torch.float32, torch.float32), (BF16, BF16), (None, torch.float32)):
        model = shard(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce))
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        run(model, rank)
        assert {layer.weight.grad.dtype for layer in model} == {wanted}


@case("DeepSpeed", "`gradient_accumulation_steps`")
def accumulation(rank: int, world_size: int) -> None:
    stage_2(rank, world_size)
    no_sync(rank, world_size)


@none("DeepSpeed", "`gradient_predivide_factor`, `prescale_gradients`", "predivide", "prescale")
def predivided(rank: int, world_size: int) -> None:
    """The sum of what fp16 cannot hold, the mean of which it can."""
    for dtype in (torch.float16, torch.float32):
        model = fully_shard(nn.Linear(1, 2, bias=False), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        (model(torch.ones(1, 1)).sum() * 40000).backward()
        assert model.weight.grad.full_tensor().eq(40000).all()
    model = fully_shard(nn.Linear(1, 2, bias=False))
    model.set_gradient_divide_factor(1.0)
    model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.full_tensor().eq(world_size).all()


none("DeepSpeed", "`train_batch_size`, `train_micro_batch_size_per_gpu`", "batch_size")


@case("DeepSpeed", "`zero_allow_untested_optimizer`")
def unknown_optimizers(rank: int, world_size: int) -> None:
    class Mine(torch.optim.SGD):
        pass

    model = shard()
    Mine(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="elementwise=True"):
        fsdp2.local_optimizer(Mine, model.parameters(), lr=0.1)
    assert isinstance(fsdp2.local_optimizer(Mine, model.parameters(), elementwise=True, lr=0.1), Mine)


@case("DeepSpeed", "`activation_checkpointing`")
@case("Accelerate", "`activation_checkpointing=`")
def recomputation(rank: int, world_size: int) -> None:
    class Recomputes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack()
            self.num_forwards = 0
            self.layers[1].register_forward_pre_hook(self.count)

        def count(self, *_: Any) -> None:
            self.num_forwards += 1

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = Recomputes()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    same(rank, model, shard(), collectives=False)
    assert model.num_forwards == 2


@case("DeepSpeed", "`tensor_parallel: {autotp_size: ...}`", ranks=4)
@case("Accelerate", "`tp_size=`", ranks=4)
def tensor_parallel(rank: int, world_size: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, plain = stack()[:2], stack()[:2]
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    shard(model, mesh=mesh["dp"])
    group = mesh.get_local_rank("dp")  # the ranks of a tp group see the same data
    run(model, group)
    averaged(rank, 2, model, plain)
    assert model[0].weight.device_mesh.ndim == 2 and model[0].weight.to_local().numel() == DIM * DIM // 4


# --- from Accelerate --------------------------------------------------------------------------------------------------

none("Accelerate", "`fsdp_version=`", "version")


@case("Accelerate", "`reshard_after_forward=`")
def reshard_after_forward(rank: int, world_size: int) -> None:
    for value, gathers in ((True, 2 * LAYERS), (False, LAYERS)):
        theirs = stack()
        for child in theirs:
            torch_fsdp.fully_shard(child, reshard_after_forward=value)
        torch_fsdp.fully_shard(theirs, reshard_after_forward=value)
        ours = shard(reshard_after_forward=value)
        same(rank, ours, theirs)
        with events.record() as log:
            run(ours, rank)
        assert counts(log)["all_gather"] == gathers


@case("Accelerate", "`dp_replicate_size=`", "`dp_shard_size=`", ranks=4)
def replicas(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for options in ({"mesh": mesh}, {"zero": ZeroPolicy(3, shard_size=2)}):
        model = trains(rank, world_size, **options)
        assert model[0].weight.placements == (Replicate(), Shard(0))
    assert trains(rank, world_size).get_submodule("0").weight.to_local().shape == (DIM // 4, DIM)


@case("Accelerate", "`cp_size=`", ranks=4)
def context_parallel(rank: int, world_size: int) -> None:
    """Parameters are sharded, and gradients averaged, over both axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    model = trains(rank, world_size, mesh=mesh["dp_shard", "cp"]._flatten("dp_shard_cp"))
    assert model[0].weight.placements == (Shard(0),)
    assert tuple(model[0].weight.to_local().shape) == (DIM // 4, DIM)


# --- the tests --------------------------------------------------------------------------------------------------------


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    """Migration: the tables and the cases above name the same rows, each once."""
    rows = Counter((row.section, row.left) for row in ROWS)
    assert not [key for key, times in rows.items() if times > 1], "twice in a section"
    assert not set(rows) - set(CASES), "rows without a case"
    assert not set(CASES) - set(rows), "cases without a row"


def test_what_is_missing_says_why() -> None:
    """Migration: rows that begin with "none" or "not yet" are the ones registered so, and give a reason."""
    for row in ROWS:
        says = re.match(r"(none|not yet)\b", row.ours)
        assert bool(says) == CASES[row.section, row.left].missing, f"{row.left}: {row.ours}"
        if says:
            reason = r"none, because .{10}" if says[1] == "none" else r"not yet\b.*: .{10}"
            assert re.match(reason, row.ours), f"{row.left}: say why, got {row.ours!r}"
        else:
            assert row.ours, f"{row.left}: empty"


@pytest.mark.parametrize("key", CASES, ids=lambda key: f"{key[0]}: {key[1]}")
def test_row(key: tuple[str, str]) -> None:
    """Migration: what the row says happens."""
    found = CASES[key]
    if found.ranks == 0:
        found.body(0, 1)
    else:
        run_on_ranks(run_row, found.ranks, section=key[0], left=key[1])


def test_all_of_fsdp1_is_in_the_tables() -> None:
    """Migration: every constructor argument, strategy, state dict type, policy, dtype option and public method."""
    lefts = " ".join(row.left for row in ROWS if row.section == "FSDP1")
    named = set(re.findall(r"\w+", lefts))
    wanted = set(inspect.signature(FullyShardedDataParallel).parameters)
    wanted |= {member.name for enum in (ShardingStrategy, torch_fsdp.StateDictType) for member in enum}
    wanted |= {field.name for field in fields(MixedPrecision)} | set(torch_wrap.__all__)
    public = set(vars(FullyShardedDataParallel)) - {"forward", "named_buffers", "named_parameters"}
    wanted |= {name for name in public if not name.startswith("_")}
    wanted |= set(inspect.signature(FullyShardedDataParallel.summon_full_params).parameters)
    assert not wanted - named


DEEPSPEED_AND_ACCELERATE = """
stage offload_optimizer offload_param device cpu pin_memory overlap_comm reduce_bucket_size allgather_bucket_size
stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters sub_group_size
contiguous_gradients round_robin_gradients zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients
mics_shard_size stage3_gather_16bit_weights_on_model_save bf16 fp16 gradient_accumulation_steps gradient_clipping
gradient_predivide_factor communication_data_type Init GatheredParameters reduce_scatter stage3_max_reuse_distance
fsdp_version sharding_strategy reshard_after_forward backward_prefetch mixed_precision_policy auto_wrap_policy
cpu_offload ignored_modules state_dict_type state_dict_config optim_state_dict_config limit_all_gathers use_orig_params
param_init_fn sync_module_states forward_prefetch activation_checkpointing cpu_ram_efficient_loading
transformer_cls_names_to_wrap min_num_params dp_replicate_size dp_shard_size tp_size cp_size
"""


def test_the_keys_that_people_have_are_in_the_tables() -> None:
    """Migration: the settings of DeepSpeed's and Accelerate's documentation, of which neither is installed."""
    lefts = " ".join(row.left for row in ROWS if row.section in ("DeepSpeed", "Accelerate"))
    assert not set(DEEPSPEED_AND_ACCELERATE.split()) - set(re.findall(r"\w+", lefts))


# --- docs/zero.md -----------------------------------------------------------------------------------------------------

COSTS = next(rows for _, header, rows in tables(ROOT / "docs" / "zero.md") if header[0] == "policy")
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


class Lora(nn.Module):
    """A frozen layer and a trainable one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM, bias=False)
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


@on_ranks(4)
@pytest.mark.parametrize("row", range(len(COSTS)), ids=lambda row: COSTS[row][0])
def test_costs_of_zero(rank: int, world_size: int, row: int) -> None:
    """docs/zero.md: collectives by number of ranks, and bytes received, of each row's policy, for W = 4, S = R = 2,
    N = 3 and M = 5; the second step as the first."""
    policy_text, *collectives, nbytes_text = COSTS[row]
    known: dict[str, Any] = {"N": LAYERS, "M": MICROBATCHES, "W": world_size, "S": 2, "R": world_size // 2}
    policy: ZeroPolicy = eval(policy_text.strip("`"), {"ZeroPolicy": ZeroPolicy, **known})
    wanted: Counter[tuple[str, int]] = Counter()
    for kind, text in zip(KINDS, collectives, strict=True):
        for times, ranks in re.findall(r"`([^`]+)` over (\w)", text):
            wanted[kind, known[ranks]] += eval(times, dict(known))
    known |= {"P": LAYERS * DIM * DIM * 4, "f": lambda n: (n - 1) / n}
    model = shard(nn.Sequential(*(Lora() for _ in range(LAYERS))) if policy.keep_frozen else stack(), zero=policy)
    for index in range(2):
        with events.record() as log:
            step_with_flag(model, rank)
        if index or not policy.keep_frozen:
            assert Counter((event.kind, event.group_size) for event in log if event.group_size) == wanted
            assert received(log) == pytest.approx(eval(nbytes_text.strip("`"), known))
        model.zero_grad()


def received(log: list[events.Event]) -> float:
    """Bytes that this rank receives, by the ring algorithms."""
    total = 0.0
    for event in log:
        if event.group_size:
            whole = event.nbytes * (event.group_size if event.kind == "reduce_scatter" else 1)
            times = 2 if event.kind == "all_reduce" else 1
            total += times * whole * (event.group_size - 1) / event.group_size
    return total


@on_ranks(2)
@pytest.mark.parametrize(("stage", "params", "grads"), [(0, 1, 1), (1, 1, 1), (2, 1, 0), (3, 0, 0)])
def test_memory_of_zero(rank: int, world_size: int, stage: int, params: int, grads: int) -> None:
    """docs/zero.md: what is whole between the backwards of a step, and after its last, in parts of all parameters."""
    model = shard(zero=ZeroPolicy(stage))
    whole: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda module, args: whole.append(module.weight)) for layer in model]

    def held() -> tuple[float, float]:
        """Whole parameters, and gradients on them."""
        numel = LAYERS * DIM * DIM
        storage = sum(weight.untyped_storage().nbytes() // weight.itemsize for weight in whole)
        return storage / numel, sum(weight.grad.numel() for weight in whole if weight.grad is not None) / numel

    model.set_is_last_backward(False)
    run(model, rank)
    for hook in hooks:
        hook.remove()
    assert held() == (params, grads)
    model.set_is_last_backward(True)
    run(model, rank, 1)
    assert held()[0] == (1 if stage == 0 else 0)
    assert (
        sum(param.to_local().numel() for param in model.parameters()) * (1 if stage == 0 else 2) == LAYERS * DIM * DIM
    )
    assert all(param.grad.to_local().shape == param.to_local().shape for param in model.parameters())
    if stage:
        assert held()[1] == 0
