"""The catalog of a folder of `torch.distributed.checkpoint` (DCP), as torch's FSDP2 and FSDP1 write it.
Layer: checkpoint.

``.metadata`` lists the chunks of each tensor, each with the range of a ``.distcp`` file that holds it
(`dcp_metadata.py`). Such a range is a complete `torch.save` file, and the bytes are read in place (`torch_files.py`).
No pickle is executed. Only the model's tensors are read; the rest is left out and listed as such.

A save with ``use_collectives=False`` writes one ``__<rank>.metadata`` per rank instead, and these do not identify their
save. Such a folder is rejected.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from math import prod

from fsdp2.checkpoint.formats.dcp_metadata import Item, Path, read_metadata
from fsdp2.checkpoint.formats.torch_files import read_tensor
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.io.pieces import StoredPiece
from fsdp2.checkpoint.schema.dtypes import DTYPES, ITEMSIZES
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.errors import CorruptError, MismatchError, UnsupportedError
from fsdp2.placement.box import Box

__all__ = ["DCP", "DcpCatalog", "is_dcp", "open_dcp"]

DCP = "DCP (torch.distributed.checkpoint)"  # `Catalog.kind`
METADATA = ".metadata"
RANK_METADATA = re.compile(r"__\d+\.metadata")
# Usual names of the model's part of a state dict.
MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict", "model_state", "net", "network", "weights")


def is_dcp(storage: Storage, path: str) -> bool:
    """Whether the folder is a DCP checkpoint."""
    return any(name == METADATA or RANK_METADATA.fullmatch(name) for name in storage.names(path))


def open_dcp(storage: Storage, path: str) -> "DcpCatalog":
    """Read the metadata.

    Raises:
        CorruptError: it is damaged, or lists something unexpected or a file outside of the folder.
        MismatchError: it has several models.
        UnsupportedError: the files were written through an extension (compression, encryption), or without collectives.
    """
    file = storage.join(path, METADATA)
    if storage.kind(file) is None:
        raise UnsupportedError(
            f"{path}: was saved with use_collectives=False. Load it with torch.distributed.checkpoint, on as many "
            "ranks as saved it, and save it again"
        )
    with closing(storage.open_file(file)) as reader:
        items = read_metadata(reader, file)
    held = sum(storage.sizes(path).values())
    for name, item in items.items():  # checked because memory will be allocated for extra state
        if item.info is not None and prod(item.info.shape) * ITEMSIZES.get(item.info.dtype, 0) > held:
            raise CorruptError(
                f"{file}: '{name}' is {item.info.dtype} {list(item.info.shape)}, and all files have {held} bytes"
            )
    return DcpCatalog(storage, path, items)


class DcpCatalog(Catalog):
    """See `Catalog`, and the module docstring."""

    def __init__(self, storage: Storage, path: str, items: Mapping[str, Item]):
        super().__init__(storage, path, DCP)
        self._items: dict[str, Item] = {}  # of the model's tensors, by name
        model, others = self.left_out.setdefault("model", {}), self.left_out.setdefault("", {})
        tensors = [item.path for item in items.values() if item.info]
        prefix = _model_prefix(tensors, path)
        is_flat = prefix == () and any(len(each) == 1 for each in tensors)  # everything else is nested
        for item in items.values():
            name = ".".join(map(str, item.path[len(prefix) :]))
            is_within = item.path[: len(prefix)] == prefix
            if not is_within or (is_flat and len(item.path) > 1) or not (item.info or prefix or is_flat):
                others[".".join(map(str, item.path[: max(1, len(prefix))]))] = "not the model, so load it with torch"
            elif item.info is None or item.info.dtype not in DTYPES:
                model[name] = "no tensor" if item.info is None else f"a tensor {item.info.dtype} {[*item.info.shape]}"
            else:
                self._items[name] = item
        self.tensors["model"] = {name: item.info for name, item in self._items.items() if item.info is not None}

    @property
    def files(self) -> Iterable[str]:
        """See `Catalog`."""
        held = {where.file for item in self._items.values() for _, where in item.chunks.values()}
        return [self.storage.join(self.path, name) for name in (METADATA, *held)]

    def pieces(self, section: str, name: str, wanted: Box) -> Iterable[StoredPiece]:
        """See `Catalog`."""
        info = self.tensors[section][name]
        for start, (shape, where) in self._items[name].chunks.items():
            box = Box(start, shape)
            if box.intersect(wanted) is None:
                continue
            file = self.storage.join(self.path, where.file)
            with self.opened.use(file) as reader:
                found = read_tensor(reader, file, where.offset, where.length)
            if (found.dtype, found.shape) != (info.dtype, shape):
                raise CorruptError(
                    f"{file}: bytes {where.offset}..{where.offset + where.length} should be '{name}' {info.dtype} "
                    f"{list(shape)}, and are {found.dtype} {list(found.shape)}"
                )
            yield StoredPiece(file, found.offset, box, box, found.dtype)


def _model_prefix(paths: Sequence[Path], folder: str) -> Path:
    """The path of the model's tensors: a key such as "model" at the top level or one level below; () if not found.

    Raises:
        MismatchError: several such keys exist, and nothing says which one is meant.
    """
    top = {path for path in paths if len(path) == 1}
    marked = {path[: depth + 1] for path in paths for depth, part in enumerate(path[:-1][:2]) if part in MODEL_KEYS}
    outermost = sorted((each for each in marked if len(each) == min(map(len, marked))), key=str)
    # As in {**model.state_dict(), "ema": {"model": ...}}: the same names exist at the top level.
    if any(path[len(each) :] in top for each in outermost for path in paths if path[: len(each)] == each):
        return ()
    if len(outermost) > 1:
        names = ", ".join(repr(".".join(map(str, each))) for each in outermost)
        raise MismatchError(
            f"{folder}: the checkpoint has several models, at {names}, and load cannot know which one is meant: no "
            "argument of load(), not even sources=, selects one. Load it with torch.distributed.checkpoint.load into a "
            "dict of these keys and the model's state_dict(), and save it again separately."
        )
    return outermost[0] if outermost else ()
