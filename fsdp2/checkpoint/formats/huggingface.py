"""The catalog of a Hugging Face folder: whole tensors in safetensors files, with an index if there are several.
Layer: checkpoint.

Of the file names that transformers, diffusers and peft use, the first that exists is read; other files are ignored. The
files have no checksums, so damaged values are not detected.

A snapshot in the cache of the hub consists of links to ``../../blobs``. Only such links are followed: the target must
be a regular file in the folder ``blobs`` next to ``snapshots``.
"""

import os
from contextlib import closing
from pathlib import Path

from fsdp2.checkpoint.formats.native import read_header, read_small
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.io.pieces import StoredPiece, StoredTensorInfo
from fsdp2.checkpoint.schema.header import parse_json
from fsdp2.checkpoint.storage.base import Storage, check_file_name
from fsdp2.checkpoint.storage.local import LocalStorage
from fsdp2.errors import CorruptError, UnsupportedError
from fsdp2.placement.box import whole

__all__ = ["HUGGING_FACE", "is_huggingface", "open_huggingface"]

HUGGING_FACE = "Hugging Face"  # `Catalog.kind`
# In the order in which transformers looks for them. Each may be replaced by an index.
NAMES = ("model.safetensors", "diffusion_pytorch_model.safetensors", "adapter_model.safetensors", "pytorch_model.bin")
MAX_INDEX_BYTES = 1 << 27


def is_huggingface(storage: Storage, path: str) -> bool:
    """Whether the folder has such files."""
    return _entry(storage, path) is not None


def _entry(storage: Storage, path: str) -> str | None:
    """The name of the file, or of its index."""
    there = set(storage.names(path))
    for name in NAMES:
        for file in (name, f"{name}.index.json"):
            if file in there and _located(storage, path, file) is not None:
                return file
    return None


def _located(storage: Storage, path: str, name: str) -> str | None:
    """The path of a file in the folder; None if it does not exist."""
    file = storage.join(path, name)
    if storage.kind(file) == "file":
        return file
    return _blob(file) if isinstance(storage, LocalStorage) else None


def _blob(file: str) -> str | None:
    """The target of a link in a snapshot of the hub's cache; None if `file` is not such a link."""
    folder, target = Path(os.path.realpath(os.path.dirname(file))), Path(os.path.realpath(file))
    for parent in (folder, *folder.parents):
        if parent.name == "snapshots" and target.parent == parent.parent / "blobs" and target.is_file():
            return str(target)
    return None


def open_huggingface(storage: Storage, path: str) -> Catalog:
    """Read the index and the headers of the files that it lists. Other files in the folder are ignored.

    Raises:
        CorruptError: a file is missing or damaged, is outside of the folder, or lacks tensors that the index lists.
        UnsupportedError: the folder only has files of `torch.save`.
    """
    catalog = Catalog(storage, path, HUGGING_FACE)
    catalog.tensors["model"] = {}
    left_out = catalog.left_out.setdefault("model", {})
    entry = _entry(storage, path) or NAMES[0]
    if ".bin" in entry:
        raise UnsupportedError(
            f"{storage.join(path, entry)}: is a file of torch.save, a pickle; expected safetensors. Rewrite it: "
            "safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')."
        )
    listed: dict[str, str] | None = None
    if entry.endswith(".json"):
        listed = _weight_map(storage, path, entry)
    for file in sorted(set(listed.values())) if listed is not None else [entry]:
        place = _located(storage, path, file)
        if place is None:
            raise CorruptError(f"{storage.join(path, file)}: is listed in the index, but is missing (or a link)")
        with closing(storage.open_file(place)) as reader:
            header = read_header(reader, place)
        for name in [name for name in listed if listed[name] == file] if listed is not None else ():
            if name not in header.tensors and name not in header.unread:
                raise CorruptError(f"{storage.join(path, file)}: lacks '{name}', which the index lists")
        left_out.update(header.unread)
        for name, stored in header.tensors.items():
            if listed is None or listed.get(name) == file:
                box = whole(stored.shape)
                catalog.tensors["model"][name] = StoredTensorInfo(stored.dtype, stored.shape)
                catalog.places[name] = StoredPiece(place, stored.offset, box, box, stored.dtype)
            elif name not in listed:
                left_out[name] = f"in {file}, and not in the index"
    return catalog


def _weight_map(storage: Storage, path: str, entry: str) -> dict[str, str]:
    """The file of each tensor, from an index."""
    index = storage.join(path, entry)
    content = parse_json(read_small(storage, _located(storage, path, entry) or index, MAX_INDEX_BYTES), index)
    if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
        raise CorruptError(f"{index}: has no weight_map")
    return {name: check_file_name(file, index) for name, file in content["weight_map"].items()}
