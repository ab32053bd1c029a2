"""Optimizers that step whole matrices, each on the rank that owns it. Layer: optim.

Optimizers such as Muon compute with a whole matrix; on a shard the result would be different. Here the update does not
depend on the number of ranks or their arrangement::

    step    the closure, if there is one
            bucket 1: gradients to the owners (all-to-all)
            param groups of elementwise optimizers, on local shards
            bucket 2: gradients to the owners
            bucket 1: owners step their matrices with the user's own optimizer; new values back (all-to-all)
            bucket 3: gradients to the owners
            ...

One optimizer object holds all param groups, each with its own optimizer class, so schedulers, state dicts and
checkpoints see one optimizer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor
from fsdp2.checks.unreduced import check_reduced
from fsdp2.errors import MismatchError
from fsdp2.optim.exchange import Bucket, Whole
from fsdp2.optim.flats import identical, local_grad
from fsdp2.optim.loading import load_with_dtypes
from fsdp2.optim.local import ELEMENTWISE
from fsdp2.optim.matrices import shape_of_matrix
from fsdp2.optim.matrix_plan import Kind, Plan, Stepper, as_param, options_of
from fsdp2.optim.owned import Matrix, OwnedTensor

__all__ = ["MatrixOptimizer", "matrix_optimizer"]

Params = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]


def matrix_optimizer(kind: Kind, params: Params, **options: Any) -> "MatrixOptimizer":
    """Create an optimizer that runs `kind` on whole matrices of sharded parameters, each on one rank.

    For optimizers that work on whole matrices, such as `torch.optim.Muon`. Parameters, state and updates are those of
    one process with the same gradients, on any number of ranks, with FSDP, HSDP, tensor parallelism, uneven and empty
    shards. Each matrix has an owner, chosen once so that all ranks have about the same work. In a step the owner
    receives the gradient and the parameter, steps it, and returns the new values: two all-to-alls for each bucket of
    matrices.

    Param groups may use other optimizers: ``{"params": ..., "kind": torch.optim.AdamW, "lr": 3e-4}``. The elementwise
    ones of `torch.optim` step local shards; any other steps whole matrices. A group of whole matrices may also have
    ``split``: the number of equal parts, or the sizes of the parts, into which the rows of its matrices are divided,
    such as ``(q_rows, k_rows, v_rows)`` of a fused projection, or the number of heads. A 3-D parameter is a stack of
    matrices (expert weights).

    The state of a matrix is on its owner. ``optimizer.state[param]`` shows it on every rank, as DTensors on the owner's
    mesh (`OwnedTensor`) under the names that `kind` uses: ``momentum_buffer``, or ``momentum_buffer[2]`` for the third
    matrix of a parameter. So `fsdp2.checkpoint` and `torch.distributed.checkpoint` save and load it by FQN, also with
    another number of ranks.

    Args:
        kind: an optimizer class whose step of a parameter depends only on that parameter, its gradient, its
            ``self.state[param]`` and the options of its group. It is created with parameters on the meta device, and
            steps the parameters of its ``param_groups`` in portions. A parameter's state must consist of named tensors
            (a step count is a 0-dim one), all created in its first step.
        params: as for `kind`: parameters, pairs of names and parameters (names are used in messages), or param groups.
            Plain parameters are stepped on every rank.
        **options: for `kind`. Groups of another kind use their own options, or the defaults of that kind.

    Raises:
        ArgumentError: `kind` rejects the parameters, or a `split` does not fit.

    Every rank must create it with the same parameters, in the same groups and order. `step` is collective. The first
    step compares the plans of all ranks, and raises `MisuseError` on all of them if they differ.

    Example::

        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
        optimizer = fsdp2.optim.matrix_optimizer(
            torch.optim.Muon,
            [{"params": matrices}, {"params": rest, "kind": torch.optim.AdamW, "lr": 3e-4, "fused": True}],
            lr=0.02,
        )

    Sources: https://kellerjordan.github.io/posts/muon/ (Muon); https://arxiv.org/abs/2502.16982 (`adjust_lr_fn`)
    """
    return MatrixOptimizer(kind, params, options)


class MatrixOptimizer(torch.optim.Optimizer):
    """The class of the optimizers from `matrix_optimizer`."""

    def __init__(self, kind: Kind, params: Params, options: dict[str, Any]):
        self._kind, self._options = kind, options
        self._steppers: list[Stepper] = []
        self._plan: Plan | None = None
        self._planned: list[Any] = []  # what the plan was made for
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `matrix_optimizer`. Owners are chosen again, and the next step moves states to them.

        Raises:
            ArgumentError: see `matrix_optimizer`.
        """
        given = dict(param_group)
        kind = given.pop("kind", self._kind)
        super().add_param_group(given)
        group = self.param_groups[-1]
        try:
            stepper = Stepper.of(kind, group, len(self._steppers), self._options if kind is self._kind else {})
        except BaseException:
            self.param_groups.pop()
            raise
        for key, value in stepper.inner.param_groups[0].items():
            group.setdefault(key, value)
        group["kind"] = kind.__name__
        stepper.inner.param_groups = []
        self._steppers.append(stepper)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all groups. Collective over the ranks that hold the parameters.

        An error of the user's optimizer is raised on the owner of the matrix; the other ranks wait for it until the
        process group's timeout. Parameters and state are then undefined: some were stepped.

        Args:
            closure: computes the loss and the gradients again; called once.

        Raises:
            MisuseError: in the first step: the ranks have different parameters or groups.
            MismatchError: a loaded state does not belong to this optimizer.
            ArgumentError: a DTensor parameter has a gradient that is not a DTensor.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_groups()
        plan = self._current_plan()
        for matrix in plan.matrices:
            matrix.take_in(self.state.get(matrix.param))
        self._step_all(plan)
        plan.show_new(self.state)
        # As operations on the DTensors would: autograd must see that tensors which it may have saved have changed.
        trained = {matrix.param for matrix in plan.matrices if matrix.param.requires_grad}
        params = [param for param in trained if isinstance(param, DTensor)]
        torch.autograd.graph.increment_version([*params, *map(local_tensor, params)])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the states of matrices keep their dtypes instead of being cast to the parameter's."""
        kinds = [stepper.kind for stepper in self._steppers]
        load_with_dtypes(self, super().load_state_dict, state_dict, lambda index: kinds[index] not in ELEMENTWISE)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Warns about unreduced gradients, which it does not clear."""
        super().zero_grad(set_to_none)
        params = (param for group in self.param_groups for param in group["params"])
        check_reduced("zero_grad", params, is_read=False)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets, in order; empty before the first step."""
        return self._plan.buckets if self._plan is not None else []

    def owned_state(
        self, param: torch.Tensor, name: str, shape: Sequence[int], dtype: torch.dtype
    ) -> OwnedTensor | None:
        """A new, unfilled tensor for a part of a matrix's state, as `state[param]` shows it: for checkpoints that fill
        an optimizer before its first step. None for parameters without an owner.

        Args:
            name: the part's name, such as ``momentum_buffer[2]``.
        """
        for matrix in self._current_plan().matrices:
            if matrix.param is param and matrix.crew.group is not None and name.endswith(matrix.suffix):
                return matrix.owned(None, shape, dtype)
        return None

    def _check_groups(self) -> None:
        """Raise if a state dict of another optimizer was loaded, because options would come from the wrong group."""
        for index, (group, stepper) in enumerate(zip(self.param_groups, self._steppers, strict=True)):
            kind, split = group.get("kind"), group.get("split")
            if kind != stepper.kind.__name__ or _as_list(split) != _as_list(stepper.split):
                raise MismatchError(
                    f"MatrixOptimizer: param group {index} is of {stepper.kind.__name__} with split={stepper.split}, "
                    f"but the loaded state is of {kind} with split={split}. Use the groups that were saved."
                )

    def _current_plan(self) -> Plan:
        """The plan for the parameters that the groups hold now. Collective if they have changed."""
        params = [
            param
            for group, stepper in zip(self.param_groups, self._steppers, strict=True)
            for param in (() if stepper.steps_shards else group["params"])
        ]
        planned = [each for param in params for each in (param, param.requires_grad, param.grad_dtype)]
        if self._plan is None or not identical(planned, self._planned):
            self._plan, self._planned = Plan(self.param_groups, self._steppers), planned
        return self._plan

    def _step_all(self, plan: Plan) -> None:
        grads = {
            param: local_grad(param, param.grad) if isinstance(param, DTensor) else param.grad
            for param in dict.fromkeys(matrix.param for matrix in plan.matrices)
            if param.grad is not None
        }
        buckets = plan.buckets
        for bucket in buckets[:1]:
            bucket.send_gradients(grads)
        for group, stepper in zip(self.param_groups, self._steppers, strict=True):
            if stepper.steps_shards:
                stepper.step(group, self.state)
        for index, bucket in enumerate(buckets):
            for following in buckets[index + 1 : index + 2]:
                following.send_gradients(grads)
            wholes = bucket.receive_gradients()
            self._step_wholes(wholes)
            bucket.send_values(wholes)
            for before in buckets[index - 1 : index] if index else ():
                before.receive_values()
        for bucket in buckets[-1:]:
            bucket.receive_values()

    def _step_wholes(self, wholes: Sequence[Whole]) -> None:
        """Step matrices that this rank owns, with the optimizer of their group."""
        by_group: defaultdict[int, dict[torch.Tensor, Matrix]] = defaultdict(dict)
        for matrix, values, grad in wholes:
            if grad is not None:
                param = as_param(*(each.view(shape_of_matrix(matrix.box)) for each in (values, grad)))
                by_group[matrix.group][param] = matrix
        for index, matrices in by_group.items():
            state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
            state.update((param, each.inside) for param, each in matrices.items() if each.inside is not None)
            self._steppers[index].step({**options_of(self.param_groups[index]), "params": [*matrices]}, state)
            for param, matrix in matrices.items():
                matrix.put_out(self.state.get(matrix.param), state[param])


def _as_list(split: Any) -> Any:
    return list(split) if isinstance(split, (list, tuple)) else split
