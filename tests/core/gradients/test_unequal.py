"""`fsdp2.join`: ranks with different numbers of microbatches give what one process gets that runs them all."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, OptionalPolicy, OrderError, ZeroPolicy, fully_shard
from tests.helpers.ranks import on_ranks

Counts = Sequence[int]


class Block(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.checkpointed = checkpointed

    def body(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x))


class Net(nn.Module):
    """An embedding, blocks in another order than they were registered in, and a head: these two are the root's own."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(3))
        self.embed = nn.Linear(5, 8)
        self.seen = nn.Linear(5, 8)  # optional

    def forward(self, x: Tensor, sees: bool = False) -> Tensor:
        x = self.embed(x) + (self.seen(x) if sees else 0)
        for index in (0, 2, 1):
            x = self.blocks[index](x)
        return self.head(x)


def net(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return Net(**options)


def microbatch(rank: int, index: int) -> tuple[Tensor, float]:
    """Inputs, and the weight: their number."""
    size = 1 + (rank + 2 * index) % 3
    return torch.randn(size, 5, generator=torch.Generator().manual_seed(100 * rank + index)), float(size)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def of_one_process(model: nn.Module, counts: Counts) -> dict[str, Tensor]:
    """The gradients of all ranks' microbatches, in rank order."""
    total = 0.0
    for rank, count in enumerate(counts):
        for index in range(count):
            x, weight = microbatch(rank, index)
            (loss_of(model, x) * weight).backward()
            total += weight
    return {name: p.grad / total for name, p in model.named_parameters() if p.grad is not None}


def run(model: Any, rank: int, counts: Counts, **options: Any) -> None:
    with fsdp2.join(model) as work:
        for x, weight in work.each([microbatch(rank, i) for i in range(counts[rank])], **options):
            work.backward(loss_of(model, x), weight)


def check(model: nn.Module, expected: dict[str, Tensor], **tolerance: Any) -> None:
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert_close(found[name], grad, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}), msg=name)


def sharded(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def plain_units(**options: Any) -> Any:
    model = net(**options)
    del model.seen
    return model


# --- the counts -------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_random_counts(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    model = sharded(plain_units())
    for turn in range(20):
        counts = [0, 0, 0, turn] if turn < 2 else torch.randint(0, 4, (4,), generator=generator).tolist()
        model.zero_grad()
        run(model, rank, counts, accumulate=turn % 2 == 1)
        if any(counts):
            check(model, of_one_process(plain_units(), counts))


@on_ranks(2)
def test_each_counts_once_without_a_weight(rank: int, world_size: int) -> None:
    model, counts = sharded(plain_units()), (2, 1)
    with fsdp2.join(model) as work:
        for x, _ in work.each([microbatch(rank, i) for i in range(counts[rank])]):
            loss_of(model, x).backward()
    plain = plain_units()
    losses = [loss_of(plain, microbatch(r, i)[0]) for r, count in enumerate(counts) for i in range(count)]
    (sum(losses) / 3).backward()  # type: ignore[union-attr]
    check(model, {name: p.grad for name, p in plain.named_parameters()})  # type: ignore[misc]


# --- with everything that a step may have -----------------------------------------------------------------------------


def hsdp(**options: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return sharded(plain_units(), mesh=mesh, **options)


def tensor_parallel() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = plain_units()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sharded(model, mesh=mesh["dp"])


def with_unused() -> Any:
    model = plain_units()
    model.blocks[1].extra = nn.Linear(2, 2)
    model = sharded(model)
    model.set_reduce_scatter_unused_params(True)
    return model


FEATURES: dict[str, Callable[[], Any]] = {
    "hsdp": hsdp,
    "mixed precision": lambda: sharded(plain_units(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "inner shards": partial(hsdp, zero=ZeroPolicy(3, shard_replicas=True)),
    "stage 1": lambda: sharded(plain_units(), zero=ZeroPolicy(1)),
    "stage 2": lambda: sharded(plain_units(), zero=ZeroPolicy(2)),
    "checkpointed": lambda: sharded(plain_units(checkpointed=True)),
    "not resharded": lambda: sharded(plain_units(), reshard_after_forward=False),
    "smaller": lambda: sharded(plain_units(), reshard_after_forward=2),
    "offloaded": lambda: sharded(plain_units(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "unused": with_unused,
    "tensor parallel": tensor_parallel,
}


@on_ranks(4)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(rank: int, world_size: int, feature: str) -> None:
    """Ranks of one tensor-parallel group have the same microbatches."""
    counts: Counts = (2, 0) if feature == "tensor parallel" else (3, 1, 0, 2)
    model = FEATURES[feature]()
    for _ in range(3):  # from the second time on in the order of the first
        model.zero_grad()
        run(model, rank // 2 if feature == "tensor parallel" else rank, counts)
    expected = of_one_process(plain_units(), counts)
    if feature == "unused":
        expected |= {f"blocks.1.extra.{name}": torch.zeros(p.shape) for name, p in nn.Linear(2, 2).named_parameters()}
    check(model, expected, **({"rtol": 0.1, "atol": 0.02} if feature == "mixed precision" else {}))


@on_ranks(2)
def test_a_root_that_computes_last_alone(rank: int, world_size: int) -> None:
    """Its gradients are there before those of the blocks, so its reduction comes first, on ranks that serve too."""
    model, counts = plain_units(), (2, 1)
    fully_shard(model.embed)
    sharded(model)
    for _ in range(2):
        model.zero_grad()
        run(model, rank, counts)
    check(model, of_one_process(plain_units(), counts))


@on_ranks(2)
def test_a_unit_of_several_modules(rank: int, world_size: int) -> None:
    model, counts = plain_units(), (2, 1)
    fully_shard([model.embed, model.head])
    sharded(model)
    for _ in range(2):
        model.zero_grad()
        run(model, rank, counts)
    check(model, of_one_process(plain_units(), counts))


@on_ranks(2)
@pytest.mark.parametrize("with_runs_if", [False, True])
def test_optional_units(rank: int, world_size: int, with_runs_if: bool) -> None:
    """Rank 0 runs the optional unit in its first microbatch."""
    runs_if = (lambda x, sees: sees) if with_runs_if else None
    model = net()
    fully_shard(model.seen, optional=OptionalPolicy(runs_if=runs_if))
    sharded(model)
    counts = (2, 1)
    with fsdp2.join(model) as work:
        for index, (x, weight) in enumerate(work.each([microbatch(rank, i) for i in range(counts[rank])])):
            work.backward(model(x, rank == 0 and index == 0).square().mean(), weight)
    plain, total = net(), 0.0
    for r, count in enumerate(counts):
        for i in range(count):
            x, weight = microbatch(r, i)
            (plain(x, r == 0 and i == 0).square().mean() * weight).backward()
            total += weight
    check(model, {name: p.grad / total for name, p in plain.named_parameters() if p.grad is not None})


@on_ranks(2)
def test_step_in_backward(rank: int, world_size: int) -> None:
    counts = (2, 1)
    total = sum(microbatch(r, i)[1] for r, count in enumerate(counts) for i in range(count))
    model = sharded(plain_units())
    fsdp2.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    with fsdp2.join(model, total=total) as work:
        own = [microbatch(rank, i) for i in range(counts[rank])]
        for x, weight in work.each(own, accumulate=True):
            work.backward(loss_of(model, x), weight)
    plain = plain_units()
    grads = of_one_process(plain, counts)
    for name, param in plain.named_parameters():
        assert_close(model.get_parameter(name).full_tensor(), param - 0.1 * grads[name], rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_hook_must_get_divided_gradients(rank: int, world_size: int) -> None:
    """`Replicas` averages in such a hook. They would have got other gradients each, if their weights differed."""
    model = sharded(plain_units())
    model.set_all_reduce_hook(lambda flat: None)
    with pytest.raises(
        fsdp2.UnsupportedError, match=r"join: a unit has an all-reduce hook .* join\(model, total=...\)"
    ):
        run(model, rank, (2, 1))


@on_ranks(2)
def test_clipping_and_steps(rank: int, world_size: int) -> None:
    model, plain = sharded(plain_units()), plain_units()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain)]
    for counts in ((2, 1), (0, 2), (1, 1)):
        run(model, rank, counts)
        norm = fsdp2.clip_grad_norm_(model.parameters(), 0.1)
        grads = of_one_process(plain, counts)
        for name, param in plain.named_parameters():
            param.grad = grads[name]
        assert_close(float(norm), float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)), rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.full_tensor(), theirs, rtol=1e-4, atol=1e-5)


# --- forwards alone ---------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_forwards_without_gradients(rank: int, world_size: int) -> None:
    model, plain, counts = sharded(plain_units()), plain_units(), (2, 0, 3, 1)
    own = [microbatch(rank, i)[0] for i in range(counts[rank])]
    with torch.no_grad(), fsdp2.join(model) as work:
        found = [model(x) for x in work.each(own)]
    assert len(found) == counts[rank]
    for x, output in zip(own, found, strict=True):
        assert_close(output, plain(x))
    run(model, rank, (1, 2, 0, 0))  # and then training, in the same order
    check(model, of_one_process(plain, (1, 2, 0, 0)))


# --- what it costs, and mistakes --------------------------------------------------------------------------------------


def leave_early(model: Any, rank: int) -> None:
    with fsdp2.join(model) as work:
        for x, weight in work.each([microbatch(rank, 0)] * 2):
            work.backward(loss_of(model, x), weight)
            break


@on_ranks(2)
def test_mistakes(rank: int, world_size: int) -> None:
    model = sharded(plain_units())
    with pytest.raises(fsdp2.ArgumentError, match="expected sequences"), fsdp2.join(model) as work:
        list(work.each(iter([microbatch(rank, 0)]), accumulate=True))
    with pytest.raises(OrderError, match="left early"):
        leave_early(model, rank)
    with pytest.raises(OrderError, match="has a gradient"):
        run(model, rank, (1, 1))
    with pytest.raises(fsdp2.ArgumentError, match="fully_shard"), fsdp2.join(nn.Linear(2, 2)):  # type: ignore[arg-type]
        pass
