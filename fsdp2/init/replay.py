"""Fill a model from a tape: restore each recorded tensor that it holds, and keep what this rank owns. Layer: init.

Everything is looked up and checked before anything changes. Then the model is filled cell by cell: only one sharded
parameter (with all that share its memory) is whole at a time, and it is freed before the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from fsdp2._torch import local_tensor, make_parameter, parameter_slots, split_factor, subclassed_parameter
from fsdp2.errors import ArgumentError, OrderError, UnsupportedError
from fsdp2.init.allocation import become
from fsdp2.init.ledger import Ledger
from fsdp2.init.restore import restore
from fsdp2.init.tape import Cell, Tape, Window
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.root import units_below
from fsdp2.runtime.shard_memory import Places
from fsdp2.runtime.slot import Slot
from fsdp2.runtime.tree import map_tensors, tensors_in

__all__ = ["fill"]


@torch.no_grad()
def fill(module: nn.Module, tape: Tape, ledger: Ledger, device: torch.device | None) -> None:
    """See `Recording.replay`."""
    units = units_below(module)
    search = _Search(module, tape, ledger, device)
    for unit in units:
        for param in unit.params:
            search.sharded(param)
    managed = {param.sharded for unit in units for param in unit.params}
    search.unsharded(managed)
    search.buffers(device or (units[0].device if units else None))
    search.attributes()
    if search.missing:
        raise ArgumentError(
            f"replay: on the meta device, but not made within this recording, or replaced since: {search.missing}. "
            "Build, convert, copy and tie within the context; or materialise these by other means first."
        )
    if not search.targets and search.already_real and not ledger.has_replayed:
        raise OrderError(
            "replay: no parameter is on the meta device any more, so none was filled. Call replay instead of "
            "to_empty(), not after it."
        )
    by_cell: dict[Cell, list[_Target]] = {}
    for target in search.targets:
        by_cell.setdefault(target.window.cell, []).append(target)
    for targets in by_cell.values():
        _fill_cell(targets, tape)
    search.mend_attributes()
    for unit in units:
        unit.refresh_groups()
    ledger.has_replayed = True


def _fill_cell(targets: "Sequence[_Target]", tape: Tape) -> None:
    for target, whole in zip(targets, restore(tape, [each.window for each in targets], tape.now), strict=True):
        target.put(whole)


@dataclass(frozen=True)
class _Target:
    """A tensor of the model to be filled, and how."""

    window: Window
    put: Callable[[torch.Tensor], None]


class _Search:
    """The tensors to fill in a module.

    Attributes:
        targets: these tensors, sharded parameters first, in the order of the units.
        missing: names of tensors on the meta device that are not on the tape.
        already_real: whether a recorded parameter is no longer on the meta device.
    """

    def __init__(self, module: nn.Module, tape: Tape, ledger: Ledger, device: torch.device | None):
        self.targets: list[_Target] = []
        self.missing: list[str] = []
        self.already_real = False
        self._module = module
        self._names = {each: name for name, each in module.named_modules()}
        self._tape = tape
        self._ledger = ledger
        self._device = device
        self._by_managed = ledger.managed()
        self._planned: set[torch.Tensor] = set()
        self._places = Places(
            [param for param in group.params if param.sharded.is_meta]
            for unit in units_below(module)
            for group in unit.groups
        )
        self._filled: dict[torch.Tensor, torch.Tensor] = {}  # what replaced the stand-ins

    def _fqn(self, module: nn.Module | None, name: str) -> str:
        prefix = "" if module is None else self._names.get(module, "")
        return f"{prefix}.{name}" if prefix else name

    def _add(self, stand_in: torch.Tensor, window: Window, put: Callable[[torch.Tensor], None]) -> None:
        self._planned.add(stand_in)
        self.targets.append(_Target(window, put))

    # --- looking up --------------------------------------------------------------------------------------------------

    def sharded(self, param: ManagedParameter) -> None:
        """A parameter that a unit manages."""
        recorded = self._by_managed.get(param)
        if not param.sharded.is_meta:
            self.already_real |= self._ledger.knows(param.slots)
            return
        fqn = self._fqn(param.slots[0].module, param.slots[0].name)
        recorded = recorded or self._ledger.at(param.slots)
        if recorded is None:
            self.missing.append(fqn)
            return
        window = recorded.check(fqn, param.plan.specs.shape)
        _check_placements(fqn, param.plan.specs.inner_placements)
        self._add(param.sharded, window, partial(_put_rows, param, self._places))

    def unsharded(self, managed: set[nn.Parameter]) -> None:
        """The parameters that no unit at or below the module manages."""
        places: dict[nn.Parameter, list[Slot]] = {}
        for module in self._module.modules():
            for name, param in parameter_slots(module).items():
                if param is not None and param not in managed:
                    places.setdefault(param, []).append(Slot(module, name))
        for param, slots in places.items():
            if not param.is_meta:
                self.already_real |= self._ledger.knows(slots)
                continue
            fqn = self._fqn(slots[0].module, slots[0].name)
            recorded = self._ledger.at(slots) if isinstance(param, DTensor) else self._ledger.get(param)
            # Another storage in the same object: it was converted or set after the recording.
            is_same = isinstance(param, DTensor) or (recorded and recorded.window == self._tape.window_of(param))
            if recorded is None or not is_same:
                self.missing.append(fqn)
            else:
                window = recorded.check(fqn, tuple(param.shape))
                self._add(param, window, partial(self._put_whole, param, slots))

    def buffers(self, device: torch.device | None) -> None:
        """The buffers of all modules."""
        places: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
        for module in self._module.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if buffer.is_meta:
                    places.setdefault(buffer, []).append((module, name))
        for buffer, holders in places.items():
            window = self._tape.window_of(buffer)
            if window is None:
                self.missing.append(self._fqn(*holders[0]))
            else:
                self._add(buffer, window, partial(self._put_buffer, buffer, holders, device))

    def attributes(self) -> None:
        """Tensors that modules hold as plain attributes."""
        for module in self._module.modules():
            for value in _attributes(module).values():
                for tensor in tensors_in(value):
                    window = self._tape.window_of(tensor)
                    # A parameter in a list is also held by a module, and filled there; if it is sharded, it is stale.
                    if window is not None and tensor not in self._planned and not isinstance(tensor, nn.Parameter):
                        self._add(tensor, window, partial(self._keep, tensor))

    # --- filling -----------------------------------------------------------------------------------------------------

    def _put_whole(self, param: nn.Parameter, slots: Sequence[Slot], whole: torch.Tensor) -> None:
        new: nn.Parameter
        if isinstance(param, DTensor):
            rows = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
            new = nn.Parameter(rows, requires_grad=param.requires_grad)
        else:
            new = subclassed_parameter(type(param), self._moved(whole), param.requires_grad)
        new.__dict__.update(param.__dict__)
        self._filled[param] = held = become(param, new)
        for slot in slots:
            slot.put(held)

    def _put_buffer(
        self,
        buffer: torch.Tensor,
        holders: Sequence[tuple[nn.Module, str]],
        device: torch.device | None,
        whole: torch.Tensor,
    ) -> None:
        new = whole if device is None else whole.to(device)
        self._keep(buffer, new)
        for module, name in holders:
            setattr(module, name, new)

    def _keep(self, stand_in: torch.Tensor, whole: torch.Tensor) -> None:
        self._filled[stand_in] = whole if stand_in in self._filled else self._moved(whole)
        self._filled[stand_in].requires_grad_(stand_in.requires_grad)

    def _moved(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if self._device is None else whole.to(self._device)

    def mend_attributes(self) -> None:
        """Replace stand-ins in plain attributes by the tensors that were filled for them."""
        for module in self._module.modules():
            for name, value in _attributes(module).items():
                mended = map_tensors(lambda tensor: self._filled.get(tensor, tensor), value)
                if mended is not value:
                    setattr(module, name, mended)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module other than parameters, buffers and submodules."""
    own = {"_parameters", "_buffers", "_modules"}
    return {name: value for name, value in vars(module).items() if name not in own}


# --- one sharded parameter --------------------------------------------------------------------------------------------


def _check_placements(fqn: str, placements: Sequence[Placement]) -> None:
    for placement in placements:
        if not placement.is_replicate() and split_factor(placement) != 1:
            raise UnsupportedError(f"replay: '{fqn}' has placement {placement}; expected Shard or Replicate")


def _put_rows(param: ManagedParameter, places: Places, whole: torch.Tensor) -> None:
    """Put this rank's rows of the whole tensor into new memory on the shards' device, with their padding."""
    specs, before = param.plan.specs, param.sharded
    if specs.inner_mesh is not None:
        whole = _model_parallel_part(whole, specs.inner_mesh, specs.inner_placements)
    rows = param.geometry.cut(whole)
    new = places.parameter_for(param)
    if new is None:
        local = param.geometry.from_memory(rows.to(param.plan.home, copy=True, memory_format=torch.contiguous_format))
        new = make_parameter(local, specs.sharded(param.dtype), before.requires_grad)
        new.__dict__.update(before.__dict__)
    else:
        param.geometry.to_memory(local_tensor(new)).copy_(rows)
    param.put(become(before, new))
    param.refresh()


def _model_parallel_part(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """The part of this rank along the model-parallel axes; a view."""
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            dim: int = placement.dim  # type: ignore[attr-defined]
            chunks, index = whole.chunk(mesh.size(axis), dim), mesh.get_local_rank(axis)
            whole = chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)
    return whole
