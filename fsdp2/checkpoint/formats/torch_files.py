"""Locate the tensor in a `torch.save` file, so that it can be read like one in any other file. Layer: checkpoint.

Such a file is an uncompressed zip archive. ``data.pkl`` is a pickle of the tensor's shape and strides, which refers to
its memory in ``data/<key>``. DCP's files consist of several such archives. The pickle is parsed, never executed
(`unpickling.py`). (https://docs.pytorch.org/docs/stable/notes/serialization.html)
"""

import io
import zipfile
import zlib
from math import prod
from typing import Any

from fsdp2._torch.checkpoint import PICKLED_TENSORS
from fsdp2.checkpoint.formats.unpickling import Note, unpickle
from fsdp2.checkpoint.schema.dtypes import DTYPES, ITEMSIZES
from fsdp2.checkpoint.schema.header import StoredTensor
from fsdp2.checkpoint.storage.base import Reader
from fsdp2.errors import CorruptError, FSDPError, UnsupportedError
from fsdp2.layout import strides

__all__ = ["TORCH_DTYPES", "Window", "read_tensor"]

EDGE = 4096  # bytes of a request: apart from the tensor, nearly everything in an archive is at its ends
MAX_READ = 1 << 25  # bytes of anything but the tensor. The directory's entries take about ten times the memory.

TORCH_DTYPES = {str(dtype): name for name, dtype in DTYPES.items()}
UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")  # for newer dtypes, which are stored separately
# The classes that give the dtype of a tensor's memory.
_STORAGES = {
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
    "torch.ComplexFloatStorage": "C64",
}
_ALLOWED = frozenset({*PICKLED_TENSORS, *UNTYPED, *_STORAGES, *TORCH_DTYPES, "collections.OrderedDict"})


def read_tensor(reader: Reader, path: str, start: int, length: int) -> StoredTensor:
    """The tensor in a range of a file that is an archive.

    Args:
        path: the path of the file that `reader` has open.

    Raises:
        CorruptError: it is damaged, or is not a tensor.
        UnsupportedError: the tensor is not contiguous.
    """
    where = f"{path}, bytes {start}..{start + length}"
    if length < 22 or start + length > reader.size:
        raise CorruptError(f"{where}: should be a file of torch.save; the file has {reader.size} bytes")
    try:
        return _Archive(Window(reader, start, length, MAX_READ), start, length, where).tensor()
    except (FSDPError, OSError):
        raise
    except Exception as error:
        raise CorruptError(
            f"{where}: not a tensor in a file of torch.save, or damaged ({type(error).__name__}: {error})"
        ) from error


class Window(io.BufferedReader):
    """A part of a file as the file object that `zipfile` and `pickle` need. It reads only what is requested, because a
    file may consist mostly of holes.

    Attributes:
        limit: the maximum number of bytes of one read.
    """

    def __init__(self, reader: Reader, start: int, length: int, limit: int):
        super().__init__(_Raw(reader, start, length), EDGE)
        self.limit = limit

    def read(self, count: int | None = -1, /) -> bytes:
        """The next bytes; fewer at the end."""
        if count is not None and count > self.limit:
            raise ValueError(f"claims {count} bytes in addition to its tensors, more than is possible")
        return super().read(count)


class _Raw(io.RawIOBase):
    def __init__(self, reader: Reader, start: int, length: int):
        self._reader, self._start, self._length, self._at = reader, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise ValueError("a position before the beginning")
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        into = memoryview(buffer)[: max(self._length - self._at, 0)]
        self._reader.read_into(self._start + self._at, into)
        self._at += into.nbytes
        return into.nbytes


class _Archive:
    """A zip archive of torch.save."""

    def __init__(self, window: Window, start: int, length: int, where: str):
        self._window, self._start, self._length, self._where = window, start, length, where
        with zipfile.ZipFile(window) as archive:
            self._entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}

    def tensor(self) -> StoredTensor:
        """The tensor."""
        if "byteorder" in self._entries and self._read("byteorder") != b"little":
            raise ValueError("it was written on a machine with another byte order")
        made = unpickle(io.BytesIO(self._read("data.pkl")), self._where, _ALLOWED, self._memory)
        if not isinstance(made, Note) or made.kind not in PICKLED_TENSORS or made.args is None:
            raise ValueError("it is something else than a tensor")
        (kind, offset, size), first, shape, steps, _, _, *rest = made.args
        name = TORCH_DTYPES[rest.pop(0).kind] if kind in UNTYPED and rest else _STORAGES[kind]
        if any(rest):  # flags: the values must be conjugated or negated
            raise UnsupportedError(f"{self._where}: a tensor that is conjugated or negated; save its values")
        numbers = (first, *shape, *steps)
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers) or len(steps) != len(shape):
            raise ValueError("a tensor of an impossible shape")
        if prod(shape) and any(
            count > 1 and step != other for count, step, other in zip(shape, steps, strides(shape), strict=True)
        ):
            raise UnsupportedError(
                f"{self._where}: a tensor of shape {list(shape)} is stored with strides {list(steps)}; load it with "
                "torch.distributed.checkpoint, make it contiguous, and save it again"
            )
        if (first + prod(shape)) * ITEMSIZES[name] > size and prod(shape):
            raise ValueError(f"a tensor of shape {list(shape)} in memory of {size} bytes")
        return StoredTensor(name, tuple(shape), offset + first * ITEMSIZES[name])

    def _range(self, name: str) -> tuple[int, int]:
        """(offset in the archive, bytes) of an entry's data."""
        entry = self._entries[name]
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise zipfile.BadZipFile(f"'{name[:80]}' is compressed")
        self._window.seek(entry.header_offset)
        head = self._window.read(30)
        lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        offset = entry.header_offset + 30 + lengths
        if head[:4] != b"PK\3\4" or offset + entry.file_size > self._length:
            raise zipfile.BadZipFile(f"'{name[:80]}' is not where the directory says")
        return offset, entry.file_size

    def _read(self, name: str) -> bytes:
        offset, size = self._range(name)
        self._window.seek(offset)
        content = self._window.read(size)
        crc = self._entries[name].CRC
        if crc and zlib.crc32(content) != crc:  # torch can be configured to leave it at 0
            raise zipfile.BadZipFile(f"'{name}' has checksum {zlib.crc32(content):08x}, expected {crc:08x}")
        return content

    def _memory(self, key: Any) -> tuple[str, int, int]:
        """(class, offset in the file, bytes) of the memory that a pickle refers to."""
        _, kind, name, *_ = key
        offset, size = self._range(f"data/{name}")
        return kind.kind, self._start + offset, size
