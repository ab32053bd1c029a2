"""Several options together: the sharded model, and its training. `reference` trains the plain model in one process."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.func import functional_call

import fsdp2
import fsdp2.comm
from fsdp2 import MixedPrecisionPolicy, ZeroPolicy, fully_shard
from fsdp2.comm.flat import FlatComm
from fsdp2.comm.gloo import GlooComm
from fsdp2.optim import clip_grad_norm_, local_optimizer
from tests.helpers.options import Option, units
from tests.helpers.options_model import DIM, OVERRIDE, Mix, Part, build, norms_of
from tests.helpers.parity_models import full, shard_like

STEPS, MICROBATCHES = 3, 2
MAX_NORM = 0.3


@contextmanager
def lane(which: str | None) -> Iterator[None]:
    """``direct``: whatever can takes the direct lane; ``flat``: the backend's own collectives; None: as it is."""
    with pytest.MonkeyPatch.context() as patch:
        if which == "flat":
            patch.setitem(fsdp2.comm.COMMS, "gloo", FlatComm())
        elif which == "direct":
            patch.setattr(GlooComm, "direct_min_bytes", 0)
        yield


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
