"""What is compared after every action, and how closely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tests.instruments.differential.program import Program

if TYPE_CHECKING:
    from tests.instruments.differential.one_process import OneProcess

Seen = tuple[str, str]  # what kind of difference, and where


@dataclass
class Observation:
    """What a program can see of a side after an action."""

    params: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    values: dict[str, Tensor]
    flags: dict[str, bool]
    rng: Tensor


def compare(
    ours: Observation, theirs: Observation, program: Program, late: set[str], forms_may_differ: bool
) -> Seen | None:
    """The first difference between fsdp2 and torch. Gradients of `late` roots have not been handed over."""
    if ours.values.keys() != theirs.values.keys():
        return "loss", f"fsdp2 has {sorted(ours.values)}, torch {sorted(theirs.values)}"
    for name, value in theirs.values.items():
        mine = ours.values[name]
        if text := _values(mine.to(value.dtype) if name == "norm" else mine, value, program):
            return "loss", f"{name}: {text}"
    if ours.params.keys() != theirs.params.keys():
        return "form", f"names: {sorted(ours.params)} and {sorted(theirs.params)}"
    for name, param in theirs.params.items():
        if forms_may_differ and form_of(ours.params[name], program) != form_of(param, program):
            continue
        if seen := _params(name, ours.params[name], param, program, _is_late(name, late)):
            return seen
    for name, buffer in theirs.buffers.items():
        if text := _values(ours.buffers[name], buffer, program):
            return "buffer", f"{name}: {text}"
    if ours.flags != theirs.flags:
        return "flag", f"training: {ours.flags} and {theirs.flags}"
    if not torch.equal(ours.rng, theirs.rng):
        return "rng", "the random states differ"
    return None


def is_sharded(param: Tensor, program: Program) -> bool:
    """Whether a parameter has its sharded form."""
    return form_of(param, program) == "sharded"


def form_of(param: Tensor, program: Program) -> str:
    """With tensor parallelism an unsharded parameter is a DTensor too; one on the smaller mesh is so in any case."""
    if not isinstance(param, DTensor) or param.device_mesh.mesh_dim_names == ("tp",):
        return "unsharded"
    return "sharded" if program.has_tp or param.device_mesh.shape == program.mesh else "resharded"


def _is_late(name: str, roots: set[str]) -> bool:
    """Whether a parameter belongs to one of these roots, which are expressions."""
    return any(name.startswith(root.replace("[", ".").replace("]", "") + ".") for root in roots)


def _params(name: str, ours: nn.Parameter, theirs: nn.Parameter, program: Program, is_late: bool) -> Seen | None:
    if form_of(ours, program) != form_of(theirs, program):
        return "form", f"{name}: {form_of(ours, program)} with fsdp2, {form_of(theirs, program)} with torch"
    if ours.requires_grad != theirs.requires_grad:
        return "flag", f"{name}.requires_grad: fsdp2 {ours.requires_grad}, torch {theirs.requires_grad}"
    if form_of(ours, program) == "resharded":
        return None  # torch puts uneven rows at wrong places there
    if text := _values(ours, theirs, program):
        return "param", f"{name}: {text}"
    if is_late or (not is_sharded(ours, program) and "mp_policy" in program.options()):
        return None  # not handed over; or unreduced, which torch keeps elsewhere where the reduce dtype is another
    if (ours.grad is None) != (theirs.grad is None):
        have = {True: "None", False: "a gradient"}
        return "grad", f"{name}.grad: fsdp2 has {have[ours.grad is None]}, torch {have[theirs.grad is None]}"
    if ours.grad is not None and theirs.grad is not None and (text := _values(ours.grad, theirs.grad, program)):
        return "grad", f"{name}.grad: {text}"
    return None


def _values(ours: Tensor, theirs: Tensor, program: Program) -> str:
    if ours.dtype != theirs.dtype:
        return f"fsdp2 has {ours.dtype}, torch {theirs.dtype}"
    if ours.shape != theirs.shape:
        return f"fsdp2 has {tuple(ours.shape)}, torch {tuple(theirs.shape)}"
    if isinstance(ours, DTensor) and isinstance(theirs, DTensor):
        if ours.placements != theirs.placements:
            return f"fsdp2 has {ours.placements}, torch {theirs.placements}"
        ours, theirs = ours.to_local(), theirs.to_local()
        if ours.shape != theirs.shape:
            return f"fsdp2 has {tuple(ours.shape)} here, torch {tuple(theirs.shape)}"
    ours, theirs = ours.detach(), theirs.detach()
    if torch.equal(ours, theirs):
        return ""
    loose = 3e-2 if is_coarse(program) else 1e-6 if is_exact(program) else 1e-4
    if _close(ours, theirs, loose, loose * 1e-2):
        return ""
    return f"fsdp2 has {_show(ours)}, torch {_show(theirs)}"


def zeros_for_none(ours: Observation, theirs: Observation) -> bool:
    """Whether some gradient is zero here, and None with torch."""
    return any(
        isinstance(grad := param.grad, DTensor)
        and name in theirs.params
        and theirs.params[name].grad is None
        and not grad.to_local().any()
        for name, param in ours.params.items()
    )


def forms_differ(ours: Observation, theirs: Observation, program: Program) -> bool:
    """Whether some parameter is unsharded on one side alone."""
    both = ours.params.keys() & theirs.params.keys()
    return any(form_of(ours.params[name], program) != form_of(theirs.params[name], program) for name in both)


def left_unreduced(ours: Observation, theirs: Observation, program: Program) -> bool:
    """Whether a parameter is sharded here, and torch holds an unsharded one with a gradient."""
    return any(
        is_sharded(param, program)
        and name in theirs.params
        and not is_sharded(theirs.params[name], program)
        and theirs.params[name].grad is not None
        for name, param in ours.params.items()
    )


def compare_with_whole(seen: Observation, plain: OneProcess, rank: int, program: Program) -> Seen | None:
    """The first difference from one process: losses, parameters, buffers and, where it knows them, gradients."""
    if plain.lost:
        return None
    coarse = is_coarse(program)
    loose = 1e-1 if coarse else 1e-3
    losses = plain.namespaces[rank]["loss"]
    for name, value in seen.values.items():
        whole = plain.namespaces[0]["norm"] if name == "norm" else losses[int(name[5:-1])].detach()
        if not _close(value.detach(), whole, loose, loose):
            return "loss", f"{name}: sharded {_show(value)}, one process {_show(whole)}"
    for model in program.models:
        for name, whole in plain.namespaces[0][model.name].named_parameters():
            param = seen.params.get(f"{model.name}.{name}")
            if not isinstance(param, DTensor) or form_of(param, program) == "unsharded" or param.dtype != whole.dtype:
                continue
            if not _close(param.to_local().detach(), local_part(whole.detach(), param), loose, loose):
                return "param", f"{model.name}.{name}: sharded {_show(param.to_local())}, one process {_show(whole)}"
            if (
                form_of(param, program) == "resharded"
                or not plain.knows_gradients()
                or _is_late(f"{model.name}.{name}", plain.late)
            ):
                continue
            if (param.grad is None) != (whole.grad is None):
                have = {True: "None", False: "a gradient"}
                return (
                    "grad",
                    f"{name}.grad: sharded {have[param.grad is None]}, one process {have[whole.grad is None]}",
                )
            if whole.grad is not None:
                assert isinstance(param.grad, DTensor)
                local = local_part(whole.grad, param)
                rtol = 0.25 if coarse else loose  # edits and steps make what bfloat16 rounds off larger
                if not _close(param.grad.to_local(), local, rtol, loose * 1e-1):
                    return "grad", f"{name}.grad: sharded {_show(param.grad.to_local())}, one process {_show(local)}"
        for path, module in plain.namespaces[0][model.name].named_modules():
            for name, _ in module.named_buffers(recurse=False):
                name, whole = f"{model.name}.{path}.{name}", plain.buffers[rank][module, name]
                if not _close(seen.buffers[name], whole, loose, loose):
                    return "buffer", f"{name}: sharded {_show(seen.buffers[name])}, one process {_show(whole)}"
    return None


def local_part(whole: Tensor, like: DTensor) -> Tensor:
    """What this rank has of a whole tensor; of tensor-parallel ones, whole again, is too much to say here."""
    local = whole
    for axis, placement in enumerate(like.placements):
        if "Strided" in type(placement).__name__:
            return local[:0]
        if isinstance(placement, Shard):
            chunks = local.chunk(like.device_mesh.size(axis), placement.dim)
            index = like.device_mesh.get_local_rank(axis)
            local = chunks[index] if index < len(chunks) else local.narrow(placement.dim, 0, 0)
    return local


def is_coarse(program: Program) -> bool:
    return any(word in program.options() for word in ("float16", "int8")) or any(
        "float16" in action.code for action in program.actions
    )


def is_exact(program: Program) -> bool:
    """Whether at most two numbers meet in each sum, and divisors are exact."""
    factors = [a.value for a in program.actions if "factor" in a.kind]
    return max(program.mesh) <= 2 and not program.has_tp and all(f in (1, 2, 4, 8, 16) for f in factors)


def _close(a: Tensor, b: Tensor, rtol: float, atol: float) -> bool:
    if a.numel() == 0 or b.numel() == 0:
        return True
    if a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    if not torch.isfinite(b).all():
        return torch.equal(a.isfinite(), b.isfinite())
    return bool((a - b).norm() <= rtol * b.norm() + atol)


def _show(value: Tensor) -> str:
    value = value.to_local() if isinstance(value, DTensor) else value
    numbers = value.detach().double().flatten()
    shown = ", ".join(f"{number:.9g}" for number in numbers[:3].tolist())
    return f"[{shown}{', ...' if numbers.numel() > 3 else ''}] (norm {numbers.norm():.9g})"
