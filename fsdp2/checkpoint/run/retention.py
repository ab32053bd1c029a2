"""The checkpoints of a run: list them, find the newest sound one, delete old ones. Layer: checkpoint."""

import warnings
from collections.abc import Callable
from contextlib import suppress

from fsdp2.checkpoint.formats.native import id_of
from fsdp2.checkpoint.run.folders import age_of, discard, find, id_at, manifest_at, old_of, put_aside, replaced, step_of
from fsdp2.checkpoint.storage.base import Folder, Storage, storage_of
from fsdp2.errors import ArgumentError, CheckpointError, FSDPError

# Called with a folder; raises an error of fsdp2 to reject it.
Valid = Callable[[str], object]

__all__ = ["checkpoints", "latest", "prune"]


def checkpoints(root: Folder) -> list[str]:
    """The complete checkpoints of a run, oldest step first.

    Args:
        root: the folder that was given to `save` together with a step.
    """
    return [*_ages(root)]


def _ages(root: Folder) -> dict[str, float]:
    """The complete checkpoints of a run, oldest step first -> seconds since each was completed."""
    storage, _ = storage_of(root)
    ages = {}
    for folder in _named_after_steps(root):
        with suppress(CheckpointError):
            ages[folder] = age_of(storage, find(storage, folder))
    return ages


def _named_after_steps(root: Folder) -> list[str]:
    """Folders that are named like checkpoints of a run, oldest step first; some may be incomplete."""
    storage, path = storage_of(root)
    names = {old_of(name) or name for name in storage.names(path)}
    steps = sorted((step, name) for name in names if (step := step_of(name)) is not None)
    return [storage.join(path, name) for _, name in steps]


def latest(root: Folder, valid: Valid | None = None) -> str | None:
    """The newest sound checkpoint of a run, for `load`, or None. A checkpoint is sound if its manifest is undamaged and
    all files that it lists exist with the right sizes. There is no pointer file.

    Args:
        root: the folder that was given to `save` together with a step.
        valid: an additional check, called with the folder. It raises an error of fsdp2 to reject a checkpoint (`verify`
            reads everything); then the next older one is considered.

    Warns:
        UserWarning: the disk cannot read a checkpoint; the next older one is considered.

    Raises:
        OSError: no sound checkpoint was found, but one that the disk cannot read. (Returning None would restart the
            run.)

    Example::

        newest = fsdp2.checkpoint.latest("runs/a")
        if newest is not None:
            fsdp2.checkpoint.load(newest, model=model, optimizer=optimizer)
    """
    rejected, seen = set(), None
    while True:
        unread: list[OSError] = []
        before = {folder: id_at(*storage_of(folder)) for folder in _named_after_steps(root)}
        for save in reversed(before.items()):
            try:
                if save not in rejected and _is_sound(save[0]):
                    if _is_sound(save[0], valid):
                        return save[0]
                    rejected.add(save)  # `valid` is called only once per save: it may take an hour
            except OSError as error:
                message = f"{save[0]}: cannot be read ({error}); the checkpoint before it is tried"
                warnings.warn(message, stacklevel=2)
                unread.append(error)
        # A checkpoint that was being replaced may have been missed, so two passes must see the same.
        if before == seen == {folder: id_at(*storage_of(folder)) for folder in _named_after_steps(root)}:
            break
        seen = before
    if unread:
        raise unread[0]
    return None


def prune(
    root: Folder,
    keep: int,
    every: int | None = None,
    valid: Valid | None = None,
) -> list[str]:
    """Delete old checkpoints of a run. Call this on one rank, after a save.

    It keeps the `keep` newest sound checkpoints by step, and the `keep` newest by time of saving. These are the same
    unless the run was rolled back; then the newest from before and after the rollback stay until the steps have caught
    up. So neither the last saved checkpoint nor the only sound one is ever deleted. Saves in progress are kept too.

    Args:
        keep: how many of the newest sound checkpoints to keep, at least one (see `latest`).
        every: also keep checkpoints whose step is a multiple of this.
        valid: as for `latest`: with `verify`, only checkpoints that were read completely count as sound. Without it
            damaged bytes within a file are not detected.

    Returns:
        The folders that were deleted. Each is renamed first, so a folder is never left partly deleted under its name.

    Raises:
        ArgumentError: `keep` or `every` is less than one.

    Example::

        if rank == 0:  # the last three, and every ten-thousandth step
            fsdp2.checkpoint.prune("runs/a", keep=3, every=10_000, valid=fsdp2.checkpoint.verify)
    """
    storage, _ = storage_of(root)
    # Read the ids first: a newer checkpoint may take one of these names afterwards, and must not be deleted.
    ids = {folder: id_at(storage, folder) for folder in _named_after_steps(root)}
    old = _old(root, keep, every, valid)
    return [folder for folder in old if folder in ids and _pruned(storage, folder, ids[folder])]


def _old(root: Folder, keep: int, every: int | None, valid: Valid | None) -> list[str]:
    """See `prune`."""
    if keep < 1 or (every is not None and every < 1):
        raise ArgumentError(f"prune: keep and every are at least 1, got {keep} and {every}")
    storage, _ = storage_of(root)
    ages = _ages(root)
    staying: dict[str, bool] = {}  # folder -> whether it is sound
    for order in ([*ages], sorted(ages, key=lambda folder: -ages[folder])):
        sound = 0
        for folder in reversed(order):  # damaged ones among the newer ones are kept
            if sound == keep:
                break
            if folder not in staying:
                staying[folder] = _is_sound(folder, valid)
            sound += staying[folder]
    steps = {folder: step_of(storage.split(folder)[1]) for folder in ages if folder not in staying}
    return [folder for folder, step in steps.items() if every is None or step is None or step % every]


def _pruned(storage: Storage, path: str, save_id: str | None) -> bool:
    """Delete the checkpoint `path`, wherever it is, if it still has this save's id."""
    if not storage.renames:
        discard(storage, path)
        return True
    older = replaced(storage, path)
    # `find` still finds it under this name. So nothing is lost if it is the wrong one, or if this process dies.
    aside = put_aside(storage, path, "old")
    if aside is not None and id_of(storage, aside) != save_id:
        with suppress(OSError):  # raised if a newer checkpoint has taken the name
            storage.rename_folder(aside, path)
        return False
    for old in older:
        if aside is not None or id_of(storage, old) == save_id:
            discard(storage, old)
    if aside is not None:
        discard(storage, aside)
    return True


def _is_sound(folder: str, valid: Valid | None = None) -> bool:
    """Whether its manifest is undamaged, its files exist, and `valid` accepts it; `OSError` if the disk cannot read."""
    try:
        manifest_at(*storage_of(folder))
        if valid is not None:
            valid(folder)
    except FSDPError:
        return False
    return True
