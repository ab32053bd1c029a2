"""Steps, clips and `zero_grad` while gradients wait to be reduced: a warning; an error if nothing is ever trained."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import OrderError, ZeroPolicy
from tests.helpers.parity_models import Layers, batch, mesh_2d, shard_blocks
from tests.helpers.ranks import on_ranks


def backward(model: nn.Module, step: int, rank: int) -> None:
    model(batch(step, rank, 4)).square().sum().backward()


@contextmanager
def alarms() -> Iterator[list[str]]:
    """The texts of the warnings about unreduced gradients."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught if "were not reduced" in str(each.message)]


LEAVING = {
    "set_requires_gradient_sync": None,
    "set_requires_all_reduce": None,
    "set_manual_backward_finalization": None,
    "set_is_last_backward": ZeroPolicy(stage=1),
}


@on_ranks(2, 4)
@pytest.mark.parametrize("setter", LEAVING)
def test_steps_that_train_nothing(rank: int, world_size: int, setter: str) -> None:
    """The last microbatch never reduces: the first clip or step warns, and the second step is an error."""
    hsdp = mesh_2d(2, world_size // 2) if setter == "set_requires_all_reduce" else None
    model: Any = shard_blocks(fsdp2, Layers(2), mesh=hsdp, zero=LEAVING[setter])
    optimizer = torch.optim.AdamW(model.parameters())
    getattr(model, setter)(setter == "set_manual_backward_finalization")
    params = list(model.parameters())
    backward(model, 0, rank)
    with alarms() as texts:
        assert fsdp2.clip_grad_norm_(params, 1.0) == 0
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)  # unsharded ones, where ZeRO keeps these
        optimizer.step()
    (text,) = texts
    assert text.startswith("clip_grad_norm_: gradients of (root), 'layers.0', 'layers.1' were not reduced"), text
    assert f"because of {setter}(" in text
    backward(model, 1, rank)
    with pytest.raises(OrderError, match=r"AdamW\.step: gradients of .*nothing is trained"):
        optimizer.step()


@on_ranks(2)
def test_a_setter_that_was_set_back(rank: int, world_size: int) -> None:
    """What held in the backward counts, not what holds at the step. Units that are stepped less often are no error."""
    model: Any = shard_blocks(fsdp2, Layers(2))
    optimizer = torch.optim.AdamW(model.parameters())
    with alarms() as texts:
        for step in range(3):
            model.layers[1].set_requires_gradient_sync(False)
            backward(model, step, rank)
            model.set_requires_gradient_sync(True)
            optimizer.step()
    assert len(texts) == 1 and "set_requires_gradient_sync(False)" in texts[0]
    assert "AdamW.step: gradients of 'layers.1' were" in texts[0]


@on_ranks(2)
def test_reductions_that_nobody_waited_for(rank: int, world_size: int) -> None:
    """`set_is_last_backward(False)` before a step, and a handle without `wait`: some gradients are on their way."""
    for handle in (False, True):
        model: Any = shard_blocks(fsdp2, Layers(2))
        model.set_is_last_backward(False)
        model.set_manual_backward_finalization(handle)
        backward(model, 0, rank)
        waiting = model.finalize_backward(async_op=True) if handle else None
        with alarms() as texts:
            fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        assert ("a handle that" if handle else "set_is_last_backward(False)") in texts[0]
        if waiting is not None:
            waiting.wait()
        else:
            model.set_is_last_backward(True)
            backward(model, 1, rank)
        with alarms() as texts:
            fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        assert not texts


@on_ranks(2)
@pytest.mark.parametrize("of_model", [True, False])
def test_clearing_is_no_error(rank: int, world_size: int, of_model: bool) -> None:
    """Who throws accumulated gradients away is told that these were not thrown away, once and no more."""
    model: Any = shard_blocks(fsdp2, Layers(2))
    optimizer = fsdp2.local_optimizer(torch.optim.AdamW, model.parameters())
    model.set_requires_gradient_sync(False)
    with alarms() as texts:
        for step in range(3):
            backward(model, step, rank)
            (model if of_model else optimizer).zero_grad()
    assert len(texts) == 1 and texts[0].startswith("zero_grad: gradients of (root)")
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    with alarms() as texts:
        (model if of_model else optimizer).zero_grad()
        backward(model, 4, rank)
        optimizer.step()
    assert not texts


def accumulate(model: Any, rank: int, setters: tuple[str, ...]) -> None:
    """Three microbatches, of which the third is the last of the step."""
    for micro in range(3):
        for setter in setters:
            getattr(model, setter)(micro == 2)
        backward(model, micro, rank)


LEGAL: tuple[tuple[tuple[str, ...], int | None], ...] = (  # what is set, and the stage of ZeRO
    (("set_requires_gradient_sync",), None),
    (("set_requires_all_reduce",), None),
    (("set_requires_gradient_sync", "set_is_last_backward", "set_reshard_after_backward"), None),
    *((("set_is_last_backward",), stage) for stage in (None, 0, 2)),
)


@on_ranks(2, 4)
def test_legal_patterns(rank: int, world_size: int) -> None:
    """Accumulation that reduces in the last microbatch, in every way there is: no warning."""
    for setters, stage in LEGAL:
        mesh = mesh_2d(2, world_size // 2) if "set_requires_all_reduce" in setters else None
        model: Any = shard_blocks(fsdp2, Layers(2), mesh=mesh, zero=None if stage is None else ZeroPolicy(stage))
        if mesh is None and stage is None:
            model.set_requires_all_reduce(False)  # without replicas it says nothing
        optimizer = fsdp2.local_optimizer(torch.optim.AdamW, model.parameters())
        for _ in range(3):
            accumulate(model, rank, setters)
            assert fsdp2.clip_grad_norm_(model.parameters(), 1.0) > 0, setters
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_other_optimizers_may_step(rank: int, world_size: int) -> None:
    """One model accumulates while another is stepped."""
    one, other = shard_blocks(fsdp2, Layers(2)), shard_blocks(fsdp2, Layers(2))
    steps = torch.optim.AdamW([*other.parameters(), nn.Parameter(torch.ones(1))])
    one.set_requires_gradient_sync(False)
    for step in range(3):
        backward(one, step, rank)
        backward(other, step, rank)
        steps.step()


@on_ranks(2)
def test_gradients_that_are_gone(rank: int, world_size: int) -> None:
    """Unsharded gradients that the user cleared, and models that are gone, do not wait."""
    model: Any = shard_blocks(fsdp2, Layers(2), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    sharded = list(model.parameters())
    backward(model, 0, rank)
    model.zero_grad()
    fsdp2.clip_grad_norm_(sharded, 1.0)
    model.zero_grad()
    backward(model, 1, rank)
    del model
    fsdp2.clip_grad_norm_(sharded, 1.0)
