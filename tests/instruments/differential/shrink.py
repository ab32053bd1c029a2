"""Makes a program that differs small: fewer actions, simpler models, as long as it differs in the same way."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.instruments.differential.interpret import Result
from tests.instruments.differential.program import Action, Model, Node, Program

__all__ = ["shrink", "way_of"]

Run = Callable[[Program], Result]


def way_of(result: Result) -> str:
    """How a result differs, without names and numbers."""
    text = result.text
    if result.kind in ("hang", "died", "error"):
        return result.kind
    if result.kind == "exception":
        return "exception " + " ".join(re.findall(r"(?:torch|fsdp2|one process): (\w+)", text))
    first = text.partition("\n")[0].partition(": ")[2] if result.kind in ("loss", "form") else text.partition("\n")[0]
    return result.kind + " " + " ".join(re.findall(r"None|has a gradient|have|DTensor|float\d+|True|False", first))


def shrink(program: Program, result: Result, run: Run, seconds: float = 60.0) -> tuple[Program, Result]:
    """The smallest program found in that time, and its result."""
    deadline = time.monotonic() + seconds
    way = way_of(result)
    if result.at >= 0:
        program = program.with_actions(program.actions[: result.at + 1])
    progress = True
    while progress and time.monotonic() < deadline:
        progress = False
        for candidate in _candidates(program):
            if time.monotonic() > deadline:
                break
            try:
                found = run(candidate)
            except SyntaxError:
                continue
            if way_of(found) == way:
                if found.at >= 0:
                    candidate = candidate.with_actions(candidate.actions[: found.at + 1])
                program, result, progress = candidate, found, True
                break
    return program, result


def _candidates(program: Program) -> Iterator[Program]:
    """Smaller programs, the much smaller ones first."""
    yield from _fewer_actions(program)
    if len(program.models) == 2:
        for kept in program.models:
            yield replace(
                program, models=(kept,), optimizer=f"optimizer = torch.optim.SGD({kept.name}.parameters(), lr=0.05)"
            )
    for index, model in enumerate(program.models):
        for smaller in _smaller_models(model):
            yield replace(program, models=(*program.models[:index], smaller, *program.models[index + 1 :]))
    if len(program.mesh) > 1:
        yield replace(program, mesh=(program.world_size,), axes=("shard",))
    for index, action in enumerate(program.actions):
        for simpler in _simpler_actions(action):
            yield program.with_actions((*program.actions[:index], simpler, *program.actions[index + 1 :]))


def _fewer_actions(program: Program) -> Iterator[Program]:
    actions = program.actions
    size = len(actions) // 2
    while size:
        for start in range(0, len(actions), size):
            yield program.with_actions(actions[:start] + actions[start + size :])
        size //= 2


def _smaller_models(model: Model) -> Iterator[Model]:
    if len(model.blocks) > 1:
        yield replace(model, blocks=model.blocks[:-1])
    if model.options:
        yield replace(model, options="")
    if model.together:
        yield replace(model, together=())
    for index, block in enumerate(model.blocks):
        for smaller in _smaller_nodes(block):
            yield replace(model, blocks=(*model.blocks[:index], smaller, *model.blocks[index + 1 :]))


def _smaller_nodes(node: Node) -> Iterator[Node]:
    if node.kind != "Lin":
        yield Node("Lin", unit=node.unit)
        yield from node.inner
    if node.options:
        yield replace(node, options="")
    if node.unit:
        yield replace(node, unit=False, options="")
    if len(node.inner) > 1:
        yield replace(node, inner=node.inner[:1])
    for index, each in enumerate(node.inner):
        for smaller in _smaller_nodes(each):
            yield replace(node, inner=(*node.inner[:index], smaller, *node.inner[index + 1 :]))


def _simpler_actions(action: Action) -> Iterator[Action]:
    """A shorter route; a plain forward."""
    for route in re.finditer(r"\((\d+(?:, \d+)*),\)", action.code):
        blocks = route.group(1).split(", ")
        for gone in range(len(blocks)):
            rest = "".join(f"{block}, " for i, block in enumerate(blocks) if i != gone).strip()
            yield replace(action, code=action.code[: route.start()] + f"({rest})" + action.code[route.end() :])
    if action.makes is not None and action.kind != "forward":
        plain = f"loss[{action.makes}] = loss_of(model(x(1), (0,)))"
        yield Action("forward", plain, makes=action.makes)
