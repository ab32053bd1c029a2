"""Finds a transformers model's weights in a transformers folder, where they may be renamed, fused, or one per expert.
Layer: checkpoint.

This follows the mapping that transformers (5 and later) publishes and applies in `from_pretrained` and
`save_pretrained`. There it applies to loaded tensors. Here it is turned into sources, so that a rank reads only what
its shards need. transformers is used only if it was imported already.
"""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp2.checkpoint.io.pieces import StoredTensorInfo
from fsdp2.checkpoint.state.sources import Source, concatenated, stacked, stored
from fsdp2.errors import UnsupportedError

__all__ = ["published_sources", "skeleton"]

# By the source pattern that matched, or by target pattern, as in transformers' operations.
Values = dict[str, list[Source]]
Shapes = Mapping[str, tuple[int, ...]]


def published_sources(
    model: object, shapes: Shapes, tensors: Mapping[str, StoredTensorInfo], said: Collection[str] = ()
) -> dict[str, Source]:
    """The sources of tensors whose names or layouts in the folder differ. Empty if the model is not from transformers,
    or if all its names are stored unchanged.

    Args:
        shapes: shapes of the model's tensors, by name.
        tensors: the stored tensors.
        said: names of the model for which the user gives sources.

    Raises:
        UnsupportedError: a tensor for which the user gives no source requires an unknown operation.
    """
    modeling = sys.modules.get("transformers.modeling_utils")  # if it is not imported, the model is not one of its
    if modeling is None or not isinstance(model, modeling.PreTrainedModel) or shapes.keys() <= tensors.keys():
        return {}
    try:
        published = import_module("transformers.conversion_mapping")
        loading = import_module("transformers.core_model_loading")
    except ImportError:  # before version 5, files had the names of the model
        return {}
    transforms = published.get_model_conversion_mapping(skeleton(model, modeling.PreTrainedModel))
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix = model.base_model_prefix
    found: dict[str, Source] = {}
    parts: dict[str, tuple[Any, Values]] = {}
    for name in sorted(tensors, key=loading.dot_natural_key):  # experts in numerical order
        renamed, pattern = loading.rename_source_key(name, renamings, converters, prefix, shapes)
        if renamed not in shapes and name in shapes:  # as in transformers: then the renaming does not apply
            renamed, pattern = loading.rename_source_key(name, [], [], prefix, shapes)
        if renamed in shapes and pattern is None:
            found.setdefault(renamed, stored(name))
        elif renamed in shapes:
            _, collected = parts.setdefault(renamed, (of_pattern[pattern], {}))
            collected.setdefault(pattern, []).append(stored(name))
    for renamed, (converter, collected) in parts.items():
        if renamed in said:
            continue
        how = (converter.operations, converter.source_patterns, converter.target_patterns)
        found |= _Conversion(*how, renamed, model.config, shapes, tensors).of(collected)
    return found


def skeleton(model: nn.Module, kind: type[nn.Module]) -> Any:
    """The module tree, with empty modules. Modules of transformers get their classes from before sharding, because the
    mapping depends on class names."""
    made: dict[str, Any] = {}
    for path, module in model.named_modules():
        made[path] = nn.Module()
        if isinstance(module, kind):
            classes = (each for each in type(module).__mro__ if issubclass(each, kind))
            original: Any = next(each for each in classes if not issubclass(each, FSDPModule))
            made[path] = original.__new__(original)
            nn.Module.__init__(made[path])
            made[path].config = module.config
        if path:
            parent, _, name = path.rpartition(".")
            made[parent].add_module(name, made[path])
    return made[""]


@dataclass
class _Conversion:
    """One `WeightConverter` of transformers, for one place in the model.

    Attributes:
        name: the name of the first tensor that it produces.
    """

    operations: Sequence[Any]
    sources: Sequence[str]
    targets: Sequence[str]
    name: str
    config: Any
    shapes: Shapes
    tensors: Mapping[str, StoredTensorInfo]

    def of(self, values: Values) -> dict[str, Source]:
        """The sources of the tensors that it produces. Empty if a part is missing, so that the tensor is reported as
        missing."""
        for operation in self.operations:
            known = KNOWN.get(type(operation).__name__)
            if known is None or not (len(values) == 1 or known in OF_SEVERAL):
                raise UnsupportedError(
                    f"load: transformers builds '{self.name}' from {', '.join(map(repr, self.sources))} by "
                    f"{type(operation).__name__}, which fsdp2 does not support. Give its source with sources=, or load "
                    "with from_pretrained before sharding"
                )
            values = known(self, operation, values)
            if not values:
                return {}
        whole = self.name.replace("*.", "0.")
        pattern = next((each for each in values if each in whole), "")
        before, _, after = whole.partition(pattern) if pattern else ("", "", "")
        return {before + each + after: parts[0] for each, parts in values.items()}

    def _one(self, values: Values) -> Source:
        """The source of the only pattern; the first one if several stored tensors match."""
        (parts,) = values.values()
        return parts[0]

    def _shape(self, source: Source) -> tuple[int, ...]:
        return source.info(self.tensors).shape

    def _cut(self, source: Source, dim: int, sizes: Sequence[int], targets: Sequence[str]) -> Values:
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        cut = [source.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]
        return {target: [part] for target, part in zip(targets, cut, strict=False)}

    def merge(self, operation: Any, values: Values) -> Values:
        only = len(values) == 1
        return {
            (self.targets[0] if only else pattern): [stacked(*parts, dim=operation.dim)]
            for pattern, parts in values.items()
        }

    def concatenate(self, operation: Any, values: Values) -> Values:
        if any(pattern not in values for pattern in self.sources):
            return {}
        parts = [part for pattern in self.sources for part in values[pattern]]
        return {self.targets[0]: [concatenated(*parts, dim=operation.dim)]}

    def chunk(self, operation: Any, values: Values) -> Values:
        targets = self.targets
        if operation.num_shards_attribute is not None:
            number = getattr(self.config.get_text_config(), operation.num_shards_attribute)
            targets = [self.targets[0].replace("*", str(place)) for place in range(number)]
        source = self._one(values)
        size = self._shape(source)[operation.dim]
        each = -(-size // len(targets))  # as `torch.chunk` does
        return self._cut(source, operation.dim, [min(each, size - at) for at in range(0, size, each or 1)], targets)

    def split(self, operation: Any, values: Values) -> Values:
        names = [self.name.replace(self.targets[0], target) for target in self.targets]
        sizes = [self.shapes[name][operation.dim] for name in names]
        return self._cut(self._one(values), operation.dim, sizes, self.targets)

    def transpose(self, operation: Any, values: Values) -> Values:
        source = self._one(values)
        if not operation.check_dims or self._shape(source) != self.shapes[self.name]:
            source = source.transpose(operation.dim0, operation.dim1)
        return {(self.sources if len(self.targets) > 1 else self.targets)[0]: [source]}


# By the class names of transformers' operations.
KNOWN: dict[str, Callable[[_Conversion, Any, Values], Values]] = {
    "MergeModulelist": _Conversion.merge,
    "Concatenate": _Conversion.concatenate,
    "Chunk": _Conversion.chunk,
    "Split": _Conversion.split,
    "Transpose": _Conversion.transpose,
}
OF_SEVERAL = (_Conversion.merge, _Conversion.concatenate)  # the others take tensors of only one pattern
