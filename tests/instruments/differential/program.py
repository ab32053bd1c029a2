"""Programs as data: models, how they are sharded, and actions. JSON in and out, so that they can be kept and shrunk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["Action", "Model", "Node", "Program", "Unit"]


@dataclass(frozen=True)
class Node:
    """A block: the name of a class in `models.py`, its arguments as source, blocks within, and how it is sharded."""

    kind: str
    args: str = ""
    inner: tuple[Node, ...] = ()
    unit: bool = False
    options: str = ""  # of fully_shard, as source

    def source(self) -> str:
        parts = [each.source() for each in self.inner]
        return f"{self.kind}({', '.join([*parts, self.args] if self.args else parts)})"

    def nodes(self, path: str) -> Iterator[tuple[str, Node]]:
        """Itself and those within, from the inside out, with the expressions that name them."""
        for index, each in enumerate(self.inner):
            yield from each.nodes(f"{path}.inner[{index}]")
        yield path, self


@dataclass(frozen=True)
class Unit:
    """One call of fully_shard: the modules, as expressions, and the options, as source."""

    modules: tuple[str, ...]
    options: str

    def source(self) -> str:
        what = self.modules[0] if len(self.modules) == 1 else f"[{', '.join(self.modules)}]"
        return f"fully_shard({what}{', ' if self.options else ''}{self.options})"


@dataclass(frozen=True)
class Model:
    """A `Net`: its blocks, which of them form one unit together, and the options of the root.

    None: it is not a unit itself, and each of its blocks is a root. What the net has beside them is frozen.
    """

    name: str
    blocks: tuple[Node, ...]
    together: tuple[int, ...] = ()
    options: str | None = ""

    def source(self) -> str:
        source = f"{self.name} = Net({', '.join(block.source() for block in self.blocks)})"
        if self.options is None:
            source += f"; {self.name}.embed.requires_grad_(False); {self.name}.head.requires_grad_(False)"
        return source

    def nodes(self) -> Iterator[tuple[str, Node]]:
        for index, block in enumerate(self.blocks):
            yield from block.nodes(f"{self.name}.blocks[{index}]")

    def roots(self) -> list[str]:
        """The modules that are roots, as expressions."""
        if self.options is not None:
            return [self.name]
        return [f"{self.name}.blocks[{index}]" for index, block in enumerate(self.blocks) if block.unit]

    def units(self) -> list[Unit]:
        """In the order in which fully_shard is called."""
        units = []
        together = tuple(i for i in self.together if i < len(self.blocks) and not self.blocks[i].unit)
        for index, block in enumerate(self.blocks):
            units += [
                Unit((path,), node.options) for path, node in block.nodes(f"{self.name}.blocks[{index}]") if node.unit
            ]
        if together:
            units.append(Unit(tuple(f"{self.name}.blocks[{i}]" for i in together), ""))
        if self.options is not None:
            units.append(Unit((self.name,), self.options))
        return units


@dataclass(frozen=True)
class Action:
    """A line of what users do.

    `kind` is what it is counted as. What one process needs to know of it, for its own account of gradients, is in the
    other fields: the module and the value of a setter, or the slots of the losses that are made or go backward.
    """

    kind: str
    code: str
    on: str = ""
    value: Any = None
    recurse: bool = False
    makes: int | None = None
    needs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """Everything that a run depends on."""

    seed: int
    world_size: int
    mesh: tuple[int, ...]
    axes: tuple[str, ...]
    models: tuple[Model, ...]
    optimizer: str
    actions: tuple[Action, ...]
    before: tuple[Action, ...] = ()  # before fully_shard: hooks on parameters

    @property
    def has_tp(self) -> bool:
        return "tp" in self.axes

    def units(self) -> list[Unit]:
        return [unit for model in self.models for unit in model.units()]

    def source(self) -> str:
        """Of the models."""
        return "\n".join(model.source() for model in self.models)

    def kinds(self) -> set[str]:
        """The classes of blocks, and the settings of units, that it uses."""
        return {node.kind for model in self.models for _, node in model.nodes()}

    def options(self) -> str:
        return " ".join(unit.options for unit in self.units())

    def with_actions(self, actions: tuple[Action, ...]) -> Program:
        return replace(self, actions=actions)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Program:
        data = json.loads(text)
        models = tuple(
            Model(m["name"], tuple(map(_node, m["blocks"])), tuple(m["together"]), m["options"]) for m in data["models"]
        )
        names = ("seed", "world_size", "optimizer")
        return Program(
            **{name: data[name] for name in names},
            mesh=tuple(data["mesh"]),
            axes=tuple(data["axes"]),
            models=models,
            actions=tuple(map(_action, data["actions"])),
            before=tuple(map(_action, data.get("before", ()))),
        )


def _action(data: dict[str, Any]) -> Action:
    return Action(**{**data, "needs": tuple(data["needs"])})


def _node(data: dict[str, Any]) -> Node:
    return Node(data["kind"], data["args"], tuple(map(_node, data["inner"])), data["unit"], data["options"])
