"""Save: what is written, where, and when it is committed. Layer: checkpoint.

On each rank:                                               in the store of the process group:

    inspect the model, optimizer and extra state
    plan its files
    [the last save failed: wait for all ranks]                the id of this save, which all its files contain
    [async_op: copy its values to host memory]
    write and sync its files (on disks, in a temporary folder)
    write a record of what it wrote, and report               the last rank to report reads the records of all ranks
    on the last rank: write the manifest (on disks, then rename)  "done", for the ranks that wait

A folder is a checkpoint if it has a manifest, which is written after everything else in it is durable.
"""

import operator
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.formats.native import id_of, read_manifest
from fsdp2.checkpoint.io.memory import bytes_of, uncollected, wait_for
from fsdp2.checkpoint.io.planned_files import (
    Homes,
    Piece,
    PlannedFile,
    Written,
    consolidated_files,
    consolidated_homes,
    joined_sums,
    owned_pieces,
    rank_files,
)
from fsdp2.checkpoint.io.workers import run_all
from fsdp2.checkpoint.io.writing import THREADS, write_file
from fsdp2.checkpoint.ranks.agreement import Agreement, world_of
from fsdp2.checkpoint.ranks.world import Entry, World
from fsdp2.checkpoint.run.background import SaveHandle, in_flight, stage
from fsdp2.checkpoint.run.committing import COPY, commit, may_count
from fsdp2.checkpoint.run.folders import delete, free_name, own_folder, step_name, sweep, work_folder
from fsdp2.checkpoint.run.records import Records, digest_of, files_id
from fsdp2.checkpoint.schema.checksum import crc32
from fsdp2.checkpoint.schema.manifest import MANIFEST, table_of
from fsdp2.checkpoint.state.extra import ExtraShare, claimed, extra_shares
from fsdp2.checkpoint.state.model import State, model_state, unwrapped
from fsdp2.checkpoint.state.optimizer import Optimizers, named_optimizers, optimizers_state
from fsdp2.checkpoint.storage.base import Storage, storage_of
from fsdp2.errors import ArgumentError, CheckpointError
from fsdp2.events import profiler_range
from fsdp2.placement.hooks import registered
from fsdp2.placement.tiling import Tiling, spread_replicas
from fsdp2.watch.current import current

__all__ = ["Job", "SaveOptions", "save"]

SAMPLE = 512  # elements at each end of a tensor to compare between copies


@dataclass(frozen=True)
class SaveOptions:
    """How to save; see `save`."""

    consolidated: bool
    max_file_bytes: int
    overwrite: bool
    timeout_s: float

    def __post_init__(self) -> None:
        if self.max_file_bytes <= 0 or self.timeout_s <= 0:
            raise ArgumentError(f"save: max_file_bytes and timeout_s are positive, got {self}")


def save(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, Any] | None = None,
    optimizer: Optimizers | None = None,
    extra: Mapping[str, Any] | None = None,
    step: int | None = None,
    async_op: bool = False,
    process_group: dist.ProcessGroup | None = None,
    consolidated: bool = False,
    max_file_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    timeout_s: float = 600.0,
) -> SaveHandle:
    """Save a checkpoint. Every rank of the group must call this, and writes its own part; no collective is issued.

    Returns when the checkpoint is complete and durable. With ``async_op=True`` it returns when this rank's values have
    been copied to host memory, so that training may change them. Only one save runs at a time; the next one waits.

    Args:
        folder: the folder of the checkpoint, which must not exist yet (or must be empty); with `step`, the folder of
            the run, in which the checkpoint is ``step-00001000``. A URL (``s3://...``) goes through fsspec.
        model: a module (several of them in a ``nn.ModuleDict``), or a plain dict of DTensors, tensors and JSON-like
            values. Tied weights are stored once.
        optimizer: needs the module for its parameters' names. A list or a dict for several (``[muon, adamw]``); or a
            plain dict like `model`.
        extra: other state needed to resume, by name: JSON-like values, tensors, or objects with ``state_dict()`` (a
            data loader, a scheduler, `RandomState`). Each rank's own state is stored; state that is equal on all ranks
            is stored once.
        step: the number of completed steps, for the folder's name and for `Loaded.step`.
        async_op: write in the background.
        process_group: the ranks that save together; None for all.
        consolidated: whole tensors in ``model-0000i-of-0000n.safetensors`` with Hugging Face's index; needs a file
            system on which ranks may write to one file.
        max_file_bytes: the largest size of the data in one of these files, unless a single tensor is larger.
        overwrite: replace a checkpoint of that name once the new one is complete. Its folder must hold nothing else.
        timeout_s: how long to wait for the other ranks while none of them makes progress.

    Returns:
        A handle with ``wait()``, which returns when the save is complete, and ``folder``.

    Raises:
        ArgumentError: a value cannot be saved; the message names it, and nothing has been written.
        CheckpointError: the folder is in use, or another rank failed (its error is in the message) or did not finish in
            time. Earlier checkpoints are unchanged.
        OSError: this rank cannot write; the other ranks raise a CheckpointError with the same text.

    Example::

        fsdp2.checkpoint.save("runs/a", model=model, optimizer=optimizer, step=1000,
                              extra={"loader": loader, "random": fsdp2.checkpoint.RandomState()})
    """
    options = SaveOptions(consolidated, max_file_bytes, overwrite, timeout_s)
    if isinstance(model, nn.Module):
        registered.models.warn_in_save(model)
    world = world_of(process_group)
    storage, path = storage_of(folder)
    if step is not None:
        step = _as_int(step)
        path = storage.join(path, step_name(step))
    agreement = Agreement(f"save {storage.split(path)[1]}", world, process_group, options.timeout_s)
    try:
        in_flight.settle()  # report to the others an error of the last save that only this rank knows
        free_name(storage, path, options.overwrite)
        model = unwrapped(model)
        job = Job(storage, path, step, world, agreement, options)
        write = job.prepare(model, optimizer, extra or {}, staged=async_op)
        agreement.check()  # a rank may have failed by now; checked after this rank's own errors, which say more
        return in_flight.start(path, write, async_op)
    except BaseException as error:
        agreement.abandon(error)
        raise


def _as_int(step: SupportsIndex) -> int:
    """A step as a Python int, as the manifest needs it; NumPy integers are accepted."""
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise ArgumentError(f"step: expected the number of steps done, got {step!r}")
    return operator.index(step)


def _tiling_for_writing(entry: Entry) -> Tiling:
    """Replicas of a DTensor are equal, so each may write a part. Plain tensors may differ: one rank writes its own."""
    if not isinstance(entry.outside, DTensor):
        return entry.tiling
    return spread_replicas(entry.tiling, entry.local.element_size())


def _wait_for(devices: set[torch.device]) -> None:
    """Wait until all work queued on these devices is done, so that the values are final.

    Raises:
        CheckpointError: communication has failed, so the values may be wrong.
    """
    wait_for(devices)
    if current.failure is not None and any(device.type != "cpu" for device in devices):
        raise CheckpointError(
            "steps that were queued after a failed collective may have used its result, so these values may be wrong. "
            f"Resume from the last checkpoint. The failure: {current.failure}"
        )


@dataclass(frozen=True)
class Job:
    """One save of one rank."""

    storage: Storage
    path: str
    step: int | None
    world: World
    agreement: Agreement
    options: SaveOptions

    def prepare(
        self,
        model: nn.Module | Mapping[str, Any] | None,
        optimizer: Optimizers | None,
        extra: Mapping[str, Any],
        staged: bool,
    ) -> Callable[[], None]:
        """Plan everything. Returns a function that writes and commits on any thread."""
        world = self.world
        for name, value, kinds in (
            ("model", model, (nn.Module, Mapping)),
            ("optimizer", optimizer, (torch.optim.Optimizer, Mapping, list, tuple)),
            ("extra", extra, (Mapping,)),
        ):
            if value is not None and not isinstance(value, kinds):
                raise ArgumentError(
                    f"save: {name}= expects {' or '.join(kind.__name__ for kind in kinds)}, got {value!r}"
                )
        with uncollected():
            states: dict[str, State] = {}
            if model is not None:
                states["model"] = model_state(model, world)
            if optimizers := named_optimizers(optimizer):
                module = model if isinstance(model, nn.Module) else None
                states["optimizer"] = optimizers_state(module, optimizers, world)
            elif isinstance(optimizer, Mapping):
                states["optimizer"] = model_state(optimizer, world)
            entries = {section: state.entries for section, state in states.items()}
            every = [entry for own in entries.values() for entry in own.values()]
            for entry in every:
                if entry.local.is_meta:
                    raise ArgumentError(f"'{entry.name}': is on the meta device: it has no values to save")
            rows = {
                section: {name: (entry.dtype, _tiling_for_writing(entry)) for name, entry in own.items()}
                for section, own in entries.items()
            }
            aliases = {section: state.aliases for section, state in states.items()}
            table = table_of(rows, aliases, {section: state.values for section, state in states.items()})
            pieces = {section: [*owned_pieces(own, rows[section], world.rank)] for section, own in entries.items()}
        _wait_for({entry.local.device for entry in every})
        about = {"table": table, "sums": _sums_of_equal(entries, world)}
        self.agreement.meet()  # after the devices have finished this step, before anything is copied
        nonce = self.agreement.claim("nonce", uuid.uuid4().hex[:12])
        shares = extra_shares(extra)
        if staged:
            with profiler_range("FSDP::checkpoint_stage"):
                pieces, shares = stage(pieces, shares)
        homes = self._homes(rows) if self.options.consolidated else {}
        return lambda: self.run(nonce, about, pieces, shares, homes)

    def _homes(self, rows: Mapping[str, Mapping[str, tuple[str, Tiling]]]) -> Homes:
        if not self.storage.renames:
            raise ArgumentError(
                "save: consolidated=True needs a file system on which all ranks may write to one file, and "
                f"{self.path} is not. Save without it, then convert the model: python -m fsdp2.checkpoint convert"
            )
        shapes = {
            section: {name: (dtype, tiling.shape) for name, (dtype, tiling) in own.items()}
            for section, own in rows.items()
        }
        return {name: consolidated_homes(name, own, self.options.max_file_bytes) for name, own in shapes.items()}

    def run(
        self,
        nonce: str,
        about: dict[str, Any],
        pieces: Mapping[str, list[Piece]],
        shares: list[ExtraShare],
        homes: Homes,
    ) -> None:
        """Write, report, and commit if all others have reported."""
        storage, agreement, rank = self.storage, self.agreement, self.world.rank
        work = work_folder(storage, self.path, nonce)
        records = Records(storage, work, nonce, agreement)
        planned: list[PlannedFile] = []
        try:
            shares = claimed(shares, agreement)  # here, because the training loop does not wait for it
            storage.make_folder(work)
            files = files_id(storage, work, nonce, agreement)
            planned = self._files({"id": files, "rank": rank, "world": self.world.size}, pieces, shares, homes)
            with own_folder(storage, work, self.path):
                written = self._write(work, planned)
                records.put(rank, {"files_id": files, **self._record(about, written, shares, homes, records)})
            if agreement.report():
                commit(storage, work, self.path, nonce, homes, agreement, records, self.world.size)
            agreement.wait()
        except BaseException as error:
            # The store may be gone together with a rank that had finished. The folder itself shows the outcome.
            counts = id_of(storage, self.path) == nonce
            has_failed = agreement.has_failed  # also after the commit, so that all ranks raise
            if agreement.abandon(error) and not counts:
                self._discard(work, [file.name for file in planned], records.written)
            if not counts or has_failed or not isinstance(error, CheckpointError):
                raise

    def _write(self, work: str, planned: list[PlannedFile]) -> list[Written]:
        write = partial(write_file, self.storage, work, report=self.agreement.report_progress)
        # On a disk several threads write one file; behind a URL each thread writes a file.
        return [*map(write, planned)] if self.storage.renames else run_all(write, planned, THREADS, "fsdp2-upload")

    def _discard(self, work: str, files: list[str], records: list[str]) -> None:
        """Delete the files of a failed save, because the disk may be full. Without renames they stay for the next
        attempt. If another save has written a manifest, they are deleted too."""
        if may_count(self.storage, self.agreement):
            return
        names = [*files, *records, MANIFEST] if self.storage.renames else records
        is_alone = self.storage.renames and self.world.size == 1
        delete(self.storage, [work] if is_alone else [self.storage.join(work, name) for name in names])
        if not self.storage.renames:
            with suppress(OSError, CheckpointError):
                delete(self.storage, sweep(self.storage, work, read_manifest(self.storage, work).files))

    @uncollected()
    def _files(
        self, about: Mapping[str, Any], pieces: Mapping[str, list[Piece]], shares: list[ExtraShare], homes: Homes
    ) -> list[PlannedFile]:
        planned: list[PlannedFile] = []
        for section, own in pieces.items():
            if homes:
                planned += consolidated_files(homes[section], own, self.world.rank, self.world.size)
            elif own:
                planned += rank_files(section, own, about, self.storage)
        if any(share.mine for share in shares):
            tensors = [piece for share in shares if share.mine for piece in share.pieces]
            planned += rank_files("extra", tensors, about, self.storage)
        return planned

    @uncollected()
    def _record(
        self, about: dict[str, Any], written: list[Written], shares: list[ExtraShare], homes: Homes, records: Records
    ) -> dict[str, Any]:
        """This rank's record for the one that commits; see `committing.py`."""
        return {
            "options": {"step": self.step, "world": self.world.size, **asdict(self.options)},
            "homes": digest_of(homes),
            "table": records.share(about["table"]),
            "equal": records.share(about["sums"]) if about["sums"] else "",
            "content": digest_of([file.sums for file in written if not file.name.startswith("extra-")]),
            "files": {file.name: [file.size, file.header_crc] for file in written},
            "sums": joined_sums(written, homes),
            "extra": {share.key: share.digest for share in shares},
            "shares": {share.key: [share.digest, share.form] for share in shares if share.mine},
        }


def _sums_of_equal(entries: Mapping[str, Mapping[str, Entry]], world: World) -> dict[str, int]:
    """Checksums of samples of the tensors that one rank stores for others: plain tensors, and parts that should have
    equal copies on other meshes."""
    found, in_file = {}, registered.optimizers.is_in_file
    for section, own in entries.items():
        for name, entry in own.items():
            if entry.copy is not None:
                found[f"{section} '{name}'{COPY}{entry.copy}"] = entry.local
            elif not (
                world.size == 1 or entry.tiling.cuts or isinstance(entry.outside, DTensor) or in_file(entry.local)
            ):
                found[f"{section} '{name}'"] = entry.local
    return dict(zip(found, _sums([*found.values()]), strict=True))


def _sums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A checksum of the first and last values of each tensor; one copy per device."""
    sums = [0] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        chosen = [index for index, tensor in enumerate(tensors) if tensor.device == device and tensor.numel()]
        flats = [tensors[index].reshape(-1).resolve_conj().resolve_neg() for index in chosen]
        ends = [part.contiguous().view(torch.uint8) for flat in flats for part in (flat[:SAMPLE], flat[-SAMPLE:])]
        parts = torch.cat(ends).cpu().split([end.numel() for end in ends]) if ends else []
        for index, first, last in zip(chosen, parts[::2], parts[1::2], strict=True):
            sums[index] = crc32(bytes_of(last), crc32(bytes_of(first)))
    return sums
