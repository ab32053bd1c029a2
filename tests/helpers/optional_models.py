"""A model of vision and language whose tower some ranks do not run, and what one process gets that runs it on all
ranks' batches. For the tests of optional units.

The tower is optional and has an unused parameter, whose gradient stays None; the projector belongs to the root, and so
has a gradient only where the tower runs.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import OptionalPolicy, events, fully_shard
from tests.helpers.parity_models import Block, batch, local, shard_like

DIM = 8


class Tower(nn.Module):
    """Blocks that are units of their own, and a layer that nobody uses."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(DIM, 5) for _ in range(2))
        self.unused = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x * self.scale


class VisionLanguage(nn.Module):
    """Text of (batch, DIM), and images of the same shape or None."""

    def __init__(self, use_reentrant: bool | None = None, times: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.vision = Tower(use_reentrant)
        self.projector = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(DIM, 7) for _ in range(2))
        self.times = times

    def forward(self, text: Tensor, images: Tensor | None = None) -> Tensor:
        x = self.embed(text)
        if images is not None:
            images = images.clone().requires_grad_()  # so that reentrant checkpoints have a backward
            for _ in range(self.times):
                images = self.vision(images)
            x = x + self.projector(images)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def has_images(text: Tensor, images: Tensor | None = None) -> bool:
    return images is not None


POLICIES: dict[str, bool | OptionalPolicy] = {
    "plain": True,
    "runs_if": OptionalPolicy(runs_if=has_images),
    "ran": OptionalPolicy(runs_if=has_images, average_over="ran"),
}


def inputs(step: int, rank: int, with_images: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """The batch of one rank; the ranks in `with_images` have images."""
    return batch(step, rank), batch(step + 1000, rank) if rank in with_images else None


def shard(model: nn.Module, optional: bool | OptionalPolicy, **options: Any) -> Any:
    for block in (*model.vision.blocks, *model.blocks):
        fully_shard(block, mesh=options.get("mesh"))
    fully_shard(model.vision, optional=optional, mesh=options.get("mesh"))
    return fully_shard(model, **options)


def pair(
    optional: bool | OptionalPolicy = True, kind: Callable[..., nn.Module] = VisionLanguage, **options: Any
) -> tuple[Any, Any]:
    """A plain model and a sharded one with the same parameters."""
    torch.manual_seed(0)
    plain = kind()
    return plain, shard(copy.deepcopy(plain), optional, **options)


Step = Callable[[Any, int], None]


def gradients(plain: nn.Module, world_size: int, step: Step, averages: str = "all") -> None:
    """Set the gradients of the plain model to those of all ranks, summed in rank order and divided."""
    total: dict[str, Tensor] = {}
    tower_ran: dict[str, int] = {}
    for rank in range(world_size):
        plain.zero_grad()
        step(plain, rank)
        for name, param in plain.named_parameters():
            if param.grad is not None:
                total[name] = param.grad if name not in total else total[name] + param.grad
                tower_ran[name] = tower_ran.get(name, 0) + 1
    for name, param in plain.named_parameters():
        by = tower_ran.get(name, 0) if averages == "ran" and name.startswith("vision.") else world_size
        param.grad = total[name] / by if name in total else None


def assert_equal_gradients(plain: nn.Module, model: nn.Module, exact: bool = True) -> None:
    wanted = {name: param.grad for name, param in plain.named_parameters()}
    for name, param in model.named_parameters():
        expected, got = shard_like(wanted[name], param), local(param.grad)
        assert (got is None) == (expected is None), f"{name}: got {got}, expected {expected}"
        if got is not None and expected is not None:
            is_exact = exact and param.ndim  # gloo's all-reduce, of scalars and replicas, has an order of its own
            tolerance = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-5, "atol": 1e-7}
            assert_close(got, expected, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def check(
    plain: nn.Module,
    model: nn.Module,
    rank: int,
    world_size: int,
    step: Step,
    averages: str = "all",
    exact: bool = True,
) -> list[events.Event]:
    """The step gives the gradients of one process; what happened in it."""
    plain.zero_grad()
    model.zero_grad()
    gradients(plain, world_size, step, averages)
    with events.record() as log:
        step(model, rank)
    assert_equal_gradients(plain, model, exact)
    return log


def forward_and_backward(step: int, with_images: Sequence[int]) -> Step:
    def run(model: Any, rank: int) -> None:
        model(*inputs(step, rank, with_images)).backward()

    return run


def counts(log: Sequence[events.Event], unit: str) -> dict[str, int]:
    found = [each.kind for each in log if each.unit == unit or each.unit.startswith(f"{unit}.")]
    return {kind: found.count(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce") if kind in found}


def who_has_images(world_size: int) -> list[list[int]]:
    """One list of ranks for each step."""
    return [[0], [], list(range(world_size)), [world_size - 1], [0]]


MESHES = ("fsdp", "hsdp")


def micro_batches(with_images: Sequence[Sequence[int]], turn: Callable[[Any, bool], None]) -> Step:
    """One step of several backwards; `turn(model, is_last)` is called before each."""

    def run(model: Any, rank: int) -> None:
        for index, ranks in enumerate(with_images):
            if isinstance(model, fsdp2.FSDPModule):
                turn(model, index == len(with_images) - 1)
            model(*inputs(10 + index, rank, ranks)).backward()

    return run


TURNS: dict[str, Callable[[Any, bool], None]] = {
    "synced": lambda model, is_last: None,
    "unsynced": lambda model, is_last: model.set_requires_gradient_sync(is_last),
    "not last": lambda model, is_last: model.set_is_last_backward(is_last),
    "no all-reduce": lambda model, is_last: model.set_requires_all_reduce(is_last),
}


class Mixture(nn.Module):
    """A layer of experts, each for the rows whose first value falls into its part of the line."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        x = self.mix(x)
        result = x
        for index, expert in enumerate(self.experts):
            if (rows := (chosen == index).nonzero()[:, 0]).numel():
                result = result.index_add(0, rows, expert(x[rows]))
        return self.out(result)


class Experts(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(DIM, 1)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            if self.use_reentrant is None:
                x = layer(x, chosen)
            else:
                x = checkpoint(layer, x, chosen, use_reentrant=self.use_reentrant)
        return self.head(x).square().mean()
