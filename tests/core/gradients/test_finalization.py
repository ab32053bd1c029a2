"""What torch 2.15 added: manual finalisation, kept storage (Behaviour 192-197) and a dtype for each gradient."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import MixedPrecisionPolicy, ZeroPolicy, events, fully_shard
from tests.helpers.models import check_step, is_sharded, run_step
from tests.helpers.one_process import in_units
from tests.helpers.parity_models import (
    Layers,
    assert_gradients,
    batch,
    count,
    local,
    mean_gradients,
    mesh_2d,
)
from tests.helpers.ranks import on_ranks
from tests.helpers.two_layers import X, assert_same_gradients, backward_of, sharded_layers, two_layers


def manual(plain: nn.Module, **options: Any) -> Any:
    model = in_units(plain, **options)
    model.set_manual_backward_finalization(True)
    return model


def backwards(model: Any, rank: int, *steps: int) -> None:
    for step in steps:
        run_step(model, rank, step)


def mean_of(plain: nn.Module, world_size: int, *steps: int) -> dict[str, Tensor | None]:
    return mean_gradients(plain, world_size, lambda model, rank: backwards(model, rank, *steps))


# --- kept storage -----------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [True, False])
def test_kept_storage(rank: int, world_size: int, raf: bool) -> None:
    """Behaviour 192: reshard leaves unsharded parameters their memory, which the next unshard fills."""
    plain = Layers(2)
    model = in_units(plain, reshard_after_forward=raf)
    model.set_keep_unsharded_storage(True)
    weights = []
    for module in (model, *model.layers):
        module.unshard()
        weights += list(module.parameters(recurse=False))
        module.reshard()
    pointers = [weight.data_ptr() for weight in weights]
    for step in range(3):
        with events.record() as log:
            check_step(model, plain, rank, world_size, step)
        assert count(log, "all_gather") == {"all_gather": 6 if raf else 3}
        assert [weight.data_ptr() for weight in weights] == pointers
        assert all(weight.untyped_storage().nbytes() >= weight.nbytes for weight in weights)
        with torch.no_grad():
            for param in (*plain.parameters(), *model.parameters()):
                param.mul_(0.9)
    with pytest.raises(ValueError):
        model.set_keep_unsharded_storage(1)
    model.set_keep_unsharded_storage(False)
    run_step(model, rank)
    assert [weight.untyped_storage().nbytes() for weight in weights] == [0, 0, 0]


@on_ranks(2)
def test_kept_storage_moved_where_integers_were_gathered(rank: int, world_size: int) -> None:
    """Each unshard resized a dequantised parameter's storage, which moved it."""
    model = in_units(Layers(2), mp_policy=MixedPrecisionPolicy(all_gather_dtype=torch.int8))
    model.set_keep_unsharded_storage(True)
    pointers = []
    for _ in range(2):
        model.unshard()
        (weight,) = model.parameters(recurse=False)
        pointers.append(weight.data_ptr())
        model.reshard()
    assert pointers[0] == pointers[1]


# --- manual finalisation ----------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [True, False, None])
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_one_reduction_of_many_backwards(rank: int, world_size: int, raf: bool | None, hsdp: bool) -> None:
    """Behaviour 194: sync off for all backwards, on, finalise: one reduce-scatter a group, of the sum."""
    plain = Layers(3)
    model = manual(plain, mesh=mesh_2d(2, world_size // 2) if hsdp else None, reshard_after_forward=raf)
    for steps in ((0, 1, 2), (3, 4, 5)):
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        with events.record() as log:
            backwards(model, rank, *steps)
        assert count(log, "reduce_scatter", "all_reduce") == {"reduce_scatter": 0, "all_reduce": 0}
        assert all(param.grad is None for param in model.parameters() if isinstance(param, DTensor))
        model.set_requires_gradient_sync(True)
        with events.record() as log:
            assert model.finalize_backward() is None
        scattered, reduced = 0 if hsdp and world_size == 2 else 4, 4 if hsdp else 0
        assert count(log, "reduce_scatter", "all_reduce") == {"reduce_scatter": scattered, "all_reduce": reduced}
        assert is_sharded(model)
        assert_gradients(model, mean_of(plain, world_size, *steps))


@on_ranks(2)
def test_mode_is_fixed_once_backward_has_begun(rank: int, world_size: int) -> None:
    """Behaviour 193: switching it off before finalising is refused, or waits; on again later it works as before."""
    plain = Layers(2)
    model = manual(plain)
    backwards(model, rank, 0)
    with contextlib.suppress(RuntimeError):
        model.set_manual_backward_finalization(False)
    model.finalize_backward()
    assert_gradients(model, mean_of(plain, world_size, 0))
    model.set_manual_backward_finalization(False)
    model.zero_grad()
    backwards(model, rank, 1)
    assert is_sharded(model)
    assert_gradients(model, mean_of(plain, world_size, 1))


@on_ranks(2, 4)
def test_gradients_that_are_set_by_hand(rank: int, world_size: int) -> None:
    """Behaviour 194: as by pipelines that split backward: gradients that come from `autograd.grad`, without hooks."""
    plain = Layers(2)
    model = manual(plain, reshard_after_forward=False)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    loss = model(batch(0, rank, 4)).square().mean()
    params = [param for param in model.parameters() if not isinstance(param, DTensor)]
    assert len(params) == len(list(plain.parameters()))
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = grad
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    model.finalize_backward(async_op=True).wait()
    assert is_sharded(model)
    assert_gradients(model, mean_of(plain, world_size, 0))


@on_ranks(2)
def test_nothing_to_finalise(rank: int, world_size: int) -> None:
    """Behaviour 195: before the first forward, and after a backward that reached no parameter that is trained."""
    model = manual(Layers(2, root_weight=False))
    with events.record() as log:
        assert model.finalize_backward() is None
        model.finalize_backward(async_op=True).wait()  # Behaviour 196: always a handle; torch's pipelining waits for it
    assert not log
    model.requires_grad_(False)
    model(batch(0, rank, 4).requires_grad_()).sum().backward()
    with events.record() as log:
        assert model.finalize_backward() is None
        model.finalize_backward(async_op=True).wait()
    assert count(log, "reduce_scatter") == {"reduce_scatter": 0}
    assert is_sharded(model) and all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_finalising_at_the_wrong_time(rank: int, world_size: int) -> None:
    """Behaviour 195: between forward and backward, on a child, without manual mode, within backward; then it works."""
    plain = Layers(2)
    model = in_units(plain)
    run_step(model, rank)
    model.zero_grad()
    with pytest.raises(RuntimeError, match="set_manual_backward_finalization"):
        model.finalize_backward()
    model.set_manual_backward_finalization(True)
    raised: list[bool] = []

    def hook(grad: Tensor) -> None:
        with pytest.raises(RuntimeError):
            model.finalize_backward()
        raised.append(True)

    output = model(batch(0, rank, 4))
    output.register_hook(hook)
    with pytest.raises(RuntimeError):
        model.finalize_backward()
    output.square().mean().backward()
    with pytest.raises(RuntimeError):
        model.layers[0].finalize_backward()
    assert raised == [True]
    model.finalize_backward()
    assert_gradients(model, mean_of(plain, world_size, 0))


# --- the handle -------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_handle(rank: int, world_size: int) -> None:
    """Behaviour 180, 196: until it is waited for, no forward and no other finalisation; `reset_iter_state` voids it."""
    plain = Layers(2)
    model = manual(plain)
    for step in range(3):
        model.zero_grad()
        backwards(model, rank, step)
        handle = model.finalize_backward(async_op=True)
        if step == 1:
            model.reset_iter_state()
            with pytest.raises(RuntimeError):
                handle.wait()
            continue
        assert isinstance(handle, fsdp2.GradientReductionHandle)
        with pytest.raises(RuntimeError, match="wait"):
            model(batch(0, rank, 4))
        with pytest.raises(RuntimeError, match="wait"):
            model.finalize_backward()
        handle.wait()
        assert is_sharded(model)
        assert_gradients(model, mean_of(plain, world_size, step))


@on_ranks(2)
def test_handle_and_a_root_beside(rank: int, world_size: int) -> None:
    """Behaviour 180, 196: a root that shares the streams must wait, too, and cannot reset what is not its own."""
    plain = Layers(2)
    one, other = manual(plain), manual(plain)
    fsdp2.share_comm_ctx([one, other])
    backwards(other, rank, 0)
    other.finalize_backward()
    backwards(one, rank, 0)
    handle = one.finalize_backward(async_op=True)
    with pytest.raises(RuntimeError):
        other(batch(1, rank, 4))
    with pytest.raises(RuntimeError):
        other.reset_iter_state()
    handle.wait()
    assert_gradients(one, mean_of(plain, world_size, 0))
    other.zero_grad()
    backwards(other, rank, 1)
    other.finalize_backward()
    assert_gradients(other, mean_of(plain, world_size, 1))


@on_ranks(4)
@pytest.mark.parametrize("case", ["all_reduce_off", "pending_partial"])
def test_partial_reduction_of_hsdp(rank: int, world_size: int, case: str) -> None:
    """Behaviour 197: manual finalisation reduces all the way; what was reduced in part is refused, by name."""
    model = in_units(Layers(2, root_weight=False), mesh=mesh_2d(2, 2))
    model.set_requires_all_reduce(False)
    if case == "pending_partial":
        backwards(model, rank, 0)
        model.set_requires_all_reduce(True)
    model.set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError, match=r"layers\.[01]"):
        backwards(model, rank, 1), model.finalize_backward()


# --- gradient dtypes --------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_grad_dtypes_of_one_group(rank: int, world_size: int) -> None:
    """Behaviour 101, 123: reduced in the dtype that holds both, handed out in each parameter's own; so they wait."""
    model: Any = fully_shard(nn.Linear(4, 4))
    model.weight.grad_dtype = torch.bfloat16
    with events.record() as log:
        model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    assert {event.dtype for event in log if event.kind == "reduce_scatter"} == {torch.float32}
    assert (model.weight.grad.dtype, model.bias.grad.dtype) == (torch.bfloat16, torch.float32)
    mean = (1 + world_size) / 2
    assert (local(model.weight.grad) == mean).all() and (local(model.bias.grad) == 1).all()
    model.set_requires_gradient_sync(False)
    for rows in (256, 1):
        model(torch.ones(rows, 4)).sum().backward()
    model.unshard()
    assert model.weight.grad.dtype == torch.bfloat16 and (model.weight.grad == 256).all()
    assert model.bias.grad.dtype == torch.float32 and (model.bias.grad == 257).all()
    model.reshard()


@on_ranks(2)
def test_unused_parameter_without_a_grad_dtype(rank: int, world_size: int) -> None:
    """Behaviour 123: zeros of which dtype? Every rank says so, and a reduce_dtype answers it."""
    model: Any = fully_shard(nn.Linear(4, 4))
    model.weight.grad_dtype = None
    model.set_reduce_scatter_unused_params(True)
    with pytest.raises(ValueError, match="weight"):
        model(batch(0, rank, 4)).sum().backward()
    model = fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    model.weight.grad_dtype = None
    model.set_reduce_scatter_unused_params(True)
    model(batch(0, rank, 4)).sum().backward()
    assert (local(model.bias.grad) == 3).all()


@on_ranks(4)
@pytest.mark.parametrize("shard_size", [None, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_is_last_backward_has_no_meaning_in_manual_mode(
    rank: int, world_size: int, stage: int, shard_size: int | None
) -> None:
    """Behaviour 193: in manual mode `set_is_last_backward` has no meaning."""
    model = sharded_layers(zero=ZeroPolicy(stage=stage, shard_size=shard_size))
    model.set_manual_backward_finalization(True)
    model.set_is_last_backward(False)
    backward_of(model)
    model.finalize_backward()
    plain = two_layers()
    backward_of(plain)
    assert is_sharded(model), "it reshards, or the next forward computes with old parameters"
    assert_same_gradients(model, plain)


@on_ranks(2)
def test_manual_mode_with_a_reentrant_checkpoint_around_the_root(rank: int, world_size: int) -> None:
    """Behaviour 195: forward, backward, finalise. It said that a forward waits for its backward."""
    model = sharded_layers()
    model.set_manual_backward_finalization(True)
    checkpoint(model, X.clone().requires_grad_(), use_reentrant=True).square().mean().backward()
    model.finalize_backward()
    plain = two_layers()
    backward_of(plain)
    assert_same_gradients(model, plain)


# --- gradients of inputs and of weights, one after the other ----------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("as_a_stage", [False, True])
def test_gradients_of_inputs_alone(rank: int, world_size: int, as_a_stage: bool) -> None:
    """When a pipeline schedule asks for them, a stage that reshards loses gradients of its weights."""
    plain = Layers(2)
    model = manual(plain, reshard_after_forward=True)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(not as_a_stage)
    x = batch(0, rank, dim=4).requires_grad_()
    torch.autograd.grad(model(x).square().mean(), x)
    if not as_a_stage:
        run_step(model, rank, 1)
    model.set_requires_gradient_sync(True)
    if as_a_stage:
        with pytest.raises(fsdp2.OrderError, match="splits backward lost gradients"):
            model.finalize_backward()
        return
    model.finalize_backward()
    assert_gradients(model, mean_of(plain, world_size, 1))
