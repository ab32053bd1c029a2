"""Locate the tensors in a `torch.save` file, so that they can be read like those of any other file. Layer: checkpoint.

Such a file is an uncompressed zip archive. ``data.pkl`` is a pickle of the object, in which each tensor refers to the
memory in ``data/<key>``. DCP's files are such archives one after the other. The pickle is parsed, never executed
(`unpickling.py`). (https://docs.pytorch.org/docs/stable/notes/serialization.html)
"""

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass
from math import prod
from typing import Any

from fsdp2._torch.checkpoint import PICKLED_PARAMETERS, PICKLED_TENSORS
from fsdp2.checkpoint.formats.unpickling import Made, Named, NotPlain, unpickle
from fsdp2.checkpoint.io.pieces import StoredPiece
from fsdp2.checkpoint.schema.dtypes import DTYPES, ITEMSIZES
from fsdp2.checkpoint.schema.header import MAX_DIMS
from fsdp2.checkpoint.storage.base import Reader
from fsdp2.errors import CorruptError, UnsupportedError
from fsdp2.layout import strides
from fsdp2.placement.box import Box

__all__ = ["LEGACY", "START", "TensorInFile", "Window", "read_torch_file"]

EDGE = 4096  # bytes of a request: nearly everything in an archive but the tensors is at its ends
MAX_READ = 1 << 28  # bytes of anything but tensors: the pickle, the directory of the archive
MAX_DIRECTORY = 1 << 25  # bytes of the archive's directory: its entries take about ten times the memory

LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # how files of torch before 1.6 begin
START = b"PK\3\4"

_NAMES = {str(dtype): name for name, dtype in DTYPES.items()}
# The classes that give the dtype of a tensor's memory; newer dtypes are stored next to `UntypedStorage`.
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


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """A tensor in a file.

    Attributes:
        path: of the file.
        dtype: its name in safetensors.
        steps: the strides, in elements.
        offset: of its first element, in bytes of the file.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    offset: int

    def piece(self, start: tuple[int, ...] | None = None) -> StoredPiece:
        """The whole tensor.

        Args:
            start: where it begins in the tensor that it is a part of.

        Raises:
            UnsupportedError: it is not contiguous.
        """
        start = start or (0,) * len(self.shape)
        expected = zip(self.shape, self.steps, strides(self.shape), strict=True)
        if prod(self.shape) and not all(size == 1 or step == other for size, step, other in expected):
            raise UnsupportedError(
                f"{self.path}: a tensor of shape {list(self.shape)} is stored with strides {list(self.steps)}; load it "
                "with torch, make it contiguous, and save it again"
            )
        box = Box(start, self.shape)
        return StoredPiece(self.path, self.offset, box, box, self.dtype)


def read_torch_file(reader: Reader, path: str, start: int = 0, length: int | None = None) -> Any:
    """The object in a file: plain data and `TensorInFile`; `Made` for anything else.

    Args:
        path: of the file that `reader` has open.
        start, length: the range of an archive within the file; by default the whole file.

    Raises:
        CorruptError: it is damaged; a `NotPlain` if it is intact, and its pickle is not understood.
        UnsupportedError: it is older than torch 1.6.
    """
    length = reader.size - start if length is None else length
    head = bytearray(min(len(LEGACY), max(reader.size - start, 0)))
    reader.read_into(start, memoryview(head))
    if head == LEGACY:
        raise UnsupportedError(
            f"{path}: was written by torch before 1.6, or with _use_new_zipfile_serialization=False. Load it with "
            "torch.load(..., weights_only=True), and save that with torch.save or safetensors."
        )
    if start < 0 or length < 22 or start + length > reader.size:
        raise CorruptError(
            f"{path}: bytes {start}..{start + length} should be a file of torch.save; it has {reader.size}"
        )
    where = f"{path}, bytes {start}..{start + length}"
    try:
        return _Archive(path, Window(reader, start, length, MAX_DIRECTORY), start, length, where).content()
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        ValueError,
        KeyError,
        EOFError,
        OverflowError,
        struct.error,
    ) as error:
        raise CorruptError(
            f"{where}: not a file of torch.save (since 1.6), or damaged ({type(error).__name__}: {error})"
        ) from error


class Window(io.BufferedReader):
    """A part of a file as the file object that `zipfile` and `pickle` need. It is read as far as it is asked for: a
    file may consist mostly of holes.

    Attributes:
        limit: the most bytes that one read may take.
    """

    def __init__(self, reader: Reader, start: int, length: int, limit: int):
        super().__init__(_Raw(reader, start, length), EDGE)
        self.limit = limit

    def read(self, count: int | None = -1, /) -> bytes:
        """The next bytes; fewer at the end."""
        if count is not None and count > self.limit:
            raise ValueError(f"claims {count} bytes beside its tensors, more than is possible")
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

    def __init__(self, path: str, window: Window, start: int, length: int, where: str):
        self._path, self._window, self._start, self._length, self._where = path, window, start, length, where
        with zipfile.ZipFile(window) as archive:
            self._entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        window.limit = MAX_READ

    def content(self) -> Any:
        """The object."""
        if "byteorder" in self._entries and self._read("byteorder") != b"little":
            raise CorruptError(f"{self._where}: was written on a machine with another byte order")
        rebuild = {
            **dict.fromkeys(PICKLED_TENSORS, self._tensor),
            **dict.fromkeys(PICKLED_PARAMETERS, lambda tensor, *_: tensor),
        }
        content = self._read("data.pkl")
        try:
            return unpickle(io.BytesIO(content), self._where, None, self._memory, rebuild)
        except CorruptError as error:
            raise NotPlain(str(error)) from error  # its checksum is right

    def _range(self, name: str) -> tuple[int, int]:
        """(offset in the archive, bytes) of an entry's data."""
        entry = self._entries.get(name)
        if entry is None:
            raise zipfile.BadZipFile(f"has no '{name[:80]}'")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise zipfile.BadZipFile(f"'{name[:80]}' is compressed")
        self._window.seek(entry.header_offset)
        head = self._window.read(30)
        if head[:4] != b"PK\3\4":
            raise zipfile.BadZipFile(f"'{name[:80]}' is not where the directory says")
        offset = (
            entry.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        )
        if offset + entry.file_size > self._length:
            raise zipfile.BadZipFile(f"'{name[:80]}' goes beyond the end")
        return offset, entry.file_size

    def _read(self, name: str) -> bytes:
        offset, size = self._range(name)
        self._window.seek(offset)
        content = self._window.read(size)
        crc = self._entries[name].CRC
        if crc and zlib.crc32(content) != crc:  # torch can be configured to leave it at 0
            raise zipfile.BadZipFile(f"'{name}' has checksum {zlib.crc32(content):08x}, expected {crc:08x}")
        return content

    def _memory(self, key: Any) -> tuple[Named, int, int]:
        """(class, offset in the file, bytes) of the memory that a pickle refers to."""
        if type(key) is not tuple or len(key) != 5 or key[0] != "storage":
            raise ValueError("a reference to something that is not a storage")
        if not isinstance(key[1], Named) or type(key[2]) is not str:
            raise ValueError("a reference to memory without a class or name")
        offset, size = self._range(f"data/{key[2]}")
        return key[1], self._start + offset, size

    def _tensor(self, *args: Any) -> Any:
        """A tensor, from the arguments of one of `PICKLED_TENSORS`."""
        (kind, offset, size), first, shape, steps, _, _, *rest = args
        name = _STORAGES.get(kind.kind)
        if kind.kind in ("torch.storage.UntypedStorage", "torch.UntypedStorage") and rest:
            name = _NAMES.get(rest.pop(0).kind)
        # The last arguments say whether the values must be conjugated or negated.
        if name is None or any(rest):
            return Made(f"torch.Tensor in a {kind.kind}", args)
        numbers = (first, *shape, *steps)
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers) or len(shape) > MAX_DIMS:
            raise ValueError("a tensor of an impossible shape")
        shape, steps = tuple(shape), tuple(steps)
        last = first + sum((count - 1) * step for count, step in zip(shape, steps, strict=True)) + 1
        itemsize = ITEMSIZES[name]
        if prod(shape) and last * itemsize > size:
            raise ValueError(f"a tensor of shape {list(shape)} in memory of {size} bytes")
        return TensorInFile(self._path, name, shape, steps, offset + first * itemsize)
