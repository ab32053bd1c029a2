"""The optimizer of each param group of a `MatrixOptimizer`, and the owner of each matrix. Layer: optim, below matrix.

Each group has its own inner optimizer, which gets the group only during a step. An elementwise one gets the group's
parameters and steps local shards. Any other is created with stand-ins on the meta device, and gets plain tensors: some
of the group's matrices at a time.

Each rank computes the plan from shapes, meshes and placements. The plans are compared once: if they differed, ranks
would wait for each other forever, or step the wrong matrices. After the first step of a matrix, its owner sends the
others the names, shapes and dtypes of its state.
"""

import hashlib
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.errors import ArgumentError, MisuseError, UnsupportedError
from fsdp2.extras.groups import group_of_all
from fsdp2.optim.exchange import Bucket
from fsdp2.optim.local import ELEMENTWISE, local_optimizer, without_hooks
from fsdp2.optim.matrices import Split, boxes_of_matrices, buckets_of, choose_owners, cost_of, shape_of_matrix
from fsdp2.optim.owned import Crew, Matrix, form_of
from fsdp2.placement.tiling import replicated, tiling_of

__all__ = ["Kind", "Plan", "Stepper", "as_param", "options_of"]

Kind = type[torch.optim.Optimizer]

# About how much each rank owns of a bucket, in bytes of parameters.
BUCKET_BYTES = 16 << 20


@dataclass(frozen=True)
class Stepper:
    """Steps a param group; see the module docstring.

    Attributes:
        kind: the class of `inner`.
        split: the `split` of a group of whole matrices.
    """

    kind: Kind
    inner: torch.optim.Optimizer
    split: Split

    @staticmethod
    def of(kind: Kind, group: dict[str, Any], index: int, options: dict[str, Any]) -> "Stepper":
        """The stepper of a param group, whose options take precedence over `options`.

        Raises:
            ArgumentError: `kind` rejects the parameters, or creates state in its constructor; `split` does not fit.
        """
        own = options_of(group)
        accepted = inspect.signature(kind).parameters
        options = {**options, **{key: value for key, value in own.items() if key in accepted}}
        params, split = group["params"], group.get("split")
        if kind in ELEMENTWISE:
            if split is not None:
                raise ArgumentError(f"matrix_optimizer: split= is for whole matrices, and {kind.__name__} has none")
            return Stepper(kind, local_optimizer(kind, [{**own, "params": params}], **options), None)
        names = names_of(group, index)
        shapes = [
            shape_of_matrix(box)
            for name, param in zip(names, params, strict=True)
            for box in boxes_of_matrices(name, param.shape, split)
        ]
        stand_ins = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
        try:
            inner = kind([{**own, "params": stand_ins}], **options)
        except (ValueError, RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"matrix_optimizer: {kind.__name__} rejects {names[0]} and the others of param group {index}: {error}. "
                "Put embeddings, norms, biases and heads into a group with another kind, such as {'params': [...], "
                "'kind': torch.optim.AdamW, 'lr': 3e-4}."
            ) from error
        if inner.state:
            raise ArgumentError(
                f"matrix_optimizer: {kind.__name__} creates state in its constructor, before it has parameters: "
                "expected one that creates it in its first step"
            )
        return Stepper(kind, inner, split)

    @property
    def steps_shards(self) -> bool:
        """Whether it steps local shards instead of whole matrices."""
        return self.kind in ELEMENTWISE

    def step(self, group: dict[str, Any], state: Any) -> None:
        """The inner optimizer's step, without torch's wrapper, which would run the step hooks again.

        Raises:
            UnsupportedError: it changes options of its param group.
        """
        before = dict(group)
        self.inner.param_groups, self.inner.state = [group], state
        try:
            without_hooks(self.inner.step)(self.inner)
        finally:
            self.inner.param_groups, self.inner.state = [], defaultdict(dict)
        changed = [key for key, value in group.items() if key not in before or before[key] is not value]
        if changed and not self.steps_shards:
            raise UnsupportedError(
                f"matrix_optimizer: a step of {self.kind.__name__} changes {changed} in its param group. It steps the "
                "matrices of a group in portions and on several ranks, so what it keeps must be in self.state[param]."
            )


class Plan:
    """What each rank does in a step, for these parameters, some of which may be frozen.

    Creating it is collective, and may create process groups.

    Attributes:
        crews: for each set of ranks, the matrices with owners among them, in the order of the groups.
        buckets: the buckets of trainable matrices, the most expensive first.

    Raises:
        MisuseError: ranks have different parameters or param groups.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], steppers: Sequence[Stepper]):
        self.crews: dict[Crew, list[Matrix]] = {}
        self.buckets: list[Bucket] = []
        self._kinds = [stepper.kind.__name__ for stepper in steppers]
        crew_of: dict[Any, Crew] = {}
        for index, (group, stepper) in enumerate(zip(groups, steppers, strict=True)):
            held = () if stepper.steps_shards else zip(names_of(group, index), group["params"], strict=True)
            for name, param in held:
                mesh = param.device_mesh if isinstance(param, DTensor) else None
                key = mesh and (mesh.device_type, tuple(sorted(mesh.mesh.flatten().tolist())))
                if key not in crew_of:
                    crew_of[key] = _crew(param)
                crew = crew_of[key]
                tiling = tiling_of(param, name) if isinstance(param, DTensor) else replicated(param.shape, crew.ranks)
                boxes = boxes_of_matrices(name, param.shape, stepper.split)
                self.crews.setdefault(crew, []).extend(
                    Matrix(param, name, index, number, len(boxes), box, tiling, crew)
                    for number, box in enumerate(boxes)
                )
        for crew, matrices in self.crews.items():
            costs = [cost_of(matrix.box) for matrix in matrices]
            for matrix, owner in zip(matrices, choose_owners(costs, crew.ranks), strict=True):
                matrix.owner = owner
            self._agree(crew, matrices)
            by_dtype: dict[torch.dtype, list[Matrix]] = {}
            for matrix in sorted(matrices, key=lambda matrix: -cost_of(matrix.box)):
                if matrix.param.requires_grad:
                    by_dtype.setdefault(torch.promote_types(matrix.param.dtype, matrix.grad_dtype), []).append(matrix)
            for dtype, trained in by_dtype.items():
                sizes = [matrix.box.numel * matrix.param.dtype.itemsize for matrix in trained]
                parts = buckets_of(sizes, len(crew.ranks), BUCKET_BYTES)
                self.buckets += [Bucket(crew, [trained[index] for index in part], dtype) for part in parts]

    @property
    def matrices(self) -> list[Matrix]:
        """Every matrix; the same order on every rank of a crew."""
        return [matrix for matrices in self.crews.values() for matrix in matrices]

    def show_new(self, state: Mapping[Any, Any]) -> None:
        """Show the states of matrices that were stepped for the first time. Collective over each crew with matrices
        whose state is not shown yet."""
        for crew, matrices in self.crews.items():
            # Only its owner knows whether a matrix was stepped: some ranks may have had no gradient.
            new = [matrix for matrix in matrices if matrix.is_new and matrix.param.requires_grad]
            own = {at: form_of(matrix.inside) for at, matrix in enumerate(new) if matrix.inside is not None}
            forms = {at: form for each in (crew.said_by_all(own) if new else ()) for at, form in each.items()}
            for at, form in sorted(forms.items()):  # without matrices whose step has failed
                new[at].show(state[new[at].param], form)

    def _agree(self, crew: Crew, matrices: Sequence[Matrix]) -> None:
        described = [self._describe(matrix) for matrix in matrices]
        if len(set(crew.said_by_all(hashlib.sha256("\n".join(described).encode()).hexdigest()))) == 1:
            return
        for rank, theirs in zip(crew.ranks, said := crew.said_by_all(described), strict=True):
            for one, other in zip([*said[0], "nothing more"], [*theirs, "nothing more"], strict=False):
                if one != other:
                    raise MisuseError(
                        f"the optimizers of ranks {crew.ranks[0]} and {rank} differ: rank {crew.ranks[0]} has {one}; "
                        f"rank {rank} has {other}. Give all ranks the same parameters in the same groups and order."
                    )

    def _describe(self, matrix: Matrix) -> str:
        """Everything that ranks must agree on."""
        tiling, param = matrix.tiling, matrix.param
        return (
            f"{self._kinds[matrix.group]} of group {matrix.group}: '{matrix.name}' {list(tiling.shape)} {param.dtype}, "
            f"gradient {matrix.grad_dtype}, {'trained' if param.requires_grad else 'frozen'}, matrix {matrix.number} "
            f"of {matrix.num_matrices} {matrix.box}, cut {tiling.cuts} over {tiling.grid.shape} {tiling.grid.ranks}, "
            f"owned by rank {matrix.owner}"
        )


def _crew(param: torch.Tensor) -> Crew:
    if not isinstance(param, DTensor):
        return Crew((dist.get_rank() if dist.is_initialized() else 0,), None, param.device.type)
    group = group_of_all(param.device_mesh)
    return Crew(tuple(dist.get_process_group_ranks(group)), group, param.device_mesh.device_type)


def as_param(values: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """A tensor on the memory of `values` that an optimizer accepts as a parameter."""
    param = values.detach().requires_grad_()
    if grad.dtype != values.dtype:
        param.grad_dtype = grad.dtype
    param.grad = grad
    return param


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's own options in a param group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "kind", "split")}


def names_of(group: dict[str, Any], index: int) -> list[str]:
    """The names of the parameters of a group, for messages."""
    names = group.get("param_names")
    return list(names) if names else [f"parameter {at} of group {index}" for at in range(len(group["params"]))]
