"""The model files of a DeepSpeed checkpoint: buffers, frozen and shared parameters, shapes. Layer: checkpoint.

See `deepspeed.py`.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

from fsdp2.checkpoint.formats.foreign_state import ForeignOptimizer, state_name
from fsdp2.checkpoint.formats.torch_files import TensorInFile, read_torch_file
from fsdp2.checkpoint.formats.unpickling import plain, shown
from fsdp2.checkpoint.io.catalog import PieceTable, StoredPiece, StoredTensorInfo
from fsdp2.checkpoint.schema.header import MAX_DIMS
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.errors import ArgumentError, CorruptError

__all__ = ["ModelStates", "is_size", "states_of"]


def states_of(storage: Storage, file: str) -> dict[str, Any]:
    """The content of a file, which must be a dict."""
    reader = storage.open_file(file)
    try:
        content = read_torch_file(reader, file)
    finally:
        reader.close()
    if not isinstance(content, dict):
        raise CorruptError(f"{file}: is not a file of DeepSpeed")
    return content


def is_size(value: Any) -> bool:
    """Whether a value may be a size, or a number of elements or steps."""
    return type(value) is int and 0 <= value < 1 << 63


@dataclass
class ModelStates:
    """The content of the files ``*_model_states.pt``, which all kinds of checkpoints have.

    Attributes:
        states: content of these files, by rank.
        whole_module: whether the model's values in them are whole (ZeRO-1 and 2), although not in fp32.
        optimizer: collects the state of the optimizer.
    """

    storage: Storage
    folder: str
    states: list[dict[str, Any]]
    whole_module: bool
    optimizer: ForeignOptimizer = field(default_factory=ForeignOptimizer)

    def table(self, kind: str) -> PieceTable:
        """A catalog with buffers and frozen parameters."""
        step = self.states[0].get("global_steps")
        table = PieceTable(self.storage, self.folder, kind, step if is_size(step) else None)
        table.tensors.update(model={}, optimizer={})
        module = self.states[0].get("module") or {}
        for name in self.states[0].get("buffer_names") or ():
            if name in module:
                _add_whole(table, name, module[name])
        for name, shape in (self.states[0].get("frozen_param_shapes") or {}).items():
            self._add_frozen(table, name, self._shape(name, shape))
        aliases = self.states[0].get("shared_params") or {}
        table.aliases = {"model": {str(name): str(other) for name, other in aliases.items()}}
        return table

    def _add_frozen(self, table: PieceTable, name: str, shape: tuple[int, ...]) -> None:
        """Add a frozen parameter, stored whole in the first file, or in parts in all of them."""
        pieces: list[StoredPiece] = []
        at, dtype = 0, ""
        for state in self.states:
            tensor = (state.get("frozen_param_fragments") or {}).get(name)
            if not isinstance(tensor, TensorInFile) or not tensor.contiguous:
                raise CorruptError(f"{self.folder}: the frozen parameter '{name}' is not stored by all ranks")
            count = min(prod(tensor.shape), prod(shape) - at)
            pieces += tensor.elements(0, count, shape, at)
            at, dtype = at + count, tensor.dtype
        if at != prod(shape):
            raise CorruptError(f"{self.folder}: of the frozen parameter '{name}' {list(shape)} there are {at} elements")
        table.add("model", name, StoredTensorInfo(dtype, shape), pieces)

    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """The parameters of each group, in their order."""
        groups = self.states[0].get("param_shapes") or []
        groups = [groups] if isinstance(groups, dict) else groups
        return [{str(name): self._shape(name, shape) for name, shape in group.items()} for group in groups]

    def _shape(self, name: str, shape: Any) -> tuple[int, ...]:
        """A parameter's shape, as read from a file."""
        sizes = shape if type(shape) in (tuple, list) else ()
        if sizes is not shape or len(sizes) > MAX_DIMS or not all(is_size(size) for size in sizes):
            got = f"({', '.join(shown(size) for size in sizes[:8])})" if sizes else shown(shape)
            raise CorruptError(
                f"{self.folder}: the files *_model_states.pt give '{name}' the shape {got}; expected at most "
                f"{MAX_DIMS} sizes, each a number from 0. Copy these files again, or load an earlier checkpoint."
            )
        return tuple(sizes)

    def add_options(self, param_groups: Any, members: Mapping[int, Iterable[str]]) -> None:
        """Add the options of each parameter.

        Args:
            param_groups: of the inner optimizer, whose parameters are the flat tensors, by number.
            members: the parameters in each flat tensor.
        """
        for number, group in enumerate(param_groups if isinstance(param_groups, list) else []):
            if not isinstance(group, dict):
                continue
            numbers = group.get("params")
            for flat in numbers if isinstance(numbers, list) else [number]:
                for fqn in members.get(flat, ()):
                    for name, value in group.items():
                        if name == "step":
                            self.add_scalar(fqn, value)
                        else:
                            with suppress(CorruptError):  # not plain data: the loading optimizer keeps its own value
                                self.optimizer.add_option(fqn, str(name), plain(value, self.folder))

    def add_scalar(self, fqn: str, value: Any, table: PieceTable | None = None) -> None:
        """Add the number of steps of a parameter: a number, or a 0-dim tensor."""
        if isinstance(value, TensorInFile) and table is not None and not value.shape:
            info = StoredTensorInfo(value.dtype, ())
            self.optimizer.add_state(fqn, ("step",), info)
            table.add("optimizer", state_name(("step",), fqn), info, value.pieces())
        elif type(value) in (int, float):
            self.optimizer.add_step(fqn, value)

    def finish(self, table: PieceTable) -> PieceTable:
        """The table, with the optimizer's values, and parameters that are neither trained nor listed as frozen."""
        module = self.states[0].get("module") if self.whole_module else None
        for name, tensor in (module or {}).items():
            if name not in table.tensors["model"] and name not in table.aliases["model"]:
                _add_whole(table, name, tensor)
        shapes = {name: info.shape for name, info in table.tensors["model"].items()}
        try:
            table.values = {"model": [], "optimizer": [self.optimizer.table(shapes)]}
        except ArgumentError as error:
            raise CorruptError(f"{self.folder}: the optimizer's options are not plain data ({error})") from error
        return table


def _add_whole(table: PieceTable, name: str, tensor: Any) -> None:
    """Add a tensor that one file has whole."""
    if isinstance(tensor, TensorInFile):
        table.add("model", name, StoredTensorInfo(tensor.dtype, tensor.shape), tensor.pieces())
    else:
        table.leave_out("model", name, f"{shown(tensor)}, not a tensor that can be read")
