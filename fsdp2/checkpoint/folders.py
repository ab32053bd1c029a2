"""Folders of checkpoints: their names, which are complete, how one takes another's place. Layer: checkpoint.

In the folder of a run::

    step-00001000/            a checkpoint, if it has a manifest
    .tmp-step-00002000-<id>/  a save that is under way, or dead; never read
    .old-step-00001000-<id>/  was replaced, and is about to go; found again if that was cut off half-way
"""

import re
from collections.abc import Collection
from contextlib import suppress
from math import inf

from fsdp2.checkpoint.manifest import MANIFEST
from fsdp2.checkpoint.storage import Storage
from fsdp2.errors import ArgumentError, CheckpointError

__all__ = [
    "discard",
    "find",
    "free_name",
    "is_complete",
    "left_overs",
    "old_of",
    "replace_folder",
    "step_name",
    "step_of",
    "sweep",
    "work_folder",
]

STALE_S = 3600.0  # a temporary folder of another run in which nothing has changed for so long is dead
STEP = re.compile(r"step-(\d+)")
# Files of a save; a user may put others beside them.
OURS = re.compile(
    r"((model|optimizer|extra)-rank-\d+-of-\d+(-[0-9a-f]{12})?\.safetensors|sums-rank-\d+-of-\d+\.json)(\.part)?"
)
LEFT_OVER = re.compile(r"\.(tmp|old)-(.+)-[0-9a-f]{12}")


def step_name(step: int) -> str:
    """The folder of a step.

    Raises:
        ArgumentError: it is negative.
    """
    if step < 0:
        raise ArgumentError(f"step: expected the number of steps done, got {step}")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a folder's name says; None if it says none."""
    match = STEP.fullmatch(name)
    return int(match[1]) if match else None


def work_folder(storage: Storage, path: str, nonce: str) -> str:
    """Where a save to `path` writes before it counts."""
    folder, name = storage.split(path)
    return storage.join(folder, f".tmp-{name}-{nonce}") if storage.renames else path


def old_of(name: str) -> str | None:
    """The checkpoint that was in a folder of this name before it was replaced; None for all other names."""
    match = LEFT_OVER.fullmatch(name)
    return match[2] if match and match[1] == "old" else None


def is_complete(storage: Storage, path: str) -> bool:
    """Whether a folder is a checkpoint. What that has of damage, reading it will tell."""
    return storage.size(storage.join(path, MANIFEST)) is not None


def find(storage: Storage, path: str) -> str:
    """Where the checkpoint `path` is: there, or beside, if replacing it was cut off between two renames.

    Raises:
        CheckpointError: nowhere; the message says what is there instead.
    """
    found = _place(storage, path)
    if found is not None:
        return found
    steps = [other for other in storage.names(path) if step_of(other) is not None]
    if steps:
        raise CheckpointError(
            f"{path}: is the folder of a run, with {', '.join(steps[:3])}{', ...' if len(steps) > 3 else ''}. Name "
            "one of them, or take fsdp2.checkpoint.latest(folder)."
        )
    raise CheckpointError(f"{path}: there is no checkpoint (no {MANIFEST})")


def _place(storage: Storage, path: str) -> str | None:
    """Where the checkpoint `path` is, see `find`; None if it is nowhere."""
    if is_complete(storage, path):
        return path
    return min(_replaced(storage, path), key=lambda old: _age(storage, old), default=None)


def _replaced(storage: Storage, path: str) -> list[str]:
    """What was at `path`, was replaced, and is there still. Several, if saves were cut off again and again."""
    folder, name = storage.split(path)
    names = storage.names(folder) if storage.renames else ()
    found = (storage.join(folder, other) for other in names if old_of(other) == name)
    return [old for old in found if storage.kind(old) == "folder" and is_complete(storage, old)]


def _age(storage: Storage, path: str) -> float:
    """Seconds since a checkpoint was completed: what a user puts beside its files later does not make it newer."""
    with suppress(OSError):  # somebody else may be cleaning up
        return storage.age(storage.join(path, MANIFEST))
    return inf


def discard(storage: Storage, path: str) -> None:
    """Delete a checkpoint. Its manifest goes first, so a half deleted one is none. Of a link, only the link."""
    if storage.kind(path) != "symbolic link":
        storage.remove(storage.join(path, MANIFEST))
    storage.remove(path)


def free_name(storage: Storage, path: str, overwrite: bool) -> None:
    """See that a checkpoint may be written to `path`.

    Raises:
        CheckpointError: something is there already.
    """
    kind = storage.kind(path)
    if kind not in (None, "folder"):
        raise CheckpointError(f"{path}: is a {kind}; save to a folder that is empty or not there")
    found = _place(storage, path)
    if found is not None and not overwrite:
        where = "" if found == path else f" (it lies in {found}, since a save that was to replace it was cut off)"
        raise CheckpointError(
            f"{path}: is a checkpoint already{where}. Save to another folder, or pass overwrite=True."
        )
    if found is not None and not storage.renames:
        raise CheckpointError(f"{path}: is a checkpoint already, and here it cannot be replaced in one step")
    if found != path and storage.renames and storage.names(path):
        raise CheckpointError(
            f"{path}: has files in it and is no checkpoint; save to a folder that is empty or not there"
        )


def replace_folder(storage: Storage, work: str, path: str, overwrite: bool) -> None:
    """Give the complete folder `work` the name `path`."""
    folder, name = storage.split(path)
    old = storage.join(folder, f".old-{name}-{work.rsplit('-', 1)[1]}")
    if overwrite and is_complete(storage, path):
        # While `path` is there, and counts: between the two renames below, `find` must not meet an older one. Only
        # their manifests, which is quick; `sweep` deletes the rest.
        for stale in _replaced(storage, path):
            with suppress(OSError):
                storage.remove(storage.join(stale, MANIFEST))
        storage.rename_folder(path, old)
    storage.rename_folder(work, path)


def left_overs(storage: Storage, folder: str, taken: str | None = None, older_than_s: float = STALE_S) -> list[str]:
    """Folders of dead saves in the folder of a run: those of the name `taken`, which a save has just been given, and
    those in which nothing has changed for a while. What was being replaced, and is nowhere else, is none of them.

    Only names that saves make are looked at.
    """
    found = []
    for name in storage.names(folder) if storage.renames else ():
        match = LEFT_OVER.fullmatch(name)
        if match is None:
            continue
        work = storage.join(folder, name)
        with suppress(OSError):  # somebody else may be cleaning up too
            dead = match[2] == taken or storage.age(work) > older_than_s
            if dead and (match[1] == "tmp" or is_complete(storage, storage.join(folder, match[2]))):
                found.append(work)
    return found


def sweep(storage: Storage, path: str, files: Collection[str]) -> None:
    """After a commit to `path`: delete what dead saves left beside it (without renames: in it). Never raises: what
    stays is nobody's checkpoint.

    Args:
        files: names of the files of the checkpoint; none if it could not be made.
    """
    folder, name = storage.split(path)
    with suppress(OSError):
        if storage.renames:
            dead = left_overs(storage, folder, taken=name)
        elif not files and is_complete(storage, path):
            dead = []  # its manifest was written, and only the answer to that was lost: then its files must stay
        else:
            names = [name for name in storage.names(path) if OURS.fullmatch(name) and name not in files]
            dead = [storage.join(path, name) for name in names]
        for work in dead:
            with suppress(OSError):
                discard(storage, work)
