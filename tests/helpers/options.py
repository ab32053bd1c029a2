"""The options of `fully_shard`, of its modules and of its surroundings as data, for the differential tests.

An `Option` says what it changes: the model, the arguments of `fully_shard`, calls on the sharded modules, the training
step. A `Case` is several options together, and trains; `reference` trains the plain model on all ranks' batches in one
process. `tests/core/test_options.py` compares the two, for every option alone and for every pair.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fsdp2
import fsdp2.comm
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, ShardPlacementResult, ZeroPolicy, fully_shard
from fsdp2.comm.flat import FlatComm
from fsdp2.comm.gloo import GlooComm
from fsdp2.optim import clip_grad_norm_, local_optimizer
from tests.helpers.parity_models import full, mesh_2d, shard_like

DIM, HIDDEN, DEPTH = 6, 5, 2
STEPS, MICROBATCHES = 3, 2
MAX_NORM = 0.3
BF16 = torch.bfloat16
OVERRIDE = "param_dtype_override_fn"

# --- the model --------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """(rows, DIM) -> (rows, DIM), with the parameters that the features ask for."""

    def __init__(self, features: frozenset[str], index: int) -> None:
        super().__init__()
        self.features = features
        self.use_side = False
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        if "scalars" in features:
            self.gain = nn.Parameter(torch.tensor(0.7))
        if "conv" in features:
            self.conv = nn.Conv2d(2, 2, (3, 1), padding=(1, 0)).to(memory_format=torch.channels_last)
        if "packed" in features:
            packed = torch.randint(0, 256, (DIM, DIM // 2), dtype=torch.uint8)
            self.packed = nn.Parameter(packed, requires_grad=False)
        if "dtypes" in features:
            self.shift = nn.Parameter(torch.randn(DIM, dtype=torch.float64))
        if "unused" in features:
            self.side = nn.Linear(DIM, DIM)
            self.never = nn.Linear(DIM, 2)
        if "frozen" in features:
            self.up.bias.requires_grad_(False)
            (self.norm.weight if index == 0 else self.down.weight).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        if "scalars" in self.features:
            y = y * self.gain.to(y.dtype)
        if "conv" in self.features:
            image = y.reshape(-1, 2, 3, 1)
            y = y + self.conv(image).reshape(y.shape)
        if "packed" in self.features:
            halves = torch.cat((self.packed & 15, self.packed >> 4), 1)
            y = y + y @ (halves.to(y.dtype) - 8) / 16
        if "dtypes" in self.features:
            y = y * self.shift.to(y.dtype)
        if self.use_side:
            y = y + self.side(x.to(self.side.weight.dtype)).to(y.dtype)
        return x + y


class Mix(nn.Module):
    """An input layer, parts, an output layer, which may have the input layer's weight."""

    def __init__(self, features: frozenset[str] = frozenset(), use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.parts = nn.ModuleList(Part(features, index) for index in range(DEPTH))
        self.out = nn.Linear(DIM, DIM)
        self.use_reentrant = use_reentrant
        if "tied" in features:
            self.out.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        """A second entry point."""
        x = self.inp(x)
        for part in self.parts:
            plain = self.use_reentrant is None or not torch.is_grad_enabled()
            x = part(x) if plain else checkpoint(part, x, use_reentrant=self.use_reentrant)
        return self.out(x)


def build(features: frozenset[str], use_reentrant: bool | None = None) -> Mix:
    """The same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Mix(features, use_reentrant)


def norms_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that some options treat differently, by name."""
    return {name: param for name, param in model.named_parameters() if ".norm." in name}


# --- collectives of the user's own ------------------------------------------------------------------------------------


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gathers(_Allocates):
    """All-gather by the backend's list form, as users write it for torch's FSDP2."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        outputs = list(output_tensor.chunk(group.size()))
        return dist.all_gather(outputs, input_tensor.clone(), group=group, async_op=async_op)


class Scatters(_Allocates):
    """Reduce-scatter as an all-reduce of everything."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        whole = input_tensor.clone()
        dist.all_reduce(whole, group=group, op=dist.ReduceOp.SUM)
        if op == dist.ReduceOp.AVG:
            whole /= group.size()
        output_tensor.copy_(whole.chunk(group.size())[group.rank()])
        return None


# --- options ----------------------------------------------------------------------------------------------------------

Call = Callable[[nn.Module, int], None]
Make = Callable[[nn.Module, int], Any]


@dataclass(frozen=True)
class Option:
    """One thing that a user may ask for.

    Attributes:
        name: in messages, and in the table of what does not go together.
        shard: arguments of `fully_shard`.
        made: more of them, made from (model, world_size).
        mp, zero: fields of the `MixedPrecisionPolicy` and of the `ZeroPolicy`.
        features: of the model.
        calls: made with (model, world_size) after sharding.
        fixed: named choices of which a case has one each: units, checkpoint, lane, optimizer, entry.
        step: what the training step does: see `Case.train_step`.
        scale: the gradients are this times the mean over ranks.
        rtol: of gradients and parameters.
        alone_on_4: its pairs are tested on 4 ranks too.
    """

    name: str
    shard: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Make] = field(default_factory=dict)
    mp: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)
    step: tuple[str, ...] = ()
    scale: float = 1.0
    rtol: float = 1e-4
    needs_4: bool = False

    @property
    def keys(self) -> set[str]:
        """The arguments that it gives, of which another option may not give the same."""
        return {*self.shard, *self.made, *self.mp, *self.zero, *self.fixed}


def units(model: nn.Module) -> list[Any]:
    """All sharded modules."""
    return [module for module in model.modules() if isinstance(module, fsdp2.FSDPModule)]


def on_each(method: str, *args: Any) -> Call:
    """Call a method of every sharded module."""

    def call(model: nn.Module, world_size: int) -> None:
        for module in units(model):
            getattr(module, method)(*args)

    return call


def on_root(method: str, *args: Any) -> Call:
    """Call a method of the root."""
    return lambda model, world_size: getattr(model, method)(*args)


def divide(model: nn.Module, world_size: int) -> None:
    on_each("set_gradient_divide_factor", 2.0 * world_size)(model, world_size)


def prefetch_lists(model: Any, world_size: int) -> None:
    first, *rest = [module for module in [*model.parts] if isinstance(module, fsdp2.FSDPModule)]
    model.set_modules_to_forward_prefetch([first, *rest])
    model.set_modules_to_backward_prefetch([*reversed(rest), first])
    for module in rest:
        module.set_modules_to_backward_prefetch([first])


def halve(grads: Tensor) -> None:
    grads.mul_(0.5)


def largest_dim(param: nn.Parameter) -> Shard | None:
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim])) if param.ndim else None


def mesh_of_norms(model: nn.Module, world_size: int) -> Any:
    """The norms' weights are on a mesh of their own, which replicates."""
    mesh, own = mesh_2d(world_size, 1), set(norms_of(model).values())
    return lambda param: ShardPlacementResult(Shard(0), mesh) if param in own else None


def norms_in_fp32(model: nn.Module, world_size: int) -> Callable[[nn.Parameter], torch.dtype | None]:
    own = set(norms_of(model).values())
    return lambda param: param.dtype if param in own else None


def half(world_size: int) -> int:
    return world_size // 2


OPTIONS = [
    # --- arguments of fully_shard
    Option("reshard_true", {"reshard_after_forward": True}),
    Option("reshard_false", {"reshard_after_forward": False}),
    Option("reshard_int", {"reshard_after_forward": 2}, needs_4=True),
    Option("hsdp", made={"mesh": lambda model, size: mesh_2d(2, size // 2)}, needs_4=True),
    Option("one_replica", made={"mesh": lambda model, size: mesh_2d(1, size)}),
    Option("largest_dim", {"shard_placement_fn": largest_dim}),
    Option("mesh_of_norms", made={"shard_placement_fn": mesh_of_norms}),
    Option("offload", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    Option("zero_0", zero={"stage": 0}),
    Option("zero_1", zero={"stage": 1}),
    Option("zero_2", zero={"stage": 2}),
    Option("zero_3", zero={"stage": 3}),
    Option("secondary", zero={"secondary_shard_size": 2}, needs_4=True),
    Option("shard_size", zero={"shard_size": half}, needs_4=True),
    Option("replicas", zero={"shard_size": half, "shard_replicas": True}, needs_4=True),
    Option("keep_frozen", zero={"keep_frozen": True}, features=("frozen",)),
    Option("bf16", mp={"param_dtype": BF16, "reduce_dtype": torch.float32}, rtol=2e-2),
    Option("override", made={OVERRIDE: norms_in_fp32}, mp={"param_dtype": BF16}, rtol=2e-2),
    Option("fp16_reduce", mp={"reduce_dtype": torch.float16}, rtol=1e-2),
    Option("int8", mp={"all_gather_dtype": torch.int8}, rtol=1e-1),
    Option("bf16_wire", mp={"reduce_scatter_dtype": BF16}, rtol=2e-2),
    Option("output_dtype", mp={"output_dtype": BF16}, rtol=2e-2),
    # --- models
    Option("tied", features=("tied",)),
    Option("scalars", features=("scalars",)),
    Option("conv", features=("conv",)),
    Option("packed", features=("packed",)),
    Option("dtypes", features=("dtypes",)),
    Option("frozen", features=("frozen",)),
    Option("unused", features=("unused",), calls=(on_root("set_reduce_scatter_unused_params", True),)),
    # --- units
    Option("list_units", fixed={"units": "list"}),
    Option("auto_shard", fixed={"units": "auto"}),
    Option("deepcopy", fixed={"copy": True}),
    Option("reentrant", fixed={"use_reentrant": True}),
    Option("non_reentrant", fixed={"use_reentrant": False}),
    # --- calls
    Option("custom_gather", calls=(lambda m, size: on_each("set_custom_all_gather", Gathers())(m, size),)),
    Option("custom_scatter", calls=(lambda m, size: on_each("set_custom_reduce_scatter", Scatters())(m, size),)),
    Option("separate_group", calls=(on_root("set_separate_reduce_scatter_group"),)),
    Option("divide_factor", calls=(divide,), scale=0.5),
    Option("force_sum", calls=(on_each("set_force_sum_reduction_for_comms", True),)),
    Option("all_reduce_hook", calls=(on_each("set_all_reduce_hook", halve),), scale=0.5),
    Option("input_buffers", calls=(on_root("set_reduce_scatter_max_input_buffers", 3),)),
    Option("auto_prefetch", calls=(on_root("set_auto_forward_prefetch", True),)),
    Option("prefetch_lists", calls=(prefetch_lists,)),
    Option("keep_storage", calls=(on_root("set_keep_unsharded_storage", True),)),
    Option("no_unshard_in_backward", calls=(lambda m, size: m.inp.set_unshard_in_backward(False),)),
    # --- the step
    Option("method", fixed={"entry": "encode"}),
    Option("manual", calls=(on_root("set_manual_backward_finalization", True),), step=("manual",)),
    Option("no_sync", step=("no_sync",)),
    Option("partial", step=("partial",), needs_4=True),
    Option("is_last", step=("is_last",)),
    Option("keep_after_backward", step=("keep",)),
    Option("local_optimizer", step=("local_optimizer",)),
    Option("clip", step=("clip",)),
    Option("full_params", step=("full_params",)),
    Option("evaluate", step=("evaluate",)),
    Option("direct_lane", fixed={"lane": "direct"}),
    Option("flat_comm", fixed={"lane": "flat"}),
]
BY_NAME = {option.name: option for option in OPTIONS}


# --- what does not go together ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """Pairs, each of the first names with each of the second, that `fully_shard` or a setter refuses.

    Attributes:
        error, match: of what is raised.
        why: in a few words.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    error: type[fsdp2.FSDPError]
    match: str
    why: str


RESHARD = ("reshard_true", "reshard_false", "reshard_int")
ONE_MESH = ("custom_gather", "custom_scatter", "all_reduce_hook")
REFUSALS = [
    Refusal(RESHARD, ("zero_0", "zero_1", "zero_2", "secondary"), fsdp2.ArgumentError, "give only one", "said twice"),
    Refusal(
        ("hsdp", "one_replica"),
        ("shard_size", "replicas"),
        fsdp2.ArgumentError,
        "shard_size makes the mesh",
        "two meshes",
    ),
    Refusal(
        ("zero_0", "zero_1", "zero_2"),
        ("secondary", "replicas"),
        fsdp2.ArgumentError,
        "need stage 3",
        "parameters that stay whole have no second copy and are not cut further",
    ),
    Refusal(("zero_0",), ("shard_size",), fsdp2.ArgumentError, "shards nothing", "nothing is sharded"),
    Refusal(("secondary",), ("replicas",), fsdp2.ArgumentError, "not both", "two ways to spend the replicas' memory"),
    Refusal(
        ("replicas",), ("int8",), fsdp2.UnsupportedError, "shard_replicas", "integers would be gathered in two steps"
    ),
    Refusal(
        ("mesh_of_norms",),
        ONE_MESH,
        fsdp2.ArgumentError,
        "on one mesh",
        "a custom collective, or hook, serves one mesh; here a unit has two",
    ),
    Refusal(
        ("reshard_int",), ("mesh_of_norms",), fsdp2.ArgumentError, "does not divide", "that mesh shards over 1 rank"
    ),
    Refusal(("fp16_reduce",), ("bf16_wire",), fsdp2.ArgumentError, "narrower", "16 bits are not narrower than 16"),
    Refusal(("bf16_wire",), ("custom_scatter",), fsdp2.ArgumentError, "leave one out", "both say how rows travel"),
]
REFUSED = {frozenset((a, b)): each for each in REFUSALS for a in each.first for b in each.second}

# Pairs that mean nothing, with the reason.
SKIPPED = {
    frozenset(("list_units", "no_unshard_in_backward")): "the input layer is no unit of its own",
    frozenset(("auto_shard", "no_unshard_in_backward")): "the input layer is no unit of its own",
}


@contextmanager
def lane(which: str | None) -> Iterator[None]:
    """``direct``: whatever can takes the direct lane; ``flat``: the backend's own collectives; None: as it is."""
    with pytest.MonkeyPatch.context() as patch:
        if which == "flat":
            patch.setitem(fsdp2.comm.COMMS, "gloo", FlatComm())
        elif which == "direct":
            patch.setattr(GlooComm, "direct_min_bytes", 0)
        yield


# --- the reference ----------------------------------------------------------------------------------------------------


def microbatch(step: int, index: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * index + rank)
    return torch.randn(4, DIM, generator=generator)


def choose_side(model: Mix, step: int, rank: int) -> None:
    """Ranks differ in what they use, where the model has it."""
    for part in model.parts:
        part.use_side = "unused" in part.features and (step + rank) % 2 == 0


@dataclass(frozen=True)
class Numbers:
    """What decides the numbers of a training; `reference` computes them once for each."""

    features: frozenset[str]
    world_size: int
    compute: torch.dtype | None
    norms_in_fp32: bool
    output: torch.dtype | None
    scale: float
    lossy: bool
    step: frozenset[str]


@dataclass
class Step:
    """What one step gave: by rank the losses of its microbatches, then by name."""

    losses: list[list[Tensor]]
    grads: dict[str, Tensor | None]
    params: dict[str, Tensor]
    evaluation: Tensor | None = None


def forward(model: Mix, x: Tensor, numbers: Numbers) -> Tensor:
    """What the sharded model computes, in the dtypes of its policy."""
    if numbers.compute is not None:
        kept = set(norms_of(model)) if numbers.norms_in_fp32 else set()
        params = {
            name: param.to(numbers.compute) if param.is_floating_point() and name not in kept else param
            for name, param in model.named_parameters()
        }
        out = functional_call(model, params, (x.to(numbers.compute),))
    else:
        out = model(x)
    return out if numbers.output is None else out.to(numbers.output)


def optimizer_of(params: Any, numbers: Numbers) -> torch.optim.Optimizer:
    """SGD where numbers are rounded: Adam makes large steps of the noise in small gradients."""
    kind, options = (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}) if numbers.lossy else (torch.optim.Adam, {"lr": 1e-2})
    )
    params = [param for param in params if param.is_floating_point()]
    return local_optimizer(kind, params, **options) if "local_optimizer" in numbers.step else kind(params, **options)


@cache
def reference(numbers: Numbers) -> list[Step]:
    """One process trains the plain model with the mean gradients of all ranks."""
    model = build(numbers.features)
    optimizer = optimizer_of(model.parameters(), numbers)
    steps = []
    for step in range(STEPS):
        losses: list[list[Tensor]] = []
        for rank in range(numbers.world_size):
            choose_side(model, step, rank)
            losses.append([])
            for index in range(MICROBATCHES):
                loss = forward(model, microbatch(step, index, rank), numbers).float().square().mean()
                (loss * numbers.scale / numbers.world_size).backward()
                losses[-1].append(loss.detach())
        if "clip" in numbers.step:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        if "full_params" in numbers.step:
            shrink(model)
        params = {name: param.detach().clone() for name, param in model.named_parameters()}
        steps.append(Step(losses, grads, params))
        if "evaluate" in numbers.step:
            choose_side(model, step, 0)
            with torch.no_grad():
                steps[-1].evaluation = forward(model, microbatch(7, 0, 0), numbers).float()
    return steps


@torch.no_grad()
def shrink(model: nn.Module) -> None:
    for param in model.parameters():
        if param.is_floating_point():
            param.mul_(0.9)


# --- a case -----------------------------------------------------------------------------------------------------------


class Case:
    """Several options together: the sharded model, and its training against the reference.

    Args:
        options: no two of which give the same argument.
    """

    def __init__(self, options: Sequence[Option], rank: int, world_size: int) -> None:
        self.name = " + ".join(option.name for option in options)
        self.options, self.rank, self.world_size = options, rank, world_size
        self.features = frozenset(feature for option in options for feature in option.features)
        self.step = frozenset(what for option in options for what in option.step)
        self.fixed = {key: value for option in options for key, value in option.fixed.items()}
        self.rtol = max(option.rtol for option in options)
        mp = {key: value for option in options for key, value in option.mp.items()}
        scale = 1.0
        for option in options:
            scale *= option.scale
        self.numbers = Numbers(
            self.features,
            world_size,
            mp.get("param_dtype"),
            any(option.name == "override" for option in options),
            mp.get("output_dtype"),
            scale,
            self.rtol > 1e-3,
            frozenset(self.step & {"clip", "full_params", "evaluate", "local_optimizer"}),
        )

    # --- sharding

    def sharded(self) -> Any:
        """The model, sharded and told all that the options tell it.

        Raises:
            FSDPError: the options do not go together.
        """
        model = build(self.features, self.fixed.get("use_reentrant"))
        kwargs, root_only = self._kwargs(model)
        match self.fixed.get("units"):
            case "list":
                fully_shard([model.inp, model.parts[0]], **kwargs)
                fully_shard(model.parts[1], **kwargs)
                fully_shard(model, **{**kwargs, **root_only})
            case "auto":
                fsdp2.auto_shard(model, fsdp2.by_class(Part), **kwargs)
            case _:
                for module in (model.inp, *model.parts):
                    fully_shard(module, **kwargs)
                fully_shard(model, **{**kwargs, **root_only})
        for option in self.options:
            for call in option.calls:
                call(model, self.world_size)
        if "entry" in self.fixed:
            fsdp2.register_fsdp_forward_method(model, self.fixed["entry"])
        return copy.deepcopy(model) if "copy" in self.fixed else model

    def _kwargs(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments for every unit, and those for the root that differ."""
        kwargs: dict[str, Any] = {}
        mp: dict[str, Any] = {}
        zero: dict[str, Any] = {}
        for option in self.options:
            kwargs |= option.shard
            kwargs |= {name: make(model, self.world_size) for name, make in option.made.items()}
            mp |= option.mp
            zero |= {name: value(self.world_size) if callable(value) else value for name, value in option.zero.items()}
        if OVERRIDE in kwargs:
            mp[OVERRIDE] = kwargs.pop(OVERRIDE)
        root_only: dict[str, Any] = {}
        if mp:
            kwargs["mp_policy"] = MixedPrecisionPolicy(**{**mp, "output_dtype": None})
            root_only["mp_policy"] = MixedPrecisionPolicy(**mp)
        if zero:
            kwargs["zero"] = ZeroPolicy(**zero)
        return kwargs, root_only

    # --- training

    def run(self) -> None:
        """Train and compare; every difference names the case."""
        with lane(self.fixed.get("lane")):
            self.train(self.sharded())

    def train(self, model: Any) -> None:
        optimizer = optimizer_of(model.parameters(), self.numbers)
        for step, wanted in enumerate(reference(self.numbers)):
            self.train_step(model, step, wanted)
            if "clip" in self.step:
                clip_grad_norm_(model.parameters(), MAX_NORM)
            self.compare_grads(model, step, wanted)
            optimizer.step()
            optimizer.zero_grad()
            if "full_params" in self.step:
                with fsdp2.full_params(model):
                    shrink(model)
            if "evaluate" in self.step:
                choose_side(model, step, 0)
                with torch.no_grad():
                    self.same(
                        f"evaluation after step {step}", self.entry(model)(microbatch(7, 0, 0)), wanted.evaluation
                    )
        for module in units(model):
            module.reshard()  # where an option keeps them, the evaluation has left parameters unsharded
        for name, param in model.named_parameters():
            assert param.shape == wanted.params[name].shape, f"{self.name}: {name}"
            self.same(f"{name} after training", full(param), wanted.params[name])

    def entry(self, model: Any) -> Callable[[Tensor], Tensor]:
        return model.encode if "entry" in self.fixed else model

    def train_step(self, model: Any, step: int, wanted: Step) -> None:
        choose_side(model, step, self.rank)
        for index in range(MICROBATCHES):
            last = index == MICROBATCHES - 1
            if "no_sync" in self.step:
                model.set_requires_gradient_sync(last)
            if "partial" in self.step:
                model.set_requires_all_reduce(last)
            if "is_last" in self.step:
                model.set_is_last_backward(last)
            if "keep" in self.step:
                model.set_reshard_after_backward(last)
            loss = self.entry(model)(microbatch(step, index, self.rank)).float().square().mean()
            loss.backward()
            self.same(f"loss {index} of step {step}", loss, wanted.losses[self.rank][index])
        if "manual" in self.step:
            handle = model.finalize_backward(async_op=step % 2 == 1)
            if handle is not None:
                handle.wait()

    def compare_grads(self, model: nn.Module, step: int, wanted: Step) -> None:
        total = torch.stack([g.norm().float() for g in wanted.grads.values() if g is not None]).norm().item()
        for name, param in model.named_parameters():
            grad, expected = param.grad, wanted.grads[name]
            if expected is None and "unused" in self.features and param.requires_grad:
                expected = torch.zeros(param.shape, dtype=param.dtype)
            self.same_or_none(f"gradient of {name} in step {step}", grad, expected, total)

    def same_or_none(self, what: str, actual: Any, expected: Tensor | None, total: float) -> None:
        assert (actual is None) == (expected is None), f"{self.name}: {what}: got {actual}, expected {expected}"
        if actual is not None and expected is not None:
            if all(type(placement) in (Shard, Replicate) for placement in actual.placements):
                actual, expected = actual.to_local(), shard_like(expected, actual)  # costs no communication
            self.same(what, full(actual), expected, total)

    def same(self, what: str, actual: Tensor, expected: Tensor | None, total: float = 0.0) -> None:
        """Equal within the norm of the error; for gradients of rounded numbers also relative to all gradients."""
        assert expected is not None
        error = (actual.detach().double() - expected.double()).norm().item()
        size = max(expected.double().norm().item(), 0.1 * total)
        assert error <= self.rtol * size + 1e-5, (
            f"{self.name} (rank {self.rank} of {self.world_size}): {what}: error {error:.2e}, expected size {size:.2e}"
        )
