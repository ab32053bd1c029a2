"""The last rank's work: check that all files exist, write the manifest, rename the folder. Layer: checkpoint."""

import json
import warnings
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from fsdp2.checkpoint.formats.native import id_of
from fsdp2.checkpoint.io.memory import uncollected
from fsdp2.checkpoint.io.planned_files import Homes
from fsdp2.checkpoint.ranks.agreement import FAILED, GO, Agreement
from fsdp2.checkpoint.run.folders import delete, is_complete, own_folder, replace_folder, sweep
from fsdp2.checkpoint.run.records import Records
from fsdp2.checkpoint.schema.dtypes import ITEMSIZES
from fsdp2.checkpoint.schema.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, body_of
from fsdp2.checkpoint.storage.base import Storage
from fsdp2.checkpoint.storage.local import LocalStorage
from fsdp2.errors import CheckpointError, CorruptError

__all__ = ["COPY", "commit", "index_files", "may_count"]

COPY = "\0part "  # in the name of a tensor that is a copy, before the rank's place in its mesh

# What one rank reported; see `Job._record` in `saving.py`.
Record = Mapping[str, Any]


def commit(
    storage: Storage, work: str, path: str, save_id: str, homes: Homes, agreement: Agreement, own: Records, ranks: int
) -> None:
    """Turn the folder `work` into the checkpoint `path`. The last rank calls this, after all ranks have reported.

    Args:
        homes: for consolidated files, which file holds each tensor.
        ranks: the number of ranks.

    Raises:
        CheckpointError: the ranks' records contradict each other, or this rank does not see a file (the folder is not
            shared between machines).
    """
    agreement.check()
    try:
        with own_folder(storage, work, path):
            records = own.get(range(ranks))
            options = _common_options(records)
            files = _files(storage, work, records)
            equal = {record["equal"]: rank for rank, record in reversed([*enumerate(records)]) if record["equal"]}
            tables: dict[str, list[int]] = {}
            for rank, record in enumerate(records):
                tables.setdefault(record["table"], []).append(rank)
            with uncollected():
                stored = [{**table, "ranks": tables[name]} for name, table in zip(tables, own.get(tables), strict=True)]
            _check_equal([*equal.values()], own.get(equal))
    finally:
        # Without renames this is the final folder, and a save that came first may have deleted these files.
        if not storage.renames and is_complete(storage, path):
            raise CheckpointError(f"{path}: another save has completed a checkpoint there in the meantime")
    for name, index in index_files(homes).items():
        storage.write_all(storage.join(work, name), index)
        files[name] = [len(index), f"{zlib.crc32(index):08x}"]
    _check_values(stored)
    _check_tables(stored, [record["content"] for record in records])
    common = {key: options[key] for key in ("step", "world")}
    sums = [record["sums"] for record in records] if homes else []
    files_id = records[0]["files_id"] if records[0]["files_id"] != save_id else ""
    body = body_of(save_id, files, stored, homes, extra=_extra(records), sums=sums, files_id=files_id, **common)
    content = _encoded(body, storage.join(path, MANIFEST))
    agreement.decide()
    try:
        own.remove(ranks, [*tables, *equal])
        _put_in_place(storage, work, path, content, save_id, options["overwrite"])
    except BaseException as error:
        agreement.fail(error)
        raise
    gone = sweep(storage, path, files)  # before other ranks continue and may write to this name
    agreement.finish()
    claims = [f"extra/{key}/{share[0]}" for record in records for key, share in record["shares"].items()]
    agreement.forget("nonce", "count", "files", "mark", "progress", *claims)
    delete(storage, gone)


def _put_in_place(storage: Storage, work: str, path: str, content: bytes, save_id: str, overwrite: bool) -> None:
    """Write the manifest of the folder `work`, and rename the folder. If folders cannot be renamed, the manifest alone
    makes it a checkpoint, so only one of two saves may succeed.

    Raises:
        CheckpointError: another save has come first.
    """
    file = storage.join(work, MANIFEST)
    with own_folder(storage, work, path):
        try:
            if isinstance(storage, LocalStorage):
                storage.write_all(file, content)
            else:
                storage.write_all(file, content, new=True)
        except FileExistsError as error:
            # The request may have been sent twice because the answer to the first was lost.
            if id_of(storage, work) != save_id:
                raise CheckpointError(
                    f"{file}: another save has completed a checkpoint there in the meantime"
                ) from error
        if storage.renames:
            replace_folder(storage, work, path, overwrite)


def may_count(storage: Storage, agreement: Agreement) -> bool:
    """Whether the manifest of a failed save may exist or still appear, so that all files must stay. Without renames it
    is written directly to its final place, and if the answer is lost, the outcome of the request is unknown."""
    if storage.renames:
        return False
    with suppress(CheckpointError):  # the store does not answer: unknown
        return agreement.claim("decision", FAILED) == GO
    return True


@uncollected()
def _encoded(body: Mapping[str, Any], file: str) -> bytes:
    """The encoded manifest. Raises before anything is committed if it cannot be parsed again."""
    try:
        content = Manifest.encode(body)
        if len(content) > MAX_MANIFEST_BYTES:
            raise ValueError(f"it has {len(content)} bytes; expected at most {MAX_MANIFEST_BYTES}")
        Manifest.parse(content, file)
    except (CorruptError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"nothing was saved, because its manifest could not be parsed: {error}. Change the name, the step or the "
            "non-tensor value that this error names, and save again."
        ) from error
    return content


def _common_options(records: Sequence[Record]) -> Mapping[str, Any]:
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
                "files. Save without it, then convert the model: python -m fsdp2.checkpoint convert"
            )
    return first


def _files(storage: Storage, work: str, records: Sequence[Record]) -> dict[str, list[Any]]:
    """All files, with size and checksum. Raises if one does not exist."""
    files: dict[str, list[Any]] = {}
    sizes = storage.sizes(work)
    for rank, record in enumerate(records):
        for name, (size, crc) in record["files"].items():
            files[name] = [size, crc if crc is not None else files.get(name, [size, None])[1]]
            found = sizes.get(name)
            if found != size:
                raise CheckpointError(
                    f"{storage.join(work, name)}: rank {rank} wrote {size} bytes, and here there are "
                    f"{found if found is not None else 'none'}. All ranks must save to one shared folder."
                )
    return files


def _extra(records: Sequence[Record]) -> dict[str, list[dict[str, Any]]]:
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
    twice. A tensor may be on several meshes if its values are the same on all of them: the data-parallel meshes along
    an axis, such as context parallelism, over which no tensor of the model is distributed.

    Args:
        contents: for each rank a digest of everything that it wrote.
    """
    described: dict[tuple[str, str], tuple[_Row, set[int]]] = {}
    for table in tables:
        for section, names in table["tensors"].items():
            for name, (dtype, shape, mesh, cuts) in names.items():
                row = _Row(dtype, shape, cuts, table["meshes"][mesh])
                first, ranks = described.setdefault((section, name), (row, set()))
                if first != row and not first.is_copy(row, contents):
                    raise CheckpointError(
                        f"{section} '{name}': ranks {first.mesh['ranks'][:4]} and {row.mesh['ranks'][:4]} saved "
                        f"different tensors under this name: {first.text} and {row.text}"
                    )
                ranks.update(table["ranks"])
    for (section, name), (row, ranks) in described.items():
        absent = sorted(set(row.mesh["ranks"]) - ranks)
        if absent:
            raise CheckpointError(
                f"{section} '{name}': is on ranks {row.mesh['ranks'][:8]}, of which {absent[:8]} did not save it. "
                "Every rank must save the same parts of the model."
            )


class _Row(NamedTuple):
    """How ranks describe one tensor."""

    dtype: str
    shape: list[int]
    cuts: list[list[int]]
    mesh: Mapping[str, Any]

    def is_copy(self, other: "_Row", contents: Sequence[str]) -> bool:
        """Whether the other row is the same tensor on another mesh, whose ranks wrote the same content."""
        mine, theirs = self.mesh["ranks"], other.mesh["ranks"]
        return (
            (self[:3], self.mesh["shape"]) == (other[:3], other.mesh["shape"])
            and not {*mine} & {*theirs}
            and all(contents[one] == contents[two] for one, two in zip(mine, theirs, strict=True))
        )

    @property
    def text(self) -> str:
        """The description, for messages."""
        return f"{self.dtype} {self.shape} on a mesh of {self.mesh['shape']} cut (axis, dim) {self.cuts}"


def _check_equal(ranks: Sequence[int], sums: Sequence[Mapping[str, int]]) -> None:
    """Check that copies are equal: a tensor on a part of a larger mesh is assumed to have copies on the other parts.
    Warn about plain tensors that differ: one rank's is stored, and every rank will load that one.

    Args:
        sums: the checksums of each of these ranks, see `_sums_of_equal` in `saving.py`.
    """
    known: dict[str, tuple[int, int]] = {}
    different: dict[str, str] = {}
    for rank, own in zip(ranks, sums, strict=True):
        for name, value in own.items():
            first, other = known.setdefault(name, (value, rank))
            if first != value and COPY in name:
                raise CheckpointError(
                    f"save: ranks {min(rank, other)} and {max(rank, other)} hold {name.partition(COPY)[0]} on parts of "
                    "one mesh, with different values; as copies they would be stored once. Give each its own name, or "
                    "make them DTensors on the larger mesh."
                )
            if first != value:
                different.setdefault(name, f"{name} (ranks {min(rank, other)} and {max(rank, other)})")
    if different:
        shown = ", ".join([*different.values()][:5]) + (f", ... ({len(different)})" if len(different) > 5 else "")
        warnings.warn(
            f"save: {shown}: plain tensors whose values differ between ranks. One rank's are stored, and every rank "
            "will load these. Make them DTensors, make them equal, or save each rank's own in extra=.",
            stacklevel=2,
        )


def _check_values(tables: Sequence[Mapping[str, Any]]) -> None:
    """Check that the model's values other than tensors are equal on all ranks that have the model."""
    known: dict[tuple[str, str], tuple[Any, Sequence[int]]] = {}
    for table in tables:
        for section, values in table["values"].items():
            for name, value in _by_name(values).items():
                first, ranks = known.setdefault((section, name), (value, table["ranks"]))
                if first != value:
                    raise CheckpointError(
                        f"{section} {name}: ranks {list(ranks[:4])} and {table['ranks'][:4]} have different values: "
                        f"{str(first)[:60]} and {str(value)[:60]}. Save values that differ between ranks in extra=."
                    )


def _by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section, those of an optimizer by parameter, since pipeline stages hold different parameters."""
    if "kinds" not in values:
        return {f"'{name}'": value for name, value in values.items()}
    states = {f"state of '{fqn}'": form for fqn, form in values["states"].items()}
    options = {f"options of '{fqn}'": group["options"] for group in values["groups"] for fqn in group["params"]}
    return {**states, **options}


def index_files(homes: Homes) -> dict[str, bytes]:
    """Hugging Face's index files, by name, for sections that have several files."""
    found = {}
    for section, placed in homes.items():
        rows = [(name, dtype, shape, file) for file, tensors in placed.items() for name, dtype, shape in tensors]
        total = sum(prod(shape) * ITEMSIZES[dtype] for _, dtype, shape, _ in rows)
        content = {"metadata": {"total_size": total}, "weight_map": {name: file for name, _, _, file in sorted(rows)}}
        if len(placed) > 1:
            found[f"{section}.safetensors.index.json"] = json.dumps(content, indent=2).encode()
    return found
