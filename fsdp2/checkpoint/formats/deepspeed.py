"""The catalog of a folder of DeepSpeed: ZeRO-1, 2 and 3 as its ranks write them, and "universal" checkpoints.
Layer: checkpoint.

ZeRO lays the parameters of a group end to end and cuts the result into one part per rank. ZeRO-3 pads and cuts every
parameter separately. A rank's file holds its part of the fp32 weights and of the optimizer's states as flat tensors.
``*_model_states.pt`` holds the names and shapes that give them meaning, the buffers and the frozen parameters::

    latest                                     the name of the folder below
    global_step100/
      mp_rank_00_model_states.pt               ZeRO-3: zero_pp_rank_<r>_mp_rank_00_model_states.pt
      zero_pp_rank_<r>_mp_rank_00_optim_states.pt           (bf16_zero_... with bf16 and ZeRO-1)
    global_step100_universal/
      zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt    whole tensors

The weights are the fp32 ones that the optimizer updates, whatever the dtype of the model. Tested with files of
DeepSpeed 0.19. With tensor, pipeline or expert parallelism, only universal checkpoints can be read. Pickles are parsed,
never executed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from fsdp2.checkpoint.formats.deepspeed_states import ModelStates, is_size, states_of
from fsdp2.checkpoint.formats.foreign_state import state_name
from fsdp2.checkpoint.formats.native import read_small
from fsdp2.checkpoint.formats.torch_files import TensorInFile, read_torch_file
from fsdp2.checkpoint.formats.unpickling import shown
from fsdp2.checkpoint.io.catalog import PieceTable, StoredPiece, StoredTensorInfo
from fsdp2.checkpoint.storage.base import Storage, check_file_name
from fsdp2.errors import CorruptError, FSDPError, UnsupportedError

__all__ = ["is_deepspeed", "open_deepspeed"]

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
OTHER_PARALLELISM = re.compile(r"layer_.*_states\.pt|.*expert.*_states\.pt")
LATEST = ("latest", "latest_universal")
# State of bitsandbytes' 8-bit optimizers that is not per element.
TABLES = re.compile(r"(qmap|absmax)\d|[gu]norm_vec")


def is_deepspeed(storage: Storage, path: str) -> bool:
    """Whether the folder is a DeepSpeed checkpoint, or a file ``latest`` in it names one."""
    return _folder(storage, path) is not None


def _folder(storage: Storage, path: str) -> str | None:
    if _matching(storage, path, MODEL_FILE):
        return path
    for name in LATEST:
        file = storage.join(path, name)
        if storage.size(file):
            tag = read_small(storage, file, 4096).decode(errors="replace").strip()
            inner = storage.join(path, check_file_name(tag, file))
            if _is_folder(storage, inner) and _matching(storage, inner, MODEL_FILE):
                return inner
    return None


def _is_folder(storage: Storage, path: str) -> bool:
    """Whether a folder exists. Links do not count, because a checkpoint is only read within its folder."""
    kind = storage.kind(path)
    if kind not in (None, "file", "folder"):
        raise CorruptError(
            f"{path}: is a {kind}, expected a folder; nothing outside of the checkpoint is read. Put the folder itself "
            "there, or load from where it is."
        )
    return kind == "folder"


def _matching(storage: Storage, path: str, pattern: re.Pattern[str]) -> dict[int, str]:
    """Files of the first model-parallel rank, by data-parallel rank."""
    found = {}
    for name in storage.names(path):
        match = pattern.fullmatch(name)
        if match and int(match[2]) == 0:
            found[int(match[1] or 0)] = name
    return dict(sorted(found.items()))


def open_deepspeed(storage: Storage, path: str) -> PieceTable:
    """Read the headers of all files.

    Raises:
        CorruptError: a file is missing or damaged.
        UnsupportedError: it was saved with tensor, pipeline or expert parallelism, and is not universal.
    """
    folder = _folder(storage, path) or path
    try:
        return _opened(storage, folder)
    except (TypeError, AttributeError, IndexError, KeyError, ValueError) as error:
        if isinstance(error, FSDPError):
            raise
        raise CorruptError(f"{folder}: is malformed ({type(error).__name__}: {error})") from error


def _opened(storage: Storage, folder: str) -> PieceTable:
    files = _matching(storage, folder, MODEL_FILE)
    states = [states_of(storage, storage.join(folder, name)) for name in files.values()]
    whole = next(iter(files.values())).startswith("mp_rank_")
    zero = storage.join(folder, "zero")
    if _is_folder(storage, zero) and storage.names(zero):
        return _Universal(storage, folder, states, whole).catalog()
    others = [name for name in storage.names(folder) if OTHER_PARALLELISM.fullmatch(name)]
    if states[0].get("mp_world_size", 1) != 1 or others:
        raise UnsupportedError(
            f"{folder}: was saved with tensor, pipeline or expert parallelism. Convert it with DeepSpeed's "
            "ds_to_universal.py, and load the universal checkpoint."
        )
    return _RankFiles(storage, folder, states, whole).catalog()


@dataclass(frozen=True, slots=True)
class _Fragment:
    """Where elements ``at..at + count`` of a parameter are stored.

    Attributes:
        rank, group: identify the flat tensor.
        first: the first element in it.
    """

    rank: int
    group: int
    first: int
    count: int
    at: int


@dataclass
class _RankFiles(ModelStates):
    """ZeRO's own files.

    Attributes:
        files: the optimizer's files, by rank.
        weights: flat fp32 tensors, by rank, then by group.
        flats: flat tensors of the state, by (group, kind such as "exp_avg"), then by rank.
        scalars: the number of steps, by group.
    """

    files: list[str] = field(default_factory=list)
    weights: list[list[TensorInFile]] = field(default_factory=list)
    flats: dict[tuple[int, str], dict[int, TensorInFile]] = field(default_factory=dict)
    scalars: dict[int, Any] = field(default_factory=dict)

    def catalog(self) -> PieceTable:
        """See `open_deepspeed`."""
        files = _matching(self.storage, self.folder, OPTIMIZER_FILE)
        self.files = [self.storage.join(self.folder, name) for name in files.values()]
        parts = [self._inner(file) for file in self.files]
        if not parts or [*files] != list(range(len(parts))):
            raise CorruptError(f"{self.folder}: has files *_optim_states.pt of ranks {[*files]}")
        counts = parts[0].get("partition_count")
        expected = max(counts) if isinstance(counts, list) else counts
        if expected != len(parts):
            raise CorruptError(f"{self.folder}: has {len(parts)} files *_optim_states.pt of {expected} ranks")
        stage = 3 if "fp32_flat_groups" in parts[0] else 2
        if stage == 3 and len(self.states) != len(parts):
            raise CorruptError(f"{self.folder}: has {len(self.states)} files *_model_states.pt of {len(parts)} ranks")
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        self._collect(parts, key, "optimizer_state_dict" if stage == 3 else "base_optimizer_state")
        table = self.table(f"DeepSpeed ZeRO-{'3' if stage == 3 else '1/2'}")
        groups = self.shapes()
        fragments = self._cut_each(groups) if stage == 3 else self._cut_groups(groups, parts)
        for name, (shape, where) in fragments.items():
            self._add(table, name, shape, where)
        members: dict[int, list[str]] = {}
        for name, (_, where) in fragments.items():
            members.setdefault(where[0].group if where else 0, []).append(name)
        for flat, names in members.items():
            for name in names:
                self.add_scalar(name, self.scalars.get(flat), table)
        inner = parts[0].get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
        self.add_options(inner.get("param_groups") if isinstance(inner, dict) else None, members)
        return self.finish(table)

    def _inner(self, file: str) -> dict[str, Any]:
        content = states_of(self.storage, file).get("optimizer_state_dict")
        if not isinstance(content, dict):
            raise CorruptError(f"{file}: has no optimizer_state_dict")
        return content

    def _collect(self, parts: list[dict[str, Any]], weights: str, states: str) -> None:
        """Find the flat tensors. All ranks must have the same kinds of state for a group."""
        self.weights = [self._flat(part.get(weights), rank) for rank, part in enumerate(parts)]
        for rank, part in enumerate(parts):
            inner = part.get(states)
            by_group = inner.get("state") if isinstance(inner, dict) else {}
            for number, weight in enumerate(self.weights[rank]):
                for kind, value in ((by_group or {}).get(number) or {}).items():
                    if kind == "step":
                        self.scalars.setdefault(number, value)
                    elif _is_flat(value) and not TABLES.fullmatch(str(kind)):
                        if value.shape[0] < weight.shape[0]:  # longer is fine: only one of them may be padded
                            raise self._incomplete(rank, number, str(kind), f"only {value.shape[0]} elements")
                        self.flats.setdefault((number, str(kind)), {})[rank] = value
        for (number, kind), found in self.flats.items():
            for rank, groups in enumerate(self.weights):
                if rank not in found and number < len(groups) and groups[number].shape[0]:
                    raise self._incomplete(rank, number, kind, f"none, and rank {next(iter(found))} has it")

    def _incomplete(self, rank: int, group: int, kind: str, got: str) -> CorruptError:
        return CorruptError(
            f"{self.files[rank]}: of the flat tensor '{kind}' of group {group} there are {got}; expected "
            f"{self.weights[rank][group].shape[0]} elements, as of the fp32 weights. Copy the file again, or load an "
            "earlier checkpoint."
        )

    def _flat(self, tensors: Any, rank: int) -> list[TensorInFile]:
        tensors = tensors if isinstance(tensors, list) else []
        flat = [tensor for tensor in tensors if _is_flat(tensor)]
        if not flat or len(flat) != len(tensors):
            raise CorruptError(f"{self.files[rank]}: lacks ZeRO's flat fp32 weights")
        return flat

    def _cut_each(self, groups: list[dict[str, tuple[int, ...]]]) -> dict[str, tuple[tuple[int, ...], list[_Fragment]]]:
        """ZeRO-3: every parameter in equal parts, the last one padded. A rank holds its parts of all parameters end to
        end."""
        world = len(self.weights)
        result = {}
        offset = 0
        for name, shape in ((name, shape) for group in groups for name, shape in group.items()):
            numel = prod(shape)
            part = -(-numel // world)
            where: list[_Fragment] = []
            for rank, weights in enumerate(self.weights):
                count = min(part, max(numel - rank * part, 0))
                where += _within(weights, rank, offset, count, rank * part)
            offset += part
            result[name] = shape, where
        return result

    def _cut_groups(
        self, groups: list[dict[str, tuple[int, ...]]], parts: list[dict[str, Any]]
    ) -> dict[str, tuple[tuple[int, ...], list[_Fragment]]]:
        """ZeRO-1 and 2: the parameters of a group end to end, some with padding, cut into one part per rank.

        (``param_slice_mappings`` in the ranks' files holds the same, but is wrong with ``round_robin_gradients``.)
        """
        result = {}
        paddings = parts[0].get("param_alignment_paddings")
        for group, shapes in enumerate(groups):
            offset = 0
            for index, (name, shape) in enumerate(shapes.items()):
                numel, where = prod(shape), []
                first, at = offset, 0
                for rank, weights in enumerate(self.weights):
                    size = weights[group].shape[0]
                    taken = min(numel - at, max(size - first, 0))
                    if taken:
                        where.append(_Fragment(rank, group, first, taken, at))
                        at, first = at + taken, first + taken
                    first -= size
                result[name] = shape, where
                padding = paddings[group][index] if paddings else 0
                if not is_size(padding):
                    raise CorruptError(
                        f"{self.files[0]}: the padding after '{name}' is {shown(padding)}; expected a number from 0"
                    )
                offset += numel + padding
        return result

    def _add(self, table: PieceTable, name: str, shape: tuple[int, ...], where: list[_Fragment]) -> None:
        """A parameter and its states."""
        found = sum(fragment.count for fragment in where)
        if found != prod(shape):
            raise CorruptError(f"{self.folder}: of '{name}' {list(shape)} the ranks have {found} elements")
        table.add("model", name, *self._part("fp32", name, shape, where))
        groups = {fragment.group for fragment in where} or {0}
        for kind in dict.fromkeys(kind for group, kind in self.flats if group in groups):
            info, pieces = self._part(kind, name, shape, where)
            self.optimizer.add_state(name, (kind,), info)
            table.add("optimizer", state_name((kind,), name), info, pieces)

    def _part(
        self, kind: str, name: str, shape: tuple[int, ...], where: list[_Fragment]
    ) -> tuple[StoredTensorInfo, list[StoredPiece]]:
        """A parameter, or a state of it."""
        pieces: list[StoredPiece] = []
        dtype = self.weights[0][0].dtype
        for number, one in enumerate(where):
            weights = self.weights[one.rank][one.group]
            flat = weights if kind == "fp32" else self.flats.get((one.group, kind), {}).get(one.rank)
            dtype = dtype if flat is None or number else flat.dtype
            if flat is None or one.first + one.count > flat.shape[0] or flat.dtype != dtype:
                raise CorruptError(
                    f"{self.files[one.rank]}: lacks its part of the {kind} of '{name}', {one.count} elements {dtype}"
                )
            pieces += flat.elements(one.first, one.first + one.count, shape, one.at)
        return StoredTensorInfo(dtype, shape), pieces


def _within(groups: list[TensorInFile], rank: int, first: int, count: int, at: int) -> Iterator[_Fragment]:
    """Elements ``first..first + count`` of flat tensors that are laid end to end."""
    for group, tensor in enumerate(groups):
        size = tensor.shape[0]
        taken = min(count, max(size - first, 0))
        if taken:
            yield _Fragment(rank, group, first, taken, at)
            at, count, first = at + taken, count - taken, first + taken
        first -= size


def _is_flat(value: Any) -> bool:
    return isinstance(value, TensorInFile) and len(value.shape) == 1 and value.contiguous


@dataclass
class _Universal(ModelStates):
    """A universal checkpoint: a folder for each parameter, with whole tensors."""

    def catalog(self) -> PieceTable:
        """See `open_deepspeed`."""
        table = self.table("DeepSpeed universal")
        groups = self.shapes()
        shapes = {name: shape for group in groups for name, shape in group.items()}
        zero = self.storage.join(self.folder, "zero")
        for name in self.storage.names(zero):
            folder = self.storage.join(zero, name)
            known = name in table.tensors["model"] or name in table.aliases["model"]
            if _is_folder(self.storage, folder) and not known:
                self._add(table, folder, name, shapes.get(name))
        file = self.storage.join(zero, "optimizer_state.pt")
        if self.storage.size(file) is not None:
            state = states_of(self.storage, file)
            members = {number: list(group) for number, group in enumerate(groups)}
            inner = state.get("optimizer_state_dict")
            for number, values in ((inner.get("state") if isinstance(inner, dict) else None) or {}).items():
                for name in members.get(number, []):
                    if state_name(("step",), name) not in table.tensors["optimizer"]:
                        self.add_scalar(name, values.get("step"), table)
            self.add_options(state.get("param_groups"), members)
        return self.finish(table)

    def _add(self, table: PieceTable, folder: str, name: str, shape: tuple[int, ...] | None) -> None:
        """Add a parameter and its states, all stored with one shape: that of the parameter, or flat (ZeRO-3)."""
        found = {file.removesuffix(".pt"): file for file in self.storage.names(folder) if file.endswith(".pt")}
        if "step" in found:
            self.add_scalar(name, self._content(folder, found.pop("step")), table)
        tensors = {kind: self._tensor(folder, file) for kind, file in found.items()}
        if tensors and "fp32" not in tensors:
            raise CorruptError(f"{folder}: has {[*found.values()]}, expected fp32.pt too; copy the folder again")
        for kind, tensor in tensors.items():
            stored = tensors["fp32"].shape
            if tensor.shape != stored:
                raise CorruptError(
                    f"{self.storage.join(folder, found[kind])}: has shape {list(tensor.shape)}, expected "
                    f"{list(stored)}, as of fp32.pt beside it. Copy these files again, or load an earlier checkpoint."
                )
            # With tensor parallelism `shape` is that of a rank's part, while the stored tensor is whole.
            whole = shape if shape is not None and prod(shape) == prod(stored) else stored
            info = StoredTensorInfo(tensor.dtype, whole)
            pieces = tensor.elements(0, prod(whole), whole, 0)
            if kind == "fp32":
                table.add("model", name, info, pieces)
            else:
                self.optimizer.add_state(name, (kind,), info)
                table.add("optimizer", state_name((kind,), name), info, pieces)

    def _content(self, folder: str, file: str) -> Any:
        path = self.storage.join(folder, file)
        reader = self.storage.open_file(path)
        try:
            return read_torch_file(reader, path)
        finally:
            reader.close()

    def _tensor(self, folder: str, file: str) -> TensorInFile:
        content = self._content(folder, file)
        tensor = content.get("param") if isinstance(content, dict) else content
        if not isinstance(tensor, TensorInFile) or not tensor.contiguous:
            raise CorruptError(
                f"{self.storage.join(folder, file)}: should be a tensor, row by row, and is {shown(content)}"
            )
        return tensor
