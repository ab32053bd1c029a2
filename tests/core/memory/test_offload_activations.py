"""`offload_activations`: what needs no device. On a device: `scenarios_of_activations.py`."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.errors import ArgumentError, MisuseError
from fsdp2.extras.activations import ActivationOffload, calls_to_move
from fsdp2.extras.host_memory import standing_for_host
from tests.helpers.parity_models import Stack, batch, shard_blocks
from tests.helpers.ranks import on_ranks


def test_the_first_calls_move_until_the_rest_fits() -> None:
    assert calls_to_move([4, 4, 4, 4], 16) == [False] * 4
    assert calls_to_move([4, 4, 4, 4], 15) == [True, False, False, False]
    assert calls_to_move([1, 9, 2, 4], 6) == [True, True, False, False]
    assert calls_to_move([1, 2], 0) == [True, True]
    assert calls_to_move([], 0) == []


@on_ranks(2)
def test_on_the_cpu_nothing_moves(rank: int, world_size: int) -> None:
    """The same gradients and nothing copied, with `fully_shard` before and after; copies and removal are ordinary."""
    results = []
    for when in ("never", "before", "after"):
        torch.manual_seed(0)
        model: Any = Stack(dim=8, hidden=5, depth=3)
        offload = fsdp2.offload_activations(model.blocks, min_bytes=0) if when == "before" else None
        shard_blocks(fsdp2, model)
        if when == "after":
            offload = fsdp2.offload_activations(model.blocks, min_bytes=0)
        copied = copy.deepcopy(model)
        for each in (model, copied):
            each(batch(0, rank)).square().mean().backward()
            results.append([param.grad.full_tensor() for param in each.parameters()])
        if offload is not None:
            assert offload.saved_bytes == offload.moved_bytes == 0
            offload.remove()
            model(batch(0, rank)).square().mean().backward()
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_nothing_is_looked_at_while_the_budget_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first iteration has hooks, until a call is not like the last iteration's, or is one more."""
    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    seen: list[torch.Tensor] = []
    save = ActivationOffload.save

    def look(offload: Any, call: Any, tensor: torch.Tensor) -> Any:
        seen.append(tensor)
        return save(offload, call, tensor)

    monkeypatch.setattr(ActivationOffload, "save", look)
    offload = fsdp2.offload_activations(blocks, budget=1 << 20, min_bytes=0)

    def forward(num_rows: int) -> torch.Tensor:
        out = torch.ones(num_rows, 4)
        for block in blocks:
            out = block(out).tanh()
        return out.sum()

    def looks(*sizes: int) -> int:
        """How many tensors hooks see in the forwards of an iteration."""
        seen.clear()
        for loss in [forward(size) for size in sizes]:
            loss.backward()
        return len(seen)

    with standing_for_host(torch.device("meta")):  # the tensors of the CPU count as those of a device
        per_forward = looks(8)
        assert per_forward > 0 and offload.saved_bytes == 3 * 8 * 4 * 4
        assert [looks(8), looks(8)] == [0] * 2
        assert [looks(8, 8), looks(8, 8), looks(8), looks(8, 8)] == [per_forward, 0, 0, per_forward]
        assert [looks(16), looks(16), looks(8)] == [per_forward, 0, per_forward]
        blocks[1].eval()
        assert 0 < looks(8) < per_forward  # from there on
        with torch.autocast("cpu"):
            assert looks(8) > 0


class InDict(nn.Module):
    """A block whose tensor comes in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layer(inputs["x"]).tanh()


def test_tensors_in_containers_are_looked_at() -> None:
    """A longer batch, in a dict, passed for one like that before: its activations stayed, whatever the budget."""
    block = InDict()
    offload = fsdp2.offload_activations([block], budget=1 << 20, min_bytes=0)
    with standing_for_host(torch.device("meta")):
        for num_rows in (8, 8, 16):
            block({"x": torch.ones(num_rows, 4, requires_grad=True)}).sum().backward()
        longest = offload.saved_bytes
        block({"x": torch.ones(8, 4, requires_grad=True)}).sum().backward()
    assert longest == 2 * offload.saved_bytes > 0


def test_a_model_that_is_dropped_is_freed() -> None:
    """(The blocks held each other by what is known of them.)"""
    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    fsdp2.offload_activations(blocks)
    blocks[0](torch.ones(1, 2)).sum().backward()
    first = weakref.ref(blocks[0])
    del blocks
    gc.collect()
    assert first() is None


def test_what_is_refused() -> None:
    block = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="expected modules"):
        fsdp2.offload_activations([])
    with pytest.raises(ArgumentError, match="budget: expected a number of bytes"):
        fsdp2.offload_activations([block], budget=-1)
    with pytest.raises(ArgumentError, match="block 1, a Linear, is inside another"):
        fsdp2.offload_activations([block, block[0]])
    offload = fsdp2.offload_activations([block])
    with pytest.raises(MisuseError, match="offloaded already"):
        fsdp2.offload_activations([block])
    offload.remove()
    fsdp2.offload_activations([block])
