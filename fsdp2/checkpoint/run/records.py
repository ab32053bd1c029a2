"""The ranks' records for the rank that commits: JSON files of any size in the folder of the save. Layer: checkpoint.

They are not synced, since only a running save reads them, and are deleted before the folder becomes a checkpoint.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from fsdp2.checkpoint.formats.native import read_small
from fsdp2.checkpoint.io.reading import THREADS
from fsdp2.checkpoint.io.workers import run_all
from fsdp2.checkpoint.ranks.agreement import Agreement
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.errors import CheckpointError

__all__ = ["Records", "digest_of", "files_id", "is_mark"]

# Marks a folder that is not a checkpoint yet: a save has begun to write files with this id there.
MARK = re.compile(r"record-files-([0-9a-f]{12})\.json")


def files_id(storage: Storage, folder: str, nonce: str, agreement: Agreement) -> str:
    """The id of this save's files. Without renames, it is the id of a save that died there, if any, so that files with
    the same content, and so the same name, are not written again."""
    if storage.renames:
        return nonce
    ids = [found[1] for name in storage.names(folder) if (found := MARK.fullmatch(name))]
    chosen = agreement.claim("files", ids[0] if ids else nonce)
    if agreement.is_first("mark"):
        storage.write_note(storage.join(folder, f"record-files-{chosen}.json"), b"{}")
    return chosen


def is_mark(name: str) -> bool:
    """Whether a file marks that a save has begun; see `files_id`."""
    return MARK.fullmatch(name) is not None


def digest_of(content: object) -> str:
    """A digest of the JSON of `content`."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class Records:
    """The records of one save.

    Args:
        folder: where they are.

    Attributes:
        written: names of the files that this rank has written.
    """

    def __init__(self, storage: Storage, folder: str, save_id: str, agreement: Agreement):
        self._storage, self._folder, self._id, self._agreement = storage, folder, save_id, agreement
        self.written: list[str] = []

    def put(self, rank: int, record: Any) -> None:
        """Write the record of a rank."""
        self._write(str(rank), json.dumps(record, separators=(",", ":")))

    def share(self, content: Any) -> str:
        """Write content that many ranks share; only the first of them does. Returns its digest, for the record."""
        digest = digest_of(content)
        if self._agreement.is_first(f"share/{digest}"):
            self._write(digest, json.dumps(content, separators=(",", ":")))
        return digest

    def get(self, names: Iterable[object]) -> list[Any]:
        """The records of ranks, or shared content by digest.

        Raises:
            CheckpointError: a file is not here.
        """
        return run_all(self._read, [str(name) for name in names], THREADS, "fsdp2-records")

    def remove(self, ranks: int, digests: Iterable[str]) -> None:
        """Delete all. Never raises, because the rest counts as stray files."""
        for name in (*map(str, range(ranks)), *digests):
            with suppress(OSError):
                self._storage.remove(self._path(name))
        self._agreement.forget(*(f"share/{digest}" for digest in digests))

    def _path(self, name: str) -> str:
        return self._storage.join(self._folder, f"record-{name}-{self._id}.json")

    def _write(self, name: str, text: str) -> None:
        path = self._path(name)
        self.written.append(self._storage.split(path)[1])
        self._storage.write_note(path, text.encode())

    def _read(self, name: str) -> Any:
        try:
            return json.loads(read_small(self._storage, self._path(name)))
        except CheckpointError as error:
            raise CheckpointError(
                f"{self._path(name)}: was written by another rank, and is not here. All ranks must save to one shared "
                "folder."
            ) from error
