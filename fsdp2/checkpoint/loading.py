"""Load: any checkpoint into any sharding; every rank reads what it needs, straight into its tensors. Layer: checkpoint.

First everything is decided and compared: names, shapes, dtypes, whether what files hold covers what is needed. Only
then does the first byte go to a tensor; and at the end the ranks tell each other whether all went well.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.checkpoint.agreement import Agreement, world_of
from fsdp2.checkpoint.box import Box, Cover
from fsdp2.checkpoint.catalog import Catalog
from fsdp2.checkpoint.formats.native import NativeCatalog
from fsdp2.checkpoint.formats.opening import open_catalog
from fsdp2.checkpoint.matching import Matching, Need
from fsdp2.checkpoint.memory import wait_for
from fsdp2.checkpoint.optimizers import Optimizers
from fsdp2.checkpoint.reading import Request, read_all
from fsdp2.checkpoint.replacing import READS, not_replaced
from fsdp2.checkpoint.sources import Sources
from fsdp2.checkpoint.state import World
from fsdp2.checkpoint.storage import Storage, storage_of
from fsdp2.checkpoint.stored_extra import StoredExtra
from fsdp2.errors import CheckpointError, MismatchError, ReplacedError

__all__ = ["Loaded", "load", "requests_for"]


@dataclass
class Loaded:
    """What came out of a checkpoint besides the tensors.

    Attributes:
        folder: where it was.
        step: as given to `save`; None if it was not given, or the format has none.
        extra: what this rank gave to `save`, by key, the state of objects included.
        missing: what was asked for and is not stored (with ``strict=False``).
        unexpected: what is stored in the sections that were asked for, and has no place here.
    """

    folder: str
    step: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def load(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, Any] | None = None,
    optimizer: Optimizers | None = None,
    extra: Mapping[str, Any] | None = None,
    sources: Sources | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = 600.0,
) -> Loaded:
    """Load a checkpoint that any number of ranks with any sharding wrote. Every rank of the group calls this; each
    reads the bytes that its shards need, and no collective is issued.

    Args:
        folder: of a checkpoint (see `latest`): one of ours, a Hugging Face folder, or one of another library that
            `fsdp2.checkpoint` reads.
        model: a module, or a dict of modules, filled in place; parameters on the meta device are allocated and filled.
            Or a plain dict of tensors and DTensors, filled in place.
        optimizer: likewise; a list or a dict for several, as they were saved. One that has made no step yet gets its
            state; options such as the learning rate come back too. Needs the module for its parameters' names.
        extra: objects with ``load_state_dict``, by the keys they were saved under; they get their state. All values
            that were saved are in `Loaded.extra` besides.
        sources: for checkpoints with other names or layouts: for names of the model, the stored name or an expression
            (`stored`, `concatenated`); a mapping, or a function that may return None for "as it is".
        strict: raise if anything is missing or unexpected; with False, `Loaded` says what.
        cast: convert to the dtype of the destination; without it another dtype is an error.
        verify: check all that is read against its checksums.
        process_group: the ranks that load together; None for all.
        timeout_s: how long to wait for the other ranks at the end.

    Raises:
        MismatchError: the checkpoint has other names, shapes or dtypes than are asked for; all of them are listed.
            Nothing has been changed then on the rank that found it; others are told of it by an error of the same kind
            that names that rank, and may have filled tensors by then: do not train on them.
        CorruptError: files are damaged. Destinations may have been filled in part: do not train on them.
        ReplacedError: another save took its place while it was read, each time of several.
        CheckpointError: no checkpoint is there; or another rank failed (its error is in the message).

    Example::

        loaded = fsdp2.checkpoint.load("runs/a/step-00001000", model=model, optimizer=optimizer,
                                       extra={"loader": loader})
        for step in range(loaded.step, num_steps): ...
    """
    storage, path = storage_of(folder)
    world = world_of(process_group)
    given = model, optimizer, extra or {}
    for reads_left in reversed(range(READS)):
        agreement = Agreement(f"load {storage.split(path)[1]}", world, process_group, timeout_s)
        try:
            return _load(storage, path, given, _How(sources, strict, cast, verify), world, agreement)
        except (CheckpointError, OSError):
            # What all ranks learn, whatever this one's own error is: all begin again, or none.
            if not reads_left or not agreement.failed_by(ReplacedError):
                raise
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class _How:
    """How to read; see `load`."""

    sources: Sources | None
    strict: bool
    cast: bool
    verify: bool


def _load(
    storage: Storage,
    path: str,
    given: tuple[nn.Module | Mapping[str, Any] | None, Optimizers | None, Mapping[str, Any]],
    how: _How,
    world: World,
    agreement: Agreement,
) -> Loaded:
    """Load what is at `path` now."""
    model, optimizer, extra = given
    try:
        catalog = open_catalog(storage, path)
        try:
            with not_replaced(storage, path, catalog):
                stored = StoredExtra(catalog, world)
                matching = Matching(catalog, world, how.cast, how.sources)
                stored.check(extra, matching.missing, matching.mismatches)
                matching.match(model, optimizer, how.strict)
                _compare_twins(catalog, matching, how.verify)
                agreement.check()  # a rank may have failed by now; after this rank's own errors, which say more
                matching.allocate(model, optimizer)
                wait_for({need.entry.local.device for need in matching.needs})
                requests = [one for need in matching.needs for one in requests_for(catalog, need)]
                read_all(catalog.storage, requests, how.verify)
                matching.finish()
                values = stored.give(extra, how.verify)  # last: what came before may have drawn random numbers
        finally:
            catalog.close()
    except BaseException as error:
        agreement.abandon(error)
        raise
    if agreement.report(catalog.manifest.id if isinstance(catalog, NativeCatalog) else ""):
        if len(set(agreement.records())) > 1:
            agreement.fail(ReplacedError(f"the ranks have loaded different checkpoints, all called {path}"))
        agreement.finish()
    agreement.wait()
    return Loaded(catalog.path, catalog.step, values, matching.missing, matching.unexpected)


def requests_for(
    catalog: Catalog, need: Need, part: Box | None = None, into: torch.Tensor | None = None
) -> list[Request]:
    """What to read for a need.

    Args:
        part: another part of the whole tensor than this rank's, which goes to `into`.

    Raises:
        CorruptError: the files do not hold all of it, or hold some of it twice.
    """
    box, target = (need.entry.box, need.entry.local) if part is None or into is None else (part, into)
    requests = []
    for wanted in need.source.wanted(target, box, catalog.tensors[need.section]):
        cover = Cover(wanted.box)
        for piece in catalog.pieces(need.section, wanted.name, wanted.box):
            common = piece.box.intersect(wanted.box)
            if common is not None:
                cover.add(common)
                requests.append(Request(need.entry.name, wanted.target, wanted.box, piece))
        cover.check(f"{catalog.path}: {need.section} '{wanted.name}'")
    return requests


def _compare_twins(catalog: Catalog, matching: Matching, verify: bool) -> None:
    """See that a weight which is one here, and is stored under two names, has the same values under both.

    Raises:
        MismatchError: it has not; which of them should go cannot be known.
    """
    for needs in matching.twins:
        values = [torch.empty_like(need.entry.local, device="cpu") for need in needs]
        for need, into in zip(needs, values, strict=True):
            read_all(catalog.storage, requests_for(catalog, need, need.entry.box, into), verify)
        if not torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in values)):
            names = [", ".join(sorted(need.source.names())) for need in needs]
            raise MismatchError(
                f"{catalog.path}: '{names[0]}' and '{names[1]}' are stored apart with different values, and here they "
                "are one weight. Load into a model that does not tie them."
            )
