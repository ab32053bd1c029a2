"""Computing with sharded parameters past the hooks: what a program that ends so is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from fsdp2.extras.past_hooks import explanation
from tests.helpers.models import wrapped
from tests.helpers.parity_models import expect
from tests.helpers.ranks import on_ranks


class Model(nn.Module):
    """A unit within a root that owns a layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def generate(self, x: Tensor) -> Tensor:
        """What nobody registered."""
        return self.forward(x)

    def peek(self, x: Tensor) -> Tensor:
        """Calls the unit below, whose hooks run, and then needs what the root owns."""
        return self.body(x) * self.head.weight[0]


def root_misuses_body(model: Any, x: Tensor) -> Tensor:
    """No module is on the stack."""
    return model.body.weight + x


CALLS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "forward": (
        lambda model, x: model.forward(x),
        """\
fsdp2: Linear needs parameters of unit (Model), which were sharded, since .forward(...) runs no
hooks. Call the module itself: module(...).
""",
    ),
    "generate": (
        lambda model, x: model.generate(x),
        """\
fsdp2: Linear needs parameters of unit (Model), which were sharded, since its method 'generate' runs
no hooks. Register it, once, after fully_shard: fsdp2.register_fsdp_forward_method(module,
'generate').
""",
    ),
    "peek": (
        lambda model, x: model.peek(x),
        """\
fsdp2: Model needs parameters of unit (Model), which were sharded, since its method 'peek' runs no
hooks. Register it, once, after fully_shard: fsdp2.register_fsdp_forward_method(module, 'peek').
""",
    ),
    "the head alone": (
        lambda model, x: model.head(x),
        """\
fsdp2: Linear needs parameters of unit (Model), which were sharded, since that module was not
called. Call it, or make the Linear a unit of its own: fully_shard(...) on it, before the modules
around it.
""",
    ),
    "no module": (
        root_misuses_body,
        """\
fsdp2: sharded parameters were used together with plain tensors, although no hook had gathered them.
Call the sharded module, or use its parameters within fsdp2.full_params(module).
""",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_the_explanation(rank: int, world_size: int, name: str) -> None:
    """It names the module, the unit and what to write."""
    call, text = CALLS[name]
    model = Model()
    fully_shard(model.body)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor") as caught:
        call(model, torch.ones(4))
    expect(rank, wrapped(str(explanation(caught.value))), text)


def test_other_errors_are_not_explained() -> None:
    """Only this error of torch is."""
    assert explanation(ValueError("got mixed torch.Tensor and DTensor")) is None
    assert explanation(RuntimeError("something else")) is None


PROGRAM = """
import sys
import torch, fsdp2
import torch.distributed as dist
from torch import nn

sys.excepthook = lambda kind, error, trace: print("notes:", getattr(error, "__notes__", []))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fsdp2.fully_shard(nn.Sequential(fsdp2.fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
{last}
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("model.forward(torch.ones(4))", "notes: ['fsdp2: Linear needs parameters of unit (Sequential), which were "),
        ("raise RuntimeError('else')", "notes: []"),
    ],
)
def test_at_the_end_of_a_program(last: str, said: str) -> None:
    """The hook of the program still runs, once, and finds the note on the error."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(last=last)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 1, result.stderr
    assert result.stdout.startswith(said), result.stdout + result.stderr
    assert result.stdout.count("\n") == 1
