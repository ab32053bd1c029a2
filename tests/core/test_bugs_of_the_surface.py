"""Bugs that a review of the whole surface found; each fixed bug leaves a test that tells its story (as in `test_bugs`).

What is unsafe on an accelerator's streams is shown by who keeps memory alive.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPError, MixedPrecisionPolicy, ZeroPolicy, fully_shard, share_comm_ctx
from fsdp2.runtime.gather import Gather
from fsdp2.runtime.reduction import Reduction
from tests.helpers.extensions import InPieces
from tests.helpers.parity_models import full
from tests.helpers.ranks import on_ranks

INT8 = MixedPrecisionPolicy(all_gather_dtype=torch.int8)
x = torch.ones(2, 8)


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def sharded(**options: Any) -> Any:
    model = build()
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def step(model: nn.Module, value: torch.Tensor = x) -> None:
    model(value).square().mean().backward()


def zero(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            assert isinstance(param, DTensor), "the module holds what the optimizer holds"
            param.zero_()


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is not None, name
        assert_close(full(param.grad), wanted.grad)


# --- int8 all-gathers -------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("original_lives", [True, False])
def test_a_copy_gathers_its_own_weights(rank: int, world_size: int, original_lives: bool) -> None:
    """`copying`: a copy is a model of its own. With `all_gather_dtype` it computes with the original's weights, or
    fails when that is gone (an EMA, a teacher)."""
    model = sharded(mp_policy=INT8)
    step(model)
    copied = copy.deepcopy(model)
    if original_lives:
        model.reshard()
        zero(model)
    else:
        del model
    assert copied(x).abs().sum() > 0


@on_ranks(4)
def test_int8_with_a_secondary_shard(rank: int, world_size: int) -> None:
    """qwZ and hpZ are two halves of ZeRO++: together, backward failed."""
    model = sharded(mp_policy=INT8, zero=ZeroPolicy(secondary_shard_size=2))
    step(model)


@on_ranks(2)
def test_int8_after_a_first_forward_in_inference_mode(rank: int, world_size: int) -> None:
    """Plain parameters can do this: validate before the first step."""
    model = sharded(mp_policy=INT8)
    with torch.inference_mode():
        model(x)
    step(model)


@on_ranks(2)
def test_int8_follows_a_conversion(rank: int, world_size: int) -> None:
    """Behaviour 33, 35: a conversion between steps, with `all_gather_dtype`."""
    model = sharded(mp_policy=INT8)
    step(model)
    model.zero_grad()
    model.to(torch.bfloat16)
    step(model, x.bfloat16())


# --- extensions -------------------------------------------------------------------------------------------------------


def extended(**options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for layer in model:
        layer.weight = nn.Parameter(InPieces(layer.weight.detach().clone(), {}))
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@on_ranks(2)
@pytest.mark.parametrize(("to_plain", "after_a_step"), [(True, False), (True, True), (False, True)])
def test_assigned_weights_are_gathered(rank: int, world_size: int, to_plain: bool, after_a_step: bool) -> None:
    """``load_state_dict(assign=True)``: the next forward must gather the new tensors (torch's FSDP2 does)."""
    model = extended()
    if after_a_step:
        step(model)
    state = {name: param.detach().clone() for name, param in model.state_dict().items()}
    if to_plain:
        state = {name: torch.zeros_like(param) for name, param in state.items()}
    else:
        for param in state.values():
            param._local_tensor.plain.zero_()
    model.load_state_dict(state, assign=True)
    assert model(x).abs().sum() == 0


@on_ranks(2)
def test_hooks_that_are_set_after_a_step(rank: int, world_size: int) -> None:
    """`ManagedParameter._note_extension`: hooks may also be set on the local tensor later on."""
    model: Any = fully_shard(nn.Linear(8, 8, bias=False))
    step(model)
    shard = model.weight._local_tensor

    def post(outputs: Any, metadata: Any, dtype: torch.dtype, out: torch.Tensor | None = None) -> Any:
        if out is None:
            whole = outputs[0].clone()
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            has_memory = out.untyped_storage().nbytes() >= outputs[0].nbytes
            assert has_memory, "the process would die of what follows"
            out.copy_(outputs[0])
        return None

    shard.fsdp_pre_all_gather = lambda mesh: ((shard,), None)
    shard.fsdp_post_all_gather = post
    model.load_state_dict(model.state_dict())
    model(x)


@on_ranks(2)
def test_an_extension_without_a_shard_axis(rank: int, world_size: int) -> None:
    """ZeRO stage 0 with a weight that has hooks, which nothing would call: refused."""
    with pytest.raises(FSDPError, match="hooks"):
        extended(zero=ZeroPolicy(stage=0))


class TimesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(InPieces(weight.t().contiguous().t(), {}))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value @ self.weight


@on_ranks(2)
def test_a_wrapper_that_is_not_contiguous(rank: int, world_size: int) -> None:
    """A transposed weight of a subclass (fp8 stores those) is cut along the wrong dim; square ones without an error.
    torch's FSDP2 refuses."""
    with pytest.raises(FSDPError):
        fully_shard(TimesWeight())


# --- sharded replicas -------------------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("how", ["forward without backward", "unsynced backward"])
def test_inner_shards_follow_the_parameters(rank: int, world_size: int, how: str) -> None:
    """docs/design.md, "Assumptions": parameters may change between a backward and the next forward. After either of
    these the module holds the sharded parameters, and without `shard_replicas` the next forward sees what they have
    become."""
    model = sharded(zero=ZeroPolicy(shard_size=2, shard_replicas=True))
    if how == "unsynced backward":
        model.set_requires_gradient_sync(False)
        step(model)
    else:
        step(model)
        model(x)
    zero(model)
    assert model(x).abs().sum() == 0


@on_ranks(4)
def test_the_first_output_lives_until_compute_has_waited(rank: int, world_size: int) -> None:
    """docs/design.md, invariant 5: a buffer of the reduce-scatter stream that the all-reduce stream reads has a keeper
    until that has been waited for. With two reductions in flight the second one's buffer takes the place of the
    first's."""
    outputs: dict[int, StorageWeakRef] = {}
    seen: list[bool] = []
    scatter, scale = Reduction._scatter_replicas, Reduction._scale

    def watched_scatter(self: Reduction, average: bool) -> Any:
        assert self._flat is not None
        outputs[id(self)] = StorageWeakRef(self._flat.untyped_storage())
        return scatter(self, average)

    def watched_scale(self: Reduction, post: float) -> None:
        seen.append(outputs[id(self)].expired())
        scale(self, post)

    model = sharded(zero=ZeroPolicy(shard_size=2, shard_replicas=True))
    model.set_reduce_scatter_max_input_buffers(2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Reduction, "_scatter_replicas", watched_scatter)
        monkeypatch.setattr(Reduction, "_scale", watched_scale)
        step(model)
    assert seen
    assert not any(seen)


# --- after an error ---------------------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("reshard_after_forward", [True, 2])
@pytest.mark.parametrize("nth", [1, 3])
def test_reset_after_an_unshard_that_failed(
    rank: int, world_size: int, nth: int, reshard_after_forward: bool | int
) -> None:
    """docs/design.md, invariant 7: what a copy out of memory, or a `fsdp_post_all_gather` that raises, leaves: in
    forward, and in backward (the third gather), where the module held parameters of the smaller mesh."""
    model = sharded(reshard_after_forward=reshard_after_forward)
    step(model)
    original, calls = Gather._finish, []

    def failing(self: Gather, *args: Any) -> None:
        original(self, *args)
        calls.append(self)
        if len(calls) == nth:
            raise torch.OutOfMemoryError("on every rank")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Gather, "_finish", failing)
        with pytest.raises(torch.OutOfMemoryError):
            step(model)
        model.reset_iter_state()
        assert all(param.device_mesh.ndim == 1 for param in model.parameters())
        model.zero_grad()
        step(model)
    plain = build()
    step(plain)
    assert_same_gradients(model, plain)


# --- manual finalisation ----------------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("shard_size", [None, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_is_last_backward_has_no_meaning_in_manual_mode(
    rank: int, world_size: int, stage: int, shard_size: int | None
) -> None:
    """Behaviour 193: in manual mode `set_is_last_backward` has no meaning."""
    model = sharded(zero=ZeroPolicy(stage=stage, shard_size=shard_size))
    model.set_manual_backward_finalization(True)
    model.set_is_last_backward(False)
    params = list(model.parameters())
    step(model)
    model.finalize_backward()
    plain = build()
    step(plain)
    for param, wanted in zip(params, plain.parameters(), strict=True):
        assert param.grad is not None
        assert_close(full(param.grad), wanted.grad)
    assert isinstance(model[0].weight, DTensor), "it reshards, or the next forward computes with old parameters"


@on_ranks(2)
def test_manual_mode_with_a_reentrant_checkpoint_around_the_root(rank: int, world_size: int) -> None:
    """Behaviour 195: forward, backward, finalise. It said that a forward waits for its backward."""
    model = sharded()
    model.set_manual_backward_finalization(True)
    checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).square().mean().backward()
    model.finalize_backward()
    plain = build()
    step(plain)
    assert_same_gradients(model, plain)


# --- weights that are tied over units ---------------------------------------------------------------------------------


def tied() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


@on_ranks(2)
@pytest.mark.parametrize("how", ["unshard", "deepcopy"])
def test_a_borrower_before_its_owner(rank: int, world_size: int, how: str) -> None:
    """`unshard` before the first forward, and a copy of the borrowing module alone."""
    model = tied()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if how == "unshard":
        model[1].unshard()
        assert_close(model[1].weight.detach(), tied()[1].weight.detach())
    else:
        step(model)
        assert_close(copy.deepcopy(model[1])(x), tied()[1](x))


@on_ranks(2)
def test_a_weight_of_two_roots(rank: int, world_size: int) -> None:
    """One weight in two models (actor and critic) has two backwards, and would be reduced in the first one's only:
    refused."""
    first, second = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))
    second[0].weight = first[0].weight
    fully_shard(first)
    fully_shard(second)
    step(first)
    with pytest.raises(FSDPError, match="outside of this root"):
        step(second)


# --- shared reductions ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_sharing_while_reductions_are_under_way(rank: int, world_size: int) -> None:
    """Behaviour 141: between two microbatches `share_comm_ctx` keeps what is in flight."""
    model, other = sharded(), sharded()
    model.set_is_last_backward(False)
    step(model)
    share_comm_ctx([model, other])
    model.set_is_last_backward(True)
    step(model)
    plain = build()
    step(plain)
    step(plain)
    assert_same_gradients(model, plain)


@on_ranks(2)
def test_a_root_outlives_anothers_handle(rank: int, world_size: int) -> None:
    """Two roots of different lifetimes share their reductions: the second one is not held up for ever."""
    model, other = sharded(), sharded()
    share_comm_ctx([model, other])
    model.set_manual_backward_finalization(True)
    step(model)
    model.finalize_backward(async_op=True)
    del model
    other(x)
    other.reset_iter_state()
    other(x)


# --- ZeRO stage 0 -----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_stage_0_notices_a_step_between_forward_and_backward(rank: int, world_size: int) -> None:
    """DDP and a plain module raise; torch's FSDP2 computes the gradient of the weights that forward used."""
    model = sharded(zero=ZeroPolicy(stage=0))
    weight = model[2].weight
    output = model(x)
    with torch.no_grad():
        weight.mul_(3)
    with pytest.raises(RuntimeError, match="between forward and backward"):
        output.square().mean().backward()


# --- plans of reductions ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_grad_dtype_that_is_set_between_steps(rank: int, world_size: int) -> None:
    """`Tensor.grad_dtype` of a sharded parameter after the first backward: worked in f44a8b9, raises since."""
    model = sharded().to(torch.bfloat16)
    step(model, x.bfloat16())
    model.zero_grad()
    for param in model.parameters():
        param.grad_dtype = torch.float32
    step(model, x.bfloat16())
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())
