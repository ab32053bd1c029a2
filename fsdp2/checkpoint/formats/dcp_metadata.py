"""Read the metadata of a DCP folder without executing it. Pure: bytes in, names and places out.

``.metadata`` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`: names, shapes and chunks of all tensors,
and for each chunk a range of a file. The few classes that it may name are listed here; any other is an error.
"""

from typing import Any, NamedTuple

import torch

from fsdp2._torch.checkpoint import PICKLED_DCP_FILE, PICKLED_DCP_METADATA
from fsdp2.checkpoint.formats.torch_files import TORCH_DTYPES, Window
from fsdp2.checkpoint.formats.unpickling import Note, unpickle
from fsdp2.checkpoint.io.pieces import StoredTensorInfo
from fsdp2.checkpoint.schema.header import MAX_DIMS
from fsdp2.checkpoint.storage.base import Reader, check_file_name
from fsdp2.errors import CorruptError, UnsupportedError
from fsdp2.placement.box import Box

__all__ = ["Item", "Path", "Range", "read_metadata"]

# The keys of a nested state dict: ``("optimizer", "state", "0.weight", "exp_avg")``.
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
        "builtins.getattr",  # how Python 3.11.2 (Debian 12) pickles an enum's member
        "torch.Size",
        *(f"{module}.{kind}" for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "PurePosixPath")),
        *(_PACKAGE + kind for kind in _KINDS.split()),
        *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
    }
)


class Range(NamedTuple):
    """A range of a file."""

    file: str
    offset: int
    length: int


class Item(NamedTuple):
    """The description of one name in the metadata.

    Attributes:
        info: a tensor's dtype and shape; None for other values. A dtype that safetensors lacks has torch's name.
        chunks: start in the tensor -> (shape, where).
    """

    path: Path
    info: StoredTensorInfo | None
    chunks: dict[tuple[int, ...], tuple[tuple[int, ...], Range]]


def read_metadata(reader: Reader, file: str) -> dict[str, Item]:
    """Everything that the metadata lists, by name.

    Args:
        reader: the open file. Reading stops where the pickle becomes invalid.
        file: its name, for messages.

    Raises:
        CorruptError: it is damaged, or lists something unexpected or a file outside of the folder.
        UnsupportedError: the files were written through an extension (compression, encryption).
    """
    metadata = unpickle(Window(reader, 0, reader.size, MAX_TEXT), file, _ALLOWED)
    try:
        ranges = {
            (index.state["fqn"], _sizes(index.state.get("offset") or ())): info
            for index, info in _list(metadata.state["storage_data"], dict).items()
        }
        paths = metadata.state.get("planner_data")
        paths = paths if isinstance(paths, dict) else {}
        described = _list(metadata.state["state_dict_metadata"], dict)
        return {fqn: _item(fqn, about, paths.get(fqn), ranges, file) for fqn, about in described.items()}
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise CorruptError(f"{file}: is malformed ({type(error).__name__}: {error})") from error


def _item(fqn: str, about: Note, path: Any, ranges: dict[Any, Any], file: str) -> Item:
    if type(path) is not tuple or not path or not all(type(part) in (str, int) for part in path):
        head, dot, rest = fqn.partition(".")  # saved without flattening: split off a usual key, if any
        path = (head, rest) if dot and head in ("model", "optimizer", "optim") else (fqn,)
    if about.kind == f"{_PACKAGE}BytesStorageMetadata":
        return Item(path, None, {})
    properties, shape = about.state["properties"].state, _sizes(about.state["size"])
    dtype = properties[0] if type(properties) is tuple else properties["dtype"]
    chunks = {}
    for chunk in _list(about.state["chunks"], list):
        box = Box(_sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"]))
        if any(end > size for end, size in zip(box.end, shape, strict=True)):
            raise CorruptError(f"{file}: '{fqn}' {list(shape)} has a part {list(box.start)}..{list(box.end)}")
        if box.numel:
            if (fqn, box.start) not in ranges:
                raise CorruptError(f"{file}: does not say where '{fqn}' {box.start} is stored")
            chunks[box.start] = box.shape, _range(fqn, ranges[fqn, box.start], file)
    return Item(path, StoredTensorInfo(TORCH_DTYPES.get(dtype.kind, dtype.kind), shape), chunks)


def _range(fqn: str, info: Note, file: str) -> Range:
    if info.kind != PICKLED_DCP_FILE:
        raise CorruptError(f"{file}: '{fqn}' is stored by {info}; expected a file of DCP's FileSystemWriter")
    if extension := info.state.get("transform_descriptors"):
        raise UnsupportedError(
            f"{file}: '{fqn}' was written through the extension {str(extension[0])[:200]}; load it with "
            "torch.distributed.checkpoint and the same extension, and save it again"
        )
    offset, length = _sizes((info.state["offset"], info.state["length"]))
    return Range(check_file_name(info.state["relative_path"], file), offset, length)


def _list(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    if isinstance(values, Note) and values.kind == "torch.Size":
        (values,) = values.args or ()
    sizes = type(values) in (tuple, list) and len(values) <= MAX_DIMS
    if not sizes or not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        raise ValueError("what should be sizes is not")
    return tuple(values)
