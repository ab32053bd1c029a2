"""Several optimizers of one run: one table in the file, in which each has its name. Layer: checkpoint.

The table of a single optimizer is described in `optimizer.py`. With several, each group names its optimizer, and
``kinds`` gives the kind of each::

    {"kind": "Muon, AdamW", "kinds": {"0": "Muon", "1": "AdamW"}, "forms": ..., "states": ...,
     "groups": [{"optimizer": "0", "params": [...], "options": {...}}, ...], "added_by": {"0": ...}}
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp2.checkpoint.ranks.world import World
from fsdp2.checkpoint.state.model import State, check_name, check_text
from fsdp2.checkpoint.state.optimizer import check_table, optimizer_state
from fsdp2.errors import ArgumentError

__all__ = ["ALONE", "Optimizers", "named_optimizers", "optimizers_state", "tables_of"]

# An optimizer, several of them, by name or not; or a plain dict of tensors.
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, Any]

ALONE = ""  # the name of a single optimizer


def named_optimizers(given: Any) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by name. Those of a list are named by their index. Empty for a plain dict of tensors.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(given, torch.optim.Optimizer):
        return {ALONE: given}
    if isinstance(given, Mapping):
        if not any(isinstance(value, torch.optim.Optimizer) for value in given.values()):
            return {}
        named = dict(given)
    elif isinstance(given, (list, tuple)):
        named = {str(index): each for index, each in enumerate(given)}
    else:
        named = {} if given is None else {"": given}
    for name, each in named.items():
        if not isinstance(name, str) or not isinstance(each, torch.optim.Optimizer) or not name:
            raise ArgumentError(
                f"optimizer= expects an optimizer, a list or a dict of such, or a dict of tensors; got {each!r:.80} "
                f"under the name {name!r}"
            )
        check_text(name, f"optimizer: the name {name!a}")
    return named


def optimizers_state(model: nn.Module | None, optimizers: Mapping[str, torch.optim.Optimizer], world: World) -> State:
    """The state of all of them; see `optimizer_state`.

    Raises:
        ArgumentError: two of them hold the same parameter.
    """
    if [*optimizers] == [ALONE]:
        return optimizer_state(model, optimizers[ALONE], world)
    joined = State()
    table: dict[str, Any] = {"kind": "", "kinds": {}, "forms": [], "states": {}, "groups": []}
    owners: dict[str, str] = {}
    for name, optimizer in optimizers.items():
        state = optimizer_state(model, optimizer, world)
        own: Any = state.values
        for group in own["groups"]:
            for fqn in group["params"]:
                if owners.setdefault(fqn, name) != name:
                    raise ArgumentError(f"optimizer: '{fqn}' is a parameter of '{owners[fqn]}' and of '{name}'")
            table["groups"].append({"optimizer": name, **group})
        for entry in state.entries.values():
            check_name(entry.name, joined.entries)
            joined.entries[entry.name] = entry
        first = len(table["forms"])
        table["forms"] += own["forms"]
        table["states"] |= {fqn: first + index for fqn, index in own["states"].items()}
        table["kinds"][name] = own["kind"]
        if "added" in own:
            table["added_by"] = {**table.get("added_by", {}), name: own["added"]}
    joined.values = table | {"kind": ", ".join(table["kinds"].values())}
    return joined


def tables_of(name: str, tables: Sequence[Mapping[str, Any]], params: set[str]) -> list[Mapping[str, Any]]:
    """The parts of the stored tables that belong to one optimizer.

    Args:
        name: of the optimizer; "" for a single one, to which everything belongs.
        params: FQNs of its parameters, which select its part of a table that a single optimizer saved.
    """
    for table in tables:
        check_table(table)
    if name == ALONE:
        return [{**table, "added": {**table.get("added", {}), **table.get("added_by", {})}} for table in tables]
    found: list[Mapping[str, Any]] = []
    for table in tables:
        kinds = table.get("kinds")
        kind = kinds.get(name) if isinstance(kinds, dict) else table.get("kind")
        groups = [
            group
            for group in table["groups"]
            if (group["optimizer"] == name if "optimizer" in group else params.intersection(group["params"]))
        ]
        if not isinstance(kinds, dict):  # several optimizers may have parts of one saved group
            groups = [{**group, "params": [fqn for fqn in group["params"] if fqn in params]} for group in groups]
        own = {fqn for group in groups for fqn in group["params"]}
        states = {fqn: index for fqn, index in table["states"].items() if fqn in own}
        added = table.get("added_by", {}).get(name, table.get("added", {}))
        found.append({"kind": kind, "forms": table["forms"], "states": states, "groups": groups, "added": added})
    return found
