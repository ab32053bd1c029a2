"""Read the bytes of stored pieces and compare them with their checksums; return a list of what is wrong. Layer:
checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fsdp2.checkpoint.io.pieces import runs_within
from fsdp2.checkpoint.io.reading import OpenFiles, PieceBytes
from fsdp2.checkpoint.schema.checksum import BLOCK
from fsdp2.checkpoint.schema.dtypes import ITEMSIZES
from fsdp2.checkpoint.tools.streaming import CHUNK_BYTES, Meter
from fsdp2.errors import CheckpointError

__all__ = ["Damage", "Lot", "append_damage", "check_lot", "lots_of"]

LOT_BYTES = 4 * CHUNK_BYTES  # checked by one task


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


# (piece, first byte, end) of parts of pieces.
Lot = list[tuple[PieceBytes, int, int]]


def lots_of(sources: Iterator[PieceBytes]) -> Iterator[Lot]:
    """The bytes of all pieces, in lots of about `LOT_BYTES`; large pieces are split."""
    lot: Lot = []
    filled = 0
    for source in sources:
        for first in range(0, source.nbytes, LOT_BYTES):
            last = min(first + LOT_BYTES, source.nbytes)
            lot.append((source, first, last))
            filled += last - first
            if filled >= LOT_BYTES:
                yield lot
                lot, filled = [], 0
    if lot:
        yield lot


def check_lot(files: OpenFiles, meter: Meter, lot: Lot) -> list[Damage]:
    """What is wrong with a lot, in order. Damage is returned, not raised."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(last - first for _, first, last in lot))))
    damage: list[Damage] = []
    for source, first, last in lot:
        for start in range(first, last, CHUNK_BYTES):
            damage += _check_bytes(files, source, start, buffer[: min(CHUNK_BYTES, last - start)])
        meter.add(last - first)
    return damage


def _check_bytes(files: OpenFiles, source: PieceBytes, start: int, data: memoryview) -> Iterator[Damage]:
    """What is wrong with the given blocks."""
    try:
        with files.use(source.piece.path) as reader:
            source.fetch(reader, start, data)
    except (CheckpointError, OSError) as error:
        if data.nbytes > BLOCK:  # read each block separately: a bad sector only affects its own block
            for at in range(0, data.nbytes, BLOCK):
                yield from _check_bytes(files, source, start + at, data[at : at + BLOCK])
        else:
            text = str(error).removeprefix(f"{source.piece.path}: ")
            yield _damage(source, start, start + data.nbytes, f"cannot be read ({text})")
        return
    if source.verify:
        for first, last, found, expected in source.bad_blocks(start, data):
            yield _damage(source, first, last, f"checksum {found}, expected {expected}")


def _damage(source: PieceBytes, first: int, last: int, problem: str) -> Damage:
    piece = source.piece
    runs = [*runs_within(piece.box, piece.container, ITEMSIZES[piece.dtype], first, last)]
    span = (piece.offset + runs[0][0], piece.offset + sum(runs[-1]))
    file = piece.path.replace("\\", "/").rsplit("/", 1)[-1]
    return Damage(file, problem, (source.name,), span)


def append_damage(found: list[Damage], damage: Damage) -> None:
    """Add damage; blocks that follow each other count as one."""
    last = found[-1] if found else None
    same = last is not None and (last.file, last.tensors) == (damage.file, damage.tensors)
    if not same or last is None or last.span is None or damage.span is None or last.span[1] != damage.span[0]:
        found.append(damage)
        return
    problem = last.problem if last.problem == damage.problem else "several blocks are not what was written"
    found[-1] = Damage(last.file, problem, last.tensors, (last.span[0], damage.span[1]))
