"""Optimizers that step whole matrices, each on one rank that owns it. Layer: optim.

Muon and its like compute with a matrix as a whole; on a shard they would compute something else. Here the
update does not depend on how many ranks there are or how they are arranged::

    step    the closure, if there is one
            bucket 1: gradients to the owners (all-to-all)
            param groups of elementwise optimizers, on local shards
            bucket 2: gradients to the owners
            bucket 1: owners step their matrices with the user's own optimizer; new values back (all-to-all)
            bucket 3: gradients to the owners
            ...

One optimizer object holds all param groups, each with an optimizer class of its own, so schedulers, state dicts and
checkpoints see one optimizer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor
from fsdp2.checks.unreduced import check_reduced
from fsdp2.errors import CollectiveError, MismatchError
from fsdp2.optim.exchange import Bucket, Local, Whole
from fsdp2.optim.loading import load_with_dtypes
from fsdp2.optim.local import ELEMENTWISE
from fsdp2.optim.matrices import Share
from fsdp2.optim.matrix_plan import MatrixGroup, Owners, Plan
from fsdp2.optim.owned import OwnedTensor
from fsdp2.optim.owners import BUCKET_BYTES
from fsdp2.optim.run import identical, local_grad
from fsdp2.optim.stepper import Kind, Stepper, as_param, names_of, options_of

__all__ = ["MatrixOptimizer", "matrix_optimizer"]

Params = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]


def matrix_optimizer(kind: Kind, params: Params, **options: Any) -> "MatrixOptimizer":
    """Create an optimizer that runs `kind` on whole matrices of sharded parameters, each on one rank.

    For optimizers that look at a matrix as a whole, such as `torch.optim.Muon`. Parameters, state and updates are those
    of one process with the same gradients, on any number of ranks, with FSDP, HSDP, tensor parallelism, uneven and
    empty shards. Each matrix has an owner, chosen once so that the ranks have about equally much to do. In a step its
    owner receives the gradient and the parameter, steps it, and returns the new values: two all-to-alls for each bucket
    of matrices.

    Param groups may use other optimizers: ``{"params": ..., "kind": torch.optim.AdamW, "lr": 3e-4}``. The elementwise
    ones of `torch.optim` step on local shards; any other steps whole matrices. Besides ``kind``, a group of whole
    matrices may have ``split``: into how many equal parts, or into parts of which sizes, the rows of its matrices are
    divided, such as ``(q_rows, k_rows, v_rows)`` of a fused projection or the number of heads. A 3-D
    parameter is a stack of matrices (the weights of experts).

    The state of a matrix is on its owner. ``optimizer.state[param]`` has it on every rank, as DTensors on the owner's
    mesh (`OwnedTensor`) under the names that `kind` uses: ``momentum_buffer``, or ``momentum_buffer[2]`` for the third
    matrix of a parameter. So `fsdp2.checkpoint` and `torch.distributed.checkpoint` save and load it by FQN, also with
    another number of ranks.

    Args:
        kind: any class of optimizers whose step of a parameter depends on nothing but that parameter, its gradient, its
            ``self.state[param]`` and the options of its group. It is created with parameters on the meta device, and
            steps those in its ``param_groups``, in portions. A parameter's state consists of tensors by name (a count
            of steps is a 0-dim one), all made in its first step.
        params: as for `kind`: parameters, pairs of names and parameters (names are used in messages), or param groups.
            Plain parameters are stepped on every rank.
        **options: for `kind`. Groups of another kind have their own, or its defaults.

    Raises:
        ArgumentError: `kind` refuses the parameters, or a `split` does not fit.

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
    """The class of what `matrix_optimizer` creates."""

    def __init__(self, kind: Kind, params: Params, options: dict[str, Any]):
        self._kind, self._options = kind, options
        self._steppers: list[Stepper] = []
        self._owners: Owners = {}
        self._plan: Plan | None = None
        self._agreed = False
        self._buckets: tuple[list[bool], list[Bucket]] | None = None
        self._locals: dict[tuple[int, int], Local] = {}
        self._error: Exception | None = None  # the first of this step on this rank
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `matrix_optimizer`. Owners of the matrices so far stay the same.

        Raises:
            ArgumentError: see `matrix_optimizer`.
        """
        given = dict(param_group)
        kind = given.pop("kind", self._kind)
        super().add_param_group(given)
        group = self.param_groups[-1]
        try:
            options = self._options if kind is self._kind else {}
            stepper = Stepper.of(kind, group, len(self._steppers), options)
        except BaseException:
            self.param_groups.pop()
            raise
        for key, value in stepper.inner.param_groups[0].items():
            group.setdefault(key, value)
        group["kind"] = kind.__name__
        stepper.inner.param_groups = []
        self._steppers.append(stepper)
        self._plan = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all groups. Collective over the ranks that hold the parameters.

        Args:
            closure: computes the loss and the gradients again, once.

        Raises:
            MisuseError: in the first step: the ranks have different parameters or groups.
            MismatchError: a state that was loaded is not this optimizer's.
            ArgumentError: a DTensor parameter has a gradient that is not a DTensor.
            CollectiveError: the optimizer has raised an error on another rank, where that error is raised. Parameters
                and state are then undefined: some were stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_groups()
        plan = self._ready_plan()
        for _, share in plan.all_shares():
            plan.states[share].take_in(self.state.get(plan.param_of(share)))
        self._locals = self._local_tensors()
        try:
            fresh = self._step_all(plan, self._ready_buckets(plan))
            plan.show_new(fresh, self.state)
            self._raise_errors()
        finally:
            self._locals, self._error = {}, None
        # As after operations on the DTensors: tells autograd that tensors it may have saved have changed.
        params = [param for param in plan.params if param.requires_grad and isinstance(param, DTensor)]
        torch.autograd.graph.increment_version([*params, *map(local_tensor, params)])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states of matrices keep their dtypes, which torch's casts to the parameter's."""
        kinds = [stepper.kind for stepper in self._steppers]
        load_with_dtypes(self, super().load_state_dict, state_dict, lambda index: kinds[index] not in ELEMENTWISE)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Warns if others wait to be reduced, which it does not clear."""
        super().zero_grad(set_to_none)
        params = (param for group in self.param_groups for param in group["params"])
        check_reduced("zero_grad", params, is_read=False)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets of the last step, in order, for whoever looks at what travels; empty before the first step."""
        return self._buckets[1] if self._buckets is not None else []

    def owned_state(
        self, param: torch.Tensor, name: str, shape: Sequence[int], dtype: torch.dtype
    ) -> OwnedTensor | None:
        """A new, unfilled tensor for a part of a matrix's state, as `state[param]` shows it: for checkpoints that fill
        an optimizer before its first step. None for parameters that have no owner.

        Args:
            name: of the part, such as ``momentum_buffer[2]``.
        """
        plan = self._current_plan()
        shares = [(crew, share) for crew, share in plan.all_shares() if plan.param_of(share) is param]
        _, bracket, rest = name.partition("[")
        number = rest.partition("]")[0] if bracket and len(shares) > 1 else "0"
        for crew, share in shares:
            if crew is not None and number == str(share.number):
                owns = share.owner == torch.distributed.get_rank()
                local = torch.empty(tuple(shape) if owns else 0, dtype=dtype, device=plan.home_of(share))
                return OwnedTensor.of(local, shape, share.owner, crew)
        return None

    # --- groups ------------------------------------------------------------------------------------------------------

    def _check_groups(self) -> None:
        """A state dict of another optimizer may have been loaded: options would come from the wrong group."""
        for index, (group, stepper) in enumerate(zip(self.param_groups, self._steppers, strict=True)):
            kind, split = group.get("kind"), group.get("split")
            if kind != stepper.kind.__name__ or _as_list(split) != _as_list(stepper.split):
                raise MismatchError(
                    f"MatrixOptimizer: param group {index} is of {stepper.kind.__name__} with split={stepper.split}, "
                    f"and the state that was loaded of {kind} with split={split}. Make the groups as they were."
                )

    # --- the plan ----------------------------------------------------------------------------------------------------

    def _current_plan(self) -> Plan:
        """The plan for the parameters that the groups hold now. Makes process groups."""
        whole = [
            MatrixGroup(index, list(group["params"]), names_of(group, index), stepper.split, stepper.kind.__name__)
            for index, (group, stepper) in enumerate(zip(self.param_groups, self._steppers, strict=True))
            if not stepper.steps_shards
        ]
        if self._plan is None or not identical((param for each in whole for param in each.params), self._plan.params):
            self._plan, self._agreed, self._buckets = Plan(whole, self._owners), False, None
        return self._plan

    def _ready_plan(self) -> Plan:
        plan = self._current_plan()
        if not self._agreed:
            plan.agree()
            self._agreed = True
        return plan

    def _ready_buckets(self, plan: Plan) -> list[Bucket]:
        """They change if parameters are frozen or unfrozen; owners do not."""
        trained = [param.requires_grad for param in plan.params]
        if self._buckets is None or self._buckets[0] != trained:
            self._buckets = trained, plan.buckets(lambda share: self._locals[share.group, share.position], BUCKET_BYTES)
        return self._buckets[1]

    # --- the step ----------------------------------------------------------------------------------------------------

    def _local_tensors(self) -> dict[tuple[int, int], Local]:
        return {
            (index, position): (local_tensor(param), None if param.grad is None else local_grad(param, param.grad))
            for index, (group, stepper) in enumerate(zip(self.param_groups, self._steppers, strict=True))
            for position, param in enumerate(() if stepper.steps_shards else group["params"])
            if isinstance(param, DTensor)
        }

    @contextmanager
    def _deferring(self) -> Iterator[None]:
        """Keep an error until the collectives of this step are done, because the other ranks wait in them."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def _raise_errors(self) -> None:
        if self._error is not None:
            raise self._error
        ranks = sorted({rank for bucket in self.buckets for rank in bucket.ranks_with_errors()})
        if ranks:
            raise CollectiveError(
                f"MatrixOptimizer: the step of a param group has raised an error on ranks {ranks}, where it is shown. "
                "Some parameters were stepped, others not: start again from a checkpoint."
            )

    def _step_all(self, plan: Plan, buckets: Sequence[Bucket]) -> list[Share]:
        """Returns the matrices that were stepped for the first time."""
        for bucket in buckets[:1]:
            bucket.send_gradients()
        for group, stepper in zip(self.param_groups, self._steppers, strict=True):
            if stepper.steps_shards:
                with self._deferring():
                    stepper.step(group, self.state)
        fresh = self._step_plain(plan)
        for index, bucket in enumerate(buckets):
            for following in buckets[index + 1 : index + 2]:
                following.send_gradients()
            wholes = bucket.receive_gradients()
            self._step_wholes(plan, [whole for whole in wholes if whole.has_grad])
            bucket.send_values(wholes, self._error is not None)
            for before in buckets[index - 1 : index] if index else ():
                fresh += self._receive(plan, before)
        for bucket in buckets[-1:]:
            fresh += self._receive(plan, bucket)
        return fresh

    def _step_plain(self, plan: Plan) -> list[Share]:
        """Step the matrices of plain parameters; those whose state is new."""
        wholes = []
        for share in plan.plain:
            param = plan.param_of(share)
            if param.grad is not None:
                whole = Whole(share, torch.device("meta"))
                whole.values, whole.grad = param.detach()[share.box.slices()], param.grad[share.box.slices()]
                wholes.append(whole)
        self._step_wholes(plan, wholes)
        return [whole.share for whole in wholes if plan.states[whole.share].is_new]

    def _step_wholes(self, plan: Plan, wholes: Sequence[Whole]) -> None:
        """Step matrices that are here, with the optimizer of their group."""
        for index in dict.fromkeys(whole.share.group for whole in wholes):
            members = [whole for whole in wholes if whole.share.group == index]
            params = [
                as_param(each.values.view(each.share.shape), each.grad.view(each.share.shape)) for each in members
            ]
            state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
            for param, each in zip(params, members, strict=True):
                inside = plan.states[each.share].inside
                if inside is not None:
                    state[param] = inside
            with self._deferring():
                self._steppers[index].step({**options_of(self.param_groups[index]), "params": params}, state)
                for param, each in zip(params, members, strict=True):
                    each.stepped = True
                    plan.states[each.share].put_out(self.state.get(plan.param_of(each.share)), state[param])

    def _receive(self, plan: Plan, bucket: Bucket) -> list[Share]:
        """Take in the new values; the matrices that were stepped for the first time."""
        # Only its owner knows whether a matrix was stepped: some ranks may have had no gradient.
        fresh = [share for share in bucket.shares if plan.states[share].is_new]
        stepped = bucket.receive_values(read_flags=bool(fresh))
        return [share for share in fresh if stepped[share]]


def _as_list(split: Any) -> Any:
    return list(split) if isinstance(split, (list, tuple)) else split
