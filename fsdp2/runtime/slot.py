"""`Slot`: one place where a module holds a parameter; `SlotTable`: the slots of a group. Layer: runtime."""

from collections.abc import Callable, Sequence
from operator import is_not, setitem
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import parameter_slots


class Slot:
    """One place where a module holds a parameter. It refers to the module weakly, because modules own units."""

    def __init__(self, module: nn.Module, name: str):
        self.name = name
        self._module = ref(module)
        self.is_direct = type(module).__setattr__ is nn.Module.__setattr__  # an RNN keeps a second list of its weights

    def get(self) -> torch.Tensor | None:
        """What the module holds now."""
        module = self._module()
        return None if module is None else parameter_slots(module)[self.name]

    def put(self, param: nn.Parameter) -> None:
        """Make the module hold `param`."""
        module = self._module()
        if module is None:
            return
        if self.is_direct:
            parameter_slots(module)[self.name] = param
        else:
            setattr(module, self.name, param)

    @property
    def module(self) -> nn.Module | None:
        """The module; None once it was freed."""
        return self._module()


def tie_again(slots: Sequence[Slot], param: nn.Parameter, check: Callable[[torch.Tensor], object]) -> None:
    """Put `param`, which the first slot holds, into the other slots too, if `check` accepts what they hold:
    `load_state_dict(assign=True)` gives each name of a tied weight its own parameter, and, as in torch, the first one
    counts."""
    for slot in slots[1:]:
        held = slot.get()
        if held is not param and isinstance(held, DTensor) and isinstance(held, nn.Parameter):
            check(held)
            slot.put(param)


class SlotTable:
    """The slots of several parameters, written and compared without a call for each. Create it while sharded."""

    def __init__(self, params: Sequence[Any]):
        rows = [(index, slot) for index, param in enumerate(params) for slot in param.slots]
        alive = [(index, slot.name, module) for index, slot in rows if (module := slot.module) is not None]
        self._indices = [index for index, _, _ in alive]
        self._names = [name for _, name, _ in alive]
        self._dicts = [parameter_slots(module) for _, _, module in alive]
        self._others = [(index, slot) for index, slot in rows if not slot.is_direct]
        self._forms: Sequence[nn.Parameter | None] = [param.at_rest for param in params]

    def put(self, forms: Sequence[nn.Parameter | None]) -> None:
        """Make the modules hold these forms of the parameters."""
        self._forms = forms
        list(map(setitem, self._dicts, self._names, map(forms.__getitem__, self._indices)))
        for index, slot in self._others:
            if (form := forms[index]) is not None:
                slot.put(form)

    def replaced(self) -> list[tuple[int, torch.Tensor | None]]:
        """The tensors that modules now hold instead of what `put` stored, each with the index of its parameter."""
        forms = self._forms
        held = list(map(dict.get, self._dicts, self._names))
        if not any(map(is_not, held, map(forms.__getitem__, self._indices))):  # without a Python frame for each
            return []
        return [(index, each) for index, each in zip(self._indices, held, strict=True) if each is not forms[index]]
