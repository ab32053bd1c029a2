"""`WeightSets`: other values for the same shards: a reference policy, an average, a teacher, adapters. Layer: extras.

::

    shards of the model     [policy]   -- use("ref") -->   [ref]        the values are swapped, on each rank
    set "ref"               [ref]      <-- afterwards --   [policy]     without communication
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor, make_dtensor, spec_of
from fsdp2.errors import ArgumentError, OrderError
from fsdp2.extras.host_memory import host
from fsdp2.runtime.root import units_below


def weight_sets(model: nn.Module) -> "WeightSets":
    """Named sets of values for the parameters of `model`; empty at first. See `WeightSets`."""
    return WeightSets(model)


class WeightSets:
    """Named sets of alternative values for a model's parameters. They are swapped shard by shard, without
    communication: every rank that shares parameters must make the same calls, between two steps.

    Example::

        sets = fsdp2.weight_sets(model)
        sets.save("ref")
        ...
        with sets.use("ref"), torch.no_grad():
            reference = model(tokens)
        checkpoint.save(folder, model={**model.state_dict(), **sets.state_dict("ref", prefix="ref.")})
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._sets: dict[str, dict[str, torch.Tensor]] = {}
        self._in_use: list[str] = []

    @property
    def names(self) -> list[str]:
        """The names of all sets."""
        return [*self._sets]

    def save(
        self, name: str, *, on_host: bool = False, only: Callable[[str], bool] | None = None, decay: float = 0.0
    ) -> None:
        """Store the current values as the set `name`, which is created if needed.

        Args:
            on_host: keep them in host memory, page-locked if there is an accelerator.
            only: called with each parameter's name; the set has those for which it returns True.
            decay: keep a moving average: ``decay * old + (1 - decay) * new``.

        Raises:
            OrderError: the set is in use.
        """
        self._check_unused(name)
        before, values = self._sets.get(name, {}), {}
        with torch.no_grad():
            for key, local in self._shards().items():
                if only is not None and not only(key):
                    continue
                if key in before and before[key].shape == local.shape:
                    values[key] = before[key].lerp_(local.to(before[key].device), 1 - decay)
                elif on_host and local.device != host():
                    memory = torch.empty_like(local, device=host(), pin_memory=local.device.type != "cpu")
                    values[key] = memory.copy_(local)
                else:
                    values[key] = local.clone()
        self._sets[name] = values

    def drop(self, name: str) -> None:
        """Delete a set. Raises `OrderError` if it is in use."""
        self._check_unused(name)
        self._sets.pop(self._known(name))

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Within this context the parameters have the values of the set, and the set has theirs. Changes made in the
        context stay with the set. On exit, also after an exception, the values are swapped back."""
        self._check_unused(self._known(name))
        self._exchange(name)
        self._in_use.append(name)
        try:
            yield
        finally:
            self._in_use.remove(name)
            self._exchange(name)

    def state_dict(self, name: str, prefix: str = "") -> dict[str, torch.Tensor]:
        """The values of a set, by `prefix` + parameter name, as DTensors like the parameters. Not a copy, so
        `fsdp2.checkpoint` can save it and load into it."""
        found: dict[str, torch.Tensor] = {}
        params = dict(self._model.named_parameters())
        for key, local in self._sets[self._known(name)].items():
            param = params[key]
            found[prefix + key] = make_dtensor(local, spec_of(param)) if isinstance(param, DTensor) else local
        return found

    def _known(self, name: str) -> str:
        if name not in self._sets:
            raise ArgumentError(f"weight_sets: there is no set '{name}', only {self.names}; save it first")
        return name

    def _check_unused(self, name: str) -> None:
        if name in self._in_use:
            raise OrderError(f"weight_sets: the set '{name}' is in use; leave the `use` of it first")

    def _shards(self) -> dict[str, torch.Tensor]:
        """This rank's shard of each parameter, which is about to be read or changed."""
        for unit in units_below(self._model):
            unit.reshard_all()
        return {
            key: local_tensor(param) if isinstance(param, DTensor) else param.detach()
            for key, param in self._model.named_parameters()
        }

    @torch.no_grad()
    def _exchange(self, name: str) -> None:
        shards = self._shards()
        for key, kept in self._sets[name].items():
            local = shards[key]
            own = local.clone()
            local.copy_(kept)
            kept.copy_(own)
