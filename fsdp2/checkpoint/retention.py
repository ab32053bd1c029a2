"""Which checkpoints of a run there are, which is the newest that is sound, which may go. Layer: checkpoint."""

import warnings
from collections.abc import Callable
from contextlib import suppress

from fsdp2.checkpoint.folders import discard, find, old_of, step_of
from fsdp2.checkpoint.formats.native import NativeCatalog
from fsdp2.checkpoint.storage import Folder, storage_of
from fsdp2.errors import ArgumentError, CheckpointError, FSDPError

__all__ = ["checkpoints", "latest", "prune", "superseded"]


def checkpoints(root: Folder) -> list[str]:
    """The complete checkpoints of a run, oldest step first.

    Args:
        root: the folder that was given to `save` together with a step.
    """
    storage, _ = storage_of(root)
    found = []
    for folder in _named_after_steps(root):
        with suppress(CheckpointError):
            find(storage, folder)
            found.append(folder)
    return found


def _named_after_steps(root: Folder) -> list[str]:
    """Folders that are checkpoints of a run by their names, oldest step first; some may not be complete."""
    storage, path = storage_of(root)
    names = {old_of(name) or name for name in storage.names(path)}
    steps = sorted((step, name) for name in names if (step := step_of(name)) is not None)
    return [storage.join(path, name) for _, name in steps]


def latest(root: Folder, valid: Callable[[str], object] | None = None) -> str | None:
    """The newest sound checkpoint of a run, for `load`; None if there is none. No pointer file is trusted: a checkpoint
    counts if its manifest is undamaged and all files that it lists are there with their sizes.

    Args:
        root: the folder that was given to `save` together with a step.
        valid: is called with a folder besides, and raises an error of fsdp2 if it is not good enough (`verify` reads
            all of it); then the one before is looked at.

    Warns:
        UserWarning: the disk cannot read one; then, too, the one before is looked at.

    Raises:
        OSError: there is none that is sound, but one that the disk cannot read. A None would begin the run anew.

    Example::

        newest = fsdp2.checkpoint.latest("runs/a")
        if newest is not None:
            fsdp2.checkpoint.load(newest, model=model, optimizer=optimizer)
    """
    unread: OSError | None = None
    for folder in reversed(_named_after_steps(root)):
        try:
            if not _is_sound(folder):
                continue
        except OSError as error:
            message = f"{folder}: cannot be read ({error}); latest goes back to the checkpoint before it"
            warnings.warn(message, stacklevel=2)
            unread = unread or error
            continue
        try:
            if valid is not None:
                valid(folder)
        except FSDPError:
            continue
        return folder
    if unread is not None:
        raise unread
    return None


def prune(root: Folder, keep: int, every: int | None = None) -> list[str]:
    """Delete old checkpoints of a run; one rank calls this, after the save that made them old.

    Args:
        keep: how many of the newest sound ones stay, at least one (see `latest`).
        every: checkpoints whose step is a multiple of it stay besides.

    Returns:
        the folders that were deleted. Each loses its manifest first, so a half deleted one is no checkpoint.

    Raises:
        ArgumentError: `keep` or `every` is less than one.

    Example::

        if rank == 0:
            fsdp2.checkpoint.prune("runs/a", keep=3, every=10_000)
    """
    gone = superseded(root, keep, every)
    storage, path = storage_of(root)
    names = {storage.split(folder)[1] for folder in gone}
    for other in storage.names(path):
        if other in names or old_of(other) in names:
            discard(storage, storage.join(path, other))
    return gone


def superseded(root: Folder, keep: int, every: int | None = None) -> list[str]:
    """What `prune` would delete."""
    if keep < 1 or (every is not None and every < 1):
        raise ArgumentError(f"prune: keep and every are at least 1, got {keep} and {every}")
    storage, _ = storage_of(root)
    everything = checkpoints(root)
    sound = [folder for folder in reversed(everything) if _is_sound(folder)]
    if len(sound) < keep:
        return []
    old = everything[: everything.index(sound[keep - 1])]  # what is damaged among the newer ones is not ours to judge
    steps = {folder: step_of(storage.split(folder)[1]) for folder in old}
    return [folder for folder, step in steps.items() if every is None or step is None or step % every]


def _is_sound(folder: str) -> bool:
    """Whether its manifest is undamaged and its files are there; `OSError` if the disk does not tell."""
    storage, path = storage_of(folder)
    try:
        NativeCatalog.open(storage, find(storage, path)).close()
    except FSDPError:
        return False
    return True
