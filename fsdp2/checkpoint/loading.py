"""Load: any checkpoint into any sharding; every rank reads what it needs, straight into its tensors. Layer: checkpoint.

First everything is decided and compared: names, shapes, dtypes, whether what files hold covers what is needed. Only
then does the first byte go to a tensor; and at the end the ranks tell each other whether all went well.
"""

import os
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import make_dtensor, make_spec
from fsdp2.checkpoint.agreement import Agreement, world_of
from fsdp2.checkpoint.box import Cover
from fsdp2.checkpoint.catalog import Catalog
from fsdp2.checkpoint.dtypes import name_of
from fsdp2.checkpoint.opening import open_catalog
from fsdp2.checkpoint.optimizer import OptimizerTarget, named_params
from fsdp2.checkpoint.reading import Request, read_all
from fsdp2.checkpoint.state import Entry, State, World, model_state
from fsdp2.checkpoint.storage import storage_of
from fsdp2.checkpoint.stored_extra import StoredExtra
from fsdp2.checkpoint.tree import decode
from fsdp2.errors import CorruptError, MismatchError

__all__ = ["Loaded", "load"]


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
    optimizer: torch.optim.Optimizer | Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
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
        model: a module, filled in place; parameters on the meta device are allocated and filled. Or a plain dict of
            tensors and DTensors, filled in place.
        optimizer: likewise. One that has made no step yet gets its state; options such as the learning rate come back
            too. Needs the module for its parameters' names.
        extra: objects with ``load_state_dict``, by the keys they were saved under; they get their state. All values
            that were saved are in `Loaded.extra` besides.
        strict: raise if anything is missing or unexpected; with False, `Loaded` says what.
        cast: convert to the dtype of the destination; without it another dtype is an error.
        verify: check all that is read against its checksums.
        process_group: the ranks that load together; None for all.
        timeout_s: how long to wait for the other ranks at the end.

    Raises:
        MismatchError: the checkpoint has other names, shapes or dtypes than are asked for; all of them are listed.
            Nothing has been changed then.
        CorruptError: files are damaged. Destinations may have been filled in part: do not train on them.
        CheckpointError: no checkpoint is there; or another rank failed (its error is in the message).

    Example::

        loaded = fsdp2.checkpoint.load("runs/a/step-00001000", model=model, optimizer=optimizer, extra={"loader":
        loader})
        for step in range(loaded.step, num_steps): ...
    """
    storage, path = storage_of(folder)
    world = world_of(process_group)
    agreement = Agreement(f"load {storage.split(path)[1]}", world, process_group, timeout_s)
    try:
        catalog = open_catalog(storage, path)
        try:
            result = _Load(catalog, world, strict, cast).run(model, optimizer, extra or {}, verify)
        finally:
            catalog.close()
    except BaseException as error:
        agreement.abandon(error)
        raise
    if agreement.report(""):
        agreement.finish()
    agreement.wait()
    return result


@dataclass
class _Load:
    """One load of one rank.

    Attributes:
        requests: what to read.
        finish: what to do after all has been read.
    """

    catalog: Catalog
    world: World
    strict: bool
    cast: bool
    requests: list[Request] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)

    def run(
        self,
        model: nn.Module | Mapping[str, Any] | None,
        optimizer: torch.optim.Optimizer | Mapping[str, Any] | None,
        extra: Mapping[str, Any],
        verify: bool,
    ) -> Loaded:
        """Decide everything, compare, read, and hand over."""
        if model is not None:
            self._ask("model", model)
        if isinstance(optimizer, torch.optim.Optimizer):
            self._ask_optimizer(model if isinstance(model, nn.Module) else None, optimizer)
        elif optimizer is not None:
            self._ask("optimizer", optimizer)
        stored = StoredExtra(self.catalog, self.world)
        stored.check(extra, self.missing, self.mismatches)
        self._compare()
        read_all(self.catalog.storage, self.requests, verify)
        for step in self.finish:
            step()
        values = stored.give(extra, verify)  # last: building and filling may have drawn random numbers
        return Loaded(self.catalog.path, self.catalog.step, values, self.missing, self.unexpected)

    def _ask(self, section: str, target: nn.Module | Mapping[str, Any]) -> None:
        """Note what a model or a dict needs."""
        state = model_state(target, self.world)
        stored = self.catalog.tensors.get(section, {})
        other_names = self.catalog.aliases.get(section, {})
        tied: dict[str, list[str]] = {}
        for alias, name in state.aliases.items():
            tied.setdefault(name, []).append(alias)
        found = set()
        assigned: dict[str, torch.Tensor] = {}
        for name, entry in state.entries.items():
            candidates = [other_names.get(one, one) for one in (name, *tied.get(name, []))]
            source = next((one for one in candidates if one in stored), None)
            if source is None:
                self.missing.append(f"{section} '{name}'")
                continue
            found.add(source)
            if entry.local.is_meta:
                entry = _allocated(entry)
                for one in (name, *tied.get(name, [])):
                    assigned[state.keys[one]] = entry.outside
            self._need(section, source, entry)
        known = {*found, *state.entries, *state.aliases}
        self.unexpected += [f"{section} '{name}'" for name in (*stored, *other_names) if name not in known]
        self._ask_values(section, state, target)
        if isinstance(target, nn.Module):
            self.finish.append(lambda: _filled(target, assigned))

    def _ask_values(self, section: str, state: State, target: nn.Module | Mapping[str, Any]) -> None:
        """What is no tensor: `_extra_state` of modules, numbers of a plain dict."""
        stored = {name: value for table in self.catalog.values.get(section, []) for name, value in table.items()}
        self.missing += [f"{section} '{name}'" for name in state.values if name not in stored]
        self.unexpected += [f"{section} '{name}'" for name in stored if name not in state.values]
        found = {
            state.keys[name]: decode(value, _no_tensor, self.catalog.path)
            for name, value in stored.items()
            if name in state.values
        }
        if found and isinstance(target, nn.Module):
            self.finish.append(lambda: _load_values(target, found))
        elif found and isinstance(target, MutableMapping):
            self.finish.append(lambda: target.update(found))

    def _ask_optimizer(self, model: nn.Module | None, optimizer: torch.optim.Optimizer) -> None:
        section = "optimizer"
        stored = self.catalog.tensors.get(section, {})
        target = OptimizerTarget(optimizer, named_params(model, optimizer), self.world)
        target.prepare(self.catalog.values.get(section, []), stored)
        self.missing += [f"optimizer state of '{fqn}'" for fqn in target.missing]
        self.unexpected += [f"optimizer state of '{fqn}'" for fqn in target.unexpected]
        for name, entry in target.entries.items():
            self._need(section, name, entry)
        self.finish.append(target.finish)

    def _need(self, section: str, name: str, entry: Entry) -> None:
        """Ask for this rank's part of a tensor, if it is what is stored."""
        info = self.catalog.tensors[section][name]
        shape, dtype = entry.tiling.shape, name_of(entry.local.dtype)
        if info.shape != shape:
            self.mismatches.append(
                f"{section} '{entry.name}': stored with shape {list(info.shape)}, here {list(shape)}"
            )
        elif info.dtype != dtype and not self.cast:
            self.mismatches.append(
                f"{section} '{entry.name}': stored as {info.dtype}, here {dtype} (cast=True converts)"
            )
        elif entry.box.numel:
            cover = Cover(entry.box)
            for piece in self.catalog.pieces(section, name, entry.box):
                part = piece.box.intersect(entry.box)
                if part is not None:
                    cover.add(part)
                    self.requests.append(Request(entry.name, entry.local, entry.box, piece))
            cover.check(f"{self.catalog.path}: {section} '{name}'")

    def _compare(self) -> None:
        """Raise if what is stored is not what is asked for."""
        problems = [*self.mismatches]
        if self.strict:
            problems += [f"missing in the checkpoint: {what}" for what in self.missing]
            problems += [f"unexpected in the checkpoint: {what}" for what in self.unexpected]
        if problems:
            shown = "\n  ".join(problems[:50])
            more = f"\n  ... and {len(problems) - 50} more" if len(problems) > 50 else ""
            advice = "" if self.mismatches else "\nstrict=False loads what there is."
            raise MismatchError(f"{self.catalog.path} does not fit:\n  {shown}{more}{advice}")


def _allocated(entry: Entry) -> Entry:
    """The same with memory instead of a meta tensor."""
    outside = entry.outside
    if isinstance(outside, DTensor):
        mesh = outside.device_mesh
        kind = mesh.device_type
        device = (
            torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
        )
        local = torch.empty_like(entry.local, device=device)
        spec = make_spec(mesh, outside.placements, outside.shape, outside.stride(), outside.dtype)
        return replace(entry, local=local, outside=make_dtensor(local, spec))
    local = torch.empty_like(entry.local, device="cpu")
    return replace(entry, local=local, outside=local)


def _filled(model: nn.Module, assigned: Mapping[str, torch.Tensor]) -> None:
    """After a module's tensors were filled behind autograd's back."""
    if assigned:
        model.load_state_dict(assigned, strict=False, assign=True)
    torch.autograd.graph.increment_version([param for param in model.parameters() if not param.is_meta])
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if assigned and left:
        warnings.warn(
            f"still on the meta device, since they are not in the checkpoint: {', '.join(left[:5])}"
            f"{', ...' if len(left) > 5 else ''} ({len(left)} in all). Buffers that are not persistent must be "
            f"made anew by "
            "their modules.",
            stacklevel=2,
        )


def _load_values(model: nn.Module, values: dict[str, Any]) -> None:
    model.load_state_dict(values, strict=False)


def _no_tensor(note: dict[str, Any]) -> Any:
    raise CorruptError(f"a tensor where there can be none: {str(note)[:80]}")
