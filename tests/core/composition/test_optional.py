"""Optional units: ranks that run a unit and ranks that do not train together, and get what one process gets that runs
the model on all ranks' batches; also with accumulation, recomputation, prefetching, ZeRO and steps in backward.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import OptionalPolicy, events, fully_shard
from tests.helpers.optional_models import (
    DIM,
    MESHES,
    POLICIES,
    TURNS,
    Experts,
    VisionLanguage,
    assert_equal_gradients,
    check,
    counts,
    forward_and_backward,
    gradients,
    inputs,
    micro_batches,
    pair,
    who_has_images,
)
from tests.helpers.parity_models import batch, local, mesh_2d, shard_like
from tests.helpers.ranks import on_ranks


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("policy", "mesh", "reshards"),
    [("plain", "fsdp", False), ("plain", "hsdp", True), ("runs_if", "hsdp", True), ("ran", "fsdp", True)],
)
def test_training_equals_one_process(rank: int, world_size: int, policy: str, mesh: str, reshards: bool) -> None:
    """Gradients bit for bit, and None where no rank had one; AdamW with weight decay tells None from zeros."""
    hsdp = mesh_2d(2, world_size // 2) if mesh == "hsdp" else None
    plain, model = pair(POLICIES[policy], mesh=hsdp, reshard_after_forward=reshards)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5) for each in (plain, model)]
    for step, with_images in enumerate(who_has_images(world_size)):
        is_exact = hsdp is None or world_size == 2
        averages = "ran" if policy == "ran" else "all"
        check(plain, model, rank, world_size, forward_and_backward(step, with_images), averages, is_exact)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            mine, wanted = local(other).detach(), shard_like(one.detach(), other)
            assert_close(mine, wanted, rtol=1e-4, atol=1e-6)
            mine.copy_(wanted)  # the vectorised part of AdamW is another on shards; a difference would grow


@on_ranks(2, 4)
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_sent_where_no_rank_runs_it(rank: int, world_size: int, policy: str) -> None:
    """With `runs_if` neither gathers nor reductions; without it the gathers, since nobody knows in advance."""
    _, model = pair(POLICIES[policy])
    forward_and_backward(0, [0])(model, rank)
    with events.record() as log:
        forward_and_backward(1, [])(model, rank)
    gathers = {"all_gather": 3} if policy == "plain" else {}
    assert counts(log, "vision") == gathers
    agreements = [each for each in log if each.kind == "agreement"]
    assert len(agreements) == (1 if policy == "plain" else 2)
    assert all(each.nbytes < 200 for each in agreements)
    with events.record() as log:
        forward_and_backward(2, [1])(model, rank)
    assert counts(log, "vision") == {"all_gather": 3, "reduce_scatter": 2, "all_reduce": 1}
    _, model = pair(False)
    with events.record() as log:
        forward_and_backward(0, range(world_size))(model, rank)
    assert not [each for each in log if each.kind == "agreement"], "nothing is optional"


@on_ranks(2)
@pytest.mark.parametrize("policy", ["plain", "runs_if"])
def test_around_the_step(rank: int, world_size: int, policy: str) -> None:
    """Evaluation, calls of the tower alone, explicit unshards, state dicts, whole parameters and copies."""
    plain, model = pair(POLICIES[policy], reshard_after_forward=policy == "plain")
    images = batch(7, rank)
    with torch.no_grad():
        assert_close(model(*inputs(0, rank, [0])), plain(*inputs(0, rank, [0])))
        assert_close(model(*inputs(0, rank, [])), plain(*inputs(0, rank, [])))
        assert_close(model.vision(images), plain.vision(images))
    assert model.state_dict()["vision.unused.weight"].shape == (DIM, DIM)
    model.vision.unshard()
    with fsdp2.full_params(model):
        assert_close(model(*inputs(1, rank, [1])), plain(*inputs(1, rank, [1])))
    model.vision.unshard()
    copied = copy.deepcopy(model)
    for sharded in (model, copied):
        sharded.vision.unshard()
        for step, with_images in ((2, [0]), (3, []), (4, [1])):
            check(plain, sharded, rank, world_size, forward_and_backward(step, with_images))

        def alone(model: Any, rank: int) -> None:
            model.vision(batch(9, rank)).square().mean().backward()

        check(plain, sharded, rank, world_size, alone)


# --- several forwards or backwards in a step --------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("turn", TURNS)
def test_accumulation(rank: int, world_size: int, turn: str, mesh: str) -> None:
    """Several microbatches in a step, of which some ranks have images in some. The last brings none to anybody."""
    plain, model = pair(POLICIES["runs_if"], mesh=mesh_2d(2, world_size // 2) if mesh == "hsdp" else None)
    for with_images in ([[0], [1], []], [[], [0, 1], [0]], [[], [], []], [[1], [], [0]]):
        check(plain, model, rank, world_size, micro_batches(with_images, TURNS[turn]), exact=False)


@on_ranks(2, 4)
@pytest.mark.parametrize("order", ["one backward", "in order", "reversed", "last before first"])
@pytest.mark.parametrize("reshards", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_two_forwards_before_a_backward(rank: int, world_size: int, reshards: bool, order: str) -> None:
    """Each backward gathers what its own forward gathered, with other ranks' images or none."""
    plain, model = pair(POLICIES["runs_if"], reshard_after_forward=reshards)
    for first, second in (([], [0]), ([1], []), ([0], [1])):

        def run(model: Any, rank: int, first: Any = first, second: Any = second) -> None:
            losses = [model(*inputs(step, rank, ranks)) for step, ranks in ((0, first), (1, second))]
            if order == "one backward":
                (losses[0] + losses[1]).backward()
            elif order == "last before first":
                losses[0].backward()
                third = model(*inputs(2, rank, []))
                losses[1].backward()
                third.backward()
            else:
                for loss in losses if order == "in order" else reversed(losses):
                    loss.backward()

        check(plain, model, rank, world_size, run, exact=False)


# --- recomputation, and hosts of many optional units ------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("reshards", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_checkpointing_and_a_tower_that_runs_twice(
    rank: int, world_size: int, reshards: bool, use_reentrant: bool
) -> None:
    """In a step in which only some ranks have images."""
    plain, model = pair(
        POLICIES["runs_if"], lambda: VisionLanguage(use_reentrant, times=2), reshard_after_forward=reshards
    )
    for step, with_images in enumerate(who_has_images(world_size)):
        log = check(plain, model, rank, world_size, forward_and_backward(step, with_images), exact=False)
        assert counts(log, "vision").get("all_gather", 0) == (3 * (1 + reshards) if with_images else 0)


@on_ranks(2, 4)
@pytest.mark.parametrize("use_reentrant", [None, True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("averages", ["all", "ran"])
def test_experts_without_tokens(rank: int, world_size: int, averages: str, use_reentrant: bool | None) -> None:
    """Expert 0 gets rows on rank 0 only, expert 1 on all ranks, expert 2 on none, whose gradient stays None. The
    experts are gathered with the layer around them, in forward and again in backward."""
    plain = Experts(use_reentrant)
    model: Any = copy.deepcopy(plain)
    for layer in model.layers:
        for expert in layer.experts:
            fully_shard(expert, optional=OptionalPolicy(average_over=averages))
        fully_shard(layer)
    fully_shard(model)

    def run(model: Any, rank: int, step: int = 0) -> None:
        model(batch(step, rank), torch.tensor([1, 0 if rank == 0 else 1, 1])).backward()

    gradients(plain, world_size, run)
    if averages == "ran":
        for layer in plain.layers:
            for param in layer.experts[0].parameters():
                param.grad = param.grad * world_size
    for _ in range(2):
        model.zero_grad()
        with events.record() as log:
            run(model, rank)
        assert_equal_gradients(plain, model, exact=False)
        assert model.layers[0].experts[2].weight.grad is None
        assert counts(log, "layers.0.experts.2") == {"all_gather": 2}
        assert counts(log, "layers.0.experts.0") == {"all_gather": 2, "reduce_scatter": 1}


@on_ranks(2)
@pytest.mark.parametrize("nested", [(), ("mix",), ("mix", "out")])
@pytest.mark.parametrize("others", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_one_checkpoint_around_several_hosts(rank: int, world_size: int, others: int, nested: tuple[str, ...]) -> None:
    """Recomputation made more room on the ranks that run experts, which then gathered a layer that others had."""

    class Together(Experts):
        def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
            def run(x: Tensor) -> Tensor:
                for layer in self.layers:
                    x = layer(x, chosen)
                return x

            return self.head(checkpoint(run, x.clone().requires_grad_(), use_reentrant=True)).square().mean()

    plain = Together(None)
    model: Any = copy.deepcopy(plain)
    for layer in model.layers:
        for expert in layer.experts:
            fully_shard(expert, optional=OptionalPolicy(runs_if=lambda x, chosen: bool((chosen < 3).any())))
        for name in nested:
            fully_shard(layer.get_submodule(name))
        fully_shard(layer)
    fully_shard(model)

    def run(model: Any, rank: int) -> None:
        model(batch(0, rank), torch.tensor([0, 1, 2] if rank == 0 else [others] * 3)).backward()

    check(plain, model, rank, world_size, run)
    with events.record() as log:
        model(batch(0, rank), torch.tensor([3, 3, 3])).backward()
    assert counts(log, "layers.0.experts.0") == {}  # nor are they gathered in backward, where the layer is
    assert counts(log, "layers.0")["all_gather"] >= 2


# --- other options ----------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("by", ["default", "prediction", "lists"])
def test_prefetching_around_a_tower_that_one_rank_runs(rank: int, world_size: int, by: str) -> None:
    """The order of the other units' gathers and reductions is the same on both ranks."""

    class Between(VisionLanguage):
        def forward(self, text: Tensor, images: Tensor | None = None) -> Tensor:
            x = self.blocks[0](self.embed(text))
            if images is not None:
                x = x + self.projector(self.vision(images))
            return self.blocks[1](x).square().mean()

    plain, model = pair(POLICIES["runs_if"], Between, reshard_after_forward=True)
    if by == "prediction":
        model.set_auto_forward_prefetch()
    elif by == "lists":
        model.blocks[0].set_modules_to_forward_prefetch([model.vision])
        model.vision.set_modules_to_forward_prefetch([model.blocks[1]])
        model.vision.set_modules_to_backward_prefetch([model.blocks[0]])
        model.blocks[1].set_modules_to_backward_prefetch([model.vision])
    orders = []
    for step, with_images in enumerate([[0], [0], [0], [], [1]]):
        log = check(plain, model, rank, world_size, forward_and_backward(step, with_images))
        sent = [each for each in log if each.kind in ("all_gather", "reduce_scatter", "all_reduce", "agreement")]
        orders.append([(each.kind, each.unit, each.numel) for each in sent])
    everywhere: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everywhere, orders)
    assert everywhere[0] == everywhere[1]


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_of_zero(rank: int, world_size: int, stage: int) -> None:
    """An optional tower trains as in one process."""
    zero = fsdp2.ZeroPolicy(stage=stage)
    plain = VisionLanguage()
    model: Any = copy.deepcopy(plain)
    fully_shard(model.vision, optional=POLICIES["runs_if"], zero=zero)
    fully_shard(model, zero=zero)
    for with_images in ([[0], []], [[], []], [[], [1]]):
        check(plain, model, rank, world_size, micro_batches(with_images, TURNS["not last"]), exact=False)


@on_ranks(2)
def test_an_optimizer_that_steps_in_backward(rank: int, world_size: int) -> None:
    """Optional units and their hosts are stepped at its end, and only where some rank has gradients."""
    plain, model = pair(POLICIES["runs_if"])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    fsdp2.step_in_backward(optimizers[1])
    for step, with_images in enumerate(([0], [], [1])):
        run = forward_and_backward(step, with_images)
        gradients(plain, world_size, run)
        run(model, rank)
        optimizers[0].step()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert_close(local(other), shard_like(one, other), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_average_over_those_that_ran_in_several_backwards(rank: int, world_size: int) -> None:
    """Without sync the sum is divided once, by the number of ranks that have gradients at the reduction."""
    plain, model = pair(POLICIES["ran"])
    run = micro_batches([[0], [1], []], TURNS["unsynced"])
    check(plain, model, rank, world_size, run, "ran", exact=False)  # both ranks have gradients in the end
