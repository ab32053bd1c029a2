"""Check a checkpoint completely: read every byte and list everything that is wrong. Layer: checkpoint.

Damage is looked for where a load would find it, with the same code, so that what passes here can be loaded: the
manifest, the files that it lists, their headers, that all parts of each tensor exist, the checksum of every block.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from fsdp2.checkpoint.formats.dcp import DcpCatalog
from fsdp2.checkpoint.formats.native import NativeCatalog
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.io.pieces import StoredPiece
from fsdp2.checkpoint.io.reading import PieceBytes
from fsdp2.checkpoint.io.workers import run_all
from fsdp2.checkpoint.opening import open_catalog
from fsdp2.checkpoint.run.replacing import READS, id_at
from fsdp2.checkpoint.schema.manifest import MANIFEST
from fsdp2.checkpoint.storage.base import Folder, Storage, storage_of
from fsdp2.checkpoint.tools.describing import stray_files, tensor_nbytes
from fsdp2.checkpoint.tools.scanning import Damage, append_damage, check_lot, lots_of
from fsdp2.checkpoint.tools.streaming import Meter, Progress
from fsdp2.errors import CheckpointError, CorruptError, ReplacedError, UnsupportedError
from fsdp2.placement.box import whole

__all__ = ["Damage", "Report", "find_damage", "verify"]

MAX_SHOWN = 50
THREADS = 4


@dataclass
class Report:
    """The result of `find_damage`.

    Attributes:
        kind: the format.
        damage: everything that is wrong.
        strays: names in the folder that do not belong to the checkpoint. They are never read, and are not damage.
        left_out: what this library does not read -> why. Not damage either.
        num_files, num_tensors: how many were checked.
        checked_bytes: of values that match their checksums.
        unchecked_bytes: of values without checksums (other formats): they can be read, but may be wrong.
    """

    folder: str
    kind: str
    damage: list[Damage] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    num_files: int = 0
    num_tensors: int = 0
    checked_bytes: int = 0
    unchecked_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damage


def verify(folder: Folder, *, progress: Progress | None = None) -> Report:
    """Read a checkpoint completely and raise if it is damaged; `find_damage` returns the damage instead.

    Args:
        folder: of a checkpoint in any format that `load` supports. Formats without checksums are only read.
        progress: is called with the number of bytes done and the total.

    Raises:
        CorruptError: it is damaged; the message lists files, tensors and bytes.
        CheckpointError: there is no checkpoint.

    Example::

        good = fsdp2.checkpoint.latest("runs/a", valid=fsdp2.checkpoint.verify)
    """
    report = find_damage(folder, progress=progress)
    if report.damage:
        lines = [str(damage) for damage in report.damage[:MAX_SHOWN]]
        if len(report.damage) > MAX_SHOWN:
            lines.append(f"... and {len(report.damage) - MAX_SHOWN} more")
        raise CorruptError(f"{report.folder} is damaged:\n  " + "\n  ".join(lines))
    return report


def find_damage(folder: Folder, *, progress: Progress | None = None) -> Report:
    """Read a checkpoint completely, in bounded memory with several threads, and list all damage; see `verify`.

    Raises:
        CheckpointError: there is no checkpoint.
        ReplacedError: it was replaced while it was read, in each of several attempts.
    """
    storage, path = storage_of(folder)
    for _ in range(READS):
        report, save_id = _looked_at(storage, path, progress)
        if report.ok or id_at(storage, path) in (None, save_id):  # else it was replaced meanwhile, not damaged
            return report
    raise ReplacedError(f"{path}: is replaced by one save after another, faster than it can be read")


def _looked_at(storage: Storage, path: str, progress: Progress | None) -> tuple[Report, str | None]:
    """The report, and the id of the save that it describes."""
    report = Report(path, "fsdp2")
    try:
        catalog = open_catalog(storage, path, files_are_there=False)
    except CorruptError as error:
        return Report(path, "damaged", [_damage_of(storage, path, error)]), None
    report.folder, report.kind = catalog.path, catalog.kind
    try:
        _Verification(catalog, report).run(progress)
    finally:
        catalog.close()
    return report, catalog.manifest.id if isinstance(catalog, NativeCatalog) else None


class _Verification:
    """One check of a checkpoint.

    Attributes:
        lost: (file, what is wrong with it) -> the tensors that are lost because of it.
    """

    def __init__(self, catalog: Catalog, report: Report):
        self._catalog = catalog
        self._report = report
        self._native = catalog if isinstance(catalog, NativeCatalog) else None
        self._lost: dict[tuple[str, str], list[str]] = {}

    def run(self, progress: Progress | None) -> None:
        """Fill the report."""
        if self._native is not None:
            self._check_files(self._native)
        sizes = [
            tensor_nbytes(info.dtype, info.shape) for infos in self._catalog.tensors.values() for info in infos.values()
        ]
        self._report.num_tensors = len(sizes)
        meter = Meter(sum(sizes), progress)
        blocks: list[Damage] = []
        check = partial(check_lot, self._catalog.opened, meter)
        for found in run_all(check, lots_of(self._sources()), THREADS, "fsdp2-verify"):
            for damage in found:
                append_damage(blocks, damage)
        meter.finish()
        whole_files = [Damage(file, problem, tuple(names)) for (file, problem), names in self._lost.items()]
        self._report.damage += whole_files + blocks

    def _check_files(self, native: NativeCatalog) -> None:
        """Check what can be checked without reading values."""
        self._report.num_files = len(native.manifest.files)
        self._report.strays = stray_files(native.storage, native.path, native.manifest)
        for file in native.manifest.files:
            with self._noting(""):
                (native.json_of if file.endswith(".json") else native.header_of)(file)

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
        if isinstance(self._catalog, DcpCatalog):  # there, values that are not tensors have their own files
            for name, error in self._catalog.damaged_items():
                damage = _damage_of(self._catalog.storage, self._catalog.path, error)
                self._lose(damage.file, damage.problem, f"'{name}'")
        for section in self._catalog.values:  # which finds what is left out
            with suppress(CheckpointError, UnsupportedError):
                self._catalog.values[section]
        self._report.left_out = self._catalog.left_out_texts()

    def _lookups(self) -> Iterator[tuple[str, Callable[[], Iterable[StoredPiece]]]]:
        """(label, what finds its pieces) of each part of a tensor, also of the extra state."""
        native = self._native
        for section, infos in self._catalog.tensors.items():
            for name, info in infos.items():
                label, box = f"{section} '{name}'", whole(info.shape)
                if native is None:
                    yield label, partial(self._catalog.covering, section, name, box)
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
            damage = _damage_of(self._catalog.storage, self._catalog.path, error)
            self._lose(damage.file, damage.problem, label)

    def _lose(self, file: str, problem: str, label: str) -> None:
        names = self._lost.setdefault((file, problem), [])
        if label and label not in names[-1:]:
            names.append(label)


def _damage_of(storage: Storage, path: str, error: Exception) -> Damage:
    """Damage from an error, whose message begins with the path of the file."""
    text = str(error)
    for name in sorted([*storage.names(path), MANIFEST], key=len, reverse=True):
        if text.startswith(prefix := f"{storage.join(path, name)}: "):
            return Damage(name, text.removeprefix(prefix))
    prefix = storage.join(path, "")
    if text.startswith(prefix) and ": " in text:
        file, problem = text.removeprefix(prefix).split(": ", 1)
        return Damage(file, problem)
    return Damage("", text.removeprefix(f"{path}: "))
