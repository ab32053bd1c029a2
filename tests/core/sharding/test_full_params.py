"""`full_params`: whole parameters for a while, written back on exit (PT#137129)."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import ArgumentError, MixedPrecisionPolicy, OrderError, ShardPlacementResult, events, fully_shard
from fsdp2.extras.full_params import full_params
from fsdp2.extras.zero import ZeroPolicy
from fsdp2.runtime.unit import unit_of
from tests.helpers.models import error_of, is_sharded, mlp
from tests.helpers.one_process import in_units
from tests.helpers.parity_models import Block, Stack, batch, count, full, local, mesh_2d, one_batch
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import dp_tp

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
LAYOUTS = ["fsdp", "hsdp", "dim1"]


def sharded(plain: nn.Module, world_size: int, layout: str = "fsdp", **options: Any) -> Any:
    """A sharded copy of `plain`, over one axis, over two, or with matrices cut along dim 1."""
    if layout == "hsdp":
        options["mesh"] = mesh_2d(world_size // 2, 2)
    if layout == "dim1":
        options["shard_placement_fn"] = lambda param: ShardPlacementResult(Shard(param.ndim - 1))
    return in_units(plain, **options)


def change(model: nn.Module) -> None:
    """The same change of every element that a plain and an opened model get."""
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.mul_(2).add_(torch.arange(param.numel(), dtype=param.dtype).view(param.shape), alpha=index / 100)


def assert_holds(model: nn.Module, plain: nn.Module) -> None:
    """The (sharded or whole) parameters of `model` are those of `plain`, bit by bit; collective."""
    pairs = zip(model.named_parameters(), plain.named_parameters(), strict=True)
    for (name, param), (plain_name, value) in pairs:
        assert name == plain_name
        assert torch.equal(full(param).cpu(), value), name


@on_ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_and_writes_back(rank: int, world_size: int, layout: str) -> None:
    """PT#137129: whole values in the original dtype, uneven shards; changes reach the sharded objects and forward."""
    plain = Stack()
    model = sharded(plain, world_size, layout, mp_policy=BF16)
    model.inp.weight.note = "mine"
    before = list(model.parameters())
    one_batch(model, 0, rank)
    model.zero_grad()
    with full_params(model):
        assert all(type(param) is nn.Parameter and param.dtype == torch.float32 for param in model.parameters())
        assert model.inp.weight.note == "mine"
        assert_holds(model, plain)
        assert torch.equal(model.state_dict()["out.weight"], plain.out.weight)
        change(model)
    change(plain)
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert_holds(model, plain)
    other = sharded(plain, world_size, layout, mp_policy=BF16)
    assert torch.equal(one_batch(model, 1, rank), one_batch(other, 1, rank))


@on_ranks(4)
@pytest.mark.parametrize(("size", "rank0_only"), [(3, False), (8, True), (17, True), (17, False)])
@pytest.mark.parametrize("kind", ["tensor_parallel", "sharded_replicas"])
def test_two_cuts_of_one_dim(rank: int, world_size: int, size: int, rank0_only: bool, kind: str) -> None:
    """Parameters that two mesh axes cut, the same dim among them, also unevenly."""
    plain = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size), nn.LayerNorm(size))
    model: Any = copy.deepcopy(plain)
    if kind == "tensor_parallel":
        mesh = dp_tp()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        if rank0_only:  # the norm is on the ranks of one column, the layers on all
            with pytest.raises(ArgumentError, match="on the same ranks"), full_params(model, rank0_only=True):
                pass
            with full_params(model, rank0_only=True, write_back=False):
                assert is_sharded(model) == (rank != 0)
            return
    else:
        fully_shard(model, mesh=mesh_2d(2, 2), zero=ZeroPolicy(shard_replicas=True))
    with full_params(model, rank0_only=rank0_only):
        if rank == 0 or not rank0_only:
            assert_holds(model, plain)
            change(model)
    change(plain)
    assert_holds(model, plain)


@on_ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offload_to_cpu", [False, True])
def test_rank0_only(rank: int, world_size: int, layout: str, offload_to_cpu: bool) -> None:
    """Only the first rank holds whole parameters; what it writes reaches all ranks."""
    plain = Stack()
    model = sharded(plain, world_size, layout)
    with full_params(model, rank0_only=True, offload_to_cpu=offload_to_cpu):
        if rank == 0:
            assert_holds(model, plain)
            change(model)
        else:
            assert is_sharded(model)
            message = error_of(OrderError, lambda: model(batch(0, rank)))
            assert "on a rank that does not hold the parameters" in message
    change(plain)
    for param, value in zip(model.parameters(), plain.parameters(), strict=True):
        wanted = torch.distributed.tensor.distribute_tensor(value, param.device_mesh, param.placements)
        assert torch.equal(local(param), local(wanted))  # on each replica by itself
    one_batch(model, 0, rank)


@on_ranks(2)
def test_dropped_changes(rank: int, world_size: int) -> None:
    """Without write_back, and when the body raises on the way, the sharded values are as before."""
    plain = Stack()
    model = sharded(plain, world_size)
    with full_params(model, write_back=False):
        change(model)
    assert is_sharded(model)
    assert_holds(model, plain)

    def fail() -> None:
        with full_params(model):
            change(model)
            raise KeyError("own")

    assert error_of(KeyError, fail) == "'own'"
    assert is_sharded(model)
    assert_holds(model, plain)
    one_batch(model, 0, rank)


def assert_same_step(model: Any, reference: Any, rank: int) -> None:
    for each in (model, reference):
        one_batch(each, 0, rank)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(local(mine.grad), local(theirs.grad))


@on_ranks(2)
def test_forward_inside(rank: int, world_size: int) -> None:
    """Without communication, on one rank alone too. A backward inside, whose gradients were lost, is an error."""
    plain = Stack()
    model = sharded(plain, world_size, mp_policy=BF16)
    x = batch(0, rank)
    with full_params(model), events.record() as log:
        assert torch.equal(model(x), plain(x))
        if rank == 1:
            model.blocks[0](x)
            with pytest.raises(OrderError, match=r"full_params: a backward has given 'out\.bias' a gradient"):
                model(x).sum().backward()
            model.reset_iter_state()
    assert count(log, "all_gather", "reduce_scatter") == {"all_gather": 0, "reduce_scatter": 0}
    assert is_sharded(model) and all(param.grad is None for param in model.parameters())
    assert_same_step(model, sharded(plain, world_size, mp_policy=BF16), rank)


@on_ranks(2)
@pytest.mark.parametrize("what", ["model", "block"])
def test_first_forward_inside_on_one_rank(rank: int, world_size: int, what: str) -> None:
    """That rank alone made a root, and compared replicas, in which the other took no part. A block stayed a root."""
    plain = Stack()
    model, other = in_units(plain, mesh=mesh_2d(2, 1)), in_units(plain, mesh=mesh_2d(2, 1))
    with full_params(model, write_back=False):
        if rank == 0:
            (model.blocks[0] if what == "block" else model)(batch(0, rank))
    dist.barrier()
    assert_same_step(model, other, rank)
    assert [unit_of(block).settings.reshard_after_forward for block in model.blocks] == [True] * len(model.blocks)


@on_ranks(2)
@pytest.mark.parametrize("trained", [False, True])
def test_part_of_a_model(rank: int, world_size: int, trained: bool) -> None:
    """Units outside the part stay sharded, and the whole model runs; recurse=False opens one unit."""
    plain = Stack()
    model = sharded(plain, world_size)
    if trained:
        one_batch(model, 0, rank)
        model.zero_grad()
    x = batch(0, rank)
    with full_params(model.blocks[1]), events.record() as log:
        assert {name.split(".")[1] for name, p in model.named_parameters() if not isinstance(p, DTensor)} == {"1"}
        assert torch.equal(model(x), plain(x))
    assert {event.unit for event in log if event.kind == "all_gather"} == {"", "blocks.0", "blocks.2"}
    with full_params(model, recurse=False):
        whole = {name.split(".")[0] for name, param in model.named_parameters() if not isinstance(param, DTensor)}
        assert whole == {"inp", "out"}
    with full_params(model.blocks):  # a container of units
        assert not any(isinstance(param, DTensor) for param in model.blocks.parameters())
    one_batch(model, 0, rank)


@on_ranks(2)
def test_gradients(rank: int, world_size: int) -> None:
    """with_grads: whole reduced gradients inside; changed, new and removed ones are written back as shards."""
    model = sharded(Stack(), world_size)
    one_batch(model, 0, rank)
    wholes: dict[str, Tensor] = {name: full(param.grad).clone() for name, param in model.named_parameters()}
    with full_params(model):
        assert all(param.grad is None for param in model.parameters())
    model.out.weight.grad = None
    with full_params(model, with_grads=True):
        for name, param in model.named_parameters():
            if name == "out.weight":
                assert param.grad is None
                param.grad = torch.ones_like(param)
            elif name == "out.bias":
                param.grad = None
            else:
                assert torch.equal(param.grad, wholes[name])
                param.grad.mul_(3)
    for name, param in model.named_parameters():
        if name == "out.bias":
            assert param.grad is None
        else:
            wanted = torch.ones(param.shape) if name == "out.weight" else 3 * wholes[name]
            assert torch.equal(full(param.grad), wanted)
            assert local(param.grad).shape == local(param).shape


@on_ranks(2)
def test_replaced_parameters(rank: int, world_size: int) -> None:
    """By `load_state_dict(assign=True)`, or by hand: counts if its shape is the same; otherwise nothing is written."""
    plain = Block(8, 11)
    model: Any = fully_shard(copy.deepcopy(plain))
    with full_params(model):
        model.load_state_dict({**plain.state_dict(), "up.bias": torch.full((11,), 7.0)}, assign=True)
    assert torch.equal(full(model.up.bias), torch.full((11,), 7.0))

    def resize() -> None:
        with full_params(model):
            change(model)
            model.up.bias = nn.Parameter(torch.zeros(12))

    message = error_of(ArgumentError, resize)
    assert message.startswith("full_params: 'up.bias' was replaced by Parameter of shape (12,); expected")
    assert is_sharded(model)
    assert torch.equal(full(model.up.weight), plain.up.weight)


@on_ranks(2)
def test_a_removed_parameter(rank: int, world_size: int) -> None:
    """Weight norm was removed within the context, which ended in `KeyError: 'weight_g'`."""
    with pytest.warns(FutureWarning, match="deprecated"):
        model = fully_shard(nn.utils.weight_norm(nn.Linear(4, 4)))

    def remove() -> None:
        with full_params(model):
            nn.utils.remove_weight_norm(model)

    assert "'weight_g' was removed" in error_of(ArgumentError, remove)


@on_ranks(4)
@pytest.mark.parametrize("layout", ["hsdp", "fsdp"])
@pytest.mark.parametrize("failing", [0, 3])
def test_a_rank_that_raises_with_rank0_only(rank: int, world_size: int, layout: str, failing: int) -> None:
    """The others waited for the first one's values. All raise, nothing is written, and the ranks can go on."""
    plain = Stack()
    model = sharded(plain, world_size, layout)

    def fail() -> None:
        with full_params(model, rank0_only=True):
            if rank == 0:
                change(model)
            if rank == failing:
                raise KeyError("own")

    if rank == failing:
        assert error_of(KeyError, fail) == "'own'"
    else:
        assert f"rank {failing} has raised" in error_of(OrderError, fail)
    assert_holds(model, plain)
    one_batch(model, 0, rank)


@on_ranks(2)
def test_wrong_time(rank: int, world_size: int) -> None:
    """An OrderError in a forward or backward, after one that raised, and within itself; `reset_iter_state` helps."""
    model = sharded(Stack(), world_size)

    def enter(*_: Any) -> None:
        with full_params(model):
            raise AssertionError

    for register in (model.blocks[1].register_forward_pre_hook, model.out.register_full_backward_hook):
        handle = register(enter)
        assert "is in a forward or backward" in error_of(OrderError, lambda: one_batch(model, 0, rank))
        handle.remove()
        assert "reset_iter_state" in error_of(OrderError, enter)
        model.reset_iter_state()
        with full_params(model):
            assert "whole already" in error_of(OrderError, enter)
    one_batch(model, 0, rank)


@on_ranks(2)
def test_mistakes(rank: int, world_size: int) -> None:
    """Modules without units, options that contradict each other, and parameters without data."""
    plain = mlp(4, 4)
    with pytest.raises(ArgumentError, match="no unit at or below this Sequential"), full_params(plain):
        pass
    model = sharded(Stack(), world_size)
    with pytest.raises(ArgumentError, match="no unit at this Linear"), full_params(model.inp, recurse=False):
        pass
    both: Any = {"rank0_only": True, "with_grads": True}
    with pytest.raises(ArgumentError, match="pass write_back=False"), full_params(model, **both):
        pass
    with full_params(model, write_back=False, **both):
        pass
    with torch.device("meta"):
        meta = mlp(4, 4)
    fully_shard(meta)
    with pytest.raises(OrderError, match="still on the meta device"), full_params(meta):
        pass
    assert is_sharded(meta)
