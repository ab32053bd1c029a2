"""Which checkpoints of a run there are, which is the newest that is sound, which may go. Layer: checkpoint."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from fsdp2.checkpoint.folders import age_of, discard, find, old_of, remains, replaced, set_aside, step_of
from fsdp2.checkpoint.formats.native import read_manifest
from fsdp2.checkpoint.lease import is_leased
from fsdp2.checkpoint.replacing import id_at, open_found
from fsdp2.checkpoint.storage import Folder, Storage, storage_of
from fsdp2.errors import ArgumentError, CheckpointError, FSDPError

__all__ = ["checkpoints", "latest", "prune", "superseded"]

JITTER = 0.01  # of a span of time: saves that are meant to be an hour apart are so by a few seconds


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
        OSError: there is none that is sound, but one that the disk cannot read. A None would begin the run again.

    Example::

        newest = fsdp2.checkpoint.latest("runs/a")
        if newest is not None:
            fsdp2.checkpoint.load(newest, model=model, optimizer=optimizer)
    """
    folders = _named_after_steps(root)
    while True:
        found, unread = _newest(folders, valid)
        if found is not None:
            return found
        # If others are there by now, a save and `prune` were faster than this: not "there is none".
        before, folders = folders, _named_after_steps(root)
        if set(folders) <= set(before):
            break
    if unread is not None:
        raise unread
    return None


def _newest(folders: Sequence[str], valid: Callable[[str], object] | None) -> tuple[str | None, OSError | None]:
    """The last that is sound and valid, and the first error of the disk."""
    unread: OSError | None = None
    for folder in reversed(folders):
        try:
            if not _is_sound(folder):
                continue
        except OSError as error:
            message = f"{folder}: cannot be read ({error}); latest goes back to the checkpoint before it"
            warnings.warn(message, stacklevel=3)
            unread = unread or error
            continue
        if _is_valid(folder, valid):
            return folder, unread
    return None, unread


def prune(
    root: Folder,
    keep: int,
    every: int | None = None,
    valid: Callable[[str], object] | None = None,
    every_s: float | None = None,
) -> list[str]:
    """Delete old checkpoints of a run; one rank calls this, after the save that made them old.

    What stays: the `keep` newest sound ones by step, and likewise by when they were saved. These are the same, but in a
    run that was rolled back: there the newest of both its lives stay, until the steps have caught up. So what was saved
    last is never deleted, nor is the only one that is sound. What somebody is saving at this moment stays too.

    Args:
        keep: how many of the newest sound ones stay, at least one (see `latest`).
        every: checkpoints whose step is a multiple of it stay besides.
        every_s: of those of each span of so many seconds one stays besides (hourly: 3600). From the oldest on, the next
            one that was saved so long after the last that stays; one that lacks a file does not count. So what once
            stayed for it goes on staying, however often this is called.
        valid: as for `latest`: with `verify`, only checkpoints that were read to the end count as sound. Without it bad
            bytes within a file are not seen.

    Returns:
        the folders that were deleted. Each is given another name first, so none is ever there in part. What is (since
        earlier versions deleted it, and were killed) goes too, once it is an hour old.

    Raises:
        ArgumentError: `keep` or `every` is less than one, or `every_s` not positive.

    Example::

        if rank == 0:  # the last three, and one of each six hours
            fsdp2.checkpoint.prune("runs/a", keep=3, every_s=6 * 3600, valid=fsdp2.checkpoint.verify)
    """
    storage, path = storage_of(root)
    rule, known = _Rule(keep, every, every_s), dict[str, bool]()
    ids = {folder: id_at(storage, folder) for folder in _old(root, rule, valid, known)}
    # Judged again: what has taken one of these names since is not what was read above.
    old = [folder for folder in _old(root, rule, valid, known) if folder in ids]
    gone = [folder for folder in old if _pruned(storage, folder, ids[folder])]
    for left in remains(storage, path):
        discard(storage, left)
    return gone


def superseded(
    root: Folder,
    keep: int,
    every: int | None = None,
    valid: Callable[[str], object] | None = None,
    every_s: float | None = None,
) -> list[str]:
    """What `prune` would delete."""
    return _old(root, _Rule(keep, every, every_s), valid, {})


@dataclass(frozen=True)
class _Rule:
    """What stays; see `prune`."""

    keep: int
    every: int | None
    every_s: float | None

    def __post_init__(self) -> None:
        if self.keep < 1 or (self.every is not None and self.every < 1):
            raise ArgumentError(f"prune: keep and every are at least 1, got {self.keep} and {self.every}")
        if self.every_s is not None and not self.every_s > 0:
            raise ArgumentError(f"prune: every_s: expected a positive number of seconds, got {self.every_s}")


def _old(root: Folder, rule: _Rule, valid: Callable[[str], object] | None, known: dict[str, bool]) -> list[str]:
    """See `prune`.

    Args:
        known: which checkpoints are sound, as far as that has been looked at.
    """
    storage, _ = storage_of(root)
    by_step = checkpoints(root)
    ages = {folder: age_of(storage, place) for folder in by_step if (place := _place(storage, folder))}
    by_time = sorted(ages, key=lambda folder: -ages[folder])
    staying: set[str] = set()
    for order in (by_step, by_time):
        sound = 0
        for folder in reversed(order):  # what is damaged among the newer ones is not ours to judge
            if sound == rule.keep:
                break
            staying.add(folder)
            if folder not in known:
                known[folder] = _is_sound(folder) and _is_valid(folder, valid)
            sound += known[folder]
    staying.update(_spaced(by_time, ages, rule.every_s) if rule.every_s is not None else ())
    steps = {folder: step_of(storage.split(folder)[1]) for folder in by_step if folder not in staying}
    return [folder for folder, step in steps.items() if rule.every is None or step is None or step % rule.every]


def _spaced(folders: Sequence[str], ages: Mapping[str, float], every_s: float) -> Iterator[str]:
    """Of folders, oldest first, those that stay for their time. The oldest does, so later calls come to the same
    answer. They are not read to the end: there may be hundreds."""
    last = inf
    for folder in folders:
        if last - ages[folder] >= every_s * (1 - JITTER) and _is_sound(folder):
            last = ages[folder]
            yield folder


def _place(storage: Storage, folder: str) -> str | None:
    """Where a checkpoint is; None if it has gone meanwhile."""
    with suppress(CheckpointError):
        return find(storage, folder)
    return None


def _pruned(storage: Storage, path: str, save_id: str | None) -> bool:
    """Delete the checkpoint `path`, wherever it is, if it still is that of the save, and nobody saves there."""
    if not storage.renames or storage.kind(path) == "symbolic link":
        discard(storage, path)
        return True
    if is_leased(storage, path):
        return False
    older = replaced(storage, path)
    # `find` still finds it then. So if it is not the one, or this process dies, nothing is lost.
    aside = set_aside(storage, path)
    if aside is not None and _id_of(storage, aside) != save_id:
        with suppress(OSError):  # taken again, by a still newer one
            storage.rename_folder(aside, path)
        return False
    for old in older:
        if aside is not None or _id_of(storage, old) == save_id:
            discard(storage, old)
    if aside is not None:
        discard(storage, aside)
    return True


def _id_of(storage: Storage, folder: str) -> str | None:
    """The id of what is in a folder; None if that cannot be read."""
    with suppress(CheckpointError, OSError):
        return read_manifest(storage, folder).id
    return None


def _is_valid(folder: str, valid: Callable[[str], object] | None) -> bool:
    try:
        if valid is not None:
            valid(folder)
    except FSDPError:
        return False
    return True


def _is_sound(folder: str) -> bool:
    """Whether its manifest is undamaged and its files are there; `OSError` if the disk does not tell."""
    storage, path = storage_of(folder)
    try:
        open_found(storage, path).close()
    except FSDPError:
        return False
    return True
