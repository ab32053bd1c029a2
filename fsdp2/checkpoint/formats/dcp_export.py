"""Write any checkpoint as a folder of `torch.distributed.checkpoint` (DCP), in one process. Layer: checkpoint.

torch's own writer creates the files chunk by chunk, so tensors may be larger than memory. The keys are "model" and
"optimizer". The options of the param groups are stored both nested and flattened, so that either form of the state dict
of `torch.distributed.checkpoint.state_dict` finds them.

During training, with the tensors in memory, use torch itself: our state dicts are plain dicts of DTensors.
"""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fsdp2.checkpoint.formats.foreign_state import Path
from fsdp2.checkpoint.io.catalog import Catalog, StoredTensorInfo
from fsdp2.checkpoint.io.reading import Request, read_all
from fsdp2.checkpoint.schema.dtypes import DTYPES, ITEMSIZES
from fsdp2.checkpoint.schema.tree import decode
from fsdp2.checkpoint.state.model import within
from fsdp2.checkpoint.state.optimizer import check_table
from fsdp2.errors import CheckpointError, CorruptError
from fsdp2.placement.box import Box, Cover, whole

__all__ = ["CHUNK_BYTES", "write_dcp"]

CHUNK_BYTES = 64 << 20  # per chunk, of which at most two are in memory at a time


def write_dcp(catalog: Catalog, folder: str, verify: bool = True) -> None:
    """Write all tensors and values of a checkpoint to `folder`, durably. One process calls this.

    The extra state is left out, because only the program that saved it knows what it means.

    Args:
        folder: a local folder that does not exist, or is empty. The ``.metadata``, which makes it a checkpoint, is
            written last.
        verify: check what is read against its checksums.

    Raises:
        CheckpointError: the folder is a checkpoint already.
        CorruptError: the source is damaged.

    Example::

        storage, path = storage_of("runs/a/step-00001000")
        write_dcp(open_catalog(storage, path), "runs/a-dcp")
        # then, with torch: dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id="runs/a-dcp")
    """
    content = _Content(catalog)
    writer = _Writer(folder, content.aliases)
    if writer.has_checkpoint():
        raise CheckpointError(f"{folder}: is a checkpoint already; write to a new folder")
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(SavePlan(content.plan()))
    plans, metadata = create_default_global_save_plan([plan])
    metadata = replace(metadata, planner_data=content.paths)
    results = writer.write_data(writer.prepare_global_plan(plans)[0], _Planner(content, verify)).wait()
    writer.finish(metadata, [results])


@dataclass
class _Content:
    """What will be written, by DCP's names.

    Attributes:
        tensors: name -> (section, name in the catalog, dtype and shape).
        values: name -> a value that is not a tensor of the catalog, or a 0-dim tensor.
        paths: name -> the parts of its path; DCP calls this planner data.
        aliases: name -> the name under which its values are written.
    """

    catalog: Catalog
    tensors: dict[str, tuple[str, str, StoredTensorInfo]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        catalog = self.catalog
        for section, tensors in catalog.tensors.items():
            tables = catalog.values.get(section, ())
            by_state = section == "optimizer" and any("forms" in table for table in tables)
            values = tuple(f"{name}/" for table in tables for name in table)
            for name, info in tensors.items() if not by_state else ():
                if not name.startswith(values):
                    self.tensors[self._key(section, name)] = section, name, info
        for section, names in catalog.aliases.items():
            for alias, name in names.items():
                self.aliases[self._key(section, alias)] = f"{section}.{name}"
        number = 0
        for section, tables in catalog.values.items():
            for table in tables:
                if section == "optimizer" and "forms" in table:
                    check_table(table)
                    self._add_states(table)
                    number = self._add_groups(table["groups"], number)
                else:
                    for name, value in table.items():
                        self._add_value(section, name, value)
        if catalog.step is not None:
            self.values[self._key("step")] = catalog.step

    def _key(self, *path: str | int) -> str:
        """The name of a path, which is added to `paths`."""
        name = ".".join(map(str, path))
        self.paths.setdefault(name, path)
        return name

    def _plain(self, value: Any) -> Any:
        return decode(value, _scalar, self.catalog.path)

    def _add_value(self, section: str, name: str, value: Any) -> None:
        """Add a value that is not a tensor. A dict is added item by item, as torch's planner stores it and looks for
        it. What the planner cannot express is lost, as in torch: keys become strings, nested empty dicts disappear."""
        places: dict[torch.Tensor, str] = {}

        def stand_in(note: dict[str, Any]) -> torch.Tensor:
            if "value" in note:
                return _scalar(note)
            own = within(name, str(note["$tensor"]))
            info = self.catalog.tensors.get(section, {}).get(own)
            if info is None:
                raise CorruptError(f"{self.catalog.path}: {section} '{own}' is needed but missing")
            tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta")
            places[tensor] = own
            return tensor

        whole_value = decode(value, stand_in, self.catalog.path)
        planner = DefaultSavePlanner()
        planner.set_up_planner({section: {name: whole_value}})
        items, paths = planner.state_dict, planner.mappings
        if not items:  # an empty dict
            items, paths = {f"{section}.{name}": whole_value}, {f"{section}.{name}": (section, name)}
        for key, item in items.items():
            self.paths.setdefault(key, paths[key])
            if isinstance(item, torch.Tensor) and item in places:
                own = places[item]
                self.tensors[key] = section, own, self.catalog.tensors[section][own]
            else:
                self.values[key] = self._filled(section, item, places)

    def _filled(self, section: str, item: Any, places: Mapping[torch.Tensor, str]) -> Any:
        """An item with its tensors instead of their stand-ins. Tensors in a tuple are stored with the tuple."""
        if isinstance(item, torch.Tensor) and item in places:
            own = places[item]
            return self._read(section, own, whole(item.shape), True)
        if isinstance(item, (list, tuple)):
            return type(item)([self._filled(section, one, places) for one in item])
        if isinstance(item, dict):
            return {key: self._filled(section, one, places) for key, one in item.items()}
        return item

    def _add_states(self, table: Mapping[str, Any]) -> None:
        stored = self.catalog.tensors["optimizer"]
        for fqn, number in table["states"].items():
            for path, value in _leaves(table["forms"][number]):
                key = self._key("optimizer", "state", fqn, *path)
                if isinstance(value, dict) and "$tensor" in value and "value" not in value:
                    name = f"{value['$tensor']}.{fqn}"
                    if name not in stored:
                        raise CorruptError(f"{self.catalog.path}: names the optimizer's '{name}' but does not have it")
                    self.tensors[key] = "optimizer", name, stored[name]
                else:
                    self.values[key] = self._plain(value)

    def _add_groups(self, groups: list[dict[str, Any]], first: int) -> int:
        for number, group in enumerate(groups, start=first):
            self.values[self._key("optimizer", "param_groups", number, "params")] = list(group["params"])
            for option, value in group["options"].items():
                plain = self._plain(value)
                self.values[self._key("optimizer", "param_groups", number, option)] = plain
                for fqn in group["params"]:
                    self.values[self._key("optimizer", f"param_groups.{fqn}.{option}")] = plain
        return first + len(groups)

    def plan(self) -> list[WriteItem]:
        """All items, tensors in chunks."""
        items = []
        for name, value in self.values.items():
            if isinstance(value, torch.Tensor):
                items.append(_write_item(name, value.dtype, Box((), ()), ()))
            else:
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        for name, (_, _, info) in self.tensors.items():
            for box in _chunks(whole(info.shape), ITEMSIZES[info.dtype]):
                items.append(_write_item(name, DTYPES[info.dtype], box, info.shape))
        return items

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...], verify: bool) -> torch.Tensor:
        """Read a chunk."""
        if name in self.values:
            scalar: torch.Tensor = self.values[name]
            return scalar
        section, own, _ = self.tensors[name]
        return self._read(section, own, Box(start, shape), verify)

    def _read(self, section: str, own: str, box: Box, verify: bool) -> torch.Tensor:
        """Read a part of a tensor of the catalog."""
        target = torch.empty(box.shape, dtype=DTYPES[self.catalog.tensors[section][own].dtype])
        cover, requests = Cover(box), []
        for piece in self.catalog.pieces(section, own, box) if box.numel else ():
            part = piece.box.intersect(box)
            if part is not None:
                cover.add(part)
                requests.append(Request(own, target, box, piece))
        cover.check(f"{self.catalog.path}: {section} '{own}'")
        read_all(self.catalog.storage, requests, verify)
        return target


def _write_item(name: str, dtype: torch.dtype, box: Box, shape: tuple[int, ...]) -> WriteItem:
    start = torch.Size(box.start)
    chunk = ChunkStorageMetadata(offsets=start, sizes=torch.Size(box.shape))
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=torch.Size(shape))
    return WriteItem(MetadataIndex(name, start), WriteItemType.SHARD, tensor_data=data)


def _chunks(box: Box, itemsize: int) -> Iterator[Box]:
    """The box in parts that fit into a chunk."""
    return box.split_until(lambda part: part.numel * itemsize <= CHUNK_BYTES)


def _leaves(form: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of everything in a parameter's state that is not a dict."""
    if isinstance(form, dict) and "$tensor" in form:
        yield tuple(unquote(part) for part in form["$tensor"].split("/")), form
    elif isinstance(form, dict) and not any(key.startswith("$") for key in form):
        for key, value in form.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(form, list) and any(isinstance(item, (dict, list)) for item in form):
        for index, value in enumerate(form):
            yield from _leaves(value, (*path, str(index)))
    else:
        yield path, form


def _scalar(note: dict[str, Any]) -> torch.Tensor:
    if "value" not in note or note.get("dtype") not in DTYPES:
        raise CorruptError(f"a tensor where there can be none: {str(note)[:80]}")
    return torch.tensor(decode(note["value"], _scalar, "a scalar"), dtype=DTYPES[note["dtype"]])


class _Planner(DefaultSavePlanner):
    """Gives torch's writer the content of items on request."""

    def __init__(self, content: _Content, verify: bool):
        super().__init__()
        self._content = content
        self._verify = verify

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the content of an item."""
        name, data = write_item.index.fqn, write_item.tensor_data
        if data is None:
            buffer = io.BytesIO()
            torch.save(self._content.values[name], buffer)
            return buffer
        return self._content.read(name, tuple(data.chunk.offsets), tuple(data.chunk.sizes), self._verify)


class _Writer(FileSystemWriter):
    """torch's writer, but tied weights are stored once and listed under all their names."""

    def __init__(self, folder: str, aliases: Mapping[str, str]):
        super().__init__(folder, overwrite=False)
        self._aliases = aliases

    def has_checkpoint(self) -> bool:
        """Whether the folder is a checkpoint already."""
        return bool(self.fs.exists(self.fs.concat_path(self.path, ".metadata")))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata."""
        other: dict[str, list[str]] = {}
        for alias, name in self._aliases.items():
            if name in metadata.state_dict_metadata:
                metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
                other.setdefault(name, []).append(alias)
        again = [
            replace(result, index=replace(result.index, fqn=alias))
            for result in results[0]
            for alias in other.get(result.index.fqn, ())
        ]
        super().finish(metadata, [*results, again])
