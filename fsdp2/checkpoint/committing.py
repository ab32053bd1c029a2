"""The last rank's work: check that everything is there, write the manifest, give the folder its name. Layer:
checkpoint."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

from fsdp2.checkpoint.agreement import Agreement
from fsdp2.checkpoint.dtypes import ITEMSIZES
from fsdp2.checkpoint.folders import replace_folder, sweep
from fsdp2.checkpoint.manifest import FORMAT, MANIFEST, MAX_MANIFEST_BYTES, Manifest
from fsdp2.checkpoint.storage import Storage
from fsdp2.errors import CheckpointError, FSDPError

__all__ = ["commit", "id_of"]

Homes = Mapping[str, Mapping[str, Sequence[tuple[str, str, tuple[int, ...]]]]]


def commit(
    storage: Storage, work: str, path: str, head: Mapping[str, Any], homes: Homes, agreement: Agreement, overwrite: bool
) -> None:
    """Make the folder `work` the checkpoint `path`. All ranks have reported; one calls this.

    Args:
        head: id, step, world and checksum, for the manifest.
        homes: for consolidated files, which tensors are in which.

    Raises:
        CheckpointError: ranks do not fit together, or a file is not where this rank sees it (folders that are not
            shared between machines).
    """
    records = [json.loads(record) for record in agreement.records()]
    files: dict[str, list[Any]] = {}
    for record in records:
        for name, (size, crc) in record["files"].items():
            files[name] = [size, crc if crc is not None else files.get(name, [size, None])[1]]
    tables: defaultdict[str, list[int]] = defaultdict(list)
    for rank, record in enumerate(records):
        tables[record["table"]].append(rank)
    body = {
        "format": FORMAT,
        **head,
        "layout": "consolidated" if homes else "ranks",
        "files": files,
        "tables": [
            {**json.loads(agreement.get(f"table/{digest}")), "ranks": ranks} for digest, ranks in tables.items()
        ],
        "homes": {
            section: {name: file for file, rows in placed.items() for name, _, _ in rows}
            for section, placed in homes.items()
        },
        "extra": _extra(records, head["world"]),
    }
    _check_tables(body["tables"])
    for name, (size, _) in files.items():
        found = storage.size(storage.join(work, name))
        if found != size:
            raise CheckpointError(
                f"{storage.join(work, name)}: rank {_writer_of(name, records)} wrote {size} bytes, and here there are "
                f"{found if found is not None else 'none'}. All ranks must save to one shared folder."
            )
    for section, placed in homes.items():
        if len(placed) > 1:
            storage.write_all(storage.join(work, f"{section}.safetensors.index.json"), _index(placed))
    content = Manifest.encode(body)
    agreement.decide()
    try:
        storage.write_all(storage.join(work, MANIFEST), content)
        if storage.renames:
            replace_folder(storage, work, path, overwrite)
    except BaseException as error:
        agreement.fail(error)
        raise
    agreement.finish()
    for digest in tables:
        agreement.forget(f"table/{digest}")
    sweep(storage, path, head["id"])


def id_of(storage: Storage, path: str) -> str | None:
    """The id of the checkpoint at `path`; None if there is none."""
    with suppress(FSDPError, OSError):
        reader = storage.open_file(storage.join(path, MANIFEST))
        try:
            content = bytearray(min(reader.size, MAX_MANIFEST_BYTES))
            reader.read_into(0, memoryview(content))
        finally:
            reader.close()
        return Manifest.parse(bytes(content), path).id
    return None


def _extra(records: Sequence[Mapping[str, Any]], world: int) -> dict[str, list[dict[str, Any]]]:
    """Key -> what ranks gave: once for all that gave the same."""
    contents: dict[tuple[str, str], dict[str, Any]] = {}
    for rank, record in enumerate(records):
        for key, (digest, form) in record["shares"].items():
            file = f"extra-rank-{rank:05d}-of-{world:05d}.safetensors"
            contents[key, digest] = {"key": key, "json": form, "file": file, "ranks": []}
    for rank, record in enumerate(records):
        for key, digest in record["extra"].items():
            contents[key, digest]["ranks"].append(rank)
    result: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for (key, _), share in contents.items():
        result[key].append(share)
    return dict(result)


def _check_tables(tables: Sequence[Mapping[str, Any]]) -> None:
    """Every tensor is described alike by all ranks of its mesh: else rows of it would be missing, or there twice."""
    described: dict[tuple[str, str], tuple[Any, set[int]]] = {}
    for table in tables:
        for section, names in table["tensors"].items():
            for name, (dtype, shape, mesh, cuts) in names.items():
                row = (dtype, shape, table["meshes"][mesh], cuts)
                first, ranks = described.setdefault((section, name), (row, set()))
                if first != row:
                    raise CheckpointError(
                        f"{section} '{name}': ranks {sorted(ranks)[:4]} and {table['ranks'][:4]} saved "
                        f"different tensors "
                        f"under this name: {_shown(first)} and {_shown(row)}"
                    )
                ranks.update(table["ranks"])
    for (section, name), (row, ranks) in described.items():
        absent = sorted(set(row[2]["ranks"]) - ranks)
        if absent:
            raise CheckpointError(
                f"{section} '{name}': is on ranks {row[2]['ranks'][:8]}, of which {absent[:8]} did not save it. "
                f"Every rank "
                "must save the same parts of the model."
            )


def _shown(row: tuple[Any, ...]) -> str:
    return f"{row[0]} {row[1]} on a mesh of {row[2]['shape']} cut (axis, dim) {row[3]}"


def _writer_of(name: str, records: Sequence[Mapping[str, Any]]) -> int:
    return next(rank for rank, record in enumerate(records) if name in record["files"])


def _index(placed: Mapping[str, Sequence[tuple[str, str, tuple[int, ...]]]]) -> bytes:
    """Hugging Face's index of sharded weights."""
    rows = [(name, dtype, shape, file) for file, tensors in placed.items() for name, dtype, shape in tensors]
    total = sum(prod(shape) * ITEMSIZES[dtype] for _, dtype, shape, _ in rows)
    content = {"metadata": {"total_size": total}, "weight_map": {name: file for name, _, _, file in sorted(rows)}}
    return json.dumps(content, indent=2).encode()
