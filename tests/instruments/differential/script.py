"""A program as a script that runs by itself, on torch's FSDP2, on fsdp2 and in one process."""

from __future__ import annotations

import ast
import inspect

from tests.instruments.differential import models, models_between
from tests.instruments.differential.interpret import build_lines
from tests.instruments.differential.program import Program

__all__ = ["script_of"]

HEAD = '''\
"""{title}

    python -m torch.distributed.run --nproc-per-node {ranks} THIS_FILE

{found}
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import ZeroPolicy

DIM, ROWS = {dim}, {rows}

'''

TAIL = """

def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def program(fully_shard):
    torch.manual_seed({seed})
    loss, saved, handles = {{}}, {{}}, {{}}
    x = lambda index: batch(index, dist.get_rank())
{body}


def show(name, models, loss):
    lines = [f"loss[{{slot}}] = {{value.item():.9g}}" for slot, value in loss.items()]
    for model in models:
        for fqn, p in model.named_parameters():
            grad = None if p.grad is None else whole(p.grad)
            full = whole(p.detach())
            slope = None if grad is None else grad.double().norm().item()
            lines.append(f"{{fqn}}: norm {{full.double().norm():.9g}}, of the gradient {{slope}}")
    if dist.get_rank() == 0:
        print("---", name, *lines, sep="\\n", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, api in (("torch", torch.distributed.fsdp.fully_shard), ("fsdp2", fsdp2.fully_shard)):
        try:
            globals().update(
                local_optimizer=fsdp2.local_optimizer if name == "fsdp2" else lambda kind, *a, **k: kind(*a, **k),
                clip_grad_norm_=(fsdp2 if name == "fsdp2" else torch.nn.utils).clip_grad_norm_,
            )
            show(name, *program(api))
        except Exception as error:
            if dist.get_rank() == 0:
                print("---", name, f"{{type(error).__name__}}: {{error}}", sep="\\n", flush=True)
    dist.destroy_process_group()
"""


def script_of(program: Program, title: str, found: str) -> str:
    """The source of the script; `found` is what differed, for its docstring."""
    lines = []
    if len(program.axes) > 1:
        lines.append(f'mesh = init_device_mesh("cpu", {program.mesh}, mesh_dim_names={program.axes})')
        if program.has_tp:
            lines.append('tp, mesh = mesh["tp"], mesh[tuple(axis for axis in mesh.mesh_dim_names if axis != "tp")]')
            lines.append("x = lambda index: batch(index, mesh.get_local_rank(0))")
    lines += build_lines(program)
    lines += [f"{action.code}  # {action.kind}" if ";" in action.code else action.code for action in program.actions]
    names = ", ".join(model.name for model in program.models)
    lines.append(f"return [{names}], loss")
    body = "\n".join("    " + line for line in lines)
    head = HEAD.format(
        title=title, found=found.replace("\\", "\\\\"), ranks=program.world_size, dim=models.DIM, rows=models.ROWS
    )
    return head + _classes(program) + TAIL.format(body=body, seed=program.seed)


def _classes(program: Program) -> str:
    """The source of the modules that the program uses, and of what these use."""
    source = inspect.getsource(models) + inspect.getsource(models_between).partition("Lin\n")[2]
    tree = ast.parse(source)
    defined = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    used = {"Net", "loss_of", "batch"} | program.kinds()
    while True:
        more = {
            name.id
            for each in used
            for name in ast.walk(defined[each])
            if isinstance(name, ast.Name) and name.id in defined
        }
        if more <= used:
            break
        used |= more
    lines = source.splitlines()
    parts = []
    for name, node in defined.items():
        if name in used:
            parts.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return "\n\n\n".join(parts) + "\n"
