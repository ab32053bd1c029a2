"""Check a checkpoint completely: read every byte and list everything that is wrong. Layer: checkpoint.

Damage is looked for where a load would find it, with the same code, so that what passes here can be loaded: the
manifest, the files that it lists, their headers, that all parts of each tensor exist, the checksum of every block.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from fsdp2.checkpoint.formats.native import NativeCatalog
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.io.memory import bytes_of
from fsdp2.checkpoint.io.pieces import StoredPiece
from fsdp2.checkpoint.io.reading import BUFFER_BYTES, OpenFiles, PieceBytes
from fsdp2.checkpoint.io.workers import run_all
from fsdp2.checkpoint.opening import not_replaced, open_catalog, until_not_replaced
from fsdp2.checkpoint.schema.checksum import BLOCK
from fsdp2.checkpoint.storage.base import Folder, Storage, storage_of
from fsdp2.errors import CheckpointError, CorruptError
from fsdp2.placement.box import whole

__all__ = ["Report", "verify"]

MAX_SHOWN = 50
THREADS = 4


@dataclass
class Report:
    """The result of `verify`.

    Attributes:
        kind: the format.
        num_tensors: how many were checked.
        checked_bytes: of values that match their checksums.
        unchecked_bytes: of values without checksums (other formats): they can be read, but may be wrong.
        left_out: what this library does not read -> why.
    """

    folder: str
    kind: str
    num_tensors: int
    checked_bytes: int = 0
    unchecked_bytes: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


def verify(folder: Folder) -> Report:
    """Read a checkpoint completely, in bounded memory with several threads.

    Args:
        folder: of a checkpoint in any format that `load` supports. Formats without checksums are only read.

    Raises:
        CorruptError: it is damaged; the message lists all damage: files, tensors and bytes.
        CheckpointError: there is no checkpoint.
        ReplacedError: it was replaced while it was read, in each of several attempts.

    Example::

        good = fsdp2.checkpoint.latest("runs/a", valid=fsdp2.checkpoint.verify)
    """
    storage, path = storage_of(folder)
    return until_not_replaced(partial(_verified, storage, path))


def _verified(storage: Storage, path: str) -> Report:
    catalog = open_catalog(storage, path, files_are_there=False)
    try:
        with not_replaced(storage, path, catalog):
            return _Verification(catalog).run()
    finally:
        catalog.close()


class _Verification:
    """One check of a checkpoint.

    Attributes:
        damage: what is wrong -> the tensors that are lost because of it.
    """

    def __init__(self, catalog: Catalog):
        self._catalog = catalog
        self._report = Report(catalog.path, catalog.kind, sum(map(len, catalog.tensors.values())))
        self._damage: dict[str, list[str]] = {}

    def run(self) -> Report:
        """The report; `CorruptError` if something is wrong."""
        catalog = self._catalog
        if isinstance(catalog, NativeCatalog):
            for file in catalog.manifest.files:
                with self._noting(""):
                    (catalog.json_of if file.endswith(".json") else catalog.header_of)(file)
        chunks = (
            (source, start, min(start + BUFFER_BYTES, source.nbytes))
            for source in self._sources()
            for start in range(0, source.nbytes, BUFFER_BYTES)
        )
        found = run_all(partial(_check, catalog.opened), chunks, THREADS, "fsdp2-verify")
        self._damage |= {problem: [] for each in found for problem in each}
        self._report.left_out = catalog.left_out_texts()
        lines = []
        for problem, names in self._damage.items():
            shown = ", ".join(names[:3]) + (f", ... ({len(names)})" if len(names) > 3 else "")
            lines.append(f"{problem} [{shown}]" if names else problem)
        if lines:
            more = [f"... and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
            raise CorruptError(f"{catalog.path} is damaged:\n  " + "\n  ".join([*lines[:MAX_SHOWN], *more]))
        return self._report

    def _sources(self) -> Iterator[PieceBytes]:
        """All readable parts of all tensors; unreadable ones are noted, each by itself, so that one bad file does not
        hide the next."""
        for label, look in self._lookups():
            with self._noting(label):
                for piece in look():
                    source = PieceBytes(label, piece, bool(piece.sums))
                    self._report.checked_bytes += source.nbytes * source.verify
                    self._report.unchecked_bytes += source.nbytes * (not source.verify)
                    yield source

    def _lookups(self) -> Iterator[tuple[str, Callable[[], Iterable[StoredPiece]]]]:
        """(label, what finds its pieces) of each part of a tensor, also of the extra state."""
        catalog = self._catalog
        native = catalog if isinstance(catalog, NativeCatalog) else None
        for section, infos in catalog.tensors.items():
            for name, info in infos.items():
                label, box = f"{section} '{name}'", whole(info.shape)
                if native is None:
                    yield label, partial(catalog.covering, section, name, box)
                    continue
                for _, part in native.manifest.records[section][name].tiling.owners(box):
                    yield label, partial(native.pieces, section, name, part)
        if native is None:
            return
        for key, shares in native.manifest.extra.items():
            for file in dict.fromkeys(str(share["file"]) for share in shares):
                yield f"extra '{key}'", partial(native.extra_pieces, file, key)

    @contextmanager
    def _noting(self, label: str) -> Iterator[None]:
        """Note an error in the block."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            names = self._damage.setdefault(str(error), [])
            if label and label not in names[-1:]:
                names.append(label)


def _check(files: OpenFiles, chunk: tuple[PieceBytes, int, int]) -> list[str]:
    """What is wrong with some bytes (from first to end) of a piece, read as a load reads them."""
    source, first, end = chunk
    try:
        with files.use(source.piece.path) as reader:
            source.read(reader, first, bytes_of(files.buffers.get(end - first, torch.device("cpu"))))
    except (CheckpointError, OSError) as error:
        if end - first <= BLOCK:
            return [str(error)]
        blocks = ((source, at, min(at + BLOCK, end)) for at in range(first, end, BLOCK))
        return [problem for block in blocks for problem in _check(files, block)]
    return []
