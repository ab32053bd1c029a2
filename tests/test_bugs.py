"""Each bug that was found and fixed, told as a story: what was done, what happened, why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp2 import OrderError, events, fully_shard
from tests.ranks import on_ranks


class Either(nn.Module):
    """Ranks take different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(4, 4)
        self.odd = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.even(x) if rank % 2 == 0 else self.odd(x)


class TwoEither(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Either()
        self.second = Either()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.second(self.first(x, rank), rank)


@on_ranks(2, 4)
def test_zeros_for_unused_parameters_were_sent_twice(rank: int, world_size: int) -> None:
    """With set_reduce_scatter_unused_params, a unit sent zeros for its unused parameters at the end of its backward, and
    again at the end of the whole backward, since they still had no gradient. A rank on which the unit's backward did
    not run would have sent them once: a hang."""
    model = TwoEither()
    for unit in (model.first, model.second):
        fully_shard(unit)
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    with events.record() as log:
        model(torch.ones(2, 4, requires_grad=True), rank).sum().backward()
    assert sorted(event.unit for event in log if event.kind == "reduce_scatter") == ["first", "second"]
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_forward_after_a_failed_backward_passed_for_a_recomputation(rank: int, world_size: int) -> None:
    """A unit whose backward had raised was still "in backward"; the next forward took itself for the recomputation of a
    checkpoint, hooked nothing, and its gradients were never reduced. Now it says what to do."""
    model = fully_shard(nn.Linear(4, 4))

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("from the user's hook")

    hidden = model(torch.ones(2, 4, requires_grad=True))
    hidden.register_hook(fail)
    with pytest.raises(KeyError):
        hidden.sum().backward()
    with pytest.raises(OrderError, match="reset_iter_state"):
        model(torch.ones(2, 4))
    model.reset_iter_state()
    model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 2.0))


@on_ranks(2)
def test_padding_of_an_uneven_direct_gradient_was_uninitialised(rank: int, world_size: int) -> None:
    """The all-reduce hook sees the flat gradients, padding included. On the direct lane nothing ever wrote the padding,
    so a hook that took a norm got garbage."""
    model = nn.Linear(300, 301, bias=False)  # large enough for the direct lane, rows 151 and 150
    fully_shard(model)
    seen: list[torch.Tensor] = []
    model.set_all_reduce_hook(lambda flat: seen.append(flat.clone()))
    for _ in range(3):
        model(torch.randn(2, 300)).sum().backward()
    for flat in seen:
        assert flat.numel() == 151 * 300
        local = model.weight.grad.to_local().numel()
        assert flat[local:].abs().sum() == 0
