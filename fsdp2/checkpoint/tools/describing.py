"""The content of a checkpoint of any supported format, without reading its values. Layer: checkpoint."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from math import prod

from fsdp2.checkpoint.formats.native import NativeCatalog
from fsdp2.checkpoint.opening import open_catalog
from fsdp2.checkpoint.schema.dtypes import ITEMSIZES
from fsdp2.checkpoint.storage.base import Folder, storage_of

__all__ = ["Description", "TensorEntry", "describe"]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint.

    Attributes:
        section: "model" or "optimizer".
        dtype: its name in safetensors.
        shape, nbytes: those of the whole tensor.
        aliases: other names of the same values.
    """

    section: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """The content of a checkpoint.

    Attributes:
        kind: the format.
        step: as given to `save`; None if unknown.
        tensors: the tensors of all sections.
        left_out: further content of the folder, which this library does not read -> why.
        id, world, layout: see `manifest.py`; empty (0) for other formats.
        files: bytes of each file, by name; empty for formats that do not list them.
        optimizer: the class of the optimizer; "" if unknown.
        extra: key -> (the number of ranks that saved it, the number of different values).
    """

    folder: str
    kind: str
    step: int | None
    tensors: tuple[TensorEntry, ...]
    left_out: Mapping[str, str]
    id: str = ""
    world: int = 0
    layout: str = ""
    files: Mapping[str, int] = field(default_factory=dict)
    optimizer: str = ""
    extra: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def describe(folder: Folder) -> Description:
    """Describe a checkpoint: names, shapes, dtypes, files. For a native one only the manifest is read, so this works
    even if files are missing; use `verify` to check them.

    Args:
        folder: the folder of a checkpoint in any format that `load` supports, local or a URL.

    Raises:
        CheckpointError: it is not a checkpoint.
        CorruptError: its manifest, index or metadata is damaged.

    Example::

        sizes = {tensor.name: tensor.nbytes for tensor in fsdp2.checkpoint.describe("runs/a/step-00001000").tensors}
    """
    with closing(open_catalog(*storage_of(folder), checks_files=False)) as catalog:
        tensors = []
        for section, infos in catalog.tensors.items():
            names: dict[str, list[str]] = {}
            for alias, name in catalog.aliases.get(section, {}).items():
                names.setdefault(name, []).append(alias)
            for name, info in infos.items():
                entry = TensorEntry(
                    section, name, *info, prod(info.shape) * ITEMSIZES[info.dtype], tuple(names.get(name, ()))
                )
                tensors.append(entry)
        found = (catalog.path, catalog.kind, catalog.step, tuple(tensors), catalog.left_out_texts())
        if not isinstance(catalog, NativeCatalog):
            return Description(*found)
        manifest = catalog.manifest
        named = [table.get("kinds") for table in catalog.values.get("optimizer", ())]
        kinds = {str(kind): None for each in named if isinstance(each, dict) for kind in each.values()}
        extra = {key: (sum(len(one["ranks"]) for one in own), len(own)) for key, own in manifest.extra.items()}
        files = {name: size for name, (size, _) in manifest.files.items()}
        about = (manifest.id, manifest.world, manifest.layout, files)
        return Description(*found, *about, ", ".join(kinds), extra)
