"""`Replicas`: the calls in the training loop. Layer: replicas."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor, make_dtensor, make_spec
from fsdp2.errors import ArgumentError, OrderError, UnsupportedError
from fsdp2.optim import MatrixOptimizer, OffloadedOptimizer
from fsdp2.replicas.manager import ReplicaManager
from fsdp2.replicas.serving import Local, pack, unpack
from fsdp2.runtime.root import units_below


class Replicas:
    """Replicas of a sharded model that die and rejoin. Each is a separate job with its own process groups. In a step
    the live replicas average their gradients, and one that is behind takes the state of another.

    Args:
        model: a module in which `fully_shard` was called.
        optimizer: one of torch, or from `local_optimizer`.
        manager: a `ReplicaManager`, or a ``torchft.Manager``.
        extra: by name, what else a replica needs to rejoin: objects with ``state_dict()`` and ``load_state_dict()``
            such as schedulers and samplers, with small values that are equal in all replicas.

    Raises:
        ArgumentError: nothing in `model` is sharded, or a unit has an all-reduce hook already.
        UnsupportedError: `step_in_backward`, an optimizer that keeps its state elsewhere, or a trainable parameter that
            is not sharded, so that its gradient would not be reduced.

    Example::

        manager = fsdp2.ReplicaManager("store-host:29400")
        replicas = fsdp2.Replicas(model, optimizer, manager)
        for batch in batches:
            replicas.begin()
            model(batch).sum().backward()
            if replicas.commit():
                optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        manager: Any,
        *,
        extra: Mapping[str, Any] | None = None,
    ):
        self._model, self._optimizer, self._manager = model, optimizer, manager
        self._units = units_below(model)
        names = {id(param): name for name, param in model.named_parameters()}
        managed = [param for unit in self._units for param in unit.params]
        self._managed = {names.get(id(param.sharded), param.fqn): param for param in managed}
        self._extra = dict(extra or {})
        self._extra_at_begin: dict[str, Any] = {}  # their state dicts when the step began
        self._weight = 1.0
        self._share: float | None = None  # known from the first reduction of a step on
        self._is_open = False
        self._check()
        for unit in self._units:
            module: Any = unit.modules[0]
            module.set_all_reduce_hook(self._reduce)
        if isinstance(manager, ReplicaManager):
            about = [(name, param.sharded.shape, param.sharded.dtype) for name, param in self._managed.items()]
            digest = hashlib.sha256(repr(about).encode()).hexdigest()[:8]
            manager.kind = f"{len(about)} parameters ({digest}) on {dist.get_world_size()} ranks"
        manager.register_state_dict_fn("fsdp2", self._load, self._save)

    def _check(self) -> None:
        if not self._units:
            raise ArgumentError("Replicas: expected a module in which fully_shard was called")
        if isinstance(self._optimizer, (MatrixOptimizer, OffloadedOptimizer)):
            raise UnsupportedError(f"Replicas: a {type(self._optimizer).__name__} cannot give its state to a replica")
        if any(unit.settings.when_reduced for unit in self._units):
            raise UnsupportedError("Replicas: step_in_backward steps before the replicas have committed the step")
        for unit in self._units:
            if unit.settings.all_reduce_hook is not None:
                raise ArgumentError("Replicas: a unit has an all-reduce hook already; remove it first")
        for name, param in self._model.named_parameters():
            if param.requires_grad and not isinstance(param, DTensor):
                raise UnsupportedError(f"Replicas: '{name}' is trainable and not sharded; shard it, or freeze it")

    @property
    def step(self) -> int:
        """The number of committed steps, counted over all replicas."""
        return int(self._manager.current_step())

    @property
    def saves(self) -> bool:
        """Whether this replica should write checkpoints after this step. The same on all its ranks."""
        return self._manager.participating_rank() == 0 and bool(self._manager.is_participating())

    def begin(self, weight: float = 1.0) -> None:
        """Begin a step, before its first forward. A previous step without `commit` is not committed.

        Args:
            weight: the weight of this replica's gradients, such as its number of tokens; equal on all its ranks. The
                sum of gradients is divided by the sum of all weights. With `join`, its `total`.
        """
        if self._is_open:
            self._manager.report_error(OrderError("Replicas: begin() was called before commit() of the last step"))
            self._manager.should_commit()
        self._weight, self._share, self._is_open = weight, None, True
        self._extra_at_begin = {name: each.state_dict() for name, each in self._extra.items()}
        self._manager.start_quorum()

    def commit(self) -> bool:
        """End a step, after its last backward and before clipping. Returns whether to step the optimizer. If not, drop
        the gradients: the step is lost, on all ranks of this replica.

        Raises:
            OrderError: `begin` was not called before.
            MismatchError: the other replicas train something else.
            CollectiveError: the store in which replicas meet is gone.
        """
        if not self._is_open:
            raise OrderError("Replicas: commit() without begin()")
        self._is_open = False
        if self._share is None:
            self._manager.report_error(OrderError("Replicas: no gradients were reduced between begin() and commit()"))
        return bool(self._manager.should_commit())

    def _reduce(self, flat: torch.Tensor, *_: object) -> None:
        """The hook on a unit's reduced gradients."""
        try:
            if self._share is None:
                self._share = 0.0  # also after an error
                self._manager.wait_quorum()
                weight = self._weight if self._manager.is_participating() else 0.0
                total = torch.tensor([weight], dtype=torch.float64, device=flat.device)
                self._manager.allreduce(total, reduce_op=dist.ReduceOp.SUM).wait()
                if self._manager.errored() is None:
                    self._share = weight / total.item()
            if self._share:
                flat.mul_(self._share)
            else:
                flat.zero_()
            self._manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM).wait()
        except Exception as error:  # backward continues, because other ranks of this replica wait for this one
            self._manager.report_error(error)

    # --- state --------------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {name: param.sharded for name, param in self._managed.items()}
        for name, tensor in chain(self._model.named_parameters(), self._model.named_buffers()):
            found.setdefault(name, tensor)
        return found

    def _save(self) -> dict[str, Any]:
        """Called in another thread, while forward or backward may run."""
        groups = self._optimizer.param_groups
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        params = [param for group in groups for param in group["params"]]
        state = {
            index: _local(self._optimizer.state[p]) for index, p in enumerate(params) if p in self._optimizer.state
        }
        tensors = {name: _local(tensor) for name, tensor in self._tensors().items()}
        text, given = pack({"tensors": tensors, "options": options, "state": state, "extra": self._extra_at_begin})
        return {"text": text, "tensors": given}

    def _load(self, given: dict[str, Any]) -> None:
        tree = unpack(given["text"], given["tensors"])
        own = {name: _local(tensor) for name, tensor in self._tensors().items()}
        with torch.no_grad():
            for name, tensor in own.items():
                _plain(tensor).copy_(_plain(tree["tensors"][name]))
        groups = [
            {**options, "params": group["params"]}
            for group, options in zip(self._optimizer.param_groups, tree["options"], strict=True)
        ]
        params = [param for group in groups for param in group["params"]]
        state = defaultdict[Any, Any](dict)
        state.update({params[index]: _distributed(params[index], each) for index, each in tree["state"].items()})
        # As torch's `load_state_dict` ends; that would cast state to the dtypes of parameters.
        self._optimizer.__setstate__({"state": state, "param_groups": groups})
        for name, each in self._extra.items():
            each.load_state_dict(tree["extra"][name])


def _plain(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.tensor if isinstance(tensor, Local) else tensor
    return found


def _local(value: Any) -> Any:
    """`value`, with a `Local` for each DTensor."""
    if isinstance(value, DTensor):
        return Local(local_tensor(value), tuple(value.shape))
    return {key: _local(each) for key, each in value.items()} if isinstance(value, dict) else value


def _distributed(param: torch.Tensor, value: Any) -> Any:
    """`value`, with a DTensor like `param` for each `Local`."""
    if isinstance(value, dict):
        return {key: _distributed(param, each) for key, each in value.items()}
    if not isinstance(value, Local):
        return value
    assert isinstance(param, DTensor)
    local = value.tensor
    return make_dtensor(local, make_spec(param.device_mesh, param.placements, param.shape, param.stride(), local.dtype))
