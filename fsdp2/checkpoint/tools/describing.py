"""The content of a checkpoint of any supported format, without reading its values. Layer: checkpoint."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from fsdp2.checkpoint.formats.native import NativeCatalog
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.io.pieces import StoredTensorInfo
from fsdp2.checkpoint.opening import open_catalog
from fsdp2.checkpoint.schema.dtypes import ITEMSIZES
from fsdp2.checkpoint.schema.manifest import MANIFEST
from fsdp2.checkpoint.storage.base import Folder, storage_of
from fsdp2.errors import CheckpointError
from fsdp2.placement.box import whole

__all__ = ["Description", "TensorEntry", "describe", "stray_files", "tensor_nbytes"]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint.

    Attributes:
        section: "model" or "optimizer".
        dtype: its name in safetensors.
        shape: of the whole tensor.
        nbytes: of the whole tensor.
        parts: the number of parts in which it is stored.
        aliases: other names of the same values.
    """

    section: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    parts: int
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """The content of a checkpoint.

    Attributes:
        folder: the folder of the checkpoint.
        kind: the format.
        step: as given to `save`; None if unknown.
        tensors: of all sections.
        id, world, layout, checksum: see `manifest.py`; empty (0) for other formats.
        files: bytes of each file, by name; empty for formats that do not list them.
        optimizer: the class of the optimizer; "" if unknown.
        extra: key -> (the number of ranks that saved it, the number of different values).
        about: the user's texts and numbers (see `save`).
        strays: names in the folder that do not belong to the checkpoint; they are never read.
        left_out: what the folder has beside `tensors` and this library does not read -> why.
    """

    folder: str
    kind: str
    step: int | None
    tensors: tuple[TensorEntry, ...]
    id: str = ""
    world: int = 0
    layout: str = ""
    checksum: str = ""
    files: Mapping[str, int] = field(default_factory=dict)
    optimizer: str = ""
    extra: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    strays: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def describe(folder: Folder) -> Description:
    """Describe a checkpoint: names, shapes, dtypes, files. For a native one only the manifest is read, so this works
    even if files are missing; use `verify` to check them.

    Args:
        folder: of a checkpoint in any format that `load` supports, local or a URL.

    Raises:
        CheckpointError: there is no checkpoint.
        CorruptError: its manifest, index or metadata is damaged.

    Example::

        sizes = {tensor.name: tensor.nbytes for tensor in fsdp2.checkpoint.describe("runs/a/step-00001000").tensors}
    """
    storage, path = storage_of(folder)
    catalog = open_catalog(storage, path, files_are_there=False)
    try:
        tensors = tuple(_entry(catalog, section, name) for section, infos in catalog.tensors.items() for name in infos)
        with suppress(CheckpointError):  # damaged values are for `verify`
            catalog.values_of("model")
        found = Description(catalog.path, catalog.kind, catalog.step, tensors, left_out=catalog.left_out_texts())
    finally:
        catalog.close()
    if not isinstance(catalog, NativeCatalog):
        return found
    manifest = catalog.manifest
    kinds = {str(kind): None for table in catalog.values_of("optimizer") for kind in table.get("kinds", {}).values()}
    shares = {key: sum(len(share["ranks"]) for share in own) for key, own in manifest.extra.items()}
    return replace(
        found,
        id=manifest.id,
        world=manifest.world,
        layout=manifest.layout,
        checksum=manifest.checksum,
        files={name: size for name, (size, _) in manifest.files.items()},
        optimizer=", ".join(kinds),
        extra={key: (ranks, len(manifest.extra[key])) for key, ranks in shares.items()},
        strays=tuple(stray_files(catalog)),
        about=manifest.about,
    )


def stray_files(catalog: NativeCatalog) -> list[str]:
    """Names in the folder of a checkpoint that its manifest does not list."""
    names = catalog.storage.names(catalog.path)
    return [name for name in names if name != MANIFEST and name not in catalog.manifest.files]


def tensor_nbytes(info: StoredTensorInfo) -> int:
    """Bytes of a tensor."""
    return prod(info.shape) * ITEMSIZES[info.dtype]


def _entry(catalog: Catalog, section: str, name: str) -> TensorEntry:
    info = catalog.tensors[section][name]
    if isinstance(catalog, NativeCatalog):  # whose files may be missing
        parts = len(catalog.manifest.records[section][name].tiling.owners(whole(info.shape)))
    else:
        parts = len(list(catalog.pieces(section, name, whole(info.shape))))
    aliases = tuple(alias for alias, stored in catalog.aliases.get(section, {}).items() if stored == name)
    return TensorEntry(section, name, info.dtype, info.shape, tensor_nbytes(info), parts, aliases)
