"""The last rank's work: check that everything is there, write the manifest, rename the folder. Layer: checkpoint."""

import json
import warnings
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

from fsdp2.checkpoint.formats.native import id_of
from fsdp2.checkpoint.io.memory import uncollected
from fsdp2.checkpoint.io.planned_files import Homes
from fsdp2.checkpoint.ranks.agreement import FAILED, GO, Agreement
from fsdp2.checkpoint.run.folders import delete, is_complete, own_folder, replace_folder, sweep
from fsdp2.checkpoint.schema.dtypes import ITEMSIZES
from fsdp2.checkpoint.schema.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, body_of
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.errors import CheckpointError, CorruptError

__all__ = ["commit", "index_files", "may_count", "write_manifest"]


def commit(storage: Storage, work: str, path: str, save_id: str, homes: Homes, agreement: Agreement) -> None:
    """Turn the folder `work` into the checkpoint `path`. The last rank calls this, after all ranks have reported.

    Args:
        homes: for consolidated files, which file holds each tensor.

    Raises:
        CheckpointError: the records of the ranks contradict each other, or this rank does not see a file (the folder is
            not shared between machines).
    """
    agreement.check()
    records = [json.loads(record) for record in agreement.records()]
    options = _common_options(records)
    try:
        with own_folder(storage, work, path):
            files = _files(storage, work, records)
    finally:
        # Without renames the folder is the checkpoint's own; a save that came first may have deleted these files.
        if not storage.renames and is_complete(storage, path):
            raise CheckpointError(f"{path}: another save has completed a checkpoint there in the meantime")
    for name, index in index_files(homes).items():
        storage.write_all(storage.join(work, name), index)
        files[name] = [len(index), f"{zlib.crc32(index):08x}"]
    tables: defaultdict[str, list[int]] = defaultdict(list)
    for rank, record in enumerate(records):
        tables[record["table"]].append(rank)
    with uncollected():
        stored = [{**json.loads(agreement.get(f"table/{digest}")), "ranks": ranks} for digest, ranks in tables.items()]
    _check_values(stored)
    _check_copies(records)
    _warn_of_plain(records, agreement)
    _check_tables(stored, [record["content"] for record in records])
    common = {key: options[key] for key in ("step", "world", "about")}
    sums = [record["sums"] for record in records] if homes else []
    body = body_of(save_id, files, stored, homes, extra=_extra(records), sums=sums, **common)
    content = encoded(body, storage.join(path, MANIFEST))
    agreement.decide()
    try:
        with own_folder(storage, work, path):
            write_manifest(storage, storage.join(work, MANIFEST), content, save_id)
            if storage.renames:
                replace_folder(storage, work, path, options["overwrite"])
    except BaseException as error:
        agreement.fail(error)
        raise
    gone = sweep(storage, path, files)  # before other ranks continue and may write to this name
    agreement.finish()
    claims = [f"extra/{key}/{share[0]}" for record in records for key, share in record["shares"].items()]
    agreement.forget("nonce", "count", *claims, *(f"table/{digest}" for digest in tables))
    agreement.forget(*{f"plain/{record['plain']}" for record in records if record["plain"]})
    delete(storage, gone)


def write_manifest(storage: Storage, file: str, content: bytes, save_id: str) -> None:
    """Write the manifest. Without renames it makes the folder a checkpoint, so only one of two saves may succeed."""
    try:
        storage.write_all(file, content, new=not storage.renames)
    except FileExistsError as error:
        # The request may have been sent twice because the answer to the first was lost.
        if id_of(storage, storage.split(file)[0]) != save_id:
            raise CheckpointError(f"{file}: another save has completed a checkpoint there in the meantime") from error


def may_count(storage: Storage, agreement: Agreement) -> bool:
    """Whether the manifest of a failed save may still exist or appear later; then all files must stay. Without renames
    it is written to its final place at once, and if the answer is lost, the outcome of the request is unknown."""
    if storage.renames:
        return False
    with suppress(CheckpointError):  # the store does not answer: unknown
        return agreement.claim("decision", FAILED) == GO
    return True


@uncollected()
def encoded(body: Mapping[str, Any], file: str, call: str = "save") -> bytes:
    """The encoded manifest. It is parsed now, while nothing counts yet, and refused if that fails."""
    try:
        content = Manifest.encode(body)
        if len(content) > MAX_MANIFEST_BYTES:
            raise ValueError(f"it has {len(content)} bytes; expected at most {MAX_MANIFEST_BYTES}")
        Manifest.parse(content, file)
    except (CorruptError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{call}: nothing is saved, since its manifest could not be read again: {error}. Change what this names, "
            f"among the values that are no tensors, the names, or the step, and {call} again."
        ) from error
    return content


def _common_options(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The options of the save; all ranks must have passed the same."""
    first: Mapping[str, Any] = records[0]["options"]
    for rank, record in enumerate(records):
        for key, value in record["options"].items():
            if value != first[key]:
                raise CheckpointError(
                    f"save: rank 0 has {key}={first[key]!r}, rank {rank} has {value!r}; give all the same"
                )
        if record["homes"] != records[0]["homes"]:
            raise CheckpointError(
                f"save: ranks 0 and {rank} have different tensors, which consolidated=True cannot store in common "
                "files. Save without it, then convert: python -m fsdp2.checkpoint convert"
            )
    return first


def _files(storage: Storage, work: str, records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """All files, with size and checksum. Raises if one does not exist."""
    files: dict[str, list[Any]] = {}
    writers: dict[str, int] = {}
    for rank, record in enumerate(records):
        for name, (size, crc) in record["files"].items():
            files[name] = [size, crc if crc is not None else files.get(name, [size, None])[1]]
            writers[name] = rank
    sizes = storage.sizes(work)
    for name, (size, _) in files.items():
        found = sizes.get(name)
        if found != size:
            raise CheckpointError(
                f"{storage.join(work, name)}: rank {writers[name]} wrote {size} bytes, and here there are "
                f"{found if found is not None else 'none'}. All ranks must save to one shared folder."
            )
    return files


def _extra(records: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Key -> the shares of the ranks; equal shares are listed once."""
    contents: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        for key, (digest, form) in record["shares"].items():
            file = next(name for name in record["files"] if name.startswith("extra-"))
            contents[key, digest] = {"key": key, "json": form, "file": file, "ranks": []}
    for rank, record in enumerate(records):
        for key, digest in record["extra"].items():
            contents[key, digest]["ranks"].append(rank)
    result: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for (key, _), share in contents.items():
        result[key].append(share)
    return dict(result)


@uncollected()
def _check_tables(tables: Sequence[Mapping[str, Any]], contents: Sequence[str]) -> None:
    """Check that all ranks of a tensor's mesh describe it in the same way. Otherwise rows would be missing, or stored
    twice.

    A tensor may be on several meshes if its values are the same on all of them. An example are the data-parallel meshes
    along an axis, such as context parallelism, that no tensor of the model is distributed over.

    Args:
        contents: for each rank a digest of everything that it wrote.
    """
    described: dict[tuple[str, str], tuple[_Row, set[int]]] = {}
    for table in tables:
        for section, names in table["tensors"].items():
            for name, (dtype, shape, mesh, cuts) in names.items():
                row = _Row(dtype, shape, table["meshes"][mesh], cuts)
                first, ranks = described.setdefault((section, name), (row, set()))
                if first != row and not first.is_copy(row, contents):
                    raise CheckpointError(
                        f"{section} '{name}': ranks {first.mesh['ranks'][:4]} and {row.mesh['ranks'][:4]} saved "
                        f"different tensors under this name: {first} and {row}"
                    )
                ranks.update(table["ranks"])
    for (section, name), (row, ranks) in described.items():
        absent = sorted(set(row.mesh["ranks"]) - ranks)
        if absent:
            raise CheckpointError(
                f"{section} '{name}': is on ranks {row.mesh['ranks'][:8]}, of which {absent[:8]} did not save it. "
                "Every rank must save the same parts of the model."
            )


def _check_copies(records: Sequence[Mapping[str, Any]]) -> None:
    """Check that tensors on a part of a larger mesh are equal on its other parts. They are assumed to be copies and
    stored only once."""
    known: dict[str, tuple[str, int]] = {}
    for rank, record in enumerate(records):
        which, values = record["copies"]
        first, other = known.setdefault(which, (values, rank))
        if first != values:
            raise CheckpointError(
                f"save: ranks {other} and {rank} hold tensors of the same names on parts of one mesh, with different "
                "values; as copies they would be stored once. Give each its own name, or make them DTensors on the "
                "larger mesh."
            )


def _warn_of_plain(records: Sequence[Mapping[str, Any]], agreement: Agreement) -> None:
    """Warn of plain tensors that differ between ranks: one rank's is stored, and every rank will load that."""
    ranks = {record["plain"]: rank for rank, record in reversed([*enumerate(records)]) if record["plain"]}
    known: dict[str, tuple[int, int]] = {}
    different: dict[str, str] = {}
    for digest, rank in ranks.items():
        for name, value in json.loads(agreement.get(f"plain/{digest}")).items():
            first, other = known.setdefault(name, (value, rank))
            if first != value:
                different.setdefault(name, f"{name} (ranks {min(rank, other)} and {max(rank, other)})")
    if different:
        shown = ", ".join([*different.values()][:5]) + (f", ... ({len(different)})" if len(different) > 5 else "")
        warnings.warn(
            f"save: {shown}: plain tensors whose values differ between ranks. One rank's are stored, and every rank "
            "will load these. Make them DTensors or equal, or save what each rank has in extra=.",
            stacklevel=2,
        )


def _check_values(tables: Sequence[Mapping[str, Any]]) -> None:
    """Check that values other than tensors, which belong to the model, are equal on all ranks that have the model."""
    known: dict[tuple[str, str], tuple[Any, Sequence[int]]] = {}
    for table in tables:
        for section, values in table["values"].items():
            for name, value in _by_name(values).items():
                first, ranks = known.setdefault((section, name), (value, table["ranks"]))
                if first != value:
                    raise CheckpointError(
                        f"{section} {name}: ranks {list(ranks[:4])} and {table['ranks'][:4]} have different values: "
                        f"{str(first)[:60]} and {str(value)[:60]}. What each rank has for itself belongs to extra=."
                    )


def _by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section. Those of an optimizer are listed by parameter, since pipeline stages hold different
    parameters."""
    if "forms" not in values:
        return {f"'{name}'": value for name, value in values.items()}
    states = {f"state of '{fqn}'": values["forms"][index] for fqn, index in values["states"].items()}
    options = {f"options of '{fqn}'": group["options"] for group in values["groups"] for fqn in group["params"]}
    return {**states, **options}


@dataclass(frozen=True)
class _Row:
    """How ranks describe one tensor."""

    dtype: str
    shape: list[int]
    mesh: Mapping[str, Any]
    cuts: list[list[int]]

    def is_copy(self, other: "_Row", contents: Sequence[str]) -> bool:
        """Whether the other row is the same tensor on another mesh, whose ranks wrote the same content."""
        pairs = list(zip(self.mesh["ranks"], other.mesh["ranks"], strict=False))
        alike = (self.dtype, self.shape, self.cuts) == (other.dtype, other.shape, other.cuts)
        same_form = self.mesh["shape"] == other.mesh["shape"] and not {one for one, _ in pairs} & {
            two for _, two in pairs
        }
        return alike and same_form and all(contents[one] == contents[two] for one, two in pairs)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} on a mesh of {self.mesh['shape']} cut (axis, dim) {self.cuts}"


def index_files(homes: Homes) -> dict[str, bytes]:
    """Hugging Face's indexes of sections that have several files, by their names."""
    found = {}
    for section, placed in homes.items():
        rows = [(name, dtype, shape, file) for file, tensors in placed.items() for name, dtype, shape in tensors]
        total = sum(prod(shape) * ITEMSIZES[dtype] for _, dtype, shape, _ in rows)
        content = {"metadata": {"total_size": total}, "weight_map": {name: file for name, _, _, file in sorted(rows)}}
        if len(placed) > 1:
            found[f"{section}.safetensors.index.json"] = json.dumps(content, indent=2).encode()
    return found
