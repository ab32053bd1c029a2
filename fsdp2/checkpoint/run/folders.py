"""Checkpoint folders: their names, which of them are complete, and how one replaces another. Layer: checkpoint.

In the folder of a run::

    step-00001000/            a checkpoint, if it has a manifest
    .tmp-step-00002000-<id>/  a save in progress, a dead save, or a folder being deleted; never read
    .old-step-00001000-<id>/  a replaced checkpoint, to be deleted; `find` still finds it if the save was interrupted

Any number of processes may change this at the same time, and each may die at any moment. These rules keep checkpoints
safe:

* A folder of the last two kinds has a unique name, chosen by its process.
* Nothing is deleted under a name that others use. It is first renamed to a private name; the rename is atomic and
  succeeds for only one process.
* A save that commits removes the ``.tmp-`` folders of all other saves to its name. So of two concurrent saves the
  second fails, even if it was suspended for hours, because it has no folder to rename.
* A replaced checkpoint is deleted only after this process has seen first it, and then its successor under the common
  name with all its files: this order proves that it is older than the successor.
"""

import re
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from errno import EEXIST, ENOTDIR, ENOTEMPTY
from math import inf

from fsdp2.checkpoint.formats.native import check_sizes, id_of, read_manifest
from fsdp2.checkpoint.run.records import is_mark
from fsdp2.checkpoint.schema.manifest import MANIFEST, Manifest
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.errors import ArgumentError, CheckpointError, ReplacedError

__all__ = [
    "TRIES",
    "age_of",
    "delete",
    "discard",
    "find",
    "free_name",
    "id_at",
    "is_complete",
    "is_whole",
    "manifest_at",
    "old_of",
    "own_folder",
    "put_aside",
    "replace_folder",
    "replaced",
    "step_name",
    "step_of",
    "sweep",
    "work_folder",
]

STALE_S = 3600.0  # a temporary folder of another run that has not changed for this long is dead
STEP = re.compile(r"step-(\d+)")
# Files of a save; users may add others to the folder.
OURS = re.compile(r"(model|optimizer|extra)-rank-\d+-of-\d+(-[0-9a-f]{12})?\.safetensors(\.part)?|record-.*\.json")
# The same, but a user may have created a file with such a name.
SHARED = re.compile(
    rf"(model|optimizer)(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?|{re.escape(MANIFEST)}\.part"
)
LEFT_OVER = re.compile(r"\.(tmp|old)-(.+)-[0-9a-f]{12}", re.DOTALL)
# How often to retry what another process disturbs by a rename. Without retries, readers may find nothing while a writer
# is active (`test_readers_beside_a_writer`), and of two writers none may commit
# (`test_two_jobs_that_overwrite_one_name`).
TRIES = 20


def step_name(step: int) -> str:
    """The folder of a step.

    Raises:
        ArgumentError: it is negative.
    """
    if step < 0:
        raise ArgumentError(f"step: expected the number of steps done, got {step}")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a folder's name, or None."""
    match = STEP.fullmatch(name)
    return int(match[1]) if match else None


def work_folder(storage: Storage, path: str, nonce: str) -> str:
    """Where a save to `path` writes before it is committed."""
    folder, name = storage.split(path)
    return storage.join(folder, f".tmp-{name}-{nonce}") if storage.renames else path


def old_of(name: str) -> str | None:
    """The original name of a replaced checkpoint's folder; None for all other names."""
    return _owner(name) if name.startswith(".old-") else None


def is_complete(storage: Storage, path: str) -> bool:
    """Whether a folder is a checkpoint. Does not check for damage."""
    return storage.kind(storage.join(path, MANIFEST)) == "file"


def is_whole(storage: Storage, path: str) -> bool:
    """Whether exactly this folder is a checkpoint whose manifest is valid and whose files have the right sizes."""
    with suppress(CheckpointError, OSError):
        check_sizes(storage, path, read_manifest(storage, path))
        return True
    return False


def find(storage: Storage, path: str) -> str:
    """Where the checkpoint `path` is: at `path`, or next to it while it is being replaced, or if the replacement was
    interrupted.

    Raises:
        CheckpointError: it is in neither place; the message says what is at `path` instead.
    """
    folder, name = storage.split(path)
    for _ in range(TRIES):
        if (found := _place(storage, path)) is not None:
            return found
        # If any folder belongs to this name, it may have moved from one place to the other between the two checks.
        if not storage.renames or not any(name in (other, _owner(other)) for other in storage.names(folder)):
            break
    steps = [other for other in storage.names(path) if step_of(other) is not None]
    if steps:
        raise CheckpointError(
            f"{path}: is the folder of a run, with {', '.join(steps[:3])}{', ...' if len(steps) > 3 else ''}. Name "
            "one of them, or take fsdp2.checkpoint.latest(folder)."
        )
    raise CheckpointError(f"{path}: there is no checkpoint (no {MANIFEST})")


def _place(storage: Storage, path: str) -> str | None:
    """Where the checkpoint `path` is, see `find`; None if neither place had it when it was checked."""
    if is_complete(storage, path):
        return path
    return min(replaced(storage, path), key=lambda old: age_of(storage, old), default=None)


def id_at(storage: Storage, path: str) -> str | None:
    """The id of the save of the checkpoint `path`, wherever it is; None if it does not exist or cannot be read."""
    with suppress(CheckpointError, OSError):
        return id_of(storage, find(storage, path))
    return None


def manifest_at(storage: Storage, path: str, checks_files: bool = True) -> tuple[str, Manifest]:
    """Where the checkpoint `path` is, see `find`, and its manifest.

    Args:
        checks_files: check the sizes of its files.

    Raises:
        CheckpointError: it does not exist.
        CorruptError: it is damaged.
    """
    for _ in range(TRIES):
        found, seen = find(storage, path), None
        try:
            manifest = read_manifest(storage, found)
            seen = manifest.id
            if checks_files:
                check_sizes(storage, found, manifest)
            return found, manifest
        except (CheckpointError, OSError):
            if _place(storage, path) == found and id_of(storage, found) == seen:
                raise  # it was not set aside or replaced meanwhile
    raise ReplacedError(f"{path}: is replaced by save after save, faster than it can be opened")


def _owner(name: str) -> str | None:
    """The name of the checkpoint to which a folder next to it belongs."""
    match = LEFT_OVER.fullmatch(name)
    return match[2] if match else None


def replaced(storage: Storage, path: str) -> list[str]:
    """Replaced checkpoints of `path` that still exist; more than one if saves were interrupted repeatedly."""
    folder, name = storage.split(path)
    names = storage.names(folder) if storage.renames else ()
    found = (storage.join(folder, other) for other in names if old_of(other) == name)
    return [old for old in found if storage.kind(old) == "folder" and is_complete(storage, old)]


def age_of(storage: Storage, path: str) -> float:
    """Seconds since a checkpoint was completed. Files that a user adds later do not make it newer."""
    with suppress(OSError):  # another process may be deleting it
        return storage.age(storage.join(path, MANIFEST))
    return inf


def put_aside(storage: Storage, path: str, kind: str = "tmp") -> str | None:
    """Rename what is at `path` to a private name.

    Args:
        kind: "tmp" for deletion (a later save sweeps it if this one is interrupted; a symbolic link is renamed
            itself), "old" for a checkpoint that `find` can still find.

    Returns:
        The new path; None if nothing was there.
    """
    folder, name = storage.split(path)
    aside = storage.join(folder, f".{kind}-{_owner(name) or name}-{uuid.uuid4().hex[:12]}")
    try:
        storage.rename_folder(path, aside, durably=kind == "old")
    except FileNotFoundError:
        return None
    return aside


def discard(storage: Storage, path: str) -> None:
    """Delete a checkpoint, or the rest of one. If it cannot be renamed first, its manifest is deleted first, so that a
    partly deleted folder is not a checkpoint."""
    if not storage.renames:
        for name in (*filter(is_mark, storage.names(path)), MANIFEST):  # so that no save reuses these files
            storage.remove(storage.join(path, name))
        storage.remove(path)
    elif (aside := put_aside(storage, path)) is not None:
        storage.remove(aside)


def free_name(storage: Storage, path: str, overwrite: bool) -> None:
    """Check that a checkpoint may be written to `path`.

    Raises:
        CheckpointError: something exists there.
    """
    kind = storage.kind(path)
    if kind not in (None, "folder"):
        raise CheckpointError(f"{path}: is a {kind}; save to an empty or a new folder")
    found = _place(storage, path)
    if found is not None and not overwrite:
        where = "" if found == path else f" (it is in {found}, because a save that was replacing it was interrupted)"
        raise CheckpointError(
            f"{path}: is a checkpoint already{where}. Save to another folder, or pass overwrite=True."
        )
    if found is not None and not storage.renames:
        raise CheckpointError(f"{path}: is a checkpoint already, and this storage cannot replace it atomically")
    if storage.renames:
        _check_contents(storage, path)


def _check_contents(storage: Storage, path: str) -> None:
    """Check that a folder to be replaced has no files of the user, because all of it will be deleted."""
    names = storage.names(path)
    if names and MANIFEST not in names:
        raise CheckpointError(f"{path}: has files in it and is not a checkpoint; save to an empty or a new folder")
    others = [name for name in names if not (name == MANIFEST or OURS.fullmatch(name) or SHARED.fullmatch(name))]
    if others:
        some = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise CheckpointError(
            f"{path}: has other files than those of the checkpoint, {some}, which overwrite=True would delete too. "
            "Move them, or save to another folder."
        )


def _check_work(storage: Storage, work: str, path: str) -> None:
    """Check that a save still has its folder.

    Raises:
        CheckpointError: another save to `path` has taken it away.
    """
    if storage.renames and storage.kind(work) is None:
        raise CheckpointError(
            f"{path}: another save to this name has completed in the meantime, so this one was abandoned. Two jobs "
            "must not save to one name: stop one, or save to another folder."
        )


@contextmanager
def own_folder(storage: Storage, work: str, path: str) -> Iterator[None]:
    """In this context, an error about missing files is explained if the whole folder is gone; see `_check_work`."""
    try:
        yield
    except (CheckpointError, FileNotFoundError):
        _check_work(storage, work, path)
        raise


def replace_folder(storage: Storage, work: str, path: str, overwrite: bool) -> None:
    """Rename the complete folder `work` to `path`.

    Raises:
        CheckpointError: something exists there that must not be replaced, or another save has replaced it.
    """
    for _ in range(TRIES):
        _check_work(storage, work, path)
        aside = _make_way(storage, path) if overwrite else None
        try:
            storage.rename_folder(work, path)
        except BaseException as error:
            if aside is not None:
                with suppress(OSError):  # raised if another save has taken the name
                    storage.rename_folder(aside, path)
            if not isinstance(error, OSError):
                raise
            if error.errno not in (EEXIST, ENOTEMPTY, ENOTDIR):
                raise
            free_name(storage, path, overwrite)  # raises, unless another save has just taken the name
        else:
            return
    raise CheckpointError(f"{path}: other saves keep taking this name; it is complete in {work}")


def _make_way(storage: Storage, path: str) -> str | None:
    """Set aside the checkpoint at `path`, where `find` finds it until its successor has the name.

    `find` would also find older ones that were set aside and never deleted, so these are removed first, while this one
    is in place. A checkpoint that another save is just setting aside is not among them, because they were listed before
    `path` was checked.

    Returns:
        Where it is now; None if there was no checkpoint.
    """
    stale = replaced(storage, path)
    if is_complete(storage, path):
        _check_contents(storage, path)
        for old in stale if stale and is_whole(storage, path) else ():
            with suppress(OSError):
                put_aside(storage, old)
        return put_aside(storage, path, "old")
    return None


def sweep(storage: Storage, path: str, files: Collection[str]) -> list[str]:
    """After a commit, put aside what other saves left: everything for the name `path`, and only old folders for other
    names. Never raises, because leftovers do no harm.

    Call this before the save is finished. The returned paths can be passed to `delete` later, after other ranks have
    continued.

    Args:
        files: the names of the checkpoint's files.
    """
    folder, name = storage.split(path)
    gone: list[str] = []
    with suppress(OSError):
        if not storage.renames:  # files of dead saves, in a folder to which saves write directly
            return [
                storage.join(path, each) for each in storage.names(path) if OURS.fullmatch(each) and each not in files
            ]
        names = storage.names(folder)
        old = {other for other in names if old_of(other) == name}
        superseded = old if old and is_whole(storage, path) else set()  # in this order: see above, last rule
        for other in names:
            with suppress(OSError):
                left = other in superseded or (_owner(other) == name and other not in old)
                if left or (other not in old and _is_stale(storage, folder, other)):
                    gone += filter(None, [put_aside(storage, storage.join(folder, other))])
    return gone


def _is_stale(storage: Storage, folder: str, name: str) -> bool:
    """Whether this was left by a dead process in the folder of a run and has not changed for a while. False for a
    replaced checkpoint that exists nowhere else."""
    match = LEFT_OVER.fullmatch(name)
    if match is None or storage.age(storage.join(folder, name)) <= STALE_S:
        return False
    return match[1] == "tmp" or is_whole(storage, storage.join(folder, match[2]))


def delete(storage: Storage, gone: Collection[str]) -> None:
    """Delete what was put aside. Never raises, because a later save sweeps the rest."""
    for path in gone:
        with suppress(OSError):
            storage.remove(path)
