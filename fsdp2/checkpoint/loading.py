"""Load any checkpoint into any sharding; every rank reads what it needs, straight into its tensors. Layer: checkpoint.

First the ranks compare which files they see. Then each rank plans everything and checks names, shapes, dtypes, and that
the files contain all that is needed. Only then are tensors filled. At the end the ranks exchange whether they
succeeded.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.checkpoint.formats.native import NATIVE
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.io.memory import uncollected, wait_for
from fsdp2.checkpoint.io.reading import THREADS
from fsdp2.checkpoint.io.workers import run_all
from fsdp2.checkpoint.matching import Matching, Need
from fsdp2.checkpoint.opening import not_replaced, open_catalog
from fsdp2.checkpoint.ranks.agreement import Agreement, some, world_of
from fsdp2.checkpoint.ranks.world import World
from fsdp2.checkpoint.run.folders import TRIES
from fsdp2.checkpoint.state.extra import StoredExtra
from fsdp2.checkpoint.state.optimizer import Optimizers
from fsdp2.checkpoint.state.sources import Sources
from fsdp2.checkpoint.storage.base import Storage, storage_of
from fsdp2.errors import CheckpointError, MismatchError, ReplacedError
from fsdp2.placement.box import Box

__all__ = ["Loaded", "check_twins", "load"]

MOST_FILES = 256  # the number of files of which ranks compare a few bytes before they read
SAMPLE_BYTES = 4096


@dataclass
class Loaded:
    """What was loaded from a checkpoint in addition to the tensors.

    Attributes:
        folder: the folder of the checkpoint.
        step: as given to `save`; None if it was not given, or the format has none.
        extra: what this rank passed to `save`, by key, including the state of objects.
        missing: names that were requested but are not stored (with ``strict=False``).
        unexpected: names that are stored in the requested sections but have no destination.
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
    """Load a checkpoint that any number of ranks wrote with any sharding. Every rank of the group must call this. Each
    reads only the bytes that its shards need; no collective is issued.

    Args:
        folder: the folder of a checkpoint (see `latest`): a native one, a Hugging Face folder, or one of another
            library in a format that `fsdp2.checkpoint` reads.
        model: a module, filled in place; parameters on the meta device are allocated and filled.
            Or a plain dict of tensors and DTensors, filled in place.
        optimizer: an optimizer, filled in place; a list or a dict for several, as they were saved. State is created if
            the optimizer has not stepped yet, and options such as the learning rate are restored. Needs the module for
            its parameters' names.
        extra: objects with ``load_state_dict``, by the keys under which they were saved; they get their state.
            `Loaded.extra` holds all saved values in any case.
        sources: for checkpoints with other names or layouts: maps names of the model to the stored name or an
            expression (`stored`, `concatenated`). A mapping, or a function that may return None for an unchanged name.
        strict: raise if anything is missing or unexpected; with False, `Loaded` lists it.
        cast: convert to the dtype of the destination; otherwise a different dtype is an error. New optimizer state gets
            its parameter's dtype, except for counters.
        verify: check the checksums of everything that is read.
        process_group: the ranks that load together; None for all.
        timeout_s: how long to wait for the other ranks, at the beginning and at the end.

    Raises:
        MismatchError: names, shapes or dtypes of the checkpoint do not match the destination; all differences are
            listed. The rank that found them has changed nothing. The others raise an error of the same type that names
            that rank, and may have filled tensors by then: do not train on them. Or the ranks see different
            checkpoints, which are listed; then no rank has changed anything.
        CorruptError: files are damaged. Destinations may be partly filled: do not train on them.
        ReplacedError: in each of several attempts another save replaced the checkpoint while it was read.
        CheckpointError: no checkpoint was found, or another rank failed (its error is in the message).

    Example::

        loaded = fsdp2.checkpoint.load("runs/a/step-00001000", model=model, optimizer=optimizer,
                                       extra={"loader": loader})
        for step in range(loaded.step, num_steps): ...
    """
    storage, path = storage_of(folder)
    world = world_of(process_group)
    given, matched_to = (model, optimizer, extra or {}), partial(Matching, world=world, cast=cast, sources=sources)
    load_once = partial(_load, storage, path, world, given, matched_to, strict, verify)
    for reads_left in reversed(range(TRIES)):
        agreement = Agreement("load", world, process_group, timeout_s)
        try:
            return load_once(agreement)
        except (CheckpointError, OSError):
            # All ranks see the same outcome, whatever their own error is, so either all start again or none.
            if not reads_left or not agreement.failed_by(ReplacedError):
                raise
    raise AssertionError("unreachable")


def _load(
    storage: Storage,
    path: str,
    world: World,
    given: tuple[nn.Module | Mapping[str, Any] | None, Optimizers | None, Mapping[str, Any]],
    matched_to: Callable[[Catalog], Matching],
    strict: bool,
    verify: bool,
    agreement: Agreement,
) -> Loaded:
    """Load what is currently at `path`."""
    model, optimizer, extra = given
    try:
        with closing(open_catalog(storage, path)) as catalog, not_replaced(storage, path, catalog):
            if world.size > 1:
                agreement.gather("Every rank must call load", _seen(catalog), _not_one)
            stored = StoredExtra(catalog, world)
            matching = matched_to(catalog)
            stored.check(extra, matching.missing, matching.mismatches)
            with uncollected():
                matching.match(model, optimizer, strict)
                for need in (need for need in matching.needs if need.twins):
                    first = torch.empty(need.entry.local.shape, dtype=need.entry.local.dtype)
                    catalog.read(need.parts(catalog, need.entry.box, first), verify)
                    check_twins(catalog, need, need.entry.box, first, verify)
                agreement.check()  # after this rank's own errors, which say more than that another rank failed
                matching.allocate(model, optimizer)
                wait_for({need.entry.local.device for need in matching.needs})
                entries = [(need, need.entry) for need in matching.needs]
                parts = [part for need, own in entries for part in need.parts(catalog, own.box, own.local)]
            catalog.read(parts, verify)
            matching.finish()
            values = stored.give(extra, verify)  # last: earlier steps may have drawn random numbers
    except BaseException as error:
        agreement.abandon(error)
        raise
    if agreement.report():
        agreement.decide()  # also so that no rank joins this attempt again
        agreement.finish()
    agreement.wait()
    return Loaded(catalog.path, catalog.step, values, matching.missing, matching.unexpected)


def _seen(catalog: Catalog) -> str:
    """What this rank is about to read. The digest is equal for equal folders in any place: it covers names, dtypes and
    shapes, and the sizes and a few bytes of the files."""
    known = {section: sorted(tensors.items()) for section, tensors in catalog.tensors.items()}
    digest = hashlib.sha256(json.dumps(sorted(known.items())).encode())
    paths = sorted(catalog.files)
    samples = run_all(partial(_sample, catalog.storage), paths[:: len(paths) // MOST_FILES + 1], THREADS, "fsdp2-look")
    digest.update(b"".join(sorted(samples)))  # sorted: a download cache has other names for the same files
    return json.dumps([catalog.path, catalog.kind, catalog.step, digest.hexdigest()])


def _sample(storage: Storage, path: str) -> bytes:
    """The size of a file and a few of its bytes."""
    with closing(storage.open_file(path)) as reader:
        sample = bytearray(min(SAMPLE_BYTES, reader.size))
        reader.read_into((reader.size - len(sample)) // 2, memoryview(sample))
        return b"%d %s" % (reader.size, sample)


def _not_one(records: list[str]) -> CheckpointError | None:
    """The error if ranks are about to read different checkpoints.

    Args:
        records: from `_seen`, by rank.
    """
    ranks: dict[tuple[str, str, int | None, str], list[int]] = {}
    for rank, record in enumerate(records):
        ranks.setdefault(tuple(json.loads(record)), []).append(rank)
    paths, kinds, _, digests = (set(column) for column in zip(*ranks, strict=True))
    if len(digests) == 1:
        return None
    shown = [
        f"ranks {some(own)} load {path} ({kind}, step {step}, content {digest[:8]})"
        for (path, kind, step, digest), own in ranks.items()
    ]
    # A save may have replaced it after some ranks opened it: then they open it again.
    error = ReplacedError if len(paths) == 1 and kinds == {NATIVE} else MismatchError
    return error(
        f"the ranks load different checkpoints: {'; '.join(shown[:8])}{'; ...' if len(shown) > 8 else ''}. Give all "
        "ranks the same files; if only one rank has them, load_from_rank sends them to the others."
    )


def check_twins(catalog: Catalog, need: Need, box: Box, values: torch.Tensor, verify: bool = True) -> None:
    """Check that a weight that is tied here but stored under several names has bitwise the same values under all.

    Args:
        box: a part of it.
        values: the values of that part, read under the first name.

    Raises:
        MismatchError: the values differ, so it is unclear which to use.
    """
    for twin in need.twins:
        other = torch.empty(values.shape, dtype=values.dtype)
        catalog.read(need.parts(catalog, box, other, twin), verify, num_threads=0)
        if not torch.equal(*(each.cpu().reshape(-1).view(torch.uint8) for each in (values, other))):
            names = [", ".join(sorted(source.names())) for source in (need.source, twin)]
            raise MismatchError(
                f"{catalog.path}: '{names[0]}' and '{names[1]}' are stored separately with different values, but "
                "are one weight here. Load into a model that does not tie them."
            )
