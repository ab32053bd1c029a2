"""Parameters that are replaced, changed, or given hooks or dtypes between steps: the next gather has to see it."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fsdp2 import MixedPrecisionPolicy, OrderError, ZeroPolicy, fully_shard
from fsdp2.runtime.root import units_below
from tests.helpers.extensions import layers_in_pieces
from tests.helpers.one_process import in_units
from tests.helpers.ranks import on_ranks
from tests.helpers.two_layers import (
    X,
    assert_same_gradients,
    backward_of,
    sharded_layers,
    train,
    two_layers,
    zero_shards,
)


@on_ranks(2)
@pytest.mark.parametrize(("to_plain", "after_a_step"), [(True, False), (True, True), (False, True)])
def test_assigned_weights_are_gathered(rank: int, world_size: int, to_plain: bool, after_a_step: bool) -> None:
    """``load_state_dict(assign=True)``: the next forward must gather the new tensors (torch's FSDP2 does)."""
    model = layers_in_pieces()
    if after_a_step:
        backward_of(model)
    state = {name: param.detach().clone() for name, param in model.state_dict().items()}
    if to_plain:
        state = {name: torch.zeros_like(param) for name, param in state.items()}
    else:
        for param in state.values():
            param._local_tensor.plain.zero_()
    model.load_state_dict(state, assign=True)
    assert model(X).abs().sum() == 0


STAYS: dict[str, dict[str, Any]] = {
    "root": {},
    "all": {"reshard_after_forward": False},
    "smaller mesh": {"reshard_after_forward": 2},
    "stage 1": {"zero": ZeroPolicy(stage=1)},
}


class OnLists(torch.optim.Optimizer):
    """Steps with an operator on a list of tensors, and has no `foreach` that says so, as torch's own on CUDA."""

    def __init__(self, params: Any):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        torch._foreach_add_(params, [param.grad for param in params], alpha=-0.1)


STEPS: dict[str, Any] = {
    "on lists": OnLists,
    "loop": partial(torch.optim.SGD, lr=0.1),
    "foreach": partial(torch.optim.SGD, lr=0.1, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
}


@on_ranks(4)
@pytest.mark.parametrize("stays", STAYS)
@pytest.mark.parametrize("steps", STEPS)
def test_a_forward_between_backward_and_step(rank: int, world_size: int, stays: str, steps: str) -> None:
    """Behaviour 77: each training step was made with the weights of the step before."""
    plain, model = two_layers(), two_layers()
    for module in (model[0], model):
        fully_shard(module, **STAYS[stays])
    for each in (plain, model):
        train(each, evaluates=True, make=STEPS[steps])
    assert_same_gradients(model, plain)


class Skipping(nn.Sequential):
    """Evaluations leave out the second layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if torch.is_grad_enabled() else self[0](x)


@on_ranks(2)
def test_what_was_gathered_ahead_is_old(rank: int, world_size: int) -> None:
    """Behaviour 77: and nobody has used it before the optimizer stepped."""
    plain = Skipping(nn.Linear(8, 8), nn.Linear(8, 8))
    model = in_units(plain)
    model[0].set_modules_to_forward_prefetch([model[1]])
    for each in (plain, model):
        train(each, evaluates=True)
    assert_same_gradients(model, plain)


@on_ranks(2)
def test_sharded_in_inference_mode(rank: int, world_size: int) -> None:
    """Its parameters count no changes."""
    with torch.inference_mode():
        model = sharded_layers()
        assert_close(model(X), two_layers()(X))
        assert_close(model(X), two_layers()(X))


@on_ranks(2)
def test_frozen_parameters_that_change_while_they_are_used(rank: int, world_size: int) -> None:
    """Between forward and reshard: what is kept is of before, and was taken for what is there now."""
    model = sharded_layers(zero=ZeroPolicy(keep_frozen=True), reshard_after_forward=False).requires_grad_(False)
    shards = [*model.parameters()]
    model(X)
    with torch.no_grad():
        for shard in shards:
            shard.zero_()
    model.reshard()
    assert model(X).abs().sum() == 0


@on_ranks(2)
def test_hooks_that_are_set_after_a_step(rank: int, world_size: int) -> None:
    """`ManagedParameter._note_extension`: hooks may also be set on the local tensor later on."""
    model: Any = fully_shard(nn.Linear(8, 8, bias=False))
    backward_of(model)
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
    model(X)


@on_ranks(4)
@pytest.mark.parametrize("how", ["forward without backward", "unsynced backward"])
def test_inner_shards_follow_the_parameters(rank: int, world_size: int, how: str) -> None:
    """docs/design.md, "Assumptions": parameters may change between a backward and the next forward."""
    model = sharded_layers(zero=ZeroPolicy(shard_size=2, shard_replicas=True))
    if how == "unsynced backward":
        model.set_requires_gradient_sync(False)
        backward_of(model)
    else:
        backward_of(model)
        model(X)
    zero_shards(model)
    assert model(X).abs().sum() == 0


@on_ranks(2)
@pytest.mark.parametrize("then", ["backward", "load"])
def test_grad_dtype_that_is_set_between_steps(rank: int, world_size: int, then: str) -> None:
    """Behaviour 36: it raised, or the step after a load saw no new dtype. Waiting gradients have it too."""
    model = sharded_layers().to(torch.bfloat16)
    backward_of(model, X.bfloat16())
    model.zero_grad()
    for param in model.parameters():
        param.grad_dtype = torch.float32
    if then == "load":
        model.load_state_dict(model.state_dict())
    model.set_requires_gradient_sync(False)
    backward_of(model, X.bfloat16())
    waiting = [param.unsharded.grad for unit in units_below(model) for param in unit.params]
    assert waiting and all(grad.dtype == torch.float32 for grad in waiting)
    model.set_requires_gradient_sync(True)
    backward_of(model, X.bfloat16())
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())


@on_ranks(4)
@pytest.mark.parametrize("then", ["backward", "state_dict"])
def test_a_change_on_the_smaller_mesh(rank: int, world_size: int, then: str) -> None:
    """Between forward and backward the modules hold copies of some rows. A change of these was lost silently."""
    model = fully_shard(nn.Linear(8, 8), reshard_after_forward=2)
    output = model(X)
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(OrderError, match="'weight' was changed between forward and backward"):
        output.sum().backward() if then == "backward" else model.state_dict()
    model.reset_iter_state()
    backward_of(model, X)
    assert model.weight.grad is not None


@on_ranks(4)
def test_frozen_and_then_other_settings(rank: int, world_size: int) -> None:
    """Between forward and backward, by what the module holds, the rows on the smaller mesh: these were thrown away."""
    model = fully_shard(nn.Linear(8, 8), reshard_after_forward=2)
    output = model(X)
    model.weight.requires_grad_(False)
    model.set_keep_unsharded_storage(True)
    output.square().mean().backward()
    assert not model.weight.requires_grad
    assert model.weight.grad is None and model.bias.grad is not None


@on_ranks(8)
def test_inner_shards_on_a_smaller_mesh(rank: int, world_size: int) -> None:
    """Shards of replicas, and an int `reshard_after_forward`: the inner ones stayed for the next step."""
    model = fully_shard(nn.Linear(8, 8), reshard_after_forward=2, zero=ZeroPolicy(3, shard_size=4, shard_replicas=True))
    backward_of(model)
    for param in model.parameters():
        param.to_local().detach().data.zero_()  # which no counter counts
    with torch.no_grad():
        assert not model(X).any()


@on_ranks(2)
@pytest.mark.parametrize("stays", ["evaluated", "kept"])
def test_copies_of_whole_parameters_get_old(rank: int, world_size: int, stays: str) -> None:
    """Behaviour 77: of parameters that are whole on every rank, copies in another dtype were taken for these."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.float64)
    plain, model = two_layers(), fully_shard(two_layers(), zero=ZeroPolicy(stage=0), mp_policy=mixed)
    model.set_reshard_after_backward(stays != "kept")
    for each, x in ((plain, X), (model, X.double())):
        train(each, x, evaluates=stays == "evaluated")
    model.reshard()
    assert_same_gradients(model, plain)


# --- modules that are no units, converted by themselves ---------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_part_is_converted_after_a_step(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Behaviour 33: its parameters get other memory. The unit gathered what was there before: nothing was trained."""
    plain, model = two_layers(), fully_shard(two_layers())
    for each in (plain, model):
        backward_of(each)
        each.zero_grad()
        for layer in (each[0], each[2]):
            layer.half().float().to(dtype)
        train(each, X.to(dtype))
    assert_same_gradients(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("then", ["forward", "state dict", "reshard"])
def test_a_part_is_converted_while_unsharded(rank: int, world_size: int, then: str) -> None:
    """The conversion reaches what the next gather replaces: an error. After `reshard` it trains."""
    plain, model = two_layers(), fully_shard(two_layers())
    model.unshard()
    model[0].double().float()
    if then != "reshard":
        with pytest.raises(OrderError, match=r"'0\.weight' was moved or converted while it was unsharded"):
            model(X) if then == "forward" else model.state_dict()
    model.reshard()
    for each in (plain, model):
        train(each)
    assert_same_gradients(model, plain)


@on_ranks(2)
def test_a_frozen_part_that_converts_itself(rank: int, world_size: int) -> None:
    """As layers of 4 bits do with their bias."""

    class Converting(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            assert self.bias is not None
            self.bias.data = self.bias.data.to(input.dtype)
            return super().forward(input)

    model = fully_shard(nn.Sequential(Converting(8, 8).requires_grad_(False)))
    model[0].weight.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        first = model(X.bfloat16())
        model.state_dict()
        assert torch.equal(model(X.bfloat16()), first)


# --- frozen and unfrozen ----------------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("held", ["module's", "sharded"])
@pytest.mark.parametrize("stays", ["smaller mesh", "root"])
def test_frozen_after_an_evaluation(rank: int, world_size: int, stays: str, held: str) -> None:
    """Behaviour 24: through the parameter that an optimizer holds, or the one in the module, which was forgotten."""
    model = fully_shard(nn.Linear(8, 8), **STAYS[stays])
    weight = model.weight
    for is_frozen in (True, False):
        with torch.no_grad():
            model(X)
        (weight if held == "sharded" else model.weight).requires_grad_(not is_frozen)
        backward_of(model)
        assert weight.requires_grad is not is_frozen
        assert (weight.grad is None) is is_frozen
        model.zero_grad()
