"""Translate the names of other libraries: find the model's tensors, and the optimizer's state by FQN in the form that
`optimizer.py` reads. Pure: names and plain data in, names and JSON out.

A path is a name split into parts, as the state dict was nested: ``("optimizer", "state", "0.weight", "exp_avg")``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import torch

from fsdp2.checkpoint.io.pieces import StoredTensorInfo
from fsdp2.checkpoint.schema.dtypes import name_of
from fsdp2.checkpoint.schema.tree import canonical, encode
from fsdp2.errors import ArgumentError, MismatchError

__all__ = [
    "ForeignOptimizer",
    "Path",
    "encoded",
    "find_model",
    "find_optimizers",
    "nested",
    "path_name",
    "state_name",
    "within_value",
]

Path = tuple[str | int, ...]

# The names that users give to the model's part of a state dict, the most likely first.
MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict", "model_state", "net", "network", "weights")
# The keys of a param group that are not options.
NO_OPTIONS = ("params", "param_names")


def find_model(paths: Iterable[Path]) -> tuple[Path, dict[str, Path]]:
    """Find the tensors of the model: those under a key such as "model", the outermost one; otherwise those at the top,
    if there are any; otherwise all, which may have a common key.

    Args:
        paths: of tensors that are not an optimizer's.

    Returns:
        (the common path of all, name -> path).

    Raises:
        MismatchError: there are several such keys, and no reason to prefer one.
    """
    paths = list(paths)
    prefix = _marked(paths, (), len(MODEL_KEYS))
    at_top: list[Path] = [path for path in paths if len(path) == 1]
    if len(prefix) > 1 and {path[len(prefix) :] for path in paths if path[: len(prefix)] == prefix} & {*at_top}:
        prefix = ()  # {**model.state_dict(), "ema": {"model": ...}}: the same names exist further out
    if prefix:
        chosen = [path for path in paths if path[: len(prefix)] == prefix]
    elif at_top:
        chosen = at_top
    else:
        prefix, chosen = _common(path[:-1] for path in paths), paths
    return prefix, {".".join(str(part) for part in path[len(prefix) :]): path for path in chosen}


def _marked(paths: list[Path], base: Path, rank: int) -> Path:
    """The key below `base` that marks a model: the outermost one, then the most likely one. Unless this has tensors of
    its own, an even more likely key is looked for below it ({"state_dict": {"model": ..., "ema": ...}}).

    Args:
        rank: only keys that come before this one in `MODEL_KEYS`.
    """
    inner = [path for path in paths if path[: len(base)] == base]
    if any(len(path) == len(base) + 1 for path in inner) and base:
        return base
    likely = MODEL_KEYS[:rank]
    marked = {
        (depth, likely.index(part), path[: depth + 1])
        for path in inner
        for depth, part in enumerate(path[:-1])
        if depth >= len(base) and part in likely
    }
    if not marked:
        return base
    best = min(each[:2] for each in marked)
    prefixes = sorted((each[2] for each in marked if each[:2] == best), key=str)
    if len(prefixes) > 1:
        names = ", ".join(repr(".".join(map(str, prefix))) for prefix in prefixes)
        raise MismatchError(
            f"the checkpoint has several models, at {names}, and load cannot know which one is meant: no argument "
            "of load() (sources= neither) says that. Load the one with torch.distributed.checkpoint.load into a dict "
            "of these keys and the model's state_dict(), and save it again by itself."
        )
    return _marked(inner, prefixes[0], best[1])


def within_value(own: Path) -> tuple[str, Path] | None:
    """(name of a module's extra state, path in it) for a path below the model; None for anything else. torch stores an
    extra state item by item if it is a dict. The path is () for all of it."""
    for depth, part in enumerate(own):
        if str(part).endswith("_extra_state"):
            return ".".join(map(str, own[: depth + 1])), own[depth + 1 :]
    return None


def nested(items: Mapping[Path, Any]) -> Any:
    """Nest values again, given their paths. A value with the path () is the only one.

    Raises:
        ArgumentError: a value has others below it, or a key has a special meaning in `tree.py`.
    """
    if () in items:
        return items[()]
    tree: dict[str | int, Any] = {}
    for path, value in items.items():
        if any(str(part).startswith("$") for part in path):
            raise ArgumentError(f"at {path}: a key that begins with '$'")
        level = tree
        for part in path[:-1]:
            level = level.setdefault(part, {})
            if not isinstance(level, dict) or "$tensor" in level:
                raise ArgumentError(f"at {path}: a value where others are below")
        level[path[-1]] = value
    return _listed(tree)


def _common(paths: Iterable[Path]) -> Path:
    first, *rest = [*paths] or [()]
    for depth, part in enumerate(first):
        if any(path[depth : depth + 1] != (part,) for path in rest):
            return first[:depth]
    return first


def find_optimizers(paths: Iterable[Path]) -> set[Path]:
    """The keys with ``state`` and ``param_groups`` below them, as torch.optim nests them or with flattened names."""
    roots = set()
    for path in paths:
        for depth, part in enumerate(path):
            nested = (part == "param_groups") or (part == "state" and len(path) >= depth + 3)
            if nested or str(part).startswith("param_groups."):
                roots.add(path[:depth])
                break
    return roots


def state_name(path: Path, fqn: str) -> str:
    """The name in the catalog of a tensor of an optimizer's state (see `optimizer.py`)."""
    return f"{path_name(path)}.{fqn}"


def path_name(path: Path) -> str:
    """A path as `tree.py` writes it."""
    return "/".join(quote(str(part), safe="").replace(".", "%2E") for part in path)


@dataclass
class ForeignOptimizer:
    """The state of an optimizer, collected item by item.

    Args:
        names: FQNs of parameters, used to parse flattened names.
        numbered: number of a parameter -> FQN, for states keyed by number.
    """

    names: frozenset[str] = frozenset()
    numbered: Mapping[str, str] = field(default_factory=dict)
    _states: dict[str, dict[Path, Any]] = field(default_factory=dict)
    _options: dict[str, dict[str, Any]] = field(default_factory=dict)
    _groups: dict[int, dict[str, Any]] = field(default_factory=dict)

    def split(self, text: str) -> tuple[str, Path]:
        """(FQN, path) of ``"<fqn>.<key>"``: the longest known FQN that fits, or all but the last part."""
        parts = text.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            fqn = ".".join(parts[:cut])
            if fqn in self.names:
                return fqn, tuple(parts[cut:])
        return ".".join(parts[:-1]), tuple(parts[-1:])

    def place(self, path: Path) -> tuple[str, str, Path] | None:
        """What an item below the optimizer's key is: ("state", FQN, path in the state), ("option", FQN, (name,)), or
        ("group", number, (name,)). None for anything else."""
        head, rest = str(path[0]), path[1:]
        if head == "state" and len(rest) >= 2:
            return "state", self.numbered.get(str(rest[0]), str(rest[0])), rest[1:]
        if head == "param_groups" and len(rest) == 2:
            return "group", str(rest[0]), rest[1:]
        for prefix, kind in (("state.", "state"), ("param_groups.", "option")):
            if head.startswith(prefix):
                fqn, own = self.split(".".join([head.removeprefix(prefix), *map(str, rest)]))
                return kind, fqn, own
        return None

    def add_state(self, fqn: str, path: Path, value: Any) -> None:
        """Add an item of a parameter's state: a `StoredTensorInfo`, or plain data."""
        self._states.setdefault(fqn, {})[path] = value

    def add_option(self, fqn: str, name: str, value: Any) -> None:
        """Add an option of a parameter's group: plain data, or a 0-dim tensor."""
        if name not in NO_OPTIONS:
            self._options.setdefault(fqn, {})[name] = value

    def add_to_group(self, number: int, name: str, value: Any) -> None:
        """Add an item of a param group, such as its parameters."""
        self._groups.setdefault(number, {})[name] = value

    def table(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """The optimizer's values (see `optimizer.py`).

        Args:
            shapes: of the parameters, as far as known.
        """
        for own in self._groups.values():
            # Parameters may be numbers; the group may also have their names.
            params = own.get("param_names") or own.get("params") or []
            for fqn in params if isinstance(params, (list, tuple)) else []:
                self._options.setdefault(str(fqn), {})
                for name, value in own.items():
                    self.add_option(str(fqn), name, value)
        forms: dict[str, Any] = {}
        numbers: dict[str, int] = {}
        states = {}
        for fqn, items in self._states.items():
            form = _form(items, shapes.get(fqn))
            forms.setdefault(canonical(form), form)
            states[fqn] = numbers.setdefault(canonical(form), len(numbers))
        groups: dict[str, dict[str, Any]] = {}
        for fqn in [*self._options, *(fqn for fqn in self._states if fqn not in self._options)]:
            options = encoded(self._options.get(fqn, {}))
            group = groups.setdefault(canonical(options), {"params": [], "options": options})
            group["params"].append(fqn)
        return {"kind": "", "forms": list(forms.values()), "states": states, "groups": list(groups.values())}


def _form(items: Mapping[Path, Any], shape: tuple[int, ...] | None) -> Any:
    """The form of a parameter's state: nested as it was, with notes instead of tensors."""
    return nested(
        {path: _item(path, value, shape) for path, value in sorted(items.items(), key=lambda item: str(item[0]))}
    )


def _item(path: Path, info: Any, shape: tuple[int, ...] | None) -> Any:
    if not isinstance(info, StoredTensorInfo):
        return encoded(info)
    note = {"$tensor": path_name(path)}
    if not info.shape and (shape != () or path == ("step",)):
        return {**note, "as": "plain"}
    # A tensor with another shape than its parameter (such as a factor) is replicated, however it was stored.
    return {**note, "as": "param"} if shape is None or info.shape == shape else note


def _listed(level: Any) -> Any:
    """Dicts with the keys 0, 1, ... become lists again."""
    if not isinstance(level, dict):
        return level
    inner = {key: _listed(value) for key, value in level.items()}
    if inner and all(type(key) is int for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    return {str(key): value for key, value in inner.items()}


def encoded(value: Any) -> Any:
    """Plain data and 0-dim tensors as JSON."""

    def scalar(path: str, tensor: torch.Tensor) -> dict[str, Any]:
        return {"value": encode(tensor.item(), scalar, path), "dtype": name_of(tensor.dtype)}

    return encode(value, scalar, "a value of another library's checkpoint")
