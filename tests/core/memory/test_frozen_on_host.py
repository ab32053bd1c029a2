"""`ZeroPolicy(keep_frozen="host")`: a frozen base is gathered once, and copied from host memory afterwards."""

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import MixedPrecisionPolicy, ZeroPolicy, events, fully_shard
from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.extras.kept import HostCopy
from tests.helpers.extensions import InPieces
from tests.helpers.mortal_ranks import Case, run_cases
from tests.helpers.parity_models import batch, mesh_2d
from tests.helpers.ranks import on_ranks

DIM, RANK = 8, 2
BASE, ADAPTER = DIM * DIM + DIM, 2 * DIM * RANK
ON_HOST = ZeroPolicy(keep_frozen="host")


class Lora(nn.Module):
    """A frozen layer and its adapter: one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(DIM, RANK, bias=False), nn.Linear(RANK, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(torch.tanh(self.down(x)))


class Adapted(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Lora() for _ in range(3))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


def pair(recomputes: bool = False, zero: ZeroPolicy = ON_HOST, **options: Any) -> tuple[Any, Any]:
    """Two equal models: one gathers the base in each forward and backward."""
    torch.manual_seed(0)
    plain = Adapted(recomputes)
    models = copy.deepcopy(plain), plain
    for model, policy in zip(models, (None, zero), strict=True):
        for layer in model.layers:
            fully_shard(layer, zero=policy, **options)
        fully_shard(model, zero=policy, **options)
    return models


def step(model: Any, number: int, rank: int) -> list[int]:
    """A batch; the sizes of the gathers that it takes."""
    with events.record() as log:
        model(batch(number, rank, DIM)).square().mean().backward()
    return sorted(event.numel for event in log if event.kind == "all_gather")


def assert_same(models: tuple[Any, Any]) -> None:
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert torch.equal(one.grad.full_tensor(), other.grad.full_tensor())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recomputes": True},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"mp_policy": MixedPrecisionPolicy(all_gather_dtype=torch.int8)},
        {"offload_policy": fsdp2.CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["plain", "recomputed", "bf16", "int8", "offload"],
)
@on_ranks(2, 3)
def test_trains_the_same_and_gathers_adapters_only(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Bit by bit; after the first gather of each base there are no more."""
    models = pair(**options)
    optimizers = [torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in models]
    sizes = []
    for number in range(3):
        step(models[0], number, rank)
        sizes.append(step(models[1], number, rank))
        assert_same(models)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(sizes[0]) == 9 and len(sizes[1]) == len(sizes[2]) == 6
    assert sum(sizes[1]) < sum(sizes[0])


@pytest.mark.parametrize("kind", ["hsdp", "smaller", "replicas", "stage2", "prefetch"])
@on_ranks(4)
def test_meshes_and_settings(rank: int, world_size: int, kind: str) -> None:
    options: dict[str, Any] = {"mesh": mesh_2d(2, 2)} if kind in ("hsdp", "replicas") else {}
    zero = {
        "smaller": ZeroPolicy(secondary_shard_size=2, keep_frozen="host"),
        "replicas": ZeroPolicy(shard_replicas=True, keep_frozen="host"),
        "stage2": ZeroPolicy(2, keep_frozen="host"),
    }.get(kind, ON_HOST)
    models = pair(zero=zero, **options)
    if kind == "prefetch":
        for one, other in zip(models[1].layers, [*models[1].layers][1:], strict=False):
            one.set_modules_to_forward_prefetch([other])
    for number in range(3):
        step(models[0], number, rank)
        sizes = step(models[1], number, rank)
        assert_same(models)
    assert max(sizes) < BASE


@on_ranks(2)
@pytest.mark.parametrize("keep", [True, "host"])
def test_what_changes_the_base_is_seen(rank: int, world_size: int, keep: Any) -> None:
    """Every change makes the ranks gather once more what may have changed."""
    models = pair(zero=ZeroPolicy(keep_frozen=keep))
    numbers = itertools.count()

    def gathers() -> list[int]:
        """Of bases, in two steps."""
        found = []
        for _ in range(2):
            number = next(numbers)
            step(models[0], number, rank)
            found.append(sum(size > ADAPTER for size in step(models[1], number, rank)))
            assert_same(models)
            for each in models:
                each.zero_grad()
        return found

    assert gathers() == [3, 0]
    for each in models:
        with torch.no_grad():
            each.layers[1].base.weight.mul_(0.5)
    assert gathers() == [1, 0]
    for assign in (False, True):
        for each in models:
            each.load_state_dict({name: value * 2 for name, value in each.state_dict().items()}, assign=assign)
            for name, param in each.named_parameters():
                param.requires_grad_("base" not in name)
        assert gathers() == [3, 0], assign
    for each in models:
        with fsdp2.full_params(each), torch.no_grad():
            each.layers[0].base.bias.add_(1)
    assert gathers() == [3, 0]
    # What is trained is gathered for forward and backward; what the device has kept serves one more forward.
    for trains, wanted in ((True, [2 if keep == "host" else 1, 2]), (False, [1, 0])):
        for each in models:
            each.layers[2].base.weight.requires_grad_(trains)
        assert gathers() == wanted
    for each in models:
        each.to(torch.float64)
        for layer in each.layers:
            layer.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    assert gathers() == [3, 0]
    models[1].eval()
    with torch.no_grad():
        assert torch.equal(models[0](batch(1, rank, DIM)), models[1](batch(1, rank, DIM)))


@pytest.mark.parametrize("keep", [True, "host"])
@on_ranks(2)
def test_one_rank_alone_may_read(rank: int, world_size: int, keep: Any) -> None:
    """A state dict, or a copy, on one rank made that rank alone gather the base again: it hung."""
    models = pair(zero=ZeroPolicy(keep_frozen=keep))
    step(models[1], 0, rank)
    if rank == 0:
        assert len(models[1].state_dict()) == 12
        copied = copy.deepcopy(models[1])
        assert copied.layers[0].base.weight.shape == (DIM, DIM)
    assert max(step(models[1], 1, rank)) <= ADAPTER
    for number in range(2):
        step(models[0], number, rank)
    assert_same(models)


@on_ranks(2)
def test_host_memory_is_that_of_the_frozen_parameters(rank: int, world_size: int) -> None:
    """Whole, in the compute dtype; and given back when the model goes."""
    before = _host_bytes()
    _, model = pair(mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    step(model, 0, rank)
    assert _host_bytes() - before == 3 * BASE * 2
    step(model, 1, rank)
    assert _host_bytes() - before == 3 * BASE * 2
    model.layers[0].load_state_dict(model.layers[0].state_dict())
    assert _host_bytes() - before == 2 * BASE * 2
    del model
    assert _host_bytes() == before


def _host_bytes() -> int:
    """Of all copies in this process."""
    return sum(each.nbytes for each in gc.get_objects() if type(each) is HostCopy)


@on_ranks(2)
def test_mistakes(rank: int, world_size: int) -> None:
    with pytest.raises(ArgumentError, match="stage 0 gathers nothing"):
        ZeroPolicy(0, keep_frozen="host")
    layer = nn.Linear(DIM, DIM, bias=False)
    layer.weight = nn.Parameter(InPieces(layer.weight.detach(), {}), requires_grad=False)
    with pytest.raises(UnsupportedError, match='keep_frozen="host"'):
        fully_shard(layer, zero=ON_HOST)


def changes_alone(rank: int) -> str:
    _, model = pair()
    step(model, 0, rank)
    if rank == 0:
        torch.autograd.graph.increment_version([model.layers[1].base.weight])
    try:
        for number in range(3):
            step(model, number, rank)
    except fsdp2.CollectiveError as error:
        return str(error)
    return "no error"


@pytest.mark.exhaustive
def test_a_change_on_one_rank_is_an_error_and_no_hang() -> None:
    outcomes = run_cases([Case(changes_alone, 2, limit_s=90)])[0]
    assert all(each.ok and "did different things" in each.value for each in outcomes), outcomes
