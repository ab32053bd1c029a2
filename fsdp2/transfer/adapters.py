"""LoRA adapters of peft, merged when weights are published, as `merge_and_unload` would merge them. Layer: transfer.

On 2 ranks, a linear layer with an adapter of rank r::

    before a pass    A [r, in], B [out, r]      whole on each rank, gathered: they are small
    each weight      W [out/2, in] += (B @ A * scaling)[rows of this rank]      in a copy, by peft's own code

Names are those of the merged model.
"""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp2.errors import UnsupportedError

if TYPE_CHECKING:
    from fsdp2.checkpoint.ranks.world import Entry


def adapters_of(model: nn.Module, clean_name: Callable[[str], str]) -> "Adapters | None":
    """The adapters of a model; None if it has none.

    Raises:
        UnsupportedError: an adapter is not LoRA, or is a variant that does more than add a product of two matrices.
    """
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # if it is not imported, the model has no adapters
    if tuners is None:
        return None
    modules = {clean_name(name): module for name, module in model.named_modules()}
    layers = {name: module for name, module in modules.items() if isinstance(module, tuners.BaseTunerLayer)}
    return Adapters(model, modules, layers) if layers else None


class Adapters:
    """The adapters of a model.

    Attributes:
        model: the model to which peft was applied.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module], layers: Mapping[str, Any]):
        peft: Any = sys.modules["peft"]
        self.model: nn.Module = model.get_base_model() if isinstance(model, peft.PeftModel) else model
        self._prefix = next(name + "." for name, module in modules.items() if module is self.model).lstrip(".")
        self._skipped: dict[str, str] = {}  # by a module's name: the attribute that is left out of names
        self._own: dict[str, set[str]] = {}  # by a module's name: the attributes that the merged model lacks
        for name, module in modules.items():
            if isinstance(module, sys.modules["peft.utils.other"].AuxiliaryTrainingWrapper):
                self._replace(name, module)
        self._layers: dict[str, list[Any]] = {}  # by the name of a weight in the merged model
        for name, layer in layers.items():
            self._skipped[name], self._own[name] = "base_layer", {*layer.adapter_layer_names}
        for name, layer in layers.items():
            if active_in(layer):
                _check(name, layer)
                weight = self.name_of(f"{name}.{getattr(layer, 'parameter_name', 'weight')}")
                self._layers.setdefault(weight, []).append((name, layer))

    def _replace(self, name: str, module: Any) -> None:
        """Register a module that is trained instead of its original."""
        if "modules_to_save" not in module.adapter_layer_names:
            raise UnsupportedError(f"weights: '{name}' is a {type(module).__name__} of peft, which is not merged here")
        others = {*module.modules_to_save}
        active = next((each for each in module.active_adapters if each in others), None)
        if active is None or module.disable_adapters:
            self._skipped[name], self._own[name] = "original_module", {"modules_to_save"}
        else:
            self._skipped[name], self._own[name] = "modules_to_save", {"original_module"}
            self._skipped[f"{name}.modules_to_save"], self._own[f"{name}.modules_to_save"] = active, others - {active}

    def name_of(self, name: str) -> str:
        """The name of a tensor in the merged model; "" if the merged model lacks it."""
        parts, kept = name.split("."), []
        for index, part in enumerate(parts):
            path = ".".join(parts[:index])
            if part in self._own.get(path, ()):
                return ""
            if part != self._skipped.get(path):
                kept.append(part)
        return ".".join(kept).removeprefix(self._prefix)

    def is_needed(self, name: str) -> bool:
        """Whether the tensor belongs to an adapter and is needed for merging."""
        layers = (layer for found in self._layers.values() for layer, _ in found)
        return not self.name_of(name) and any(name.startswith(f"{layer}.") for layer in layers)

    def renamed(self, entries: "Mapping[str, Entry]") -> "dict[str, Entry]":
        """The entries of the merged model, by their names there."""
        names = {name: self.name_of(name) for name in entries}
        return {new: entries[name]._replace(name=new) for name, new in names.items() if new}

    def deltas(self, name: str, dtype: torch.dtype, whole: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors to add to a weight, in this order.

        Args:
            dtype: the dtype of the weight.
            whole: the tensors of the adapters.
        """
        found = []
        for path, layer in self._layers.get(name, ()):
            for adapter in active_in(layer):
                delta = _with_tensors(layer, path, whole).get_delta_weight(adapter)
                found.append(delta.to(dtype) if adapter in layer.lora_embedding_A else delta)
        return found


def active_in(layer: Any) -> list[str]:
    """The adapters of a layer that `merge_and_unload` would merge."""
    merged = layer.merged_adapters
    of_layer = {each for name in layer.adapter_layer_names for each in getattr(layer, name, ())}
    return [each for each in layer.active_adapters if each in of_layer and each not in merged]


def _check(name: str, layer: Any) -> None:
    for adapter in active_in(layer):
        is_lora = isinstance(layer, sys.modules["peft.tuners.lora.layer"].LoraLayer)
        if not is_lora or adapter in layer.lora_variant or layer.lora_bias.get(adapter):
            raise UnsupportedError(
                f"weights: the adapter '{adapter}' of '{name}' ({type(layer).__name__}) does more than add the product "
                "of two matrices (DoRA, a bias, another method). Merge it with peft before a pass"
            )


def _with_tensors(module: nn.Module, path: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The module with these tensors instead of its parameters; it keeps parameters that are not among them."""
    found = object.__new__(type(module))
    own, below = vars(module)["_parameters"], vars(module)["_modules"]
    vars(found).update(vars(module))
    vars(found)["_parameters"] = {name: tensors.get(f"{path}.{name}", value) for name, value in own.items()}
    vars(found)["_modules"] = {
        name: each if name == "base_layer" or each is None else _with_tensors(each, f"{path}.{name}", tensors)
        for name, each in below.items()
    }
    return found
