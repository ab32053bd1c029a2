"""Check a checkpoint completely: read every byte and list everything that is wrong. Layer: checkpoint.

Damage is looked for where a load would find it, with the same code, so that what passes here can be loaded: the
manifest, the files that it lists, their headers, that all parts of each tensor exist, the checksum of every block.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from fsdp2.checkpoint.formats.native import NativeCatalog
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.io.memory import bytes_of
from fsdp2.checkpoint.io.pieces import StoredPiece, runs_within
from fsdp2.checkpoint.io.reading import BUFFER_BYTES, OpenFiles, PieceBytes
from fsdp2.checkpoint.io.workers import Meter, Progress, run_all
from fsdp2.checkpoint.opening import open_catalog
from fsdp2.checkpoint.run.folders import TRIES, id_at
from fsdp2.checkpoint.schema.checksum import BLOCK
from fsdp2.checkpoint.schema.dtypes import ITEMSIZES
from fsdp2.checkpoint.storage.base import Folder, Storage, storage_of
from fsdp2.checkpoint.tools.describing import stray_files, tensor_nbytes
from fsdp2.errors import CheckpointError, CorruptError, ReplacedError, UnsupportedError
from fsdp2.placement.box import whole

__all__ = ["Damage", "Report", "find_damage", "verify"]

MAX_SHOWN = 50
THREADS = 4


@dataclass(frozen=True)
class Damage:
    """Something that is wrong.

    Attributes:
        file: its name in the folder.
        problem: what is wrong with it.
        tensors: what is lost because of it ("model 'layers.0.weight'"): the tensor of the damaged bytes, or all tensors
            with a part in the file.
        span: the damaged bytes of the file (first, end), if not all. If a tensor was cut by columns and is stored
            whole, bytes of other parts lie in between.
    """

    file: str
    problem: str
    tensors: tuple[str, ...] = ()
    span: tuple[int, int] | None = None

    def __str__(self) -> str:
        shown = ", ".join(self.tensors[:3]) + (f", ... ({len(self.tensors)})" if len(self.tensors) > 3 else "")
        where = f" bytes {self.span[0]}..{self.span[1]}:" if self.span else ""
        return f"{self.file}:{where} {self.problem}" + (f" [{shown}]" if shown else "")


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
    for _ in range(TRIES):
        report, save_id = _looked_at(storage, path, progress)
        if report.ok or id_at(storage, path) in (None, save_id):  # else it was replaced meanwhile, not damaged
            return report
    raise ReplacedError(f"{path}: is replaced by one save after another, faster than it can be read")


def _looked_at(storage: Storage, path: str, progress: Progress | None) -> tuple[Report, str | None]:
    """The report, and the id of the save that it describes."""
    try:
        catalog = open_catalog(storage, path, files_are_there=False)
    except CorruptError as error:
        return Report(path, "damaged", [_damage_of(storage, path, error)]), None
    try:
        return _Verification(catalog).run(progress), catalog.manifest.id if isinstance(catalog, NativeCatalog) else None
    finally:
        catalog.close()


class _Verification:
    """One check of a checkpoint.

    Attributes:
        lost: (file, what is wrong with it) -> the tensors that are lost because of it.
    """

    def __init__(self, catalog: Catalog):
        self._catalog = catalog
        self._report = Report(catalog.path, catalog.kind)
        self._native = catalog if isinstance(catalog, NativeCatalog) else None
        self._lost: dict[tuple[str, str], list[str]] = {}

    def run(self, progress: Progress | None) -> Report:
        """The report."""
        report, catalog = self._report, self._catalog
        if self._native is not None:
            report.num_files = len(self._native.manifest.files)
            report.strays = stray_files(self._native)
            for file in self._native.manifest.files:
                with self._noting(""):
                    (self._native.json_of if file.endswith(".json") else self._native.header_of)(file)
        infos = [info for own in catalog.tensors.values() for info in own.values()]
        report.num_tensors = len(infos)
        meter = Meter(sum(map(tensor_nbytes, infos)), progress)
        chunks = (
            (source, start, min(start + BUFFER_BYTES, source.nbytes))
            for source in self._sources()
            for start in range(0, source.nbytes, BUFFER_BYTES)
        )
        found = run_all(partial(_check, catalog.opened, meter), chunks, THREADS, "fsdp2-verify")
        meter.finish()
        for section in catalog.tensors:  # which finds what is left out
            with self._noting(f"{section}'s values"), suppress(UnsupportedError):
                catalog.values_of(section)
        report.left_out = catalog.left_out_texts()
        report.damage += [Damage(file, problem, tuple(names)) for (file, problem), names in self._lost.items()]
        report.damage += _joined(damage for each in found for damage in each)
        return report

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
            names = self._lost.setdefault((damage.file, damage.problem), [])
            if label and label not in names[-1:]:
                names.append(label)


def _check(files: OpenFiles, meter: Meter, chunk: tuple[PieceBytes, int, int]) -> list[Damage]:
    """What is wrong with some bytes (from first to end) of a piece, in order. Damage is returned, not raised."""
    source, first, end = chunk
    meter.add(end - first)
    return [*_check_bytes(files, source, first, bytes_of(files.buffers.get(end - first, torch.device("cpu"))))]


def _check_bytes(files: OpenFiles, source: PieceBytes, start: int, data: memoryview) -> Iterator[Damage]:
    """What is wrong with the given blocks, read as a load reads them."""
    try:
        with files.use(source.piece.path) as reader:
            source.read(reader, start, data)
    except (CheckpointError, OSError) as error:
        if data.nbytes > BLOCK:  # each block by itself
            for at in range(0, data.nbytes, BLOCK):
                yield from _check_bytes(files, source, start + at, data[at : at + BLOCK])
            return
        piece = source.piece
        text = str(error).removeprefix(f"{piece.path}: ")
        sums = re.search("checksum .*, expected [0-9a-f]*", text) if isinstance(error, CorruptError) else None
        end = start + data.nbytes
        runs = [*runs_within(piece.box, piece.container, ITEMSIZES[piece.dtype], start, end)]
        span = (piece.offset + runs[0][0], piece.offset + sum(runs[-1]))
        file = piece.path.replace("\\", "/").rsplit("/", 1)[-1]
        yield Damage(file, sums[0] if sums else f"cannot be read ({text})", (source.name,), span)


def _joined(damages: Iterable[Damage]) -> list[Damage]:
    """The same; blocks that follow each other count as one."""
    found: list[Damage] = []
    for damage in damages:
        last = found[-1] if found else damage
        if (
            found
            and last.span
            and damage.span
            and (last.file, last.tensors, last.span[1])
            == (
                damage.file,
                damage.tensors,
                damage.span[0],
            )
        ):
            problem = last.problem if last.problem == damage.problem else "several blocks are not what was written"
            found[-1] = Damage(last.file, problem, last.tensors, (last.span[0], damage.span[1]))
        else:
            found.append(damage)
    return found


def _damage_of(storage: Storage, path: str, error: Exception) -> Damage:
    """Damage from an error, whose message begins with the path of the file."""
    text, prefix = str(error), storage.join(path, "")
    if text.startswith(prefix) and ": " in text:
        file, _, problem = text.removeprefix(prefix).partition(": ")
        return Damage(file, problem)
    return Damage("", text.removeprefix(f"{path}: "))
