"""What a user does between, around and within steps reaches the shards and gradients, or is an error: evaluations,
edits, hooks, tensors that modules keep, losses outside of forward. "Right" is one process with averaged gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.optim.swa_utils import AveragedModel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import MixedPrecisionPolicy, OrderError, ZeroPolicy, events, fully_shard
from tests.helpers.meshes import shared_mesh
from tests.helpers.parity_models import assert_gradients, batch, count, full, mean_gradients
from tests.helpers.ranks import on_ranks

STAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "stage 2": {"zero": ZeroPolicy(stage=2)},
    "smaller": {"reshard_after_forward": 2},
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def shard(model: nn.Module, **options: Any) -> Any:
    fully_shard(model[0], **options)  # type: ignore[index]
    return fully_shard(model, **options)


def pair(**options: Any) -> tuple[nn.Module, Any]:
    plain = layers()
    return plain, shard(copy.deepcopy(plain), **options)


def loss(model: nn.Module, rank: int) -> Tensor:
    out: Tensor = model(batch(0, rank, 4))
    return out.square().sum()


def evaluate(model: nn.Module, rank: int) -> Tensor:
    with torch.no_grad():
        return loss(model, rank)


def backward(model: nn.Module, rank: int) -> None:
    loss(model, rank).backward()


def assert_same_values(model: Any, plain: nn.Module) -> None:
    model.reshard()
    for (name, mine), right in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert_close(full(mine), right, msg=name)


# --- evaluation between any two steps ---------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("stays", STAYS)
def test_a_moving_average(rank: int, world_size: int, stays: str) -> None:
    """Both models are evaluated between updates of the average. Its root's values were those of the first update, and
    after a step the average itself was lost."""
    plain, model = pair(**STAYS[stays])
    average, right = AveragedModel(model), AveragedModel(plain)
    evaluate(model, rank), evaluate(average.module, rank)
    for _ in range(2):
        with torch.no_grad():
            for one in plain.parameters():
                one.add_(1)
            for one in model.parameters():
                one.add_(1)
        average.update_parameters(model)
        right.update_parameters(plain)
        assert_close(evaluate(average.module, rank), evaluate(right.module, rank))
        assert_close(evaluate(model, rank), evaluate(plain, rank))
    assert_same_values(average.module, right.module)


EDITS: dict[str, Callable[[list[nn.Parameter]], None]] = {
    "one by one": lambda params: [param.mul_(2) for param in params],  # type: ignore[dict-item, return-value]
    "foreach": lambda params: torch._foreach_mul_(params, 2.0),
    "data": lambda params: [param.data.mul_(2) for param in params],  # type: ignore[dict-item, return-value]
}


@on_ranks(2)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_between_evaluations(rank: int, world_size: int, edit: str) -> None:
    """Not every edit counts as a change of a DTensor, so ranks compare what was kept of the root with its shards."""
    plain, model = pair()
    for _ in range(2):
        for each in (plain, model):
            evaluate(each, rank)
            with torch.no_grad():
                EDITS[edit](list(each.parameters()))
        assert_close(evaluate(model, rank), evaluate(plain, rank))
    assert_same_values(model, plain)


@on_ranks(2)
def test_an_edit_on_one_rank_between_evaluations(rank: int, world_size: int) -> None:
    """Rank 1 edits the rows that it has. All ranks have to see them, and nobody hangs."""
    plain, model = pair()
    evaluate(model, rank)
    last = model[2].weight.to_local()
    with torch.no_grad():
        plain[2].weight[-1] = 7  # type: ignore[index]
        if rank == 1:
            last[-1] = 7
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
    """As for the log of PPO's divergence. The norm lacked the root's gradients, and these were not scaled; `zero_grad`
    then left them for the next step."""
    plain, model = pair(**STAYS[stays])
    backward(model, rank)
    evaluate(model, rank)
    right = mean_gradients(plain, world_size, backward)
    norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in right.values()]))
    assert_close(fsdp2.clip_grad_norm_(model.parameters(), 0.1), norm)
    assert_close(fsdp2.clip_grad_norm_(model.parameters(), 9.0), torch.tensor(0.1), atol=1e-5, rtol=0)
    model.zero_grad()
    backward(model, rank)
    assert_gradients(model, right)


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
def test_an_optimizer_that_is_made_after_an_evaluation(rank: int, world_size: int) -> None:
    """It has the shards, or says that it has none."""
    plain, model = pair()
    evaluate(model, rank)
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        backward(each, 0)
        optimizer.step()
    assert_same_values(model, plain)
    _, kept = pair(reshard_after_forward=False)
    evaluate(kept, rank)
    optimizer = torch.optim.SGD(kept.parameters(), lr=0.1)
    backward(kept, rank)
    with pytest.warns(UserWarning, match=r"SGD holds 4 parameters.*adopt_optimizer"):
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("by_hand", [False, True])
def test_layers_are_sharded_after_the_model(rank: int, world_size: int, by_hand: bool) -> None:
    """Layers trained nothing for a step, and then an error blamed functional_call."""
    model: Any = fully_shard(layers())
    evaluate(model, rank)
    if by_hand:
        model.unshard()
    with pytest.raises(OrderError, match=r"'weight' is sharded already, as '0.weight' of the FSDPSequential"):
        fully_shard(model[0])


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
    with pytest.raises(OrderError, match=r"weight': its \.data was assigned"):
        loss(model, rank)


# --- backwards that reach a unit by no output of it -------------------------------------------------------------------


class Keeps(nn.Module):
    """Its loss reads what the first layer computed; the second layer gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.first(x)
        out: Tensor = self.second(self.kept.detach())
        return out


@on_ranks(2)
def test_a_loss_of_a_kept_tensor(rank: int, world_size: int) -> None:
    """Nothing was trained, and the gradient that was left made a later step wrong."""

    def kept(model: Any, rank: int) -> None:
        model(batch(0, rank, 4))
        model.kept.square().sum().backward()

    def both(model: Any, rank: int) -> None:
        (model(batch(0, rank, 4)).sum() + model.kept.sum()).backward()

    plain = Keeps()
    model: Any = fully_shard(copy.deepcopy(plain))
    for run in (kept, both):
        model.zero_grad()
        run(model, rank)
        assert_gradients(model, mean_gradients(plain, world_size, run))


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
    """As fused cross-entropy losses do: `unshard()` on the module that holds the weight, and then the loss. With HSDP
    on four ranks, and accumulation over two microbatches."""
    plain = Head(tied)
    model: Any = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(None if precision == torch.float32 else precision, torch.float32)
    mesh = shared_mesh((2, 2), ("replicate", "shard")) if world_size == 4 else None
    for module in (model.embed, model.head, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for seed in range(2):
        model.set_requires_gradient_sync(seed == 1)
        fused_loss(model, rank, checkpointed, seed).backward()

    def right(plain: nn.Module, rank: int) -> None:
        for seed in range(2):
            fused_loss(plain, rank, checkpointed, seed).backward()

    tolerance = {} if precision == torch.float32 else {"atol": 0.05, "rtol": 0.05}
    expected = mean_gradients(plain, world_size, right)
    for name, param in model.named_parameters():
        assert_close(param.grad.full_tensor(), expected[name], **tolerance)


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
    unhooked = dict(right)
    right["2.weight"] = right["2.weight"] * 3
    assert_gradients(model, right)
    assert len(seen) == 1 and seen[0] is model[2].weight.grad
    for handle in handles:
        handle.remove()
    model.zero_grad()
    backward(model, rank)
    assert_gradients(model, unhooked)


# --- gradients that autograd returns ----------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("how", ["inputs", "grad", "grad of a layer alone"])
def test_gradients_with_respect_to_parameters(rank: int, world_size: int, how: str) -> None:
    """The graph has the unsharded parameters, so there are none, and the step did nothing. It says so; at the second
    time it is an error."""
    _, model = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())
    for matcher in (
        pytest.warns(UserWarning, match="Call loss.backward"),
        pytest.raises(OrderError, match="nothing is"),
    ):
        value = loss(model[0] if how.endswith("alone") else model, rank)
        if how == "inputs":
            value.backward(inputs=params)
        else:
            assert set(torch.autograd.grad(value, params, allow_unused=True)) == {None}
        with matcher:
            optimizer.step()
        optimizer.zero_grad()
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
    backward(model, rank)
    assert_gradients(model, mean_gradients(plain, world_size, backward))


@on_ranks(2)
def test_a_backward_for_all_that_parameters_returns(rank: int, world_size: int) -> None:
    """After a forward these are the root's unsharded parameters, which get gradients, and a layer's sharded ones, which
    get none. A gradient of inputs alone is nothing to warn about."""
    plain = layers()
    model: Any = copy.deepcopy(plain)
    fully_shard(model[2])
    fully_shard(model)
    with pytest.warns(UserWarning, match=r"backward\(inputs=...\) gave gradients.* none to those of '2'"):
        loss(model, rank).backward(inputs=list(model.parameters()))
    x = batch(0, rank, 4).requires_grad_()
    grads = [torch.autograd.grad(each(x).square().sum(), x)[0] for each in (plain, model)]
    assert_close(*grads)
    model.zero_grad()
    backward(model, rank)
    assert_gradients(model, mean_gradients(plain, world_size, backward))


# --- units that are used several times --------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(self.layer(x).tanh()))
        return out


@on_ranks(2)
@pytest.mark.parametrize("steps", [False, True])
def test_a_unit_used_twice_accumulates(rank: int, world_size: int, steps: bool) -> None:
    """Its second use took the gradients of earlier microbatches: an error blamed reentrant checkpoints, and without
    steps in backward there was a reduce-scatter more."""
    plain = Twice()
    model: Any = copy.deepcopy(plain)
    fully_shard(model.layer)
    fully_shard(model)
    make = partial(torch.optim.SGD, lr=0.1)
    if steps:
        fsdp2.step_in_backward(make(model.parameters()))
    with events.record() as log:
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch == 2)
            model(batch(microbatch, rank, 4)).square().sum().backward()

    def right(each: nn.Module, rank: int) -> None:
        for microbatch in range(3):
            each(batch(microbatch, rank, 4)).square().sum().backward()

    assert count(log, "reduce_scatter") == {"reduce_scatter": 2}
    grads = mean_gradients(plain, world_size, right)
    if not steps:
        assert_gradients(model, grads)
        return
    for name, param in plain.named_parameters():
        param.grad = grads[name]
    make(plain.parameters()).step()
    assert_same_values(model, plain)
