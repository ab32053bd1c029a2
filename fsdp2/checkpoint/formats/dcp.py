"""The catalog of a folder of `torch.distributed.checkpoint` (DCP), as torch's FSDP2 and FSDP1 write it.
Layer: checkpoint.

``.metadata`` lists the chunks of each tensor, each with the range of a ``.distcp`` file that holds it
(`dcp_metadata.py`). Such a range is a complete `torch.save` file, and the bytes are read in place (`torch_files.py`).
Values other than tensors are `torch.save` files too. No pickle is executed. An item that is intact but not plain data
(a pickled data loader) is left out and listed as such, unless it is part of an optimizer's state, which must be
complete. A damaged item is an error.

A save with ``use_collectives=False`` writes one ``__<rank>.metadata`` per rank instead, which do not say to which save
they belong. It is refused.
"""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from fsdp2.checkpoint.formats.dcp_metadata import Item, Path, Range, read_metadata
from fsdp2.checkpoint.formats.torch_files import TensorInFile, read_torch_file
from fsdp2.checkpoint.formats.unpickling import NotPlain, plain, shown
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.io.memory import bytes_of
from fsdp2.checkpoint.io.pieces import StoredPiece, StoredTensorInfo
from fsdp2.checkpoint.schema.dtypes import DTYPES, ITEMSIZES, name_of
from fsdp2.checkpoint.schema.tree import canonical, encode
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.errors import ArgumentError, CheckpointError, CorruptError, MismatchError, UnsupportedError
from fsdp2.placement.box import Box

__all__ = ["DcpCatalog", "is_dcp", "open_dcp"]

METADATA = ".metadata"
RANK_METADATA = re.compile(r"__\d+\.metadata")
MAX_VALUE_BYTES = 1 << 28
# The names that users give to the model's part of a state dict, and to the number of steps.
MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict", "model_state", "net", "network", "weights")
NO_OPTIONS = ("params", "param_names")  # keys of a param group
PLAIN_NAME = re.compile(r"\w+")  # of a tensor in the state of a parameter; others are nested


def is_dcp(storage: Storage, path: str) -> bool:
    """Whether the folder is a DCP checkpoint."""
    return any(name == METADATA or RANK_METADATA.fullmatch(name) for name in storage.names(path))


def open_dcp(storage: Storage, path: str) -> "DcpCatalog":
    """Read the metadata.

    Raises:
        CorruptError: it is damaged, lists something unexpected, or a file outside of the folder.
        MismatchError: there are several models.
        UnsupportedError: the files were written through an extension (compression, encryption), or without collectives.
    """
    file = storage.join(path, METADATA)
    if storage.kind(file) is None:
        raise UnsupportedError(
            f"{path}: was saved with use_collectives=False. Load it with torch.distributed.checkpoint, on as many "
            "ranks as saved it, and save it again"
        )
    reader = storage.open_file(file)
    try:
        items = read_metadata(reader, file)
    finally:
        reader.close()
    held = sum(storage.sizes(path).values())
    for name, item in items.items():  # memory is allocated for optimizer state
        info = item.info
        if info is not None and item.is_readable and prod(info.shape) * ITEMSIZES[info.dtype] > held:
            raise CorruptError(
                f"{file}: '{name}' is {info.dtype} {list(info.shape)}, and all files together have {held} bytes"
            )
    return DcpCatalog(storage, path, items)


class DcpCatalog(Catalog):
    """See `Catalog`, and the module docstring."""

    def __init__(self, storage: Storage, path: str, items: Mapping[str, Item]):
        super().__init__(storage, path, "DCP (torch.distributed.checkpoint)")
        self._items = items
        self._keys = {item.path: key for key, item in items.items()}
        self._of: dict[str, dict[str, str]] = {"model": {}, "optimizer": {}}  # section -> name -> key of the tensor
        self._optimizers: dict[Path, dict[str, tuple[str, str, str]]] = {}  # root -> key -> what it is, see `_place`
        self.left_out = {"model": {}, "optimizer": {}, "": {}}
        self._sort()
        for section, names in self._of.items():
            infos = ((name, items[key].info) for name, key in names.items())
            self.tensors[section] = {name: info for name, info in infos if info is not None}

    def _sort(self) -> None:
        """Find out what belongs where; what belongs nowhere, or cannot be read, is left out."""
        roots = _optimizer_roots(self._keys)
        owner = {path: next((root for root in roots if _is_below(path, root)), None) for path in self._keys}
        tensors = [path for path, key in self._keys.items() if owner[path] is None and self._items[key].info]
        prefix, model = _model_prefix(tensors, self.path), set(tensors)
        if prefix == () and any(len(path) == 1 for path in tensors):
            model = {path for path in tensors if len(path) == 1}
        for path, key in self._keys.items():
            item, is_within = self._items[key], path[: len(prefix)] == prefix and len(path) > len(prefix)
            name = ".".join(map(str, path[len(prefix) :]))
            if owner[path] is not None:
                continue
            if is_within and path in model and item.is_readable:
                self._of["model"][name] = key
            elif is_within and (path in model or (item.info is None and (prefix or "_extra_state" in name))):
                self.left_out["model"][name] = _unreadable(item)
            else:
                self.left_out[""][key] = "neither model nor optimizer"
        for path, root in owner.items():
            if root is not None:
                self._add_to_optimizer(root, path, self._keys[path])

    def _add_to_optimizer(self, root: Path, path: Path, key: str) -> None:
        place = _place(path[len(root) :], self._of["model"])
        if place is None:
            self.left_out[""][key] = "neither model nor optimizer"
            return
        kind, owner, name = place
        self._optimizers.setdefault(root, {})[key] = place
        if kind == "state" and self._items[key].is_readable and PLAIN_NAME.fullmatch(name):
            stored = f"{name}.{owner}"
            if stored in self._of["optimizer"]:
                raise CheckpointError(f"two optimizers have a '{stored}': {self._of['optimizer'][stored]} and {key}")
            self._of["optimizer"][stored] = key

    def read_values(self, section: str) -> Sequence[Mapping[str, Any]]:
        """See `Catalog`.

        Raises:
            CorruptError: one of them is damaged.
            UnsupportedError: an item of an optimizer's state cannot be read; the rest is useless without it.
        """
        return [self._table(members) for members in self._optimizers.values()] if section == "optimizer" else ()

    def _table(self, members: Mapping[str, tuple[str, str, str]]) -> dict[str, Any]:
        """The values of an optimizer (see `optimizer.py`)."""
        shapes = {name: info.shape for name, info in self.tensors["model"].items()}
        states: dict[str, dict[str, Any]] = {}
        options: dict[str, dict[str, Any]] = {}
        groups: dict[str, dict[str, Any]] = {}
        places = {"state": states, "option": options, "group": groups}
        for key, (kind, owner, name) in members.items():
            own = places[kind].setdefault(owner, {})
            if kind == "state" and f"{name}.{owner}" in self._of["optimizer"]:
                own[name] = _note(name, self.tensors["optimizer"][f"{name}.{owner}"], shapes.get(owner))
                continue
            try:
                if kind == "state" and not PLAIN_NAME.fullmatch(name):
                    raise NotPlain("it is nested")
                value = self._value(key)
                own[name] = value if name in NO_OPTIONS else _encoded(value)
            except (NotPlain, ArgumentError) as error:
                self.left_out["optimizer"][key] = str(error)
                if kind == "state":
                    raise UnsupportedError(
                        f"{self.path}: '{key}' is a part of the optimizer's state that cannot be read here ({error}), "
                        "and without it the rest is not what was saved. Load the optimizer with "
                        "torch.distributed.checkpoint, or the model alone."
                    ) from error
        for own in groups.values():
            for fqn in own.get("param_names") or own.get("params") or ():
                options.setdefault(str(fqn), {}).update(own)
        listed: dict[str, dict[str, Any]] = {}
        for fqn in {**options, **states}:
            chosen = {name: form for name, form in options.get(fqn, {}).items() if name not in NO_OPTIONS}
            group = {"optimizer": "", "params": [], "options": chosen}
            listed.setdefault(canonical(chosen), group)["params"].append(fqn)
        return {"kinds": {"": ""}, "states": states, "groups": [*listed.values()]}

    @property
    def files(self) -> Iterable[str]:
        """See `Catalog`."""
        held = {where.file for item in self._items.values() for _, where in item.chunks.values()}
        return [self.storage.join(self.path, name) for name in (METADATA, *held)]

    def pieces(self, section: str, name: str, wanted: Box) -> Iterable[StoredPiece]:
        """See `Catalog`."""
        key = self._of[section][name]
        for start, (shape, where) in self._items[key].chunks.items():
            if Box(start, shape).intersect(wanted) is not None:
                yield self._tensor(key, shape, where).piece(start)

    def _tensor(self, key: str, shape: tuple[int, ...], where: Range) -> TensorInFile:
        """The tensor stored in a range of a file, with its metadata checked."""
        info = self._items[key].info
        found = self._read(where)
        if info is None or not isinstance(found, TensorInFile) or (found.dtype, found.shape) != (info.dtype, shape):
            raise CorruptError(
                f"{self.storage.join(self.path, where.file)}: bytes {where.offset}..{where.offset + where.length} "
                f"should be '{key}' {info and info.dtype} {list(shape)}, and are {shown(found)}"
            )
        return found

    def _read(self, where: Range) -> Any:
        file = self.storage.join(self.path, where.file)
        with self.opened.use(file) as reader:
            return read_torch_file(reader, file, where.offset, where.length)

    def _value(self, key: str) -> Any:
        """A value that is not a tensor, or a tensor of one element, as a 0-dim tensor.

        Raises:
            NotPlain: it is something else.
            CorruptError: it is damaged.
        """
        item = self._items[key]
        if not item.chunks:
            raise CorruptError(f"{self.path}: nothing of '{key}' is stored")
        shape, where = next(iter(item.chunks.values()))
        if item.info is not None:
            if not item.is_readable or prod(item.info.shape) != 1:
                raise NotPlain(_unreadable(item))
            return self._scalar(self._tensor(key, shape, where))
        if where.length > MAX_VALUE_BYTES:
            raise NotPlain(f"no tensor, and has {where.length} bytes")
        found = self._read(where)
        return self._scalar(found) if isinstance(found, TensorInFile) and not found.shape else plain(found, f"'{key}'")

    def _scalar(self, tensor: TensorInFile) -> torch.Tensor:
        value = torch.empty((), dtype=DTYPES[tensor.dtype])
        with self.opened.use(tensor.path) as reader:
            reader.read_into(tensor.offset, bytes_of(value)[: ITEMSIZES[tensor.dtype]])
        return value


def _model_prefix(paths: Sequence[Path], folder: str) -> Path:
    """The common path of the model's tensors: a key such as "model", the outermost one; otherwise (), if there are
    tensors at the top; otherwise what all have in common.

    Raises:
        MismatchError: there are several such keys, and no reason to prefer one.
    """
    top = {path for path in paths if len(path) == 1}
    marked = {path[: depth + 1] for path in paths for depth, part in enumerate(path[:-1]) if part in MODEL_KEYS}
    outermost = sorted((each for each in marked if len(each) == min(map(len, marked))), key=str)
    # {**model.state_dict(), "ema": {"model": ...}}: the same names exist further out.
    if any(path[len(each) :] in top for each in outermost for path in paths if path[: len(each)] == each):
        return ()
    if len(outermost) > 1:
        names = ", ".join(repr(".".join(map(str, each))) for each in outermost)
        raise MismatchError(
            f"{folder}: the checkpoint has several models, at {names}, and load cannot know which one is meant: no "
            "argument of load() (sources= neither) says that. Load the one with torch.distributed.checkpoint.load into "
            "a dict of these keys and the model's state_dict(), and save it again by itself."
        )
    if outermost:
        return outermost[0]
    first, *rest = [path[:-1] for path in paths] if paths and not top else [()]
    length = next((at for at, part in enumerate(first) if any(path[at : at + 1] != (part,) for path in rest)), None)
    return first[:length]


def _optimizer_roots(paths: Iterable[Path]) -> list[Path]:
    """The keys with ``state`` and ``param_groups`` below them, as torch.optim nests them or with flattened names."""
    roots = set()
    for path in paths:
        for depth, part in enumerate(path):
            is_nested = part == "param_groups" or (part == "state" and len(path) >= depth + 3)
            if is_nested or str(part).startswith("param_groups."):
                roots.add(path[:depth])
                break
    return sorted(roots, key=str)


def _is_below(path: Path, root: Path) -> bool:
    """Whether an item belongs to the optimizer at `root`."""
    rest = path[len(root) :]
    return path[: len(root)] == root and bool(rest) and str(rest[0]).split(".")[0] in ("state", "param_groups")


def _place(path: Path, names: Container[str]) -> tuple[str, str, str] | None:
    """What an item below an optimizer's key is: ("state", FQN, name), ("option", FQN, name), or ("group", number,
    name). None for anything else.

    Args:
        names: of the model's tensors, to tell where an FQN ends in a flattened name.
    """
    head, *rest = map(str, path)
    if head == "state" and len(rest) >= 2:
        return "state", rest[0], "/".join(rest[1:])
    if head == "param_groups" and len(rest) == 2 and rest[0].isdecimal():
        return "group", rest[0], rest[1]
    for prefix, kind in (("state.", "state"), ("param_groups.", "option")):
        if head.startswith(prefix):
            parts = ".".join([head.removeprefix(prefix), *rest]).split(".")
            cut = next((at for at in range(len(parts) - 1, 0, -1) if ".".join(parts[:at]) in names), len(parts) - 1)
            return kind, ".".join(parts[:cut]), "/".join(parts[cut:])
    return None


def _note(name: str, info: StoredTensorInfo, shape: tuple[int, ...] | None) -> dict[str, Any]:
    """How a tensor of a parameter's state is created again (see `optimizer.py`)."""
    note = {"$tensor": name}
    if not info.shape and (shape != () or name == "step"):
        return {**note, "as": "plain"}
    # A tensor with another shape than its parameter (such as a factor) is replicated, however it was stored.
    return {**note, "as": "param"} if shape is None or info.shape == shape else note


def _encoded(value: Any) -> Any:
    """Plain data and 0-dim tensors as JSON."""

    def scalar(path: str, tensor: torch.Tensor) -> dict[str, Any]:
        return {"value": encode(tensor.item(), scalar, path), "dtype": name_of(tensor.dtype)}

    return encode(value, scalar, "a value of another library's checkpoint")


def _unreadable(item: Item) -> str:
    if item.info is None:
        return "no tensor"
    reason = ", which safetensors does not have" if not item.is_readable else ""
    return f"a tensor {item.info.dtype} {list(item.info.shape)}{reason}"
