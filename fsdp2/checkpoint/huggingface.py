"""The catalog of a Hugging Face folder: whole tensors in safetensors files, with an index if there are several.
Layer: checkpoint.
"""

from fsdp2.checkpoint.box import whole
from fsdp2.checkpoint.catalog import PieceTable, StoredPiece, StoredTensorInfo
from fsdp2.checkpoint.header import parse_json
from fsdp2.checkpoint.native import read_header, read_small
from fsdp2.checkpoint.storage import Storage, check_file_name
from fsdp2.errors import CorruptError

__all__ = ["is_huggingface", "open_huggingface"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 1 << 28


def is_huggingface(storage: Storage, path: str) -> bool:
    """Whether such files are there."""
    return any(storage.size(storage.join(path, name)) is not None for name in (SINGLE, INDEX))


def open_huggingface(storage: Storage, path: str) -> PieceTable:
    """Read the index and the headers of the files that it lists; others in the folder are not looked at.

    Raises:
        CorruptError: a file is missing or damaged, is outside of the folder, or has not the tensors that the index
            lists.
    """
    catalog = PieceTable(storage, path, "Hugging Face")
    index = storage.join(path, INDEX)
    if storage.size(index) is None:
        header = read_header(storage, storage.join(path, SINGLE))
        listed = dict.fromkeys(header.tensors, SINGLE)
    else:
        content = parse_json(read_small(storage, index, MAX_INDEX_BYTES), index)
        if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
            raise CorruptError(f"{index}: has no weight_map")
        listed = {name: check_file_name(file, index) for name, file in content["weight_map"].items()}
    headers = {file: read_header(storage, storage.join(path, file)) for file in sorted(set(listed.values()))}
    for name, file in listed.items():
        stored = headers[file].tensors.get(name)
        if stored is None:
            raise CorruptError(f"{storage.join(path, file)}: has no '{name}', which the index says it has")
        box = whole(stored.shape)
        piece = StoredPiece(storage.join(path, file), stored.offset, box, box, stored.dtype)
        catalog.add("model", name, StoredTensorInfo(stored.dtype, stored.shape), [piece])
    return catalog
