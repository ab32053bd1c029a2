"""What a user does between steps (evaluations, edits, clipping) reaches the shards, or is an error."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import vector_to_parameters
from torch.optim.swa_utils import AveragedModel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import MixedPrecisionPolicy, OrderError, events, fully_shard
from tests.helpers.one_process import check, in_units
from tests.helpers.parity_models import assert_gradients, batch, count, mean_gradients, mesh_2d
from tests.helpers.ranks import on_ranks
from tests.helpers.two_units import STAYS, assert_same_values, backward, evaluate, layers, loss, pair, shard

# --- evaluation between any two steps ---------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("stays", STAYS)
def test_a_moving_average(rank: int, world_size: int, stays: str) -> None:
    """Its root's values were those of the first update, and after a step the average itself was lost."""
    plain, model = pair(**STAYS[stays])
    average, right = AveragedModel(model), AveragedModel(plain)
    evaluate(model, rank), evaluate(average.module, rank)
    for _ in range(2):
        with torch.no_grad():
            for one in (*plain.parameters(), *model.parameters()):
                one.add_(1)
        average.update_parameters(model)
        right.update_parameters(plain)
        assert_close(evaluate(average.module, rank), evaluate(right.module, rank))
        assert_close(evaluate(model, rank), evaluate(plain, rank))
    assert_same_values(average.module, right.module)


@on_ranks(2)
@pytest.mark.parametrize("is_counted", [False, True])
def test_an_edit_on_one_rank_between_evaluations(rank: int, world_size: int, is_counted: bool) -> None:
    """Rank 1 edits rows that it has. All ranks have to see them, also if the edit counts as no change of a DTensor."""
    plain, model = pair()
    evaluate(model, rank)
    last = model[2].weight.to_local()
    with torch.no_grad():
        plain[2].weight[-1] = 7  # type: ignore[index]
        if rank == 1:
            last[-1] = 7
            if is_counted:
                model[2].weight.mul_(1)
    assert_close(evaluate(model, rank), evaluate(plain, rank))


@on_ranks(2)
def test_generation_gathers_the_root_once(rank: int, world_size: int) -> None:
    """As torch does, which leaves it unsharded; and a training step gathers it again."""
    _, model = pair()
    with events.record() as log:
        for _ in range(4):
            evaluate(model, rank)
    assert [event.unit for event in log if event.kind == "all_gather"] == ["", "0", "0", "0", "0"]
    with events.record() as log:
        backward(model, rank)
    assert count(log, "all_gather") == {"all_gather": 3}


@on_ranks(4)
@pytest.mark.parametrize("stays", STAYS)
def test_an_evaluation_between_backward_and_clipping(rank: int, world_size: int, stays: str) -> None:
    """As for the log of PPO's divergence. The norm lacked the root's gradients, and `zero_grad` left them."""
    plain, model = pair(**STAYS[stays])
    backward(model, rank)
    evaluate(model, rank)
    right = mean_gradients(plain, world_size, backward)
    norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in right.values()]))
    assert_close(fsdp2.clip_grad_norm_(model.parameters(), 0.1), norm)
    assert_close(fsdp2.clip_grad_norm_(model.parameters(), 9.0), torch.tensor(0.1), atol=1e-5, rtol=0)
    check(model, plain, rank, world_size, backward)


@on_ranks(2)
def test_an_inner_module_alone_after_a_step(rank: int, world_size: int) -> None:
    """It had stayed unsharded after backward, and computed with the values from before the step."""
    plain, model = pair(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    for each in (plain, model):
        optimizer = torch.optim.SGD([*each.parameters()], lr=0.1)
        backward(each, 0)
        optimizer.step()
    with torch.no_grad():
        assert_close(model[0](batch(1, 0, 4)), plain[0](batch(1, 0, 4)))  # type: ignore[index, operator]


@on_ranks(2)
def test_a_method_that_turns_gradients_off(rank: int, world_size: int) -> None:
    """Our hooks run outside of its decorator, and see that no output needs a gradient."""

    class Generates(nn.Linear):
        @torch.no_grad()
        def generate(self, x: Tensor) -> Tensor:
            return self(x)  # type: ignore[no-any-return]

    model: Any = fully_shard(Generates(4, 4))
    fsdp2.register_fsdp_forward_method(model, "generate")
    model.generate(batch(0, rank, 4))
    assert isinstance(model.weight, DTensor)


# --- changes of unsharded parameters in place -------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)])
@pytest.mark.parametrize("then", ["reshard", "forward", "torch.func", "backward", "state dict"])
def test_an_edit_of_unsharded_parameters(rank: int, world_size: int, policy: MixedPrecisionPolicy, then: str) -> None:
    """Each rank's rows of it reach the shards, as with `full_params`. What was not edited keeps all its digits."""
    plain, model = pair(mp_policy=policy)
    if then == "backward":
        pending = loss(model, rank)  # the root stays unsharded
    else:
        model.unshard()
    with torch.no_grad():
        for each in (plain, model):
            each[2].bias[:2] = 7  # type: ignore[index, operator]
    if then == "forward":
        evaluate(model, rank)
    elif then == "torch.func":
        torch.func.grad(lambda x: model(x).sum())(batch(0, rank, 4))
    elif then == "backward":
        pending.backward()
    elif then == "state dict":
        model.state_dict()
    assert_same_values(model, plain)


@on_ranks(2)
@pytest.mark.parametrize("raf", [True, False])
def test_an_edit_within_forward(rank: int, world_size: int, raf: bool) -> None:
    """The ranks edit other rows, and gather what is not edited for backward."""
    model: Any = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 4))
    fully_shard(model[0], reshard_after_forward=raf)
    fully_shard(model)
    with pytest.raises(OrderError, match=r"'0\.weight' was changed in place within the forward"):
        model(torch.tensor([rank]))
    model.reset_iter_state()


@on_ranks(2)
def test_edits_of_both_forms(rank: int, world_size: int) -> None:
    """Which one counts is unknown."""
    _, model = pair()
    weight = model[2].weight
    model.unshard()
    with torch.no_grad():
        weight.zero_()
        model[2].weight.fill_(1)
    with pytest.raises(OrderError, match=r"'2.weight' was changed in place while it was unsharded, and its shards"):
        model.reshard()


@on_ranks(2)
@pytest.mark.parametrize("to", ["a DTensor", "a plain tensor", "a vector"])
def test_assigned_data(rank: int, world_size: int, to: str) -> None:
    """A DTensor keeps its local tensor then, so nothing changed and nobody said so."""
    _, model = pair()
    backward(model, rank)
    if to == "a vector":
        vector_to_parameters(torch.zeros(sum(param.numel() for param in model.parameters())), model.parameters())
    else:
        weight = model[0].weight
        weight.data = weight.detach() * 2 if to == "a DTensor" else torch.zeros(6, 4)
    with pytest.warns(UserWarning, match=r"weight': its \.data was assigned"):
        loss(model, rank)


@on_ranks(2)
def test_frozen_for_a_part_of_the_roots_forward(rank: int, world_size: int) -> None:
    """As people do with the discriminator of a GAN. Its weights got the gradient of both uses."""

    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gen, self.disc = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.disc.requires_grad_(False)
            fooled = self.disc(self.gen(x)).sum()
            self.disc.requires_grad_(True)
            return fooled + self.disc(x * 3).sum()

    plain = Gan()
    check(in_units(plain), plain, rank, world_size, lambda m, r: m(batch(0, r, 4)).backward(), times=2)


@on_ranks(2)
def test_a_gradient_for_a_parameter_that_was_converted(rank: int, world_size: int) -> None:
    """It entered the next step, silently."""
    model: Any = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    model.unshard()
    loss = model[0].weight.sum()
    model.to(torch.bfloat16)
    with pytest.raises(OrderError, match=r"'0\.weight' was converted between forward and backward"):
        loss.backward()


@on_ranks(2)
def test_converted_within_the_roots_forward(rank: int, world_size: int) -> None:
    """By a call of a module that is no unit, before its unit runs: one step ran in the dtype from before."""

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            self.block[0].double()
            return self.block(x.double())

    model: Any = Casts()
    fully_shard(model.block)
    fully_shard(model)
    assert model(torch.ones(2, 4)).dtype is torch.float64


# --- backwards that reach a unit by no output of it -------------------------------------------------------------------


class Head(nn.Module):
    """A language model without a loss; its head may be tied to the embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.body(self.embed(tokens))
        return out


def cross_entropy(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy((hidden @ weight.t()).float(), tokens, reduction="sum")


def fused_loss(model: Any, rank: int, checkpointed: bool, seed: int = 0) -> Tensor:
    tokens = torch.tensor([rank, 2 + rank, 5 + seed])
    hidden = model(tokens)
    if isinstance(model, fsdp2.FSDPModule):
        model.head.unshard()  # type: ignore[operator]
    run = partial(checkpoint, cross_entropy, use_reentrant=False) if checkpointed else cross_entropy
    return run(hidden, model.head.weight, tokens)  # type: ignore[no-any-return]


@on_ranks(2, 4)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_loss_that_reads_a_weight(
    rank: int, world_size: int, tied: bool, checkpointed: bool, precision: torch.dtype
) -> None:
    """As fused cross-entropy losses do: `unshard()` on the module that holds the weight, and then the loss."""
    plain = Head(tied)
    model: Any = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(None if precision == torch.float32 else precision, torch.float32)
    mesh = mesh_2d(2, 2) if world_size == 4 else None
    for module in (model.embed, model.head, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)

    def microbatches(each: Any, rank: int) -> None:
        for seed in range(2):
            if each is model:
                model.set_requires_gradient_sync(seed == 1)
            fused_loss(each, rank, checkpointed, seed).backward()

    microbatches(model, rank)
    tolerance = {} if precision == torch.float32 else {"atol": 0.05, "rtol": 0.05}
    assert_gradients(model, mean_gradients(plain, world_size, microbatches), **tolerance)


# --- hooks on parameters ----------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after", "between steps"])
def test_hooks_on_parameters(rank: int, world_size: int, when: str) -> None:
    """They see the gradient that the optimizer will see, and may replace it."""
    plain, seen = layers(), []
    model: Any = copy.deepcopy(plain)

    def add_hooks(each: nn.Module) -> list[Any]:
        weight = each[2].weight  # type: ignore[index]
        return [
            weight.register_hook(lambda grad: grad * 3),  # type: ignore[operator]
            weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad)),  # type: ignore[operator]
        ]

    handles = add_hooks(model) if when == "before" else []
    shard(model)
    if when == "between steps":
        backward(model, rank)
        model.zero_grad()
    handles = handles or add_hooks(model)
    backward(model, rank)
    right = mean_gradients(plain, world_size, backward)
    assert_gradients(model, {**right, "2.weight": right["2.weight"] * 3})
    assert len(seen) == 1 and seen[0] is model[2].weight.grad
    for handle in handles:
        handle.remove()
    check(model, plain, rank, world_size, backward)


# --- gradients that autograd returns ----------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("how", ["inputs", "grad", "grad of a layer alone"])
def test_gradients_with_respect_to_parameters(rank: int, world_size: int, how: str) -> None:
    """The graph has the unsharded parameters, so there are none, and the step did nothing. It says so."""
    _, model = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())
    evaluate(model, rank)  # makes it the root
    value = loss(model[0] if how.endswith("alone") else model, rank)
    if how == "inputs":
        value.backward(inputs=params)
    else:
        assert set(torch.autograd.grad(value, params, allow_unused=True)) == {None}
    with pytest.warns(UserWarning, match="Call loss.backward"):
        optimizer.step()
    backward(model, rank)
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("stays", ["default", "kept"])
def test_a_gradient_of_unsharded_parameters(rank: int, world_size: int, stays: str) -> None:
    """It was this rank's own, and nobody averaged it."""
    plain, model = pair(**STAYS[stays])
    value = loss(model, rank)
    with pytest.raises(OrderError, match=r"torch.autograd.grad would return this rank's own gradient"):
        torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    check(model, plain, rank, world_size, backward)


@on_ranks(2)
def test_a_backward_for_all_that_parameters_returns(rank: int, world_size: int) -> None:
    """The root's unsharded parameters get gradients, a layer's sharded ones get none."""
    plain = layers()
    model: Any = copy.deepcopy(plain)
    fully_shard(model[2])
    fully_shard(model)
    with pytest.warns(UserWarning, match=r"backward\(inputs=...\) gave gradients.* none to those of '2'"):
        loss(model, rank).backward(inputs=list(model.parameters()))
    x = batch(0, rank, 4).requires_grad_()
    grads = [torch.autograd.grad(each(x).square().sum(), x)[0] for each in (plain, model)]
    assert_close(*grads)
    check(model, plain, rank, world_size, backward)


@on_ranks(2)
def test_one_rank_runs_another_forward(rank: int, world_size: int) -> None:
    """Without a backward, of units that stay unsharded, to log something. The ranks reduced in other orders."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    plain = nn.Sequential(Part(), Part())
    model = in_units(plain, reshard_after_forward=False)
    for module in (model, *model):
        module.unshard()
    if rank == 0:
        loss(model, rank)
    check(model, plain, rank, world_size, backward)


class Keeps(nn.Sequential):
    """Keeps the output of its first layer, and passes on a copy without its graph."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self[0](x)
        return self[1](self.kept.detach())  # type: ignore[no-any-return]


@on_ranks(2)
def test_a_loss_of_a_kept_tensor(rank: int, world_size: int) -> None:
    """Nothing was trained, and the gradient that was left made a later step wrong."""

    def kept(model: Any, rank: int) -> None:
        model(batch(0, rank, 4))
        model.kept.square().sum().backward()

    def both(model: Any, rank: int) -> None:
        (model(batch(0, rank, 4)).sum() + model.kept.sum()).backward()

    plain = Keeps(*layers()[::2])
    model = fully_shard(copy.deepcopy(plain))
    for run in (kept, both):
        check(model, plain, rank, world_size, run)


# --- reductions in flight ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_reduction_in_flight_when_another_unit_becomes_the_root(rank: int, world_size: int) -> None:
    """A loss on an unsharded weight before the first forward, whose backward was not the last: it was dropped."""
    model: Any = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    model[0].set_is_last_backward(False)
    model[0].unshard()
    model[0].weight.sum().backward()
    model[0].reshard()
    model(torch.ones(2, 4))
    assert torch.equal(model[0].weight.grad.full_tensor(), torch.ones(4, 4))
