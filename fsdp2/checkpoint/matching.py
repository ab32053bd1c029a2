"""Compare what is requested with what is stored (names, shapes, dtypes) before anything changes. Layer: checkpoint."""

import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch.checkpoint import loading_code
from fsdp2.checkpoint.formats.dcp import DCP
from fsdp2.checkpoint.formats.huggingface import HUGGING_FACE
from fsdp2.checkpoint.formats.transformers_weights import published_sources
from fsdp2.checkpoint.io.catalog import Catalog, Part
from fsdp2.checkpoint.ranks.world import Entry, World
from fsdp2.checkpoint.schema.dtypes import DTYPES, name_of
from fsdp2.checkpoint.schema.tree import decode
from fsdp2.checkpoint.state.model import State, entry_of, model_state, ranks_of, unwrapped
from fsdp2.checkpoint.state.optimizer import Optimizers, named_optimizers, named_params
from fsdp2.checkpoint.state.optimizer_target import OptimizerTarget, tables_of
from fsdp2.checkpoint.state.sources import Source, Sources, source_of
from fsdp2.checkpoint.state.sources import stored as from_stored
from fsdp2.errors import ArgumentError, CorruptError, FSDPError, MismatchError, UnsupportedError
from fsdp2.placement.allocation import allocate, tensors_of
from fsdp2.placement.box import Box

__all__ = ["Matching", "Need"]

# The last part of the state-dict key of a module's `get_extra_state`.
EXTRA_STATE = "_extra_state"
OWN_HOOKS = "fsdp2."  # modules with the hooks of sharded modules, which do not matter here

Model = nn.Module | Mapping[str, Any]


@dataclass(slots=True)
class Need:
    """A tensor to be filled on this rank, which matches what is stored.

    Attributes:
        source: the values of the whole tensor.
        entry: this rank's part.
        twins: further sources with the same values, for a weight that is tied here but stored more than once.
    """

    section: str
    source: Source
    entry: Entry
    twins: Sequence[Source] = ()

    def parts(self, catalog: Catalog, box: Box, into: torch.Tensor, source: Source | None = None) -> list[Part]:
        """The parts to read for a box of the whole tensor."""
        return [
            Part(self.section, name, part, target, self.entry.name)
            for name, target, part in (source or self.source).wanted(into, box, catalog.tensors[self.section])
        ]


@dataclass
class Matching:
    """Compares what is requested with what is stored. Call `match`, which changes nothing, then `allocate`, fill
    `needs`, and call `finish`.

    Args:
        cast: accept a different dtype.
        sources: see `load`.

    Attributes:
        needs: the tensors to fill.
        without_memory: keys of the model's parameters and buffers that are on the meta device.
        missing, unexpected, mismatches: as text; see `Loaded`.
    """

    catalog: Catalog
    world: World
    cast: bool = False
    sources: Sources | None = None
    needs: list[Need] = field(default_factory=list)
    without_memory: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    _finish: list[Callable[[], None]] = field(default_factory=list)
    _before: list[str] = field(default_factory=list)
    _published: Mapping[str, Source] | None = None  # from the model's library, by names of the model

    def match(self, model: Model | None, optimizer: Optimizers | None, strict: bool) -> None:
        """Determine what a model and an optimizer need. Changes nothing.

        Raises:
            MismatchError: this does not match what is stored.
        """
        self._before = list(self.missing)
        self._ask_all(model, optimizer)
        self._check(strict)

    def allocate(self, model: Model | None, optimizer: Optimizers | None) -> None:
        """After a successful match: allocate the model's meta tensors, to be filled instead."""
        if not self.without_memory:
            return
        model = unwrapped(model)
        assert isinstance(model, nn.Module)
        fresh = allocate(model, wanted=frozenset(self.without_memory).__contains__)
        for each in named_optimizers(optimizer).values():
            _move(each, {one.was: one.tensor for one in fresh})
        _warn_of_meta(model)
        for found in (self.needs, self.missing, self.unexpected, self._finish):
            found.clear()
        self.missing += self._before
        self._ask_all(model, optimizer)

    def _ask_all(self, model: Model | None, optimizer: Optimizers | None) -> None:
        model = unwrapped(model)
        if model is not None:
            self._ask("model", model)
        optimizers, held = named_optimizers(optimizer), set[str]()
        if optimizer is not None and self.catalog.kind == DCP:
            raise UnsupportedError(
                f"{self.catalog.path}: of a DCP folder only the model is read, not the optimizer's state. Load both "
                "with torch.distributed.checkpoint (get_state_dict and set_state_dict work with models of fsdp2), and "
                "save them with fsdp2.checkpoint. Or leave optimizer= out, to begin with a fresh state."
            )
        for name, each in optimizers.items():
            held |= self._ask_optimizer(model if isinstance(model, nn.Module) else None, name, each)
        if optimizers:
            groups = [group for table in self.catalog.values.get("optimizer", ()) for group in table["groups"]]
            stored = dict.fromkeys(fqn for group in groups for fqn in group["params"])
            self.unexpected += [f"optimizer state of '{fqn}'" for fqn in stored if fqn not in held]
        elif isinstance(optimizer, Mapping):
            self._ask("optimizer", optimizer)

    def finish(self) -> None:
        """After all needs are filled: load values that are not tensors, and put allocated tensors into the model."""
        for step in self._finish:
            step()

    def _ask(self, section: str, target: Model) -> None:
        """Determine what a model or a dict needs."""
        state = model_state(target, self.world)
        stored = self.catalog.tensors.get(section, {})
        if section == "model" and self._published is None and self.catalog.kind == HUGGING_FACE:
            shapes = {name: entry.tiling.shape for name, entry in state.entries.items()}
            shapes |= {alias: shapes[name] for alias, name in state.aliases.items()}
            said = [name for name in shapes if source_of(name, self.sources) is not None]
            self._published = published_sources(target, shapes, stored, said)
        other_names = self.catalog.aliases.get(section, {})
        tied: dict[str, list[str]] = {}
        for alias, name in state.aliases.items():
            tied.setdefault(name, []).append(alias)
        found: set[str] = set()
        filled = {state.keys[name] for name in (*state.entries, *state.aliases)}
        computed: dict[str, Any] = {}
        for name, entry in state.entries.items():
            source, *twins = self._sources_of(section, (name, *tied.get(name, [])))
            absent = sorted(name for name in source.names() if name not in stored)
            if absent:
                made_of = "" if absent == [name] else f" (made of {', '.join(map(repr, absent))})"
                self.missing.append(f"{section} '{name}'{made_of}{_why(self.catalog, section, absent)}")
                filled -= {state.keys[each] for each in (name, *tied.get(name, []))}
                continue
            found.update(*(each.names() for each in (source, *twins)))
            if name in state.computed:
                entry = self._computed(section, entry, source)
                computed[state.keys[name]] = entry.outside
            if entry.local.is_meta:
                if not isinstance(target, nn.Module):
                    raise ArgumentError(
                        f"load: '{name}' is on the meta device, where there is nothing to fill; allocate it"
                    )
                self.without_memory.append(state.keys[name])
            self._need(section, source, entry, [twin for twin in twins if self._fits(section, twin, entry)])
        given = {name: self._given(section, name) for name in (*state.entries, *state.aliases)}
        known = {*found, *(one for name, source in given.items() for one in (source.names() if source else [name]))}
        self.unexpected += [f"{section} '{name}'" for name in (*stored, *other_names) if name not in known]
        apart = computed | self._ask_values(section, state)
        if isinstance(target, nn.Module):
            self._finish.append(lambda: _finish_model(target, filled, apart))
        else:
            if isinstance(target, MutableMapping):
                self._finish.append(lambda: target.update(apart))
            held = [entry.outside for entry in state.entries.values()]
            self._finish.append(lambda: _filled(each for each in held if isinstance(each, DTensor)))

    def _computed(self, section: str, entry: Entry, source: Source) -> Entry:
        """The entry to fill for a tensor that a module creates for its state dict. A tensor of an extra state may have
        had another shape or dtype when it was saved, so a new one is created."""
        if entry.name.rpartition(".")[2] != EXTRA_STATE or type(entry.outside) is not torch.Tensor:
            return entry
        info = source.info(self.catalog.tensors[section])
        device = "cpu" if entry.local.is_meta else entry.local.device
        made = torch.empty(info.shape, dtype=DTYPES[info.dtype], device=device)
        return entry_of(entry.name, made, self.world, entry.tiling.grid.sorted_ranks)

    def _given(self, section: str, name: str) -> Source | None:
        """The source for a name of the model from the user or from the model's library."""
        if section != "model":
            return None
        return source_of(name, self.sources) or (self._published or {}).get(name)

    def _sources_of(self, section: str, names: Sequence[str]) -> list[Source]:
        """The sources of a tensor with these names: the one that fills it, then those that must have equal values."""
        stored = self.catalog.tensors.get(section, {})
        other_names = self.catalog.aliases.get(section, {})
        sources: dict[Source, None] = {}
        for name in names:
            source = self._given(section, name) or from_stored(name)
            sources.setdefault(source.under(other_names))
        there = [source for source in sources if source.names() <= stored.keys()]
        return there or [next(iter(sources))]

    def _ask_values(self, section: str, state: State) -> dict[str, Any]:
        """Values that are not tensors, by key: `_extra_state` of modules, numbers of a plain dict."""
        stored = {name: value for table in self.catalog.values.get(section, ()) for name, value in table.items()}
        self.missing += [
            f"{section} '{name}'{_why(self.catalog, section, [name])}" for name in state.values if name not in stored
        ]
        left = {name: f" ({why})" for name, why in self.catalog.left_out.get(section, {}).items()}
        self.unexpected += [
            f"{section} '{name}'{left.get(name, '')}"
            for name in (*stored, *left)
            if name not in (state.values if name in stored else state.keys)
        ]
        return {
            state.keys[name]: decode(value, _no_tensor, self.catalog.path)
            for name, value in stored.items()
            if name in state.values
        }

    def _ask_optimizer(self, model: nn.Module | None, name: str, optimizer: torch.optim.Optimizer) -> set[str]:
        """Determine what an optimizer needs. Returns the FQNs under which its parameters are stored."""
        section = "optimizer"
        stored = self.catalog.tensors.get(section, {})
        names, other_names = named_params(model, optimizer), self.catalog.aliases.get("model", {})
        taken = set(names.values())
        target = OptimizerTarget(
            optimizer,
            # If the names of a tied weight had another order when it was saved, its state is stored under another one.
            {param: fqn if (one := other_names.get(fqn, fqn)) in taken else one for param, fqn in names.items()},
            self.world,
            ranks_of(model.parameters() if model else (), self.world),
            self.cast,
        )
        tables = self.catalog.values.get(section, ())
        if any(table.keys().isdisjoint(("kinds", "states", "groups")) for table in tables):
            raise MismatchError(
                f"{self.catalog.path}: the optimizer was saved as a dict, optimizer={{...}}; load it into such a dict"
            )
        try:
            target.prepare(tables_of(name, tables, set(target.names.values())), stored)
        except FSDPError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"{self.catalog.path}: the optimizer's values are malformed ({error!r})") from error
        self.missing += target.missing
        self.mismatches += [target.unfit] if target.unfit else []
        for tensor, entry in target.entries.items():
            self._need(section, from_stored(tensor), entry)
        self._finish.append(target.finish)
        return set(target.names.values())

    def _need(self, section: str, source: Source, entry: Entry, twins: Sequence[Source] = ()) -> None:
        """Request this rank's part of a tensor, if it matches what is stored."""
        if self._fits(section, source, entry):
            self.needs.append(Need(section, source, entry, twins))

    def _fits(self, section: str, source: Source, entry: Entry) -> bool:
        """Whether a source has the shape and dtype of a tensor; records a mismatch."""
        shape, dtype, local = entry.tiling.shape, name_of(entry.local.dtype), entry.local
        # Elements that share memory cannot be filled.
        steps = zip(local.stride(), local.shape, strict=True)
        expanded = not local.is_meta and any(not step and size > 1 for step, size in steps)
        problem = "is expanded here, so its elements share memory and cannot be filled; make it contiguous"
        try:
            info = source.info(self.catalog.tensors[section])
        except MismatchError as error:
            problem = str(error)
        else:
            if info.shape != shape:
                problem = f"stored with shape {list(info.shape)}, here {list(shape)}"
            elif info.dtype != dtype and not self.cast:
                problem = f"stored as {info.dtype}, here {dtype} (cast=True converts)"
            elif not expanded:
                return True
        self.mismatches.append(f"{section} '{entry.name}': {problem}")
        return False

    def _check(self, strict: bool) -> None:
        """Raise a `MismatchError` that lists all mismatches (of names only if `strict`)."""
        problems = [*self.mismatches]
        if strict:
            problems += [f"missing in the checkpoint: {what}" for what in self.missing]
            problems += [f"unexpected in the checkpoint: {what}" for what in self.unexpected]
        if problems:
            shown = "\n  ".join(problems[:50])
            more = f"\n  ... and {len(problems) - 50} more" if len(problems) > 50 else ""
            advice = "" if self.mismatches else "\nstrict=False loads what matches."
            raise MismatchError(f"{self.catalog.path} does not fit:\n  {shown}{more}{advice}")


def _no_tensor(note: Mapping[str, Any]) -> None:
    raise CorruptError(f"a tensor {str(note)[:80]} within a value")


def _why(catalog: Catalog, section: str, names: Iterable[str]) -> str:
    """The reason, if the folder has these names but they cannot be read."""
    left = catalog.left_out.get(section, {})
    return "".join(f" ({left[name]})" for name in names if name in left)


def _move(optimizer: torch.optim.Optimizer, successors: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Replace an optimizer's parameters on the meta device by their successors."""
    for group in optimizer.param_groups:
        group["params"][:] = [successors.get(param, param) for param in group["params"]]
    for param in [param for param in optimizer.state if param in successors]:
        optimizer.state[successors[param]] = optimizer.state.pop(param)


def _warn_of_meta(model: nn.Module) -> None:
    left = [name for name, tensor in tensors_of(model) if tensor.is_meta]
    if left:
        warnings.warn(
            "still on the meta device, since they are not in the checkpoint: "
            f"{', '.join(left[:5])}{', ...' if len(left) > 5 else ''} ({len(left)} in all). Buffers that are not "
            "persistent must be recomputed by their modules.",
            stacklevel=4,
        )


def _filled(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that tensors were filled behind its back."""
    torch.autograd.graph.increment_version([each for each in tensors if not each.is_meta])


def _finish_model(model: nn.Module, filled: set[str], values: Mapping[str, Any]) -> None:
    """After a model's tensors were filled: load the rest through its own code, and everything if it has hooks.

    Args:
        filled: keys of the state dict that the checkpoint has.
        values: values that are not memory of the model (extra state), by key.
    """
    _filled(model.parameters())
    code = [each for module in model.modules() for each in loading_code(module)]
    state: dict[str, Any] = {}
    if not all(str(getattr(each, "__module__", "")).startswith(OWN_HOOKS) for each in code):
        state = model.state_dict()  # with its metadata; filled tensors are copied onto themselves
        for key in [key for key in state if key not in filled]:
            del state[key]
    state.update(values)
    if state:
        model.load_state_dict(state, strict=False)
