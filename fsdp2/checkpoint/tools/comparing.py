"""Differences between two checkpoints of any formats and layouts: names, shapes, dtypes, values, options. Layer:
checkpoint.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from fsdp2.checkpoint.formats.native import NativeCatalog
from fsdp2.checkpoint.io.catalog import Catalog, StoredTensorInfo
from fsdp2.checkpoint.io.workers import run_all
from fsdp2.checkpoint.opening import open_catalog
from fsdp2.checkpoint.schema.dtypes import ITEMSIZES
from fsdp2.checkpoint.state.optimizer import check_table
from fsdp2.checkpoint.storage.base import Folder, storage_of
from fsdp2.checkpoint.tools.describing import tensor_nbytes
from fsdp2.checkpoint.tools.elements import Distance, distance_of, joined
from fsdp2.checkpoint.tools.streaming import CHUNK_BYTES, Meter, Pieces, Progress, StoredValues
from fsdp2.placement.box import whole

__all__ = ["Difference", "TensorDifference", "diff"]

THREADS = 4


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor differs.

    Attributes:
        section: "model", "optimizer" or "extra".
        problem: "only in the first", "only in the second", "shape", "dtype" or "values".
        first, second: dtype and shape in each; "" where it does not exist.
        num_different: elements that differ in any bit; with two dtypes, in value.
        max_abs: the largest absolute difference; infinite where only one of two elements is NaN.
        at: index of the first such element.
    """

    section: str
    name: str
    problem: str
    first: str = ""
    second: str = ""
    num_different: int = 0
    max_abs: float = 0.0
    at: tuple[int, ...] | None = None


@dataclass
class Difference:
    """The result of `diff`.

    Attributes:
        first, second: the folders.
        tensors: those that differ.
        other: other differences, as text: options of the optimizer, extra state, the step.
        num_equal: tensors that do not differ in what was compared.
        compared_bytes: of values, in the first checkpoint.
        values: whether values were compared, or only names, shapes and dtypes.
    """

    first: str
    second: str
    tensors: list[TensorDifference] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    num_equal: int = 0
    compared_bytes: int = 0
    values: bool = True

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.tensors and not self.other


def diff(
    first: Folder, second: Folder, *, values: bool = True, model_only: bool = False, progress: Progress | None = None
) -> Difference:
    """Compare two checkpoints, however each of them is sharded or stored. One process calls this; memory is bounded.

    Args:
        first: the folder of a checkpoint in any format that `load` supports.
        second: the other one.
        values: compare values; False compares only names, shapes and dtypes of tensors.
        model_only: ignore optimizer, extra state and step.
        progress: is called with the number of bytes done and the total.

    Raises:
        CheckpointError: there is no checkpoint.
        CorruptError: one is damaged.

    Example::

        assert fsdp2.checkpoint.diff("runs/a/step-00001000", "export", model_only=True).equal
    """
    one = open_catalog(*storage_of(first))
    try:
        two = open_catalog(*storage_of(second))
        try:
            return _Comparison(one, two, values, ("model",) if model_only else ("model", "optimizer")).run(progress)
        finally:
            two.close()
    finally:
        one.close()


@dataclass(frozen=True)
class _Common:
    """A tensor that is in both."""

    section: str
    name: str
    infos: tuple[StoredTensorInfo, StoredTensorInfo]
    pieces: tuple[Pieces, Pieces]

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.infos[0].dtype, self.infos[0].shape)


class _Comparison:
    """One comparison."""

    def __init__(self, one: Catalog, two: Catalog, values: bool, sections: tuple[str, ...]):
        self._both = (one, two)
        self._values = values
        self._sections = sections
        self._result = Difference(one.path, two.path, values=values)

    def run(self, progress: Progress | None) -> Difference:
        """Compare everything."""
        common = [tensor for section in self._sections for tensor in self._common(section)]
        if "optimizer" in self._sections and self._values:
            common += self._common_extra()
            self._compare_others()
        if self._values:
            common = self._compare_values(common, progress)
        else:
            common = self._of_one_dtype(common)
        self._result.num_equal = len(common)
        order = {section: number for number, section in enumerate(("model", "optimizer", "extra"))}
        self._result.tensors.sort(key=lambda tensor: order[tensor.section])
        return self._result

    def _common(self, section: str) -> Iterator[_Common]:
        """Tensors of the same shape; others are noted. All names of tied tensors are compared."""
        names = [_names(catalog, section) for catalog in self._both]
        for name in {**names[0], **names[1]}:
            infos = [
                catalog.tensors[section][own[name]] if name in own else None
                for catalog, own in zip(self._both, names, strict=True)
            ]
            problem = _problem(infos[0], infos[1])
            if problem:
                self._note(section, name, problem, infos[0], infos[1])
            elif infos[0] and infos[1]:
                pieces = [
                    partial(catalog.pieces, section, own[name]) for catalog, own in zip(self._both, names, strict=True)
                ]
                yield _Common(section, name, (infos[0], infos[1]), (pieces[0], pieces[1]))

    def _of_one_dtype(self, common: list[_Common]) -> list[_Common]:
        """Tensors with equal dtypes; others are noted."""
        for tensor in common:
            if tensor.infos[0].dtype != tensor.infos[1].dtype:
                self._note(tensor.section, tensor.name, "dtype", *tensor.infos)
        return [tensor for tensor in common if tensor.infos[0].dtype == tensor.infos[1].dtype]

    def _compare_values(self, common: list[_Common], progress: Progress | None) -> list[_Common]:
        """Note the tensors whose values differ; return the others."""
        meter = Meter(sum(tensor.nbytes for tensor in common), progress)
        readers = [StoredValues(catalog.storage) for catalog in self._both]
        work = [(number, first, last) for number, tensor in enumerate(common) for first, last in _chunks(tensor)]
        found: dict[int, Distance] = {}

        def compare(chunk: tuple[int, int, int]) -> Distance:
            number, first, last = chunk
            tensor = common[number]
            data = [
                reader.read(f"{tensor.section} '{tensor.name}'", pieces, whole(info.shape), info.dtype, first, last)
                for reader, pieces, info in zip(readers, tensor.pieces, tensor.infos, strict=True)
            ]
            meter.add((last - first) * ITEMSIZES[tensor.infos[0].dtype])
            result = distance_of(data[0], tensor.infos[0].dtype, data[1], tensor.infos[1].dtype)
            return Distance(result.num, result.max_abs, result.at + first if result.num else -1)

        try:
            for (number, _, _), one in zip(work, run_all(compare, work, THREADS, "fsdp2-diff"), strict=True):
                found[number] = joined(found.get(number, Distance()), one)
        finally:
            for reader in readers:
                reader.close()
        meter.finish()
        self._result.compared_bytes = sum(tensor.nbytes for tensor in common)
        equal = []
        for number, tensor in enumerate(common):
            what = found.get(number, Distance())
            if what.num or tensor.infos[0].dtype != tensor.infos[1].dtype:
                problem = "values" if tensor.infos[0].dtype == tensor.infos[1].dtype else "dtype"
                self._note(tensor.section, tensor.name, problem, *tensor.infos, what)
            else:
                equal.append(tensor)
        return equal

    def _common_extra(self) -> list[_Common]:
        """Tensors of the extra state; its other differences are noted."""
        one, two = (catalog if isinstance(catalog, NativeCatalog) else None for catalog in self._both)
        if one is None or two is None:  # other formats have none
            if any(own is not None and own.manifest.extra for own in (one, two)):
                self._result.other.append(f"extra state: only in the {'first' if two is None else 'second'}")
            return []
        common = []
        for key in {**one.manifest.extra, **two.manifest.extra}:
            if key not in one.manifest.extra or key not in two.manifest.extra:
                which = "first" if key in one.manifest.extra else "second"
                self._result.other.append(f"extra '{key}': only in the {which}")
                continue
            pairs = zip_longest(one.manifest.extra[key], two.manifest.extra[key])
            for first, second in pairs:
                if first is None or second is None or _ranks_and_text(first) != _ranks_and_text(second):
                    self._result.other.append(f"extra '{key}': the values or the ranks that gave them differ")
                    break
                for path in _tensor_paths(first["json"]):
                    name = f"{key}/{path}"
                    pieces = one.extra_piece(first["file"], name), two.extra_piece(second["file"], name)
                    infos = tuple(StoredTensorInfo(piece.dtype, piece.box.shape) for piece in pieces)
                    problem = _problem(infos[0], infos[1])
                    if problem:
                        self._note("extra", name, problem, infos[0], infos[1])
                        continue
                    both = (lambda box, at=pieces[0]: [at]), (lambda box, at=pieces[1]: [at])
                    common.append(_Common("extra", name, (infos[0], infos[1]), both))
        return common

    def _compare_others(self) -> None:
        """Compare values that are not tensors."""
        one, two = self._both
        if one.step != two.step:
            self._result.other.append(f"step: {one.step} and {two.step}")
        for section in self._sections:
            facts = [_facts(catalog, section) for catalog in self._both]
            if not all(facts):
                if any(facts):
                    which = "first" if facts[0] else "second"
                    self._result.other.append(f"{section}: values that are not tensors are only in the {which}")
                continue
            names_by_line: dict[tuple[str, ...], list[str]] = {}  # one line for all that differ in the same way
            for what, name in {**facts[0], **facts[1]}:
                shown = [_text(own[what, name]) if (what, name) in own else "nothing" for own in facts]
                if shown[0] != shown[1]:
                    names_by_line.setdefault((what, *shown), []).append(name)
            for (what, *texts), owners in names_by_line.items():
                whose = f" of {owners[0]}" if owners[0] else ""
                more = f" and {len(owners) - 1} others" if len(owners) > 1 else ""
                line = f"{section} {what}{whose}{more}: {_short(texts[0])} and {_short(texts[1])}"
                self._result.other.append(line)

    def _note(
        self,
        section: str,
        name: str,
        problem: str,
        first: StoredTensorInfo | None,
        second: StoredTensorInfo | None,
        found: Distance | None = None,
    ) -> None:
        at = None
        if found is not None and found.num and first is not None:
            at = tuple(int(index) for index in torch.unravel_index(torch.tensor(found.at), first.shape or (1,)))
            at = at if first.shape else ()
        counts = (found.num, found.max_abs) if found is not None else (0, 0.0)
        self._result.tensors.append(
            TensorDifference(section, name, problem, _shown(first), _shown(second), *counts, at)
        )


def _names(catalog: Catalog, section: str) -> dict[str, str]:
    """All names of a section's tensors, each with the name under which it is stored."""
    tensors = catalog.tensors.get(section, {})
    aliases = catalog.aliases.get(section, {}).items()
    return {name: name for name in tensors} | {alias: name for alias, name in aliases if name in tensors}


def _problem(first: StoredTensorInfo | None, second: StoredTensorInfo | None) -> str:
    if first is None or second is None:
        return "only in the second" if first is None else "only in the first"
    return "shape" if first.shape != second.shape else ""


def _chunks(tensor: _Common) -> Iterator[tuple[int, int]]:
    """Ranges of elements to compare at a time."""
    itemsize = max(ITEMSIZES[info.dtype] for info in tensor.infos)
    numel = whole(tensor.infos[0].shape).numel
    step = CHUNK_BYTES // itemsize
    for first in range(0, numel, step):
        yield first, min(first + step, numel)


def _facts(catalog: Catalog, section: str) -> dict[tuple[str, str], Any]:
    """Values that are not tensors: (what it is, whose) -> value. For an optimizer, options and state of each
    parameter."""
    facts: dict[tuple[str, str], Any] = {}
    for table in catalog.values.get(section, ()):
        if section != "optimizer" or "groups" not in table:
            facts |= {("value", f"'{name}'"): value for name, value in table.items()}
            continue
        check_table(table)
        facts["kind", ""] = table.get("kind")
        for group in table["groups"]:
            for param in group["params"]:
                facts |= {(f"option {name}", f"'{param}'"): value for name, value in group["options"].items()}
        for param, form in table["states"].items():
            facts["state", f"'{param}'"] = _without_tensors(table["forms"][form])
    return facts


def _without_tensors(form: Any) -> Any:
    """Encoded state without its tensors, which are compared by value."""
    if isinstance(form, dict):
        if "$tensor" in form:
            return None
        return {key: _without_tensors(value) for key, value in form.items()}
    return [_without_tensors(value) for value in form] if isinstance(form, list) else form


def _ranks_and_text(share: Mapping[str, Any]) -> Any:
    return share["ranks"], _text(share["json"])


def _tensor_paths(value: Any) -> Iterator[str]:
    """The names of the tensors in encoded state; see `tree.py`."""
    if isinstance(value, dict):
        if "$tensor" in value:
            yield str(value["$tensor"])
            return
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _tensor_paths(item)


def _shown(info: StoredTensorInfo | None) -> str:
    return "" if info is None else f"{info.dtype} {list(info.shape)}"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
