"""Encode the header of a safetensors file, and parse it without trusting it. Pure: bytes in, bytes out.

A file is ``u64 little-endian length | JSON | data``. The JSON maps each name to dtype, shape and range in the data. The
ranges must follow each other without gaps or overlaps, and end with the file. Spaces are allowed after the JSON; here
they align the data to a page. (https://github.com/huggingface/safetensors, "Format")
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from fsdp2.checkpoint.schema.dtypes import ITEMSIZES
from fsdp2.errors import ArgumentError, CorruptError

__all__ = ["MAX_DIMS", "MAX_HEADER_BYTES", "Header", "StoredTensor", "encode_header", "parse_header", "parse_json"]

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_DIMS = 64  # per tensor: torch's limit; multiplying very many sizes takes minutes
MAX_DEPTH = 100  # of JSON, because code that walks it may recurse
CONTAINERS = frozenset({dict, list})  # of JSON
PAGE = 4096
ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})
INT = frozenset({int})


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        dtype: its name in safetensors.
        offset: the position of its first byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return prod(self.shape) * ITEMSIZES[self.dtype]


@dataclass(frozen=True)
class Header:
    """The content of a header.

    Attributes:
        tensors: by name, in the order of their data.
        unread: names of tensors that torch cannot hold -> why.
        metadata: its ``__metadata__``, strings only.
    """

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)


def encode_header(tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file, up to its data.

    Args:
        tensors: (name, dtype, shape), larger items first, so that every tensor is aligned to its item.
        metadata: strings by name.

    Raises:
        ArgumentError: a tensor has the name that is reserved for the metadata.
    """
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        if name == "__metadata__":
            raise ArgumentError("a tensor is called '__metadata__', a name that safetensors reserves")
        begin, end = end, end + prod(shape) * ITEMSIZES[dtype]
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // PAGE) * PAGE - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def parse_header(text: bytes, file: str, size: int) -> Header:
    """Parse a header and check that it describes a file of `size` bytes completely.

    Args:
        text: the JSON, without the eight bytes of its length.
        file: for messages.

    Raises:
        CorruptError: it is invalid; the message names the file, and the tensor if there is one.
    """
    content = parse_json(text, file)
    if not isinstance(content, dict):
        raise CorruptError(f"{file}: the header is not a JSON object")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptError(f"{file}: __metadata__ is not an object of strings")
    data = 8 + len(text)
    found = {name: _range_of(name, entry, file) for name, entry in content.items()}
    tensors, unread, end = {}, {}, 0
    for name, (dtype, shape, first, last) in sorted(found.items(), key=lambda item: item[1][2:]):
        if first != end:
            problem = "overlaps the one before" if first < end else "leaves a hole after the one before"
            raise CorruptError(f"{file}: '{name}' at bytes {first}..{last} of the data {problem}, which ends at {end}")
        end = last
        if dtype not in ITEMSIZES:
            unread[name] = f"{dtype[:40]} {_short(list(shape))}, which torch cannot hold"
            continue
        if last - first != prod(shape) * ITEMSIZES[dtype]:
            raise CorruptError(
                f"{file}: '{name}' has {last - first} bytes, but {dtype} {list(shape)} needs another size"
            )
        tensors[name] = StoredTensor(dtype, shape, data + first)
    if data + end != size:
        raise CorruptError(f"{file}: has {size} bytes, but its header describes {data + end}: it was cut or written to")
    return Header(tensors, metadata, unread)


def _range_of(name: str, entry: Any, file: str) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, first byte, end) of one entry of a header."""
    if not isinstance(entry, dict) or entry.keys() != ENTRY_KEYS:
        raise CorruptError(f"{file}: the entry of '{name}' must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise CorruptError(f"{file}: '{name}' has dtype {_short(dtype)}; expected a text")
    numbers = shape + offsets if isinstance(shape, list) and isinstance(offsets, list) else [None]
    # Numbers of more than 63 bits cannot be sizes, and would make torch fail.
    are_sizes = not numbers or (INT.issuperset(map(type, numbers)) and min(numbers) >= 0 and max(numbers) < 1 << 63)
    if not are_sizes or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptError(f"{file}: '{name}' has shape {_short(shape)} and data_offsets {_short(offsets)}")
    if len(shape) > MAX_DIMS:
        raise CorruptError(f"{file}: '{name}' has {len(shape)} dims; expected at most {MAX_DIMS}, as torch has")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def parse_json(text: bytes, file: str) -> Any:
    """Parse untrusted JSON.

    Raises:
        CorruptError: it is not JSON, an object has a duplicate key, or it is nested too deeply.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise CorruptError(f"{file}: the key '{twice[:80]}' appears twice")
        return result

    try:
        content = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{file}: not valid JSON ({type(error).__name__}: {error})") from error
    level = [content] if type(content) in CONTAINERS else []
    for _ in range(MAX_DEPTH):
        if not level:
            break
        items = (value.values() if type(value) is dict else value for value in level)
        level = [item for inner in items for item in inner if type(item) in CONTAINERS]
    if level:
        raise CorruptError(f"{file}: JSON nested more than {MAX_DEPTH} levels deep")
    return content
