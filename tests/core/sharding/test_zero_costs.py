"""The table of costs in docs/parallel.md, evaluated and run."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from torch import Tensor, nn

from fsdp2 import (
    ZeroPolicy,
    events,
)
from tests.helpers.migration_cases import (
    DIM,
    LAYERS,
    MICROBATCHES,
    run,
    shard,
    stack,
    step_with_flag,
    tables,
)
from tests.helpers.ranks import on_ranks
from tests.helpers.source_tree import ROOT

# --- docs/parallel.md -------------------------------------------------------------------------------------------------

COSTS = next(rows for _, header, rows in tables(ROOT / "docs" / "parallel.md") if header[0] == "policy")
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


class Lora(nn.Module):
    """A frozen layer and a trainable one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM, bias=False)
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


@on_ranks(4)
def test_costs_of_zero(rank: int, world_size: int) -> None:
    """docs/parallel.md: collectives by number of ranks, and bytes received, of each row's policy, for W = 4, S = R = 2,
    N = 3 and M = 5; the second step as the first."""
    for policy_text, *collectives, nbytes_text in COSTS:
        known: dict[str, Any] = {"N": LAYERS, "M": MICROBATCHES, "W": world_size, "S": 2, "R": world_size // 2}
        policy: ZeroPolicy = eval(policy_text.strip("`"), {"ZeroPolicy": ZeroPolicy, **known})
        wanted: Counter[tuple[str, int]] = Counter()
        for kind, text in zip(KINDS, collectives, strict=True):
            for times, ranks in re.findall(r"`([^`]+)` over (\w)", text):
                wanted[kind, known[ranks]] += eval(times, dict(known))
        known |= {"P": LAYERS * DIM * DIM * 4, "f": lambda n: (n - 1) / n}
        model = shard(nn.Sequential(*(Lora() for _ in range(LAYERS))) if policy.keep_frozen else stack(), zero=policy)
        for index in range(2):
            with events.record() as log:
                step_with_flag(model, rank)
            if index or not policy.keep_frozen:
                found = Counter((event.kind, event.group_size) for event in log if event.group_size)
                assert found == wanted, policy_text
                assert received(log) == pytest.approx(eval(nbytes_text.strip("`"), known)), policy_text
            model.zero_grad()


def received(log: list[events.Event]) -> float:
    """Bytes that this rank receives, by the ring algorithms."""
    total = 0.0
    for event in log:
        if event.group_size:
            whole = event.nbytes * (event.group_size if event.kind == "reduce_scatter" else 1)
            times = 2 if event.kind == "all_reduce" else 1
            total += times * whole * (event.group_size - 1) / event.group_size
    return total


@on_ranks(2)
@pytest.mark.parametrize(("stage", "params", "grads"), [(0, 1, 1), (1, 1, 1), (2, 1, 0), (3, 0, 0)])
def test_memory_of_zero(rank: int, world_size: int, stage: int, params: int, grads: int) -> None:
    """What is whole between the backwards of a step, and after its last, in parts of all parameters."""
    model = shard(zero=ZeroPolicy(stage))
    whole: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda module, args: whole.append(module.weight)) for layer in model]

    def held() -> tuple[float, float]:
        """Whole parameters, and gradients on them."""
        numel = LAYERS * DIM * DIM
        storage = sum(weight.untyped_storage().nbytes() // weight.itemsize for weight in whole)
        return storage / numel, sum(weight.grad.numel() for weight in whole if weight.grad is not None) / numel

    model.set_is_last_backward(False)
    run(model, rank)
    for hook in hooks:
        hook.remove()
    assert held() == (params, grads)
    model.set_is_last_backward(True)
    run(model, rank, 1)
    assert held()[0] == (1 if stage == 0 else 0)
    assert (
        sum(param.to_local().numel() for param in model.parameters()) * (1 if stage == 0 else 2) == LAYERS * DIM * DIM
    )
    assert all(param.grad.to_local().shape == param.to_local().shape for param in model.parameters())
    if stage:
        assert held()[1] == 0
