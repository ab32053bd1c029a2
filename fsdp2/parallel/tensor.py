"""Tensor parallelism by a plan: the user's, or the model's own. Layer: parallel.

torch's styles do the work (`torch.distributed.tensor.parallel`). This module adds the names of styles that transformers
uses, a check of the whole plan before anything changes, and support for tied weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp2._torch import parameter_slots
from fsdp2.errors import ArgumentError, MisuseError, UnsupportedError
from fsdp2.parallel.blocks import matches
from fsdp2.runtime.geometry import is_wrapper

__all__ = ["TensorPlan", "apply_tensor_parallel", "check_tensor_plan"]

TensorPlan = Mapping[str, ParallelStyle | str]
"""Styles by module name; a ``*`` stands for one part of a name."""

# transformers' names (4 and 5) for torch's styles. A norm of single heads sees only this rank's heads,
# [batch, length, heads, head dim], so it is "sequence parallel" along the heads: its gradients are sums over ranks.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}


def check_tensor_plan(
    model: nn.Module, plan: TensorPlan | None, degree: int, is_stage: bool
) -> dict[str, ParallelStyle]:
    """The style of each module that the plan names, by FQN. Changes nothing. Without a plan it uses the model's own
    `tp_plan`. The plan of a stage may be that of the whole model, with names of modules of other stages.

    Raises:
        ArgumentError: no plan is given, a name in it matches nothing, or a module cannot be split in this way.
        UnsupportedError: a style of transformers without a counterpart in torch.
        MisuseError: a module is tensor parallel already.
    """
    is_own = plan is None
    plan = getattr(model, "tp_plan", None) if is_own else plan
    if not plan:
        raise ArgumentError(
            f"parallelize: tensor = {degree} needs a plan, and {type(model).__name__} has none; pass "
            'tp_plan={"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel(), ...}'
        )
    if is_own:
        _check_heads(model, degree)
    styles: dict[str, ParallelStyle] = {}
    for pattern, given in plan.items():
        if not isinstance(given, ParallelStyle):
            if given not in _STYLES:
                raise UnsupportedError(
                    f"tp_plan: '{pattern}' has the style {given!r}, which is not one of {', '.join(_STYLES)}. Pass a "
                    "tp_plan with torch's styles or your own instead."
                )
            given = _STYLES[given]()
        found = {fqn: each for fqn, each in model.named_modules() if (matches(pattern, fqn) if pattern else not fqn)}
        if not found and not is_stage and not is_own:
            raise ArgumentError(f"tp_plan: no module of this {type(model).__name__} is named '{pattern}'")
        for fqn, module in found.items():
            if isinstance(given, (ColwiseParallel, RowwiseParallel)) and not isinstance(
                module, (nn.Linear, nn.Embedding)
            ):
                raise ArgumentError(
                    f"tp_plan: '{fqn}' is a {type(module).__name__}; {type(given).__name__} splits Linear and Embedding"
                )
            if any(isinstance(param, DTensor) for param in module.parameters(recurse=False)):
                raise MisuseError(f"tp_plan: '{fqn}' has DTensors for parameters already; pass a plain model, once")
            styles[fqn] = given
    if not styles:
        raise ArgumentError(
            f"tp_plan: none of its names ({', '.join(map(repr, plan))}) is a module of this {type(model).__name__}"
        )
    return styles


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]) -> None:
    """Split the modules over `mesh`, in place; tied weights stay tied.

    Collective over `mesh`: all ranks get the values of its first rank, also for parameters and buffers that are not
    split. (On the meta device nothing is communicated.)

    Raises:
        ArgumentError: the names of one tied weight would be split in different ways.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    for fqn, style in styles.items():
        parallelize_module(model.get_submodule(fqn), mesh, style)
    for before, tied in names.items():
        _tie(model, tied, before.requires_grad)
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            _take_from_first(tensor, mesh)


@torch.no_grad()
def _take_from_first(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Broadcast a plain tensor from the first rank, as torch's styles do for tensors that they split. Sparse tensors
    and wrappers stay as they are."""
    if is_wrapper(tensor) or tensor.layout is not torch.strided:
        return  # only its own operators may read its memory
    if any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return  # elements that share memory (`expand`) cannot be written
    dense = tensor.to(mesh.device_type).contiguous()
    dist.broadcast(dense.view(-1).view(torch.uint8), group=mesh.get_group(), group_src=0)  # of any dtype
    tensor.copy_(dense)


def _check_heads(model: nn.Module, degree: int) -> None:
    """Check that heads can be split: otherwise attention in transformers would use a wrong number of heads."""
    config: Any = getattr(model, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        for name in ("num_attention_heads", "num_key_value_heads"):
            if isinstance(heads := getattr(each, name, None), int) and heads % degree:
                raise ArgumentError(
                    f"parallelize: tensor = {degree} does not divide {name} = {heads} of this {type(model).__name__}"
                )


def _tie(model: nn.Module, names: list[str], requires_grad: bool) -> None:
    """Make all names of one parameter refer to one object again."""
    slots = [(parameter_slots(model.get_submodule(name.rpartition(".")[0])), name.rpartition(".")[2]) for name in names]
    forms = [slot[last] for slot, last in slots]
    first = forms[0]
    assert first is not None
    first.requires_grad_(requires_grad)
    split = [getattr(form, "placements", "a plain tensor") for form in forms]
    for name, placements in zip(names, split, strict=True):
        if placements != split[0]:
            raise ArgumentError(
                f"tp_plan: '{names[0]}' and '{name}' are one weight, but would be split as {split[0]} and as "
                f"{placements}; give both modules styles that split it in the same way (an embedding "
                "RowwiseParallel, its head ColwiseParallel), or neither"
            )
    for slot, last in slots:
        slot[last] = first
