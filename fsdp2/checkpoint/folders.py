"""Folders of checkpoints: their names, which are complete, which go. Layer: checkpoint.

In the folder of a run::

    step-00001000/            a checkpoint, if it has a manifest
    .tmp-step-00002000-<id>/  a save that is under way, or dead; never read
    .old-step-00001000-<id>/  was replaced, and is about to go; found again if that was cut off half-way
"""

import re
from collections.abc import Callable
from contextlib import suppress

from fsdp2.checkpoint.manifest import MANIFEST
from fsdp2.checkpoint.storage import Folder, Storage, storage_of
from fsdp2.errors import ArgumentError, CheckpointError, FSDPError

__all__ = ["checkpoints", "find", "free_name", "latest", "prune", "replace_folder", "step_name", "step_of", "sweep"]

STALE_S = 3600.0  # a temporary folder of another run in which nothing has changed for so long is dead
STEP = re.compile(r"step-(\d+)")


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


def is_complete(storage: Storage, path: str) -> bool:
    """Whether a folder is a checkpoint. What that has of damage, reading it will tell."""
    return storage.size(storage.join(path, MANIFEST)) is not None


def find(storage: Storage, path: str) -> str:
    """Where the checkpoint `path` is: there, or beside, if replacing it was cut off between two renames.

    Raises:
        CheckpointError: nowhere; the message says what is there instead.
    """
    if is_complete(storage, path):
        return path
    folder, name = storage.split(path)
    for other in storage.names(folder):
        if other.startswith(f".old-{name}-") and is_complete(storage, storage.join(folder, other)):
            return storage.join(folder, other)
    steps = [other for other in storage.names(path) if step_of(other) is not None]
    if steps:
        raise CheckpointError(
            f"{path}: is the folder of a run, with {', '.join(steps[:3])}{', ...' if len(steps) > 3 else ''}. "
            f"Name one of "
            "them, or take fsdp2.checkpoint.latest(folder)."
        )
    raise CheckpointError(f"{path}: there is no checkpoint (no {MANIFEST})")


def checkpoints(root: Folder) -> list[str]:
    """The complete checkpoints of a run, oldest step first.

    Args:
        root: the folder that was given to `save` together with a step.
    """
    storage, path = storage_of(root)
    names = storage.names(path)
    old = {name.removeprefix(".old-").rsplit("-", 1)[0] for name in names if name.startswith(".old-")}
    found = []
    for name in sorted(old | set(names)):
        step = step_of(name)
        if step is not None:
            with suppress(CheckpointError):
                find(storage, storage.join(path, name))
                found.append((step, name))
    return [storage.join(path, name) for _, name in sorted(found)]


def latest(root: Folder, valid: Callable[[str], object] | None = None) -> str | None:
    """The newest complete checkpoint of a run, for `load`; None if there is none. No pointer file is trusted.

    Args:
        root: the folder that was given to `save` together with a step.
        valid: is called with a folder and raises an error of fsdp2 if it is not good enough (``verify`` reads
            all of it); then the one before is looked at.

    Example::

        newest = fsdp2.checkpoint.latest("runs/a")
        if newest is not None:
            fsdp2.checkpoint.load(newest, model=model, optimizer=optimizer)
    """
    for folder in reversed(checkpoints(root)):
        try:
            if valid is not None:
                valid(folder)
        except FSDPError:
            continue
        return folder
    return None


def prune(root: Folder, keep: int, every: int | None = None) -> list[str]:
    """Delete old checkpoints of a run; one rank calls this, after the save that made them old.

    Args:
        keep: how many of the newest stay, at least one.
        every: checkpoints whose step is a multiple of it stay besides.

    Returns:
        the folders that were deleted. Each loses its manifest first, so a half deleted one is no checkpoint.

    Raises:
        ArgumentError: `keep` or `every` is less than one.

    Example::

        if rank == 0:
            fsdp2.checkpoint.prune("runs/a", keep=3, every=10_000)
    """
    if keep < 1 or (every is not None and every < 1):
        raise ArgumentError(f"prune: keep and every are at least 1, got {keep} and {every}")
    storage, _ = storage_of(root)
    gone = []
    for folder in checkpoints(root)[:-keep]:
        step = step_of(storage.split(folder)[1])
        if every is None or step is None or step % every:
            storage.remove(storage.join(folder, MANIFEST))
            storage.remove(folder)
            gone.append(folder)
    return gone


def free_name(storage: Storage, path: str, overwrite: bool) -> None:
    """See that a checkpoint may be written to `path`.

    Raises:
        CheckpointError: something is there already.
    """
    if is_complete(storage, path):
        if not overwrite:
            raise CheckpointError(f"{path}: is a checkpoint already. Save to another folder, or pass overwrite=True.")
        if not storage.renames:
            raise CheckpointError(f"{path}: is a checkpoint already, and here it cannot be replaced in one step")
    elif storage.renames and storage.names(path):
        raise CheckpointError(
            f"{path}: has files in it and is no checkpoint; save to a folder that is empty or not there"
        )
    elif storage.renames and storage.size(path) is not None:
        raise CheckpointError(f"{path}: is a file; save to a folder that is empty or not there")


def replace_folder(storage: Storage, work: str, path: str, overwrite: bool) -> None:
    """Give the complete folder `work` the name `path`."""
    folder, name = storage.split(path)
    old = storage.join(folder, f".old-{name}-{storage.split(work)[1].rsplit('-', 1)[1]}")
    if overwrite and is_complete(storage, path):
        storage.rename_folder(path, old)
    storage.rename_folder(work, path)
    storage.remove(old)


def sweep(storage: Storage, path: str, own_id: str) -> list[str]:
    """After a commit: delete what dead saves left beside `path`. Those of the same name are dead, since it is taken
    now; others if nothing has happened in them for an hour.

    Returns:
        what was deleted.
    """
    if not storage.renames:
        return []
    folder, own = storage.split(path)
    gone = []
    for name in storage.names(folder):
        if not name.startswith((".tmp-", ".old-")) or name.endswith(own_id):
            continue
        work = storage.join(folder, name)
        target = name.split("-", 1)[1].rsplit("-", 1)[0]
        with suppress(OSError):  # somebody else may be sweeping too; what stays is nobody's checkpoint
            dead = target == own or storage.age(work) > STALE_S
            if dead and (name.startswith(".tmp-") or is_complete(storage, storage.join(folder, target))):
                storage.remove(work)
                gone.append(work)
    return gone
