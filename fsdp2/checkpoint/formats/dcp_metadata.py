"""Read the metadata of a DCP folder without executing it. Pure: bytes in, names and places out.

``.metadata`` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`: names, shapes and chunks of all tensors,
and for each chunk a range of a file. The few classes that it may name are listed here; any other is an error. This file
also decides what the names mean (`Places`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp2._torch.checkpoint import PICKLED_DCP_FILE, PICKLED_DCP_METADATA
from fsdp2.checkpoint.formats.foreign_state import (
    ForeignOptimizer,
    Path,
    find_model,
    find_optimizers,
    path_name,
    state_name,
    within_value,
)
from fsdp2.checkpoint.formats.unpickling import Made, Named, shown, unpickle
from fsdp2.checkpoint.io.pieces import StoredTensorInfo
from fsdp2.checkpoint.io.reading import Window
from fsdp2.checkpoint.schema.dtypes import DTYPES
from fsdp2.checkpoint.state.model import within
from fsdp2.checkpoint.storage.base import Reader, check_file_name
from fsdp2.errors import CheckpointError, CorruptError, UnsupportedError
from fsdp2.placement.box import Box

__all__ = ["STEPS", "Item", "Places", "Range", "read_metadata", "unreadable"]

# The names of the number of steps, at the top or one level below.
STEPS = ("step", "global_step")

BLOCK = 1 << 20
MAX_TEXT = 1 << 16

_PACKAGE = "torch.distributed.checkpoint.metadata."
_DTYPES = {str(dtype): name for name, dtype in DTYPES.items()}
# The classes and functions that the pickle of the metadata may name.
_ALLOWED = frozenset(
    {
        *PICKLED_DCP_METADATA,
        "builtins.getattr",  # see `_member`
        "collections.OrderedDict",
        "torch.Size",
        *(f"{module}.{kind}" for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "PurePosixPath")),
        *(
            _PACKAGE + kind
            for kind in (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "StorageMeta",
            )
        ),
        *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
    }
)


def read_metadata(reader: Reader, file: str) -> dict[str, "Item"]:
    """Everything that the metadata lists, by name.

    Args:
        reader: of the file. Reading stops where the pickle becomes invalid.
        file: for messages.

    Raises:
        CorruptError: it is damaged, lists something unexpected, or a file outside of the folder.
        UnsupportedError: the files were written through an extension (compression, encryption).
    """
    metadata = unpickle(
        Window(reader, file, 0, reader.size, BLOCK, MAX_TEXT), file, _ALLOWED, makers={"builtins.getattr": _member}
    )
    try:
        return _Metadata(metadata, file).items()
    except (TypeError, AttributeError, ValueError, KeyError) as error:
        raise CorruptError(f"{file}: is malformed ({type(error).__name__}: {error})") from error


def _member(args: tuple[Any, ...]) -> Made:
    """A note of an enum's member, which some versions of Python 3.11 (3.11.2, of Debian 12) pickle as
    ``getattr(enum, name)``."""
    kind, name = args
    if not isinstance(kind, Named) or type(name) is not str:
        raise ValueError("an attribute of something that is no class")
    return Made(kind.kind, (name,))


@dataclass(frozen=True, slots=True)
class Range:
    """A range of a file."""

    file: str
    offset: int
    length: int


@dataclass
class Item:
    """What a name in the metadata stands for.

    Attributes:
        info: of a tensor; None for other values. Its dtype is torch's name if safetensors does not have it.
        chunks: start in the tensor -> (shape, where). One chunk with the key () for a value.
    """

    path: Path
    info: StoredTensorInfo | None
    chunks: dict[tuple[int, ...], tuple[tuple[int, ...], Range]] = field(default_factory=dict)

    @property
    def is_readable(self) -> bool:
        """Whether it is a tensor of a dtype that safetensors has."""
        return self.info is not None and self.info.dtype in DTYPES


class _Metadata:
    """The metadata, unpickled."""

    def __init__(self, content: Any, file: str):
        self._file = file
        self._names = _field(content, "Metadata", "state_dict_metadata", dict)
        planner = content.field("planner_data")
        self._paths = planner if isinstance(planner, dict) else {}
        self._ranges: dict[tuple[str, tuple[int, ...] | None], Range] = {}
        for index, info in _field(content, "Metadata", "storage_data", dict).items():
            fqn = _field(index, "MetadataIndex", "fqn", str)
            offset = index.field("offset")
            self._ranges[fqn, offset if offset is None else tuple(offset)] = self._range(fqn, info)

    def _range(self, fqn: str, info: Any) -> Range:
        if not isinstance(info, Made) or info.kind != PICKLED_DCP_FILE:
            raise CorruptError(
                f"{self._file}: '{fqn}' is stored by {shown(info)}; expected a file of DCP's FileSystemWriter"
            )
        descriptors = info.field("transform_descriptors")
        if descriptors:
            raise UnsupportedError(
                f"{self._file}: '{fqn}' was written through the extension {shown(descriptors[0])}; load it with "
                "torch.distributed.checkpoint and the same extension, and save it again"
            )
        offset, length = info.field("offset"), info.field("length")
        if not _is_size(offset) or not _is_size(length):
            raise CorruptError(f"{self._file}: '{fqn}' is at bytes {shown(offset)} and has {shown(length)} bytes")
        return Range(check_file_name(info.field("relative_path"), self._file), offset, length)

    def items(self) -> dict[str, Item]:
        """All names."""
        items = {}
        for fqn, about in self._names.items():
            if type(fqn) is not str or not isinstance(about, Made):
                raise CorruptError(f"{self._file}: {shown(fqn)} is not described")
            is_value = about.kind == _PACKAGE + "BytesStorageMetadata"
            info = None if is_value else self._info(fqn, about)
            items[fqn] = item = Item(self._path_of(fqn), info)
            if info is None:
                item.chunks[()] = (), self._found(fqn, None)
                continue
            for chunk in _field(about, "TensorStorageMetadata", "chunks", list):
                self._add_chunk(item, info, fqn, chunk)
        return items

    def _path_of(self, fqn: str) -> Path:
        path = self._paths.get(fqn)
        if type(path) is tuple and path and all(type(part) in (str, int) for part in path):
            return path
        head, dot, rest = fqn.partition(".")  # saved without flattening: split off a usual key, if there is one
        return (head, rest) if dot and head in ("model", "optimizer", "optim") else (fqn,)

    def _info(self, fqn: str, about: Made) -> StoredTensorInfo:
        properties = _field(about, "TensorStorageMetadata", "properties", Made)
        state = properties.state
        dtype = state[0] if type(state) is tuple and state else properties.field("dtype")
        if not isinstance(dtype, Named):
            raise CorruptError(f"{self._file}: '{fqn}' has no dtype")
        return StoredTensorInfo(_DTYPES.get(dtype.kind, dtype.kind), _sizes(about.field("size")))

    def _add_chunk(self, item: Item, info: StoredTensorInfo, fqn: str, chunk: Any) -> None:
        start = _sizes(_field(chunk, "ChunkStorageMetadata", "offsets", tuple))
        shape = _sizes(_field(chunk, "ChunkStorageMetadata", "sizes", tuple))
        ends = [low + size for low, size in zip(start, shape, strict=True)]
        if any(end > size for end, size in zip(ends, info.shape, strict=True)):
            raise CorruptError(f"{self._file}: '{fqn}' {list(info.shape)} has a part {list(start)}..{ends}")
        if Box(start, shape).numel:
            item.chunks[start] = shape, self._found(fqn, start)

    def _found(self, fqn: str, offset: tuple[int, ...] | None) -> Range:
        if (fqn, offset) not in self._ranges:
            raise CorruptError(f"{self._file}: does not say where '{fqn}' {offset or ''} is stored")
        return self._ranges[fqn, offset]


def _described(info: StoredTensorInfo | None) -> str:
    return "no tensor" if info is None else f"{info.dtype} {list(info.shape)}"


def _field(made: Any, kind: str, name: str, expected: type) -> Any:
    """A field of an object of the metadata."""
    if not isinstance(made, Made) or made.kind != _PACKAGE + kind:
        raise ValueError(f"{shown(made)} instead of a {kind}")
    value = made.field(name)
    if not isinstance(value, expected):
        raise ValueError(f"{kind}.{name} is {shown(value)}")
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) not in (tuple, list) or len(values) > 64 or not all(_is_size(value) for value in values):
        raise ValueError(f"{shown(values)} are no sizes")
    return tuple(values)


@dataclass
class Places:
    """Where the names belong.

    Attributes:
        tensors: section -> name there -> name in the metadata.
        model_values: values of the model that are not tensors: name there -> path in the value (() for all of it) ->
            name in the metadata. torch stores dicts item by item, so a value may have several; some may be tensors.
        optimizers: the items of each: name in the metadata -> what that is (`ForeignOptimizer.place`).
    """

    tensors: dict[str, dict[str, str]]
    model_values: dict[str, dict[Path, str]]
    optimizers: list[tuple[ForeignOptimizer, dict[str, tuple[str, str, Path]]]]

    @classmethod
    def of(
        cls, items: Mapping[str, Item], left_out: dict[str, dict[str, str]], numbered: Mapping[Path, Mapping[str, str]]
    ) -> "Places":
        """Sort all names; tensors that cannot be read, and what belongs nowhere, are added to `left_out`."""
        keys = {item.path: key for key, item in items.items()}
        roots = find_optimizers(keys)
        owner = {path: _root_of(path, roots) for path in keys}
        prefix, model = find_model(
            path for path, key in keys.items() if owner[path] is None and items[key].info is not None
        )
        result = cls({"model": {}, "optimizer": {}}, {}, [])
        for name, path in model.items():
            if items[keys[path]].is_readable:
                result._add_to_model(name, path[len(prefix) :], keys[path])
            elif not (within_value(path[len(prefix) :]) or ("", ()))[1]:
                left_out["model"][name] = unreadable(items[keys[path]])
        for path, key in keys.items():
            own = path[len(prefix) :]
            if model and owner[path] is None and path[: len(prefix)] == prefix and own:
                result._add_value(own, key, items[key], bool(prefix))
        for root in sorted(roots, key=str):
            optimizer = ForeignOptimizer(frozenset(model), numbered.get(root, {}))
            result._add_optimizer(root, [path for path in keys if owner[path] == root], items, keys, optimizer)
        placed = {key for members in result.model_values.values() for key in members.values()}
        placed.update(key for names in result.tensors.values() for key in names.values())
        placed.update(key for _, members in result.optimizers for key in members)
        placed.update(keys[path] for path in model.values())
        left_out[""].update((key, "neither model nor optimizer") for key in items if key not in placed)
        return result

    def _add_to_model(self, name: str, own: Path, key: str) -> None:
        """Add a tensor of the model, or one inside a value of the model."""
        value, inner = within_value(own) or (name, ())
        if inner:
            self.model_values.setdefault(value, {})[inner] = key
            name = within(value, path_name(inner))
        self.tensors["model"][name] = key

    def _add_value(self, own: Path, key: str, item: Item, below_key: bool) -> None:
        """Add a value of the model, or an item of one. A tensor is only added if it is part of a value and cannot be
        read."""
        value, inner = within_value(own) or ("", ())
        if (value and item.info is None) or (inner and item.info is not None and not item.is_readable):
            self.model_values.setdefault(value, {})[inner] = key
        elif below_key and item.info is None:
            self.model_values[".".join(map(str, own))] = {(): key}

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
            if place[0] == "state" and items[key].is_readable:
                name = state_name(place[2], place[1])
                if name in self.tensors["optimizer"]:
                    raise CheckpointError(
                        f"two optimizers have a '{name}': {self.tensors['optimizer'][name]} and {key}"
                    )
                self.tensors["optimizer"][name] = key
        self.optimizers.append((optimizer, members))


def unreadable(item: Item) -> str:
    """What a tensor is that safetensors has no dtype for."""
    return f"a tensor {_described(item.info)}, which safetensors does not have"


def _root_of(path: Path, roots: set[Path]) -> Path | None:
    """The optimizer that an item belongs to; None if it belongs to none."""
    for depth in range(len(path)):
        if path[:depth] in roots and str(path[depth]).split(".")[0] in ("state", "param_groups"):
            return path[:depth]
    return None
