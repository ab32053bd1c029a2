"""Optional units: ranks that run a unit and ranks that do not train together, and get what one process gets that runs
the model on all ranks' batches.

The model is a small one of vision and language. Its tower is optional and has an unused parameter, whose gradient stays
None; the projector belongs to the root, and so has a gradient only where the tower runs.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import ArgumentError, MixedPrecisionPolicy, OptionalPolicy, OrderError, UnsupportedError, events, fully_shard
from tests.helpers.parity_models import Block, batch, local, mesh_2d, shard_like
from tests.helpers.ranks import on_ranks

DIM = 8


class Tower(nn.Module):
    """Blocks that are units of their own, and a layer that nobody uses."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(DIM, 5) for _ in range(2))
        self.unused = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x * self.scale


class VisionLanguage(nn.Module):
    """Text of (batch, DIM), and images of the same shape or None."""

    def __init__(self, use_reentrant: bool | None = None, times: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.vision = Tower(use_reentrant)
        self.projector = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(DIM, 7) for _ in range(2))
        self.times = times

    def forward(self, text: Tensor, images: Tensor | None = None) -> Tensor:
        x = self.embed(text)
        if images is not None:
            images = images.clone().requires_grad_()  # so that reentrant checkpoints have a backward
            for _ in range(self.times):
                images = self.vision(images)
            x = x + self.projector(images)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def has_images(text: Tensor, images: Tensor | None = None) -> bool:
    return images is not None


POLICIES: dict[str, bool | OptionalPolicy] = {
    "plain": True,
    "runs_if": OptionalPolicy(runs_if=has_images),
    "ran": OptionalPolicy(runs_if=has_images, average_over="ran"),
}


def inputs(step: int, rank: int, with_images: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """The batch of one rank; the ranks in `with_images` have images."""
    return batch(step, rank), batch(step + 1000, rank) if rank in with_images else None


def shard(model: nn.Module, optional: bool | OptionalPolicy, **options: Any) -> Any:
    for block in (*model.vision.blocks, *model.blocks):
        fully_shard(block, mesh=options.get("mesh"))
    fully_shard(model.vision, optional=optional, mesh=options.get("mesh"))
    return fully_shard(model, **options)


def pair(
    optional: bool | OptionalPolicy = True, kind: Callable[..., nn.Module] = VisionLanguage, **options: Any
) -> tuple[Any, Any]:
    """A plain model and a sharded one with the same parameters."""
    torch.manual_seed(0)
    plain = kind()
    return plain, shard(copy.deepcopy(plain), optional, **options)


Step = Callable[[Any, int], None]


def gradients(plain: nn.Module, world_size: int, step: Step, averages: str = "all") -> None:
    """Set the gradients of the plain model to those of all ranks, summed in rank order and divided."""
    total: dict[str, Tensor] = {}
    tower_ran: dict[str, int] = {}
    for rank in range(world_size):
        plain.zero_grad()
        step(plain, rank)
        for name, param in plain.named_parameters():
            if param.grad is not None:
                total[name] = param.grad if name not in total else total[name] + param.grad
                tower_ran[name] = tower_ran.get(name, 0) + 1
    for name, param in plain.named_parameters():
        by = tower_ran.get(name, 0) if averages == "ran" and name.startswith("vision.") else world_size
        param.grad = total[name] / by if name in total else None


def assert_equal_gradients(plain: nn.Module, model: nn.Module, exact: bool = True) -> None:
    wanted = {name: param.grad for name, param in plain.named_parameters()}
    for name, param in model.named_parameters():
        expected, got = shard_like(wanted[name], param), local(param.grad)
        assert (got is None) == (expected is None), f"{name}: got {got}, expected {expected}"
        if got is not None and expected is not None:
            is_exact = exact and param.ndim  # gloo's all-reduce, of scalars and replicas, has an order of its own
            tolerance = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-5, "atol": 1e-7}
            assert_close(got, expected, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def forward_and_backward(step: int, with_images: Sequence[int]) -> Step:
    def run(model: Any, rank: int) -> None:
        model(*inputs(step, rank, with_images)).backward()

    return run


def counts(log: Sequence[events.Event], unit: str) -> dict[str, int]:
    found = [each.kind for each in log if each.unit == unit or each.unit.startswith(f"{unit}.")]
    return {kind: found.count(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce") if kind in found}


def who_has_images(world_size: int) -> list[list[int]]:
    """One list of ranks for each step."""
    return [[0], [], list(range(world_size)), [world_size - 1], [0]]


MESHES = ("fsdp", "hsdp")


WAYS = [(policy, mesh, reshards) for policy in POLICIES for mesh in MESHES for reshards in (False, True)]
PROTECTIVE = (("plain", "fsdp", False), ("runs_if", "hsdp", True), ("ran", "fsdp", True))


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("policy", "mesh", "reshards"),
    [pytest.param(*way, marks=() if way in PROTECTIVE else pytest.mark.exhaustive) for way in WAYS],
)
def test_training_equals_one_process(rank: int, world_size: int, policy: str, mesh: str, reshards: bool) -> None:
    """Gradients bit for bit, and None where no rank had one; AdamW with weight decay tells None from zeros."""
    hsdp = mesh_2d(2, world_size // 2) if mesh == "hsdp" else None
    plain, model = pair(POLICIES[policy], mesh=hsdp, reshard_after_forward=reshards)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5) for each in (plain, model)]
    for step, with_images in enumerate(who_has_images(world_size)):
        run = forward_and_backward(step, with_images)
        gradients(plain, world_size, run, "ran" if policy == "ran" else "all")
        run(model, rank)
        assert_equal_gradients(plain, model, exact=hsdp is None or world_size == 2)
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
    """With `runs_if` neither gathers nor reductions; without it the gathers, since nobody knows in advance. The gathers
    of all other units are the same."""
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


@on_ranks(2)
def test_ranks_agree_only_where_units_are_optional(rank: int, world_size: int) -> None:
    _, model = pair(False)
    with events.record() as log:
        forward_and_backward(0, range(2))(model, rank)
    assert not [each for each in log if each.kind == "agreement"]


def micro_batches(with_images: Sequence[Sequence[int]], turn: Callable[[Any, bool], None]) -> Step:
    """One step of several backwards; `turn(model, is_last)` is called before each."""

    def run(model: Any, rank: int) -> None:
        for index, ranks in enumerate(with_images):
            if isinstance(model, fsdp2.FSDPModule):
                turn(model, index == len(with_images) - 1)
            model(*inputs(10 + index, rank, ranks)).backward()

    return run


TURNS: dict[str, Callable[[Any, bool], None]] = {
    "synced": lambda model, is_last: None,
    "unsynced": lambda model, is_last: model.set_requires_gradient_sync(is_last),
    "not last": lambda model, is_last: model.set_is_last_backward(is_last),
    "no all-reduce": lambda model, is_last: model.set_requires_all_reduce(is_last),
}


@on_ranks(2, 4)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("turn", TURNS)
def test_accumulation(rank: int, world_size: int, turn: str, mesh: str) -> None:
    """Several microbatches in a step, of which some ranks have images in some. The last brings none to anybody."""
    plain, model = pair(POLICIES["runs_if"], mesh=mesh_2d(2, world_size // 2) if mesh == "hsdp" else None)
    for with_images in ([[0], [1], []], [[], [0, 1], [0]], [[], [], []], [[1], [], [0]]):
        for each in (plain, model):
            each.zero_grad()
        run = micro_batches(with_images, TURNS[turn])
        gradients(plain, world_size, run)
        run(model, rank)
        assert_equal_gradients(plain, model, exact=False)


@on_ranks(2)
def test_zeros_for_all_unused_parameters(rank: int, world_size: int) -> None:
    """`set_reduce_scatter_unused_params` means zeros for what no rank used, here too."""
    plain, model = pair(POLICIES["ran"])
    model.set_reduce_scatter_unused_params(True)
    for with_images in ([0], []):
        for each in (plain, model):
            each.zero_grad()
        run = forward_and_backward(0, with_images)
        gradients(plain, world_size, run, "ran")
        for param in plain.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        run(model, rank)
        assert_equal_gradients(plain, model)


@on_ranks(2)
def test_average_over_those_that_ran_in_a_step_of_several_backwards(rank: int, world_size: int) -> None:
    """Without sync the sum is divided once, by the number of ranks that have gradients at the reduction."""
    plain, model = pair(POLICIES["ran"])
    run = micro_batches([[0], [1], []], TURNS["unsynced"])
    gradients(plain, world_size, run, "ran")  # both ranks have gradients in the end
    run(model, rank)
    assert_equal_gradients(plain, model, exact=False)


@on_ranks(2, 4)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("reshards", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_checkpointing_and_a_tower_that_runs_twice(
    rank: int, world_size: int, reshards: bool, use_reentrant: bool
) -> None:
    plain, model = pair(
        POLICIES["runs_if"], lambda: VisionLanguage(use_reentrant, times=2), reshard_after_forward=reshards
    )
    for step, with_images in enumerate(who_has_images(world_size)):
        for each in (plain, model):
            each.zero_grad()
        run = forward_and_backward(step, with_images)
        gradients(plain, world_size, run)
        with events.record() as log:
            run(model, rank)
        assert_equal_gradients(plain, model, exact=False)
        assert counts(log, "vision").get("all_gather", 0) == (3 * (1 + reshards) if with_images else 0)


@on_ranks(2, 4)
@pytest.mark.parametrize("order", ["one backward", "in order", "reversed", "last before first"])
@pytest.mark.parametrize("reshards", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_two_forwards_before_a_backward(rank: int, world_size: int, reshards: bool, order: str) -> None:
    """Of one forward's batches nobody has images, of the other's one rank: each backward gathers what its own forward
    gathered."""
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

        for each in (plain, model):
            each.zero_grad()
        gradients(plain, world_size, run)
        run(model, rank)
        assert_equal_gradients(plain, model, exact=False)


class Mixture(nn.Module):
    """A layer of experts, each for the rows whose first value falls into its part of the line."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        x = self.mix(x)
        result = x
        for index, expert in enumerate(self.experts):
            if (rows := (chosen == index).nonzero()[:, 0]).numel():
                result = result.index_add(0, rows, expert(x[rows]))
        return self.out(result)


class Experts(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(DIM, 1)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            if self.use_reentrant is None:
                x = layer(x, chosen)
            else:
                x = checkpoint(layer, x, chosen, use_reentrant=self.use_reentrant)
        return self.head(x).square().mean()


@on_ranks(2, 4)
@pytest.mark.parametrize("use_reentrant", [None, True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("averages", ["all", "ran"])
def test_experts_without_tokens(rank: int, world_size: int, averages: str, use_reentrant: bool | None) -> None:
    """Expert 0 gets rows on rank 0 only, expert 1 on all ranks, expert 2 on none, whose gradient stays None. The
    experts are gathered with the layer around them, in forward and again in backward."""
    torch.manual_seed(0)
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
    """The recomputation of a reentrant checkpoint makes room as it goes. Expert units would have made more of it on the
    ranks that run them, which then gathered a layer that the others still had. Rank 1 runs one expert or none."""

    class Together(Experts):
        def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
            def run(x: Tensor) -> Tensor:
                for layer in self.layers:
                    x = layer(x, chosen)
                return x

            return self.head(checkpoint(run, x.clone().requires_grad_(), use_reentrant=True)).square().mean()

    torch.manual_seed(0)
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

    gradients(plain, world_size, run)
    run(model, rank)
    assert_equal_gradients(plain, model)
    with events.record() as log:
        model(batch(0, rank), torch.tensor([3, 3, 3])).backward()
    assert counts(log, "layers.0.experts.0") == {}  # nor are they gathered in backward, where the layer is
    assert counts(log, "layers.0")["all_gather"] >= 2


@on_ranks(2)
@pytest.mark.parametrize("policy", ["plain", "runs_if"])
def test_frozen_tower(rank: int, world_size: int, policy: str) -> None:
    plain, model = pair(POLICIES[policy])
    for each in (plain, model):
        each.vision.requires_grad_(False)
    for step, with_images in enumerate(who_has_images(world_size)):
        for each in (plain, model):
            each.zero_grad()
        run = forward_and_backward(step, with_images)
        gradients(plain, world_size, run)
        with events.record() as log:
            run(model, rank)
        assert_equal_gradients(plain, model)
        assert set(counts(log, "vision")) <= {"all_gather"}


@on_ranks(2)
@pytest.mark.parametrize("by", ["default", "prediction", "lists"])
def test_prefetching_around_a_tower_that_one_rank_runs(rank: int, world_size: int, by: str) -> None:
    """The order of the other units' gathers and reductions is the same on both ranks, with prefetch lists, with the
    automatic prefetch, and with the tower between two blocks of text."""

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
        for each in (plain, model):
            each.zero_grad()
        run = forward_and_backward(step, with_images)
        gradients(plain, world_size, run)
        with events.record() as log:
            run(model, rank)
        assert_equal_gradients(plain, model)
        sent = [each for each in log if each.kind in ("all_gather", "reduce_scatter", "all_reduce", "agreement")]
        orders.append([(each.kind, each.unit, each.numel) for each in sent])
    everywhere: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everywhere, orders)
    assert everywhere[0] == everywhere[1]


@on_ranks(2)
def test_an_exception_in_the_tower(rank: int, world_size: int) -> None:
    """After `reset_iter_state` on all ranks the next batch is computed as if the failed one had not been."""
    plain, model = pair(POLICIES["runs_if"])

    def fail(*_: Any) -> None:
        raise ValueError("a broken image")

    for place in (model.vision.blocks[1], model.blocks[1]):
        handle = place.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="a broken image"):
            model(*inputs(0, rank, [0, 1]))
        handle.remove()
        model.reset_iter_state()
    output = model(*inputs(0, rank, [1]))
    output.register_hook(fail)
    with pytest.raises(ValueError, match="a broken image"):
        output.backward()
    model.reset_iter_state()
    run = forward_and_backward(1, [0])
    gradients(plain, world_size, run)
    run(model, rank)
    assert_equal_gradients(plain, model)


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
            for each in (plain, sharded):
                each.zero_grad()
            run = forward_and_backward(step, with_images)
            gradients(plain, world_size, run)
            run(sharded, rank)
            assert_equal_gradients(plain, sharded)
        for each in (plain, sharded):
            each.zero_grad()

        def alone(model: Any, rank: int) -> None:
            model.vision(batch(9, rank)).square().mean().backward()

        gradients(plain, world_size, alone)
        alone(sharded, rank)
        assert_equal_gradients(plain, sharded)


@on_ranks(2)
def test_a_list_of_modules_and_an_optional_unit_within_another(rank: int, world_size: int) -> None:
    """Tower and projector as one unit; its second block has a policy of its own."""
    torch.manual_seed(0)
    plain = VisionLanguage()
    model: Any = copy.deepcopy(plain)
    asked = []

    def note(*args: Any, **kwargs: Any) -> bool:
        asked.append(len(args) + len(kwargs))
        return args[1] is not None

    fully_shard(model.vision.blocks[0])
    fully_shard(model.vision.blocks[1], optional=OptionalPolicy(runs_if=note))
    fully_shard([model.vision, model.projector], optional=POLICIES["ran"])
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for step, with_images in enumerate(who_has_images(world_size)):
        for each in (plain, model):
            each.zero_grad()
        run = forward_and_backward(step, with_images)
        gradients(plain, world_size, run, "ran")
        for name, param in plain.named_parameters():
            if with_images and name.startswith("projector") and param.grad is not None:
                param.grad *= world_size / len(with_images)
            if with_images and name.startswith("vision.blocks.1") and param.grad is not None:
                param.grad /= world_size / len(with_images)  # its own policy averages over all
        run(model, rank)
        assert_equal_gradients(plain, model, exact=False)
    assert asked == [2] * 5


@on_ranks(2)
def test_mixed_precision_reduces_in_the_reduce_dtype(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    torch.manual_seed(0)
    plain = VisionLanguage()
    model: Any = copy.deepcopy(plain)
    fully_shard(model.vision, optional=POLICIES["runs_if"], mp_policy=policy)
    fully_shard(model)
    run = forward_and_backward(0, [1])
    gradients(plain, world_size, run)
    with events.record() as log:
        run(model, rank)
    sent = {each.dtype for each in log if each.kind == "reduce_scatter" and each.unit == "vision"}
    assert sent == {torch.float32}
    for name, param in model.named_parameters():
        wanted = shard_like(plain.get_parameter(name).grad, param)
        assert (param.grad is None) == (wanted is None)
        if wanted is not None:
            assert_close(local(param.grad), wanted, rtol=0.1, atol=0.02)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_of_zero(rank: int, world_size: int, stage: int) -> None:
    zero = fsdp2.ZeroPolicy(stage=stage)
    torch.manual_seed(0)
    plain = VisionLanguage()
    model: Any = copy.deepcopy(plain)
    fully_shard(model.vision, optional=POLICIES["runs_if"], zero=zero)
    fully_shard(model, zero=zero)
    for with_images in ([[0], []], [[], []], [[], [1]]):
        for each in (plain, model):
            each.zero_grad()
        run = micro_batches(with_images, TURNS["not last"])
        gradients(plain, world_size, run)
        run(model, rank)
        assert_equal_gradients(plain, model, exact=False)


@on_ranks(2)
def test_gradients_that_are_finalised_by_hand(rank: int, world_size: int) -> None:
    plain, model = pair(POLICIES["runs_if"])
    model.set_manual_backward_finalization(True)

    def run(model: Any, rank: int) -> None:
        for step, with_images in ((0, [1]), (1, [])):
            model(*inputs(step, rank, with_images)).backward()
        if model is not plain:
            model.finalize_backward()

    gradients(plain, world_size, run)
    run(model, rank)
    assert_equal_gradients(plain, model, exact=False)


@pytest.mark.exhaustive
@on_ranks(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks(rank: int, world_size: int, backend: str) -> None:
    plain, model = pair(POLICIES["runs_if"])
    for block in (*model.blocks, *model.vision.blocks):
        block.compile(backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo reports what it does not trace
        for step, with_images in enumerate([[0], [], [1]]):
            for each in (plain, model):
                each.zero_grad()
            run = forward_and_backward(step, with_images)
            gradients(plain, world_size, run)
            run(model, rank)
            assert_equal_gradients(plain, model, exact=False)
    torch.compiler.reset()


# --- mistakes ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("others", [[], [0, 1]])
def test_a_unit_that_runs_against_the_agreement(rank: int, world_size: int, others: list[int]) -> None:
    """It raises on the ranks that had said that they would not run it, whatever the others said."""
    _, model = pair(OptionalPolicy(runs_if=lambda text, images=None: bool(others) and has_images(text, None)))
    with pytest.raises(OrderError, match="optional unit 'vision' runs, but runs_if of 'vision' returned False"):
        model(*inputs(0, rank, [0, 1]))
    model.reset_iter_state()
    model(*inputs(0, rank, [])).backward()


@on_ranks(2)
def test_a_unit_that_runs_outside_of_its_host(rank: int, world_size: int) -> None:
    """The host, `layers.0`, has not gathered it; on one rank alone it would wait for the other forever."""
    model: Any = Experts(None)
    for expert in model.layers[0].experts:
        fully_shard(expert, optional=True)
    fully_shard(model.layers[0])
    fully_shard(model)
    model.register_forward_pre_hook(lambda _, args: model.layers[0].experts[0](args[0]) and None)
    with pytest.raises(OrderError, match=r"optional unit 'layers\.0\.experts\.0' runs outside of the forward"):
        model(batch(0, rank), torch.tensor([0, 0, 0]))


@on_ranks(2)
def test_policies_that_cannot_work(rank: int, world_size: int) -> None:
    with pytest.raises(ArgumentError, match="average_over: expected 'all' or 'ran', got 'some'"):
        OptionalPolicy(average_over="some")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="runs_if: expected a function or None, got True"):
        OptionalPolicy(runs_if=True)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"optional: expected a bool .*Pass OptionalPolicy\(runs_if=has_images\)"):
        fully_shard(nn.Linear(2, 2), optional=has_images)  # type: ignore[arg-type]
    model: Any = fully_shard(nn.Linear(2, 2), optional=True)
    with pytest.raises(ArgumentError, match="the root is an optional unit"):
        model(torch.ones(1, 2))
    _, model = pair(OptionalPolicy(runs_if=lambda text, images=None: torch.tensor(True)))  # type: ignore[arg-type, return-value]
    with pytest.raises(ArgumentError, match=r"unit 'vision': expected a bool from runs_if, got tensor\(True\)"):
        model(*inputs(0, rank, [0]))


@on_ranks(2)
@pytest.mark.parametrize("owner", ["optional", "root"])
def test_weights_shared_with_a_unit_that_all_ranks_run(rank: int, world_size: int, owner: str) -> None:
    model = VisionLanguage()
    if owner == "optional":
        model.projector.weight = model.vision.unused.weight
        fully_shard(model.vision, optional=True)
    else:
        model.blocks[0].up = nn.Linear(DIM, DIM)
        model.vision.unused.weight = model.blocks[0].up.weight
        fully_shard(model.blocks[0])
        fully_shard(model.vision, optional=True)
    fully_shard(model)
    with pytest.raises(UnsupportedError, match="share a weight"):
        model(*inputs(0, rank, [0]))


# --- a model of transformers ------------------------------------------------------------------------------------------


def llava() -> nn.Module:
    """LLaVA with a vision tower of CLIP and a language model of Llama, two layers each. The tower's last layer is
    unused: LLaVA takes the outputs of the one before."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=16)
    text = transformers.LlamaConfig(**sizes, vocab_size=32, num_key_value_heads=1, pad_token_id=0)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=31)
    return transformers.LlavaForConditionalGeneration(config)  # type: ignore[no-any-return]


def words(step: int, rank: int, with_images: Sequence[int]) -> dict[str, Tensor]:
    """Two sentences; each begins with the four tokens of an image where the rank has images."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(1, 30, (2, 8), generator=generator)
    if rank not in with_images:
        return {"input_ids": tokens, "labels": tokens}
    tokens[:, :4] = 31
    return {"input_ids": tokens, "labels": tokens, "pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}


@pytest.mark.exhaustive
@on_ranks(2, timeout_s=240)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_vision_language_model_of_transformers(rank: int, world_size: int, checkpoints: bool) -> None:
    torch.manual_seed(0)
    plain: Any = llava()
    plain.train()
    model: Any = copy.deepcopy(plain)
    has_pixels = OptionalPolicy(runs_if=lambda *args, pixel_values=None, **kwargs: pixel_values is not None)
    fully_shard([model.model.vision_tower, model.model.multi_modal_projector], optional=has_pixels)
    for layer in model.model.language_model.layers:
        fully_shard(layer)
    fully_shard(model)
    if checkpoints:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it has another name in transformers 6
            for each in (plain, model):
                each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for step, with_images in enumerate(who_has_images(world_size)):
        for each in (plain, model):
            each.zero_grad()

        def run(model: Any, rank: int, step: int = step, with_images: Sequence[int] = with_images) -> None:
            model(**words(step, rank, with_images)).loss.backward()

        gradients(plain, world_size, run)
        with events.record() as log:
            run(model, rank)
        assert_equal_gradients(plain, model)
        sent = {each.kind for each in log if "vision_tower" in each.unit} & {"all_gather", "reduce_scatter"}
        assert sent == ({"all_gather", "reduce_scatter"} if with_images else set())
    assert model.model.vision_tower.post_layernorm.weight.grad is None


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
