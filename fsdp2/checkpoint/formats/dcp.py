"""The catalog of a folder of `torch.distributed.checkpoint` (DCP), as torch's FSDP2 and FSDP1 write it.
Layer: checkpoint.

``.metadata`` names each chunk of each tensor and the range of a ``.distcp`` file where it is (`dcp_metadata.py`). Such
a range is a `torch.save` file of its own, from which the bytes are read where they are (`torch_files.py`). What is no
tensor is a `torch.save` file too. No pickle is executed, and what is not plain data is left out.

Saved with ``use_collectives=False`` there is a ``__<rank>.metadata`` of each rank instead; together they say the same.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from fsdp2.checkpoint.box import Box
from fsdp2.checkpoint.catalog import StoredPiece, StoredTensorInfo
from fsdp2.checkpoint.dtypes import DTYPES, ITEMSIZES
from fsdp2.checkpoint.formats.dcp_metadata import Item, Range, read_metadata
from fsdp2.checkpoint.formats.foreign_state import (
    ForeignOptimizer,
    Path,
    encoded,
    find_model,
    find_optimizers,
    state_name,
)
from fsdp2.checkpoint.formats.native import read_small
from fsdp2.checkpoint.formats.torch_files import TensorInFile, read_torch_file
from fsdp2.checkpoint.formats.unpickling import plain, shown
from fsdp2.checkpoint.memory import bytes_of
from fsdp2.checkpoint.storage import Reader, Storage
from fsdp2.errors import ArgumentError, CheckpointError, CorruptError

__all__ = ["DcpCatalog", "is_dcp", "open_dcp"]

METADATA = ".metadata"
RANK_METADATA = re.compile(r"__(\d+)\.metadata")
MAX_METADATA_BYTES = 1 << 32
MAX_VALUE_BYTES = 1 << 28


def is_dcp(storage: Storage, path: str) -> bool:
    """Whether such a folder is there."""
    return bool(_metadata_files(storage, path))


def _metadata_files(storage: Storage, path: str) -> list[str]:
    if storage.size(storage.join(path, METADATA)) is not None:
        return [METADATA]
    return [name for name in storage.names(path) if RANK_METADATA.fullmatch(name)]


def open_dcp(storage: Storage, path: str) -> "DcpCatalog":
    """Read the metadata.

    Raises:
        CorruptError: it is damaged, names something that has no place in it, or a file outside of the folder.
        UnsupportedError: the files were written through an extension (compression, encryption).
    """
    items: dict[str, Item] = {}
    for name in _metadata_files(storage, path):
        file = storage.join(path, name)
        read_metadata(read_small(storage, file, MAX_METADATA_BYTES), file, items)
    left_out: dict[str, str] = {}
    catalog = DcpCatalog(storage, path, items, _Places({}, {}, []), left_out)
    catalog.places = _Places.of(items, left_out, catalog.numbered())
    return catalog


@dataclass
class DcpCatalog:
    """See `Catalog`, and the module docstring.

    Attributes:
        items: all that the metadata names.
        places: which of them belong where.
        left_out: names that are not in any section -> why.
    """

    storage: Storage
    path: str
    items: Mapping[str, Item]
    places: "_Places"
    left_out: dict[str, str]
    kind: str = "DCP (torch.distributed.checkpoint)"
    aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> dict[str, dict[str, StoredTensorInfo]]:
        """See `Catalog`."""
        return {
            section: {name: self.items[key].info or StoredTensorInfo("", ()) for name, key in names.items()}
            for section, names in self.places.tensors.items()
        }

    @cached_property
    def step(self) -> int | None:
        """See `Catalog`: a number called "step" at the top, or one level below ("train_state")."""
        for key, item in self.items.items():
            if item.path[-1] in ("step", "global_step") and len(item.path) <= 2 and key in self.left_out:
                value = self._value(key)
                value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
                if type(value) is int and value >= 0:
                    return value
        return None

    @cached_property
    def values(self) -> dict[str, list[Mapping[str, Any]]]:
        """See `Catalog`."""
        model: dict[str, Any] = {}
        for name, key in self.places.model_values.items():
            try:
                model[name] = encoded(self._value(key))
            except (CorruptError, ArgumentError) as error:
                self.left_out[key] = str(error)
        shapes = {name: info.shape for name, info in self.tensors.get("model", {}).items()}
        tables: list[Mapping[str, Any]] = []
        for optimizer, members in self.places.optimizers:
            for key, (kind, fqn, path) in members.items():
                info = self.items[key].info
                if kind == "state" and info is not None:
                    optimizer.add_state(fqn, path, info)
                    continue
                try:
                    value = self._value(key)
                    encoded(value)
                except (CorruptError, ArgumentError) as error:
                    self.left_out[key] = str(error)
                    continue
                if kind == "state":
                    optimizer.add_state(fqn, path, value)
                elif kind == "option":
                    optimizer.add_option(fqn, str(path[0]), value)
                else:
                    optimizer.add_to_group(int(fqn), str(path[0]), value)
            tables.append(optimizer.table(shapes))
        return {"model": [model] if model else [], "optimizer": tables}

    def numbered(self) -> dict[Path, dict[str, str]]:
        """Optimizer -> number of a parameter -> its name, where `optimizer.state_dict()` itself was saved, which has
        numbers, and the names beside if the optimizer got them."""
        keys = {item.path: key for key, item in self.items.items()}
        result: dict[Path, dict[str, str]] = {}
        for path, key in keys.items():
            beside = (*path[:-1], "params")
            if path[-1] == "param_names" and path[-3:-2] == ("param_groups",) and beside in keys:
                with suppress(CorruptError):
                    names, numbers = self._value(key), self._value(keys[beside])
                    if type(names) is list and type(numbers) is list:
                        result.setdefault(path[:-3], {}).update(zip(map(str, numbers), map(str, names), strict=False))
        return result

    def pieces(self, section: str, name: str, wanted: Box) -> Iterable[StoredPiece]:
        """See `Catalog`."""
        key = self.places.tensors[section][name]
        for start, (shape, where) in self.items[key].chunks.items():
            box = Box(start, shape)
            if box.intersect(wanted) is not None:
                tensor = self._tensor(key, shape, where)
                yield from (piece for piece in tensor.pieces(start) if piece.box.intersect(wanted) is not None)

    def close(self) -> None:
        """See `Catalog`."""

    def _tensor(self, key: str, shape: tuple[int, ...], where: Range) -> TensorInFile:
        """The chunk in a range of a file, which is looked at."""
        info = self.items[key].info
        found = self._read(where)
        if info is None or not isinstance(found, TensorInFile) or (found.dtype, found.shape) != (info.dtype, shape):
            raise CorruptError(
                f"{self.storage.join(self.path, where.file)}: bytes "
                f"{where.offset}..{where.offset + where.length} should "
                f"be '{key}' {info and info.dtype} {list(shape)}, and are {shown(found)}"
            )
        return found

    def _read(self, where: Range) -> Any:
        file = self.storage.join(self.path, where.file)
        reader = self.storage.open_file(file)
        try:
            return read_torch_file(reader, file, where.offset, where.length)
        finally:
            reader.close()

    def _value(self, key: str) -> Any:
        """A value that is no tensor, or a 0-dim tensor."""
        item = self.items[key]
        if not item.chunks:
            raise CorruptError(f"{self.path}: nothing of '{key}' is stored")
        shape, where = next(iter(item.chunks.values()))
        if item.info is not None:
            tensor = self._tensor(key, shape, where)
            if item.info.shape:
                raise CorruptError(f"{self.path}: '{key}' is a tensor of shape {list(item.info.shape)}")
            return self._scalar(tensor)
        if where.length > MAX_VALUE_BYTES:
            raise CorruptError(f"{self.path}: '{key}' is no tensor, and has {where.length} bytes")
        found = self._read(where)
        return self._scalar(found) if isinstance(found, TensorInFile) and not found.shape else plain(found, f"'{key}'")

    def _scalar(self, tensor: TensorInFile) -> torch.Tensor:
        value = torch.empty((), dtype=DTYPES[tensor.dtype])
        reader: Reader = self.storage.open_file(tensor.path)
        try:
            reader.read_into(tensor.offset, bytes_of(value)[: ITEMSIZES[tensor.dtype]])
        finally:
            reader.close()
        return value


@dataclass
class _Places:
    """Which names belong where.

    Attributes:
        tensors: section -> name there -> name in the metadata.
        model_values: values of the model that are no tensors, likewise.
        optimizers: each with its items: name in the metadata -> what that is (`ForeignOptimizer.place`).
    """

    tensors: dict[str, dict[str, str]]
    model_values: dict[str, str]
    optimizers: list[tuple[ForeignOptimizer, dict[str, tuple[str, str, Path]]]]

    @classmethod
    def of(
        cls, items: Mapping[str, Item], left_out: dict[str, str], numbered: Mapping[Path, Mapping[str, str]]
    ) -> "_Places":
        """Sort all names; `left_out` gets those that have no place."""
        keys = {item.path: key for key, item in items.items()}
        roots = find_optimizers(keys)
        owner = {path: _root_of(path, roots) for path in keys}
        readable = [path for path, key in keys.items() if (info := items[key].info) is None or info.dtype]
        tensors = [path for path in readable if owner[path] is None and items[keys[path]].info is not None]
        prefix, model = find_model(tensors)
        result = cls({"model": {name: keys[path] for name, path in model.items()}, "optimizer": {}}, {}, [])
        for path in readable:
            if owner[path] is None and items[keys[path]].info is None and model:
                own = path[len(prefix) :]
                if path[: len(prefix)] == prefix and own and (prefix or str(own[-1]).endswith("_extra_state")):
                    result.model_values[".".join(map(str, own))] = keys[path]
        for root in sorted(roots, key=str):
            optimizer = ForeignOptimizer(frozenset(model), numbered.get(root, {}))
            result._add_optimizer(root, [path for path in readable if owner[path] == root], items, keys, optimizer)
        placed = {*result.model_values.values(), *(key for names in result.tensors.values() for key in names.values())}
        placed.update(key for _, members in result.optimizers for key in members)
        for key in keys.values():
            if key not in placed:
                info = items[key].info
                strange = info is not None and not info.dtype
                left_out[key] = "a dtype that safetensors does not have" if strange else "neither model nor optimizer"
        return result

    def _add_optimizer(
        self,
        root: Path,
        paths: list[Path],
        items: Mapping[str, Item],
        keys: Mapping[Path, str],
        optimizer: ForeignOptimizer,
    ) -> None:
        members = {}
        for path in paths:
            place = optimizer.place(path[len(root) :])
            key = keys[path]
            if place is None or (place[0] == "group" and not place[1].isdecimal()):
                continue
            members[key] = place
            if place[0] == "state" and items[key].info is not None:
                name = state_name(place[2], place[1])
                if name in self.tensors["optimizer"]:
                    raise CheckpointError(
                        f"two optimizers have a '{name}': {self.tensors['optimizer'][name]} and {key}"
                    )
                self.tensors["optimizer"][name] = key
        self.optimizers.append((optimizer, members))


def _root_of(path: Path, roots: set[Path]) -> Path | None:
    """The optimizer that an item is below; None if it is below none."""
    for depth in range(len(path)):
        if path[:depth] in roots and str(path[depth]).split(".")[0] in ("state", "param_groups"):
            return path[:depth]
    return None
