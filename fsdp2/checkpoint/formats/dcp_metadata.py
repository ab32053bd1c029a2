"""What the metadata of a DCP folder says, read without executing it. Pure: bytes in, names and places out.

``.metadata`` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`: names, shapes and chunks of all tensors,
and
for each chunk a range of a file. The few classes that it may name are listed here; any other is an error.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp2.checkpoint.box import Box
from fsdp2.checkpoint.catalog import StoredTensorInfo
from fsdp2.checkpoint.dtypes import DTYPES
from fsdp2.checkpoint.formats.foreign_state import Path
from fsdp2.checkpoint.formats.unpickling import Made, Named, shown, unpickle
from fsdp2.checkpoint.storage import check_file_name
from fsdp2.errors import CorruptError, UnsupportedError

__all__ = ["Item", "Range", "read_metadata"]

_PACKAGE = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_DTYPES = {str(dtype): name for name, dtype in DTYPES.items()}
# All that the pickle of the metadata may name.
_ALLOWED = frozenset(
    {
        _STORAGE_INFO,
        "collections.OrderedDict",
        "torch.Size",
        "torch.serialization._get_layout",
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
                "_MEM_FORMAT_ENCODING",
            )
        ),
        # Older versions of torch took these from ShardedTensor.
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
    }
)


def read_metadata(content: bytes, file: str, items: dict[str, "Item"]) -> None:
    """Add all that a metadata file names to `items`; the chunks of a tensor may be spread over several such files.

    Args:
        file: for messages.

    Raises:
        CorruptError: it is damaged, names something that has no place in it, or a file outside of the folder.
        UnsupportedError: the files were written through an extension (compression, encryption).
    """
    metadata = unpickle(content, file, _ALLOWED)
    try:
        _Metadata(metadata, file).add_to(items)
    except (TypeError, AttributeError, ValueError, KeyError) as error:
        raise CorruptError(f"{file}: is not in order ({type(error).__name__}: {error})") from error


@dataclass(frozen=True, slots=True)
class Range:
    """A part of a file."""

    file: str
    offset: int
    length: int


@dataclass
class Item:
    """What a name of the metadata stands for.

    Attributes:
        info: of a tensor; None for other values. Its dtype is "" if safetensors has none for it.
        chunks: start in the tensor -> (shape, where). One with the key () for a value.
    """

    path: Path
    info: StoredTensorInfo | None
    chunks: dict[tuple[int, ...], tuple[tuple[int, ...], Range]] = field(default_factory=dict)


class _Metadata:
    """One metadata file, unpickled."""

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
        if not isinstance(info, Made) or info.kind != _STORAGE_INFO:
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

    def add_to(self, items: dict[str, Item]) -> None:
        """Add all names; the chunks of a tensor may be spread over several metadata files."""
        for fqn, about in self._names.items():
            if type(fqn) is not str or not isinstance(about, Made):
                raise CorruptError(f"{self._file}: {shown(fqn)} is not described")
            path = self._path_of(fqn)
            if about.kind == _PACKAGE + "BytesStorageMetadata":
                item = items.setdefault(fqn, Item(path, None))
                item.chunks.setdefault((), ((), self._found(fqn, None)))
                continue
            info = self._info(fqn, about)
            item = items.setdefault(fqn, Item(path, info))
            if item.info != info:
                raise CorruptError(f"{self._file}: '{fqn}' is {info}, and another rank has {item.info}")
            for chunk in _field(about, "TensorStorageMetadata", "chunks", list):
                self._add_chunk(item, info, fqn, chunk)

    def _path_of(self, fqn: str) -> Path:
        path = self._paths.get(fqn)
        if type(path) is tuple and path and all(type(part) in (str, int) for part in path):
            return path
        head, dot, rest = fqn.partition(".")  # saved without flattening: the usual keys, if they are there
        return (head, rest) if dot and head in ("model", "optimizer", "optim") else (fqn,)

    def _info(self, fqn: str, about: Made) -> StoredTensorInfo:
        properties = _field(about, "TensorStorageMetadata", "properties", Made)
        state = properties.state
        dtype = state[0] if type(state) is tuple and state else properties.field("dtype")
        if not isinstance(dtype, Named):
            raise CorruptError(f"{self._file}: '{fqn}' has no dtype")
        return StoredTensorInfo(_DTYPES.get(dtype.kind, ""), _sizes(about.field("size")))

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
