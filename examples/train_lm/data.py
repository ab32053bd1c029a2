"""Text for the examples: bytes of files, split into training and validation, and batches of them.

Imported by `train_lm.py`, `finetune.py` and modules of theirs. There is no tokenizer and nothing to download: a token
is a byte, and the default text is the source code of the running Python's standard library. All of it is kept in memory
by each rank.
"""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from runtime import UsageError

VALID_SHARE = 20  # one byte in twenty is held out for validation
MIN_FILES_TO_SPLIT = 40  # with fewer, a split by whole files could leave one side empty
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Corpus:
    """The two sides of the split, each one long array of bytes, and what a person needs to know about them."""

    train: NDArray[np.uint8]
    valid: NDArray[np.uint8]
    num_files: int
    split: str
    crc32: int


def load_corpus(paths: Sequence[Path], seq_len: int) -> Corpus:
    """Read `paths` (files, or folders searched for text files), or the standard library's sources if there are none."""
    texts = sorted(_read_given(paths) if paths else _read_standard_library())
    if not any(text for _, text in texts):
        raise UsageError(f"no text found in {', '.join(map(str, paths))}")
    train, valid = bytearray(), bytearray()
    by_file = len(texts) >= MIN_FILES_TO_SPLIT
    for name, text in texts:
        if by_file:
            (valid if _is_held_out(name) else train).extend(text)
        else:
            cut = len(text) - len(text) // VALID_SHARE
            train.extend(text[:cut])
            valid.extend(text[cut:])
    for side, held in (("training", train), ("validation", valid)):
        if len(held) < seq_len + 1:
            raise UsageError(
                f"too little data: the {side} side has {len(held):,} bytes and one sequence needs {seq_len + 1:,}; "
                "give more text with --data or lower --seq-len"
            )
    return Corpus(
        np.frombuffer(train, np.uint8),
        np.frombuffer(valid, np.uint8),
        len(texts),
        "one file in 20 held out" if by_file else "the last 20th of each file held out",
        zlib.crc32(valid, zlib.crc32(train)),
    )


def _is_held_out(name: str) -> bool:
    """The same files on every machine and in every run, whatever else lies beside them."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return digest[0] * 256 + digest[1] < 65536 // VALID_SHARE


def _read_standard_library() -> Iterator[tuple[str, bytes]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not SKIPPED_FOLDERS.intersection(name.parts) and path.is_file():
            yield name.as_posix(), path.read_bytes()


def _read_given(paths: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    for root in paths:
        try:
            if root.is_dir():
                yield from _read_folder(root)
            else:
                yield root.name, root.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read --data {root}: {error.strerror}") from error


def _read_folder(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in root.rglob("*"):
        name = path.relative_to(root)
        hidden = any(part.startswith(".") or part in SKIPPED_FOLDERS for part in name.parts)
        if path.is_file() and not hidden:
            content = path.read_bytes()
            if b"\0" not in content[:8192]:  # a zero byte marks pictures, archives, programs
                yield (Path(root.name) / name).as_posix(), content


@dataclass(frozen=True)
class BatchPlan:
    """Which windows of the text each rank reads in each step.

    A step's batch is a function of (seed, step) alone: one draw fixes all windows of all ranks and microbatches, and
    each takes its rows. So a resumed run continues with exactly the batches that the interrupted one would have read,
    and two worlds with equal `per_rank * world_size * microbatches` read the same ones.
    """

    seq_len: int
    per_rank: int
    microbatches: int
    rank: int
    world_size: int
    seed: int

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.per_rank * self.microbatches * self.world_size

    def train(self, text: NDArray[np.uint8], step: int, device: torch.device) -> Iterator[Batch]:
        """This rank's microbatches of `step`: inputs and targets, each [per_rank, seq_len]."""
        shape = (self.microbatches, self.world_size, self.per_rank)
        draw = np.random.default_rng([self.seed, step])
        starts = draw.integers(len(text) - self.seq_len, size=shape)
        for microbatch in range(self.microbatches):
            yield self._windows(text, starts[microbatch, self.rank], device)

    def valid(self, text: NDArray[np.uint8], batches: int, device: torch.device) -> Iterator[Batch]:
        """This rank's share of windows spread evenly over the whole validation text: the same ones every time."""
        shape = (batches, self.world_size, self.per_rank)
        starts = np.linspace(0, len(text) - self.seq_len - 1, num=int(np.prod(shape)), dtype=np.int64).reshape(shape)
        for batch in range(batches):
            yield self._windows(text, starts[batch, self.rank], device)

    def _windows(self, text: NDArray[np.uint8], starts: NDArray[np.int64], device: torch.device) -> Batch:
        rows = np.stack([text[start : start + self.seq_len + 1] for start in starts])
        window = torch.from_numpy(rows).to(device).long()
        return window[:, :-1], window[:, 1:]
