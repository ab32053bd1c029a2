"""Random module trees and settings, from a seed: what `tests/core/test_random_trees.py` trains.

Every node maps (rows, DIM) to (rows, DIM), so any node fits anywhere. A `Tree` is plain data (it prints as what failed)
and is made the same on every rank; `build` turns it into a module and `Settings.shard` applies `fully_shard` to it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.parity_models import Race, mesh_2d

DIM = 6


@dataclass
class Tree:
    """A node: its kind, a size or a repeat count, and its children."""

    kind: str
    size: int = 0
    children: list[Tree] = field(default_factory=list)

    def __str__(self, depth: int = 0) -> str:
        text = "  " * depth + self.kind + (f" {self.size}" if self.size else "")
        return "\n".join([text, *(child.__str__(depth + 1) for child in self.children)])

    def has(self, *kinds: str) -> bool:
        return self.kind in kinds or any(child.has(*kinds) for child in self.children)


LEAVES = ("linear", "mlp", "norm", "scale", "embed", "tied", "empty")
INNER = ("seq", "seq", "residual", "branch", "repeat", "kwargs", "checkpoint", "detached")


def random_tree(rng: random.Random, depth: int) -> Tree:
    if depth == 0 or rng.random() < 0.25:
        return Tree(rng.choice(LEAVES), rng.randint(1, 9))
    kind = rng.choice(INNER)
    num_children = rng.randint(2, 3) if kind in ("seq", "branch") else 1
    children = [random_tree(rng, depth - 1) for _ in range(num_children)]
    return Tree(kind, rng.randint(2, 3) if kind in ("repeat", "branch") else 0, children)


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Scale(nn.Module):
    """Parameters of its own, of one and of three dims, and a buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM))
        self.cube = nn.Parameter(torch.randn(size, 2, DIM))
        self.register_buffer("offset", torch.full((DIM,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.cube.mean((0, 1)) + self.offset.to(x.dtype)


class Embed(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(len(x)) % self.table.num_embeddings)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(DIM, DIM)
        self.b = nn.Linear(DIM, DIM)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Empty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Inner(nn.Module):
    """One node with children."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.kind, self.size = tree.kind, tree.size
        self.children_ = nn.ModuleList(build(child) for child in tree.children)

    def forward(self, x: Any = None, *, inputs: dict[str, Any] | None = None) -> Any:
        if inputs is not None:
            return {"out": (self(inputs["x"]), 3)}
        first = self.children_[0]
        match self.kind:
            case "seq":
                for child in self.children_:
                    x = child(x)
                return x
            case "residual":
                return x + first(x)
            case "branch":  # the last child never runs
                return sum(
                    (child(x) for child in self.children_[: min(self.size, len(self.children_)) - 1]), torch.tanh(x)
                )
            case "repeat":
                for _ in range(self.size):
                    x = torch.tanh(first(x))
                return x
            case "kwargs":
                return first(inputs={"x": x})["out"][0] if isinstance(first, Inner) else first(x)
            case "checkpoint":
                return checkpoint(first, x, use_reentrant=False)
            case "detached":
                with torch.no_grad():
                    y = first(x)
                return x + y
        raise ValueError(self.kind)


def build(tree: Tree) -> nn.Module:
    match tree.kind:
        case "linear":
            return nn.Linear(DIM, DIM, bias=tree.size % 2 == 0)
        case "mlp":
            return Mlp(tree.size)
        case "norm":
            return nn.LayerNorm(DIM)
        case "scale":
            return Scale(tree.size)
        case "embed":
            return Embed(tree.size)
        case "tied":
            return Tied()
        case "empty":
            return Empty()
    return Inner(tree)


class Root(nn.Module):
    """An input and an output layer around the tree, so that something always trains."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.tree = build(tree)
        self.out = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.tree(self.inp(x)))


POLICIES: list[dict[str, torch.dtype]] = [
    {},
    {},
    {"reduce_dtype": torch.bfloat16},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
]


@dataclass
class Settings:
    """What is sharded and how: units as tuples of module names, bottom-up, the root last."""

    units: list[tuple[str, ...]]
    reshard_after_forward: dict[tuple[str, ...], bool | int | None]
    frozen: list[str]
    policy: dict[str, torch.dtype]
    unsynced: list[bool]
    """for every microbatch of a step: not reduced"""
    keep: bool
    """parameters stay unsharded between the microbatches of a step"""
    forward_prefetch: dict[str, list[str]]
    backward_prefetch: dict[str, list[str]]
    hsdp: bool
    """on four ranks: two replicas of two shards"""
    partial: list[bool]
    """for every microbatch of a step: reduced, but not over the replicas"""

    def __str__(self) -> str:
        return "\n".join(f"  {name}={value}" for name, value in vars(self).items())

    def prepare(self, model: nn.Module) -> nn.Module:
        for name, param in model.named_parameters():
            param.requires_grad_(name not in self.frozen)
        return model

    def shard(self, api: ModuleType, model: nn.Module) -> None:
        policy = api.MixedPrecisionPolicy(**self.policy)
        mesh = mesh_2d(2, 2) if self.hsdp else None
        for unit in self.units:
            modules = [model.get_submodule(name) for name in unit]
            raf = self.reshard_after_forward[unit]
            target = modules if len(modules) > 1 else modules[0]
            api.fully_shard(target, mesh=mesh, reshard_after_forward=raf, mp_policy=policy)
        for name, targets in self.forward_prefetch.items():
            model.get_submodule(name).set_modules_to_forward_prefetch([model.get_submodule(t) for t in targets])
        for name, targets in self.backward_prefetch.items():
            model.get_submodule(name).set_modules_to_backward_prefetch([model.get_submodule(t) for t in targets])

    def backward(self, model: nn.Module, step: int, rank: int) -> Tensor:
        """The microbatches of one step."""
        total = torch.zeros(())
        for micro, (unsynced, partial) in enumerate(zip(self.unsynced, self.partial, strict=True)):
            if hasattr(model, "set_requires_gradient_sync"):
                last = micro == len(self.unsynced) - 1
                model.set_requires_gradient_sync(not unsynced)
                model.set_requires_all_reduce(not partial)
                model.set_is_last_backward(last)
                model.set_reshard_after_backward(last or not self.keep)
            generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
            loss = model(torch.randn(4, DIM, generator=generator)).float().square().mean()
            loss.backward()
            total = total + loss.detach()
        return total


def _units(rng: random.Random, model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Disjoint units below the root; neighbours sometimes become one list unit."""
    inside_tied = {id(sub) for module in model.modules() if isinstance(module, Tied) for sub in module.children()}
    repeated = {
        id(m) for module in model.modules() if getattr(module, "kind", "") == "repeat" for m in module.modules()
    }
    taken: set[str] = set()
    for name, module in reversed(list(model.named_modules())):
        if not name or name in taken or isinstance(module, nn.ModuleList) or id(module) in inside_tied:
            continue
        if rng.random() < 0.45:
            unit = [name]
            parent, _, index = name.rpartition(".")
            sibling = f"{parent}.{int(index) - 1}" if index.isdigit() and index != "0" else ""
            in_seq = sibling and model.get_submodule(parent.rpartition(".")[0]).kind == "seq"
            # A list unit must not hold a module that is called again and again: torch would wait for its other members.
            if in_seq and rng.random() < 0.4 and id(module) not in repeated:
                unit.insert(0, sibling)
            taken.update(unit)
            yield tuple(unit)


def random_settings(rng: random.Random, model: nn.Module, world_size: int) -> Settings:
    # Bottom-up by depth: a list unit may have picked up a module whose children come later in the walk.
    units = [*sorted(_units(rng, model), key=lambda unit: -unit[0].count(".")), ("",)]
    names = [unit[0] for unit in units]
    num_micro = rng.choice([1, 1, 2, 3])
    params = [name for name, _ in model.named_parameters() if name.startswith("tree")]
    frozen_prefixes = tuple(rng.sample(names[:-1], min(len(names) - 1, rng.choice([0, 0, 1]))))
    frozen = [name for name in params if rng.random() < 0.1 or (frozen_prefixes and name.startswith(frozen_prefixes))]

    hsdp = world_size == 4 and rng.random() < 0.5

    def random_lists() -> dict[str, list[str]]:
        chosen = rng.sample(names, min(len(names), rng.choice([0, 0, 1, 3])))
        return {
            name: rng.sample([other for other in names if other != name], min(len(names) - 1, 2)) for name in chosen
        }

    return Settings(
        units=units,
        reshard_after_forward={unit: rng.choice([True, True, False, None, 2]) for unit in units},
        frozen=frozen,
        policy=rng.choice(POLICIES),
        unsynced=[rng.random() < 0.5 for _ in range(num_micro - 1)] + [False],
        keep=rng.random() < 0.2,
        forward_prefetch=random_lists(),
        backward_prefetch=random_lists(),
        hsdp=hsdp,
        partial=[hsdp and rng.random() < 0.3 for _ in range(num_micro - 1)] + [False],
    )


def race(rank: int, world_size: int, seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, depth=4)
    settings = random_settings(rng, Root(tree), world_size)

    def build() -> torch.nn.Module:
        torch.manual_seed(seed)
        return settings.prepare(Root(tree))

    coarse = bool(settings.policy)
    # Several gradients of one parameter, in one backward or in unsynced ones: fsdp2 adds them up in the reduce dtype,
    # torch 2.13 in part in the compute dtype.
    same_sums = not coarse or not (tree.has("repeat", "tied") or any(settings.unsynced))
    try:
        Race(
            rank,
            world_size,
            build,
            settings.shard,
            settings.backward,
            lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5),
            exact=same_sums and (world_size == 2 or settings.hsdp),
            plain=not coarse,
            by_norm=coarse,
            rtol=5e-2 if coarse else 1e-4,
            atol=1e-3 if coarse else 1e-5,
        ).run(3)
    except Exception as error:
        raise AssertionError(f"seed {seed} on {world_size} ranks: {error}\n{tree}\n{settings}") from error
