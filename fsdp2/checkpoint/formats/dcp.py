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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Any

import torch

from fsdp2.checkpoint.formats.dcp_metadata import STEPS, Item, Places, Range, read_metadata, unreadable
from fsdp2.checkpoint.formats.foreign_state import (
    Path,
    encoded,
    nested,
    path_name,
)
from fsdp2.checkpoint.formats.torch_files import TensorInFile, read_torch_file
from fsdp2.checkpoint.formats.unpickling import NotPlain, plain, shown
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.io.memory import bytes_of
from fsdp2.checkpoint.io.pieces import StoredPiece
from fsdp2.checkpoint.schema.dtypes import DTYPES, ITEMSIZES
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.errors import ArgumentError, CheckpointError, CorruptError, MismatchError, UnsupportedError
from fsdp2.placement.box import Box

__all__ = ["DcpCatalog", "is_dcp", "open_dcp"]

METADATA = ".metadata"
RANK_METADATA = re.compile(r"__\d+\.metadata")
MAX_VALUE_BYTES = 1 << 28


def is_dcp(storage: Storage, path: str) -> bool:
    """Whether the folder is a DCP checkpoint."""
    return any(name == METADATA or RANK_METADATA.fullmatch(name) for name in storage.names(path))


def open_dcp(storage: Storage, path: str) -> "DcpCatalog":
    """Read the metadata.

    Raises:
        CorruptError: it is damaged, lists something unexpected, or a file outside of the folder.
        MismatchError: there are several models (see `find_model`).
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
    _check_sizes(storage, path, items)
    return DcpCatalog(storage, path, items)


def _check_sizes(storage: Storage, path: str, items: Mapping[str, Item]) -> None:
    """Check that no tensor claims to be larger than the folder: memory is allocated for optimizer state."""
    held = sum(storage.sizes(path).values())
    for name, item in items.items():
        info = item.info
        if info is not None and item.is_readable and prod(info.shape) * ITEMSIZES[info.dtype] > held:
            raise CorruptError(
                f"{storage.join(path, METADATA)}: '{name}' is {info.dtype} {list(info.shape)}, and all files together "
                f"have {held} bytes"
            )


class _Sections(Mapping[str, list[Mapping[str, Any]]]):
    """The values of each section, read on access, so that a model can be loaded without its optimizer's state.

    Raises:
        CorruptError: one of them is damaged.
        UnsupportedError: an item of an optimizer's state cannot be read; the rest is useless without it.
    """

    def __init__(self, makers: Mapping[str, Callable[[], list[Mapping[str, Any]]]]):
        self._makers = makers
        self._made: dict[str, list[Mapping[str, Any]]] = {}

    def __getitem__(self, section: str) -> list[Mapping[str, Any]]:
        if section not in self._made:
            self._made[section] = self._makers[section]()
        return self._made[section]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class DcpCatalog(Catalog):
    """See `Catalog`, and the module docstring.

    Attributes:
        items: everything that the metadata lists.
        places: where the items belong.
    """

    def __init__(self, storage: Storage, path: str, items: Mapping[str, Item]):
        super().__init__(storage, path, "DCP (torch.distributed.checkpoint)")
        self.items = items
        self.left_out = {"model": {}, "optimizer": {}, "": {}}
        try:
            self.places = Places.of(items, self.left_out, self.numbered())
        except MismatchError as error:
            raise MismatchError(f"{path}: {error}") from None
        self.tensors = {
            section: {name: info for name, key in names.items() if (info := items[key].info) is not None}
            for section, names in self.places.tensors.items()
        }
        self.values = _Sections({"model": self._model_values, "optimizer": self._optimizer_values})
        self.step = self.find_step()

    def find_step(self) -> int | None:
        """A number called "step" at the top, or one level below ("train_state"); None if there is none.

        Raises:
            CorruptError: it is damaged.
        """
        for key, item in self.items.items():
            if item.path[-1] in STEPS and len(item.path) <= 2 and key in self.left_out[""] and item.chunks:
                shape, where = next(iter(item.chunks.values()))
                value = self._count(key, shape, where)
                if value is not None:
                    del self.left_out[""][key]
                    return value
        return None

    def _model_values(self) -> list[Mapping[str, Any]]:
        model: dict[str, Any] = {}
        for name, members in self.places.model_values.items():
            found: dict[Path, Any] = {}
            try:
                for path, key in members.items():
                    is_tensor = self.items[key].is_readable
                    found[path] = {"$tensor": path_name(path)} if is_tensor else encoded(self._value(key))
                model[name] = nested(found)
            except (NotPlain, ArgumentError) as error:
                self.left_out["model"][name] = str(error)  # all of it: an incomplete value would be a different one
        return [model] if model else []

    def _optimizer_values(self) -> list[Mapping[str, Any]]:
        shapes = {name: info.shape for name, info in self.tensors.get("model", {}).items()}
        tables: list[Mapping[str, Any]] = []
        for optimizer, members in self.places.optimizers:
            for key, (kind, fqn, path) in members.items():
                info = self.items[key].info
                if kind == "state" and info is not None and self.items[key].is_readable:
                    optimizer.add_state(fqn, path, info)
                    continue
                try:
                    value = self._value(key)
                    encoded(value)
                except (NotPlain, ArgumentError) as error:
                    self.left_out["optimizer"][key] = str(error)
                    if kind == "state":
                        raise UnsupportedError(
                            f"{self.path}: '{key}' is a part of the optimizer's state that cannot be read here "
                            f"({error}), and without it the rest is not what was saved. Load the optimizer with "
                            "torch.distributed.checkpoint, or the model alone."
                        ) from error
                    continue
                if kind == "state":
                    optimizer.add_state(fqn, path, value)
                elif kind == "option":
                    optimizer.add_option(fqn, str(path[0]), value)
                else:
                    optimizer.add_to_group(int(fqn), str(path[0]), value)
            tables.append(optimizer.table(shapes))
        return tables

    def damaged_items(self) -> Iterator[tuple[str, CheckpointError]]:
        """The damaged items, and what is wrong with them. Reads all items except the tensors of the model and the
        optimizer, including those that are never loaded. (For tensors outside of all sections, it checks only that they
        exist, not their values.)"""
        tensors = {key for names in self.places.tensors.values() for key in names.values()}
        for key, item in self.items.items():
            for _, where in item.chunks.values() if key not in tensors else ():
                try:
                    self._read(where)
                except (NotPlain, UnsupportedError):
                    continue
                except CheckpointError as error:
                    yield key, error

    def numbered(self) -> dict[Path, dict[str, str]]:
        """Optimizer -> number of a parameter -> its name, for checkpoints with an `optimizer.state_dict()`. That
        contains numbers, and also the names if the optimizer was given named parameters."""
        keys = {item.path: key for key, item in self.items.items()}
        result: dict[Path, dict[str, str]] = {}
        for path, key in keys.items():
            beside = (*path[:-1], "params")
            if path[-1] == "param_names" and path[-3:-2] == ("param_groups",) and beside in keys:
                with suppress(NotPlain):
                    names, numbers = self._value(key), self._value(keys[beside])
                    if type(names) is list and type(numbers) is list:
                        result.setdefault(path[:-3], {}).update(zip(map(str, numbers), map(str, names), strict=False))
        return result

    @property
    def files(self) -> Iterable[str]:
        """See `Catalog`."""
        held = {where.file for item in self.items.values() for _, where in item.chunks.values()}
        return [self.storage.join(self.path, name) for name in (METADATA, *held)]

    def pieces(self, section: str, name: str, wanted: Box) -> Iterable[StoredPiece]:
        """See `Catalog`."""
        key = self.places.tensors[section][name]
        for start, (shape, where) in self.items[key].chunks.items():
            box = Box(start, shape)
            if box.intersect(wanted) is not None:
                tensor = self._tensor(key, shape, where)
                yield from (piece for piece in tensor.pieces(start) if piece.box.intersect(wanted) is not None)

    def _tensor(self, key: str, shape: tuple[int, ...], where: Range) -> TensorInFile:
        """The tensor stored in a range of a file, with its metadata checked."""
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
        with self.opened.use(file) as reader:
            return read_torch_file(reader, file, where.offset, where.length)

    def _value(self, key: str) -> Any:
        """A value that is not a tensor, or is a 0-dim tensor.

        Raises:
            NotPlain: it is something else.
            CorruptError: it is damaged.
        """
        item = self.items[key]
        if not item.chunks:
            raise CorruptError(f"{self.path}: nothing of '{key}' is stored")
        shape, where = next(iter(item.chunks.values()))
        if item.info is not None and not item.is_readable:
            raise NotPlain(unreadable(item))
        if item.info is not None and item.info.shape:
            raise NotPlain(f"a tensor {item.info.dtype} {list(item.info.shape)}")
        return self._value_at(key, shape, where)

    def _value_at(self, key: str, shape: tuple[int, ...], where: Range) -> Any:
        """The value in a range of a file. A tensor of one element is returned as a 0-dim tensor."""
        if self.items[key].info is not None:
            return self._scalar(self._tensor(key, shape, where))
        if where.length > MAX_VALUE_BYTES:
            raise NotPlain(f"no tensor, and has {where.length} bytes")
        found = self._read(where)
        if isinstance(found, TensorInFile) and not found.shape:
            return self._scalar(found)
        return plain(found, f"'{key}'")

    def _count(self, key: str, shape: tuple[int, ...], where: Range) -> int | None:
        """A number of steps: an integer, or a tensor that holds one; None for anything else."""
        info = self.items[key].info
        if info is not None and (prod(info.shape) != 1 or not self.items[key].is_readable):
            return None
        try:
            value = self._value_at(key, shape, where)
        except NotPlain:
            return None
        value = value.item() if isinstance(value, torch.Tensor) else value
        return value if type(value) is int and value >= 0 else None

    def _scalar(self, tensor: TensorInFile) -> torch.Tensor:
        value = torch.empty((), dtype=DTYPES[tensor.dtype])
        with self.opened.use(tensor.path) as reader:
            reader.read_into(tensor.offset, bytes_of(value)[: ITEMSIZES[tensor.dtype]])
        return value
