"""Read the metadata of a DCP folder without executing it. Pure: bytes in, names and places out.

``.metadata`` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`: names, shapes and chunks of all tensors,
and for each chunk a range of a file. The few classes that it may name are listed here; any other is an error.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp2._torch.checkpoint import PICKLED_DCP_FILE, PICKLED_DCP_METADATA
from fsdp2.checkpoint.formats.torch_files import TORCH_DTYPES, Window
from fsdp2.checkpoint.formats.unpickling import Made, Named, shown, unpickle
from fsdp2.checkpoint.io.pieces import StoredTensorInfo
from fsdp2.checkpoint.schema.dtypes import DTYPES
from fsdp2.checkpoint.storage.base import Reader, check_file_name
from fsdp2.errors import CorruptError, UnsupportedError
from fsdp2.placement.box import Box

__all__ = ["Item", "Path", "Range", "read_metadata"]

# A name split into parts, as the state dict was nested: ``("optimizer", "state", "0.weight", "exp_avg")``.
Path = tuple[str | int, ...]

MAX_TEXT = 1 << 16

_PACKAGE = "torch.distributed.checkpoint.metadata."
_KINDS = (
    "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
    "StorageMeta"
)
# The classes and functions that the pickle of the metadata may name.
_ALLOWED = frozenset(
    {
        *PICKLED_DCP_METADATA,
        "builtins.getattr",  # Python 3.11.2, of Debian 12, names an enum's member so
        "torch.Size",
        *(f"{module}.{kind}" for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "PurePosixPath")),
        *(_PACKAGE + kind for kind in _KINDS.split()),
        *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
    }
)


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


def read_metadata(reader: Reader, file: str) -> dict[str, Item]:
    """Everything that the metadata lists, by name.

    Args:
        reader: of the file. Reading stops where the pickle becomes invalid.
        file: for messages.

    Raises:
        CorruptError: it is damaged, lists something unexpected, or a file outside of the folder.
        UnsupportedError: the files were written through an extension (compression, encryption).
    """
    metadata = unpickle(Window(reader, 0, reader.size, MAX_TEXT), file, _ALLOWED)
    try:
        ranges = {
            (_field(index, "MetadataIndex", "fqn", str), _place(index.field("offset"))): _range(index, info, file)
            for index, info in _field(metadata, "Metadata", "storage_data", dict).items()
        }
        paths = metadata.field("planner_data")
        items = {}
        for fqn, about in _field(metadata, "Metadata", "state_dict_metadata", dict).items():
            if type(fqn) is not str or not isinstance(about, Made):
                raise CorruptError(f"{file}: {shown(fqn)} is not described")
            items[fqn] = _item(fqn, about, paths.get(fqn) if isinstance(paths, dict) else None, ranges, file)
        return items
    except (TypeError, AttributeError, ValueError) as error:
        raise CorruptError(f"{file}: is malformed ({type(error).__name__}: {error})") from error


def _item(fqn: str, about: Made, path: Any, ranges: dict[Any, Range], file: str) -> Item:
    def found(place: tuple[int, ...] | None) -> Range:
        if (fqn, place) not in ranges:
            raise CorruptError(f"{file}: does not say where '{fqn}' {place or ''} is stored")
        return ranges[fqn, place]

    if type(path) is not tuple or not path or not all(type(part) in (str, int) for part in path):
        head, dot, rest = fqn.partition(".")  # saved without flattening: split off a usual key, if there is one
        path = (head, rest) if dot and head in ("model", "optimizer", "optim") else (fqn,)
    if about.kind == f"{_PACKAGE}BytesStorageMetadata":
        return Item(path, None, {(): ((), found(None))})
    properties = _field(about, "TensorStorageMetadata", "properties", Made)
    state = properties.state
    dtype = state[0] if type(state) is tuple and state else properties.field("dtype")
    if not isinstance(dtype, Named):
        raise CorruptError(f"{file}: '{fqn}' has no dtype")
    item = Item(path, StoredTensorInfo(TORCH_DTYPES.get(dtype.kind, dtype.kind), _sizes(about.field("size"))))
    assert item.info is not None
    for chunk in _field(about, "TensorStorageMetadata", "chunks", list):
        start = _sizes(_field(chunk, "ChunkStorageMetadata", "offsets", object))
        shape = _sizes(_field(chunk, "ChunkStorageMetadata", "sizes", object))
        ends = [low + size for low, size in zip(start, shape, strict=True)]
        if any(end > size for end, size in zip(ends, item.info.shape, strict=True)):
            raise CorruptError(f"{file}: '{fqn}' {list(item.info.shape)} has a part {list(start)}..{ends}")
        if Box(start, shape).numel:
            item.chunks[start] = shape, found(start)
    return item


def _range(index: Made, info: Any, file: str) -> Range:
    fqn = index.field("fqn")
    if not isinstance(info, Made) or info.kind != PICKLED_DCP_FILE:
        raise CorruptError(f"{file}: '{fqn}' is stored by {shown(info)}; expected a file of DCP's FileSystemWriter")
    if descriptors := info.field("transform_descriptors"):
        raise UnsupportedError(
            f"{file}: '{fqn}' was written through the extension {shown(descriptors[0])}; load it with "
            "torch.distributed.checkpoint and the same extension, and save it again"
        )
    offset, length = info.field("offset"), info.field("length")
    if not _is_size(offset) or not _is_size(length):
        raise CorruptError(f"{file}: '{fqn}' is at bytes {shown(offset)} and has {shown(length)} bytes")
    return Range(check_file_name(info.field("relative_path"), file), offset, length)


def _field(made: Any, kind: str, name: str, expected: type) -> Any:
    """A field of an object of the metadata."""
    if not isinstance(made, Made) or made.kind != _PACKAGE + kind:
        raise ValueError(f"{shown(made)} instead of a {kind}")
    value = made.field(name)
    if not isinstance(value, expected):
        raise ValueError(f"{kind}.{name} is {shown(value)}")
    return value


def _place(offset: Any) -> tuple[int, ...] | None:
    return None if offset is None else _sizes(offset)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _sizes(values: Any) -> tuple[int, ...]:
    if isinstance(values, Made) and values.kind == "torch.Size":
        (values,) = values.args
    if type(values) not in (tuple, list) or len(values) > 64 or not all(_is_size(value) for value in values):
        raise ValueError(f"{shown(values)} are no sizes")
    return tuple(values)
