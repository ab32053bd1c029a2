"""Deferred initialisation: build anything without memory, shard it, replay; values as the eager model's, bit by bit.

The reference is always the same builder without `deferred`, from the same seed.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2 import (
    ArgumentError,
    CPUOffloadPolicy,
    OrderError,
    ShardPlacementResult,
    UnsupportedError,
    ZeroPolicy,
    fully_shard,
)
from fsdp2.init.deferred import Recording, deferred
from tests.helpers.deferred_models import HABITS, HUGGING_FACE, NETS, hugging_face
from tests.helpers.parity_models import Block, Stack, local, mesh_2d, one_batch, shard_blocks, shard_like
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import dp_tp

Build = Callable[[], nn.Module]


def eager_and_deferred(build: Build, **options: Any) -> tuple[nn.Module, nn.Module, Recording]:
    """The same model both ways, from the same seed. Asserts that the generator then is at the same place."""
    torch.manual_seed(0)
    eager = build()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    with deferred(**options) as recording:
        model = build()
    if not options:
        assert torch.equal(torch.get_rng_state(), after)
    assert all(param.is_meta for param in model.parameters())
    return eager, model, recording


def named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def assert_same(model: nn.Module, eager: nn.Module) -> None:
    """Values of what this rank holds, dtypes, strides, ties: as in the eager model."""
    mine, wanted = named(model), named(eager)
    assert list(mine) == list(wanted)
    for name, tensor in wanted.items():
        other = mine[name]
        assert (other.dtype, other.device.type, other.requires_grad) == (tensor.dtype, "cpu", tensor.requires_grad)
        assert torch.equal(local(other).detach(), shard_like(tensor.detach(), other)), name
        strides = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
        assert all(size == 1 or stride == its for size, stride, its in strides), name
        ties = [key for key in wanted if wanted[key] is tensor]
        assert ties == [key for key in mine if mine[key] is other], name


# --- without ranks: what modules do -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
def test_nets(name: str) -> None:
    """Nets as others write them; plain attributes are filled too, or forward would not run."""
    build, inputs = NETS[name]
    eager, model, recording = eager_and_deferred(build)
    recording.replay(model)
    assert_same(model, eager)
    assert torch.equal(model(*inputs()), eager(*inputs()))


@pytest.mark.sampled
@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_hugging_face(name: str, dtype: torch.dtype) -> None:
    """transformers' models from configs, as `from_config` makes them."""
    build = hugging_face(name)
    eager, model, recording = eager_and_deferred(lambda: build(dtype=dtype))
    recording.replay(model)
    assert_same(model, eager)
    ids = torch.arange(6).view(2, 3)
    inputs = {"input_ids": ids, "decoder_input_ids": ids} if name == "t5" else {"input_ids": ids}
    assert torch.equal(model.eval()(**inputs).logits, eager.eval()(**inputs).logits)


@pytest.mark.sampled
@pytest.mark.parametrize("name", HABITS)
def test_habits(name: str) -> None:
    """What is hard to do to a parameter that has no memory; each habit is described where it is defined."""
    eager, model, recording = eager_and_deferred(HABITS[name])
    state = torch.get_rng_state()
    recording.replay(model)
    assert_same(model, eager)
    assert torch.equal(torch.get_rng_state(), state)


def test_memory_that_nobody_initialised_is_zero() -> None:
    """An eager model holds anything there; ranks must agree."""
    with deferred() as recording:
        model = nn.ParameterList([nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(4))])
        with torch.no_grad():
            model[1][1:3] = 7
    recording.replay(model)
    assert [param.tolist() for param in model] == [[0, 0, 0, 0], [0, 7, 7, 0]]


def test_tensors_from_before_stay() -> None:
    """What existed before keeps its memory; writing to it from within is done at once."""
    before, target = torch.arange(4.0), torch.zeros(4)
    with deferred() as recording:
        model = nn.Linear(4, 4)
        with torch.no_grad():
            model.weight.copy_(before.expand(4, 4))
            target.copy_(model.weight[2])
        before_too = before * 2
        held = model.weight.t() @ model.weight
    assert torch.equal(target, before) and torch.equal(before_too, 2 * before)
    assert held.is_meta and torch.equal(recording.whole(held)[1], 4 * before)
    recording.replay(model)
    assert torch.equal(model.weight[3], before)


def test_replay_is_for_what_is_left() -> None:
    """Parts one after another, in any order; parts with values of their own stay."""
    eager, model, recording = eager_and_deferred(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    model[1] = nn.Linear(4, 4)
    mine = model[1].weight.detach().clone()
    recording.replay(model[2])
    assert model[0].weight.is_meta and torch.equal(model[2].weight, eager[2].weight)
    for _ in range(2):
        recording.replay(model)
    assert torch.equal(model[0].weight, eager[0].weight) and torch.equal(model[1].weight, mine)


def test_seed_makes_recording_free() -> None:
    """With a seed nothing is drawn while recording, and each operation has its own stream: equal ones differ, another
    seed gives others, and nothing depends on the default generator."""
    states, values = [], []
    for seed, default in ((5, 0), (5, 1), (6, 0)):
        torch.manual_seed(default)
        states.append(torch.get_rng_state())
        with deferred(seed=seed) as recording:
            model = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        assert torch.equal(torch.get_rng_state(), states[-1])
        recording.replay(model)
        assert torch.equal(torch.get_rng_state(), states[-1])
        values.append(torch.stack([layer.weight.detach() for layer in model]))
    assert torch.equal(values[0], values[1])
    assert not torch.isclose(values[0], values[2]).any(2).all() and not torch.equal(*values[0])
    assert abs(values[0].mean()) < 0.005 and abs(values[0].std() - 0.125 / 3**0.5) < 0.005


# --- sharded ----------------------------------------------------------------------------------------------------------


def options_of(layout: str, world_size: int) -> dict[str, Any]:
    """Arguments of `fully_shard`."""
    if layout == "dim1":
        return {"shard_placement_fn": lambda param: ShardPlacementResult(Shard(param.ndim - 1))}
    if layout == "hsdp":
        return {"mesh": mesh_2d(world_size // 2, 2)}
    if layout == "replicas":
        return {"zero": ZeroPolicy(3, shard_size=2, shard_replicas=True)}
    return {"zero0": {"zero": ZeroPolicy(0)}, "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}}.get(
        layout, {}
    )


def shard_all(model: nn.Module, **options: Any) -> Any:
    """Units: whatever stands in lists, then the root."""
    for module in reversed(list(model.modules())):
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            for child in module:
                if any(True for _ in child.parameters()) and not isinstance(child, (nn.ModuleList, nn.ParameterList)):
                    fully_shard(child, **options)
    return fully_shard(model, **options)


def check_sharded(build: Build, inputs: Callable[[], Any], layout: str, world_size: int) -> None:
    """Replayed shards are the eager model's rows, and forward and backward give what a model sharded with its values
    does."""
    options = options_of(layout, world_size)
    eager, model, recording = eager_and_deferred(build)
    shard_all(model, **options)
    assert all(isinstance(param, DTensor) and param.is_meta for param in model.parameters())
    recording.replay(model)
    assert_same(model, eager)
    losses = []
    for each in (model, shard_all(eager, **options)):
        output = each.eval()(*inputs())
        loss = getattr(output, "logits", output).square().mean()
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    for param, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert local(param).untyped_storage().nbytes() == local(other).untyped_storage().nbytes()
        assert (param.grad is None) == (other.grad is None)
        assert param.grad is None or torch.equal(local(param.grad), local(other.grad))


@on_ranks(2)
@pytest.mark.parametrize("name", NETS)
def test_sharded_nets(rank: int, world_size: int, name: str) -> None:
    """Uneven everywhere: 3, 5, 7 and 9 rows."""
    check_sharded(*NETS[name], "dim0", world_size)


@on_ranks(4)
@pytest.mark.parametrize("layout", ["dim0", "dim1", "hsdp", "replicas", "zero0", "offload"])
def test_layouts(rank: int, world_size: int, layout: str) -> None:
    """Dims, meshes and homes, with shards that are uneven or empty, and weights in channels-last order."""
    check_sharded(*NETS["convnext"], layout, world_size)


@pytest.mark.exhaustive
@on_ranks(2)
def test_sharded_hugging_face(rank: int, world_size: int) -> None:
    """transformers' models; T5's parts share the embedding, Llama's rotary frequencies are a buffer."""
    for name in HUGGING_FACE:
        ids = torch.arange(6).view(2, 3)
        check_sharded(hugging_face(name), lambda: (ids, None, ids) if name == "t5" else (ids,), "dim0", world_size)  # noqa: B023


@on_ranks(2)
@pytest.mark.parametrize("name", ["deep_copies", "copies_another_layer", "changes_parts", "all_generators"])
def test_sharded_habits(rank: int, world_size: int, name: str) -> None:
    """Values that depend on other parameters, which this rank holds in part only."""
    eager, model, recording = eager_and_deferred(HABITS[name])
    recording.replay(shard_all(nn.Sequential(model)))
    assert_same(model, eager)


@on_ranks(4)
def test_tensor_parallel(rank: int, world_size: int) -> None:
    """Plain modules recorded, then cut by tensor parallelism (which leaves no trace of the objects), then sharded, or
    not. What was tied only then has two sets of values."""
    mesh = dp_tp(2, 2)
    for how in ("sharded", "alone", "tied"):
        eager, model, recording = eager_and_deferred(lambda: nn.Sequential(Block(6, 10), Block(6, 10)))
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if how == "tied":
            model[1].up.weight = model[0].up.weight
        if how != "alone":
            fully_shard(model, mesh=mesh["dp"])
        if how == "tied":
            with pytest.raises(ArgumentError, match=r"'0.up.weight' and '1.up.weight' were different parameters"):
                recording.replay(model)
            continue
        recording.replay(model)
        assert_same(model, eager)
        placements = {param.placements for param in model.parameters() if isinstance(param, DTensor)}
        assert len(placements) > 1 and max(map(len, placements)) == (2 if how == "sharded" else 1)


@on_ranks(2)
def test_units_one_by_one_then_train(rank: int, world_size: int) -> None:
    """Replay each unit by itself, the last first; the optimizer made afterwards trains as that of an eager model."""
    eager, model, recording = eager_and_deferred(Stack)
    models = [shard_blocks(fsdp2, each) for each in (eager, model)]
    for block in reversed(model.blocks):
        recording.replay(block)
    assert model.inp.weight.is_meta
    recording.replay(model)
    optims = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in models]
    for step in range(2):
        losses = [one_batch(each, step, rank) for each in models]
        assert torch.equal(*losses)
        for optim in optims:
            optim.step()
            optim.zero_grad()
    for param, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(local(param), local(other))


@on_ranks(2, 4)
def test_seeded_streams_do_not_depend_on_the_mesh(rank: int, world_size: int) -> None:
    """With a seed, too, every mesh gives the same model: that of one process."""
    models = []
    for shard in (shard_all, None):
        with deferred(seed=3) as recording:
            model = NETS["vit"][0]()
        recording.replay(model if shard is None else shard(model))
        models.append(model)
    assert_same(*models)


# --- memory -----------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """The most bytes that storages made within had at one time, meta tensors apart."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta:
                self.storages.setdefault(id(tensor.untyped_storage()), weakref.ref(tensor.untyped_storage()))
        alive = [storage for weak in self.storages.values() if (storage := weak()) is not None]
        self.storages = {id(storage): weakref.ref(storage) for storage in alive}
        nbytes = end = 0
        for storage in sorted(alive, key=lambda each: (each.data_ptr(), -each.nbytes())):
            if storage.data_ptr() + storage.nbytes() > end:  # shards have storages of their own on shared memory
                nbytes += storage.nbytes()
                end = storage.data_ptr() + storage.nbytes()
        self.peak = max(self.peak, nbytes)
        return result


@on_ranks(2, 4)
def test_peak_is_one_parameter(rank: int, world_size: int) -> None:
    """Beside its shards, a rank never holds more than the largest parameter whole: less than one unit. Recording never
    holds more than that either."""
    dim, depth = 64, 6
    with LiveBytes() as recorded, deferred() as recording:
        model = nn.Sequential(*(nn.TransformerEncoderLayer(dim, 2, 4 * dim) for _ in range(depth)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    nbytes = [param.numel() * 4 for param in model.parameters()]
    with LiveBytes() as replayed:
        recording.replay(model)
    slack = 100_000  # states of the generator, biases
    assert recorded.peak <= max(nbytes) + slack
    assert sum(nbytes) // world_size < replayed.peak <= sum(nbytes) // world_size + 2 * max(nbytes) + slack
    assert replayed.peak < sum(nbytes) // world_size + sum(nbytes) // depth + slack  # one unit


def test_intermediate_results_are_freed() -> None:
    """A long computation needs two of its results at a time."""
    with deferred() as recording:
        value = torch.ones(100_000)
        for _ in range(20):
            value = value * 1.5 - 0.5
        model = nn.ParameterList([nn.Parameter(value)])
    with LiveBytes() as replayed:
        recording.replay(model)
    assert 400_000 <= replayed.peak <= 3 * 400_000


def test_overwritten_values_are_not_made() -> None:
    """What was initialised twice is drawn once in replay, and what no parameter needs is not run at all."""
    ops: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(str(func))
            return func(*args, **(kwargs or {}))

    with deferred() as recording:
        model = nn.Linear(4, 4)
        torch.randn(1000)
        nn.init.normal_(model.weight)
        nn.init.zeros_(model.bias)
    with Names():
        recording.replay(model)
    drawn = [name for name in ops if any(kind in name for kind in ("normal", "uniform", "randn"))]
    assert drawn == ["aten.normal_.default"]


# --- errors -----------------------------------------------------------------------------------------------------------


def built() -> tuple[nn.Module, Recording]:
    with deferred() as recording:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, recording


def test_what_the_recording_does_not_know() -> None:
    """All are named, and nothing is changed."""
    model, recording = built()
    with torch.device("meta"):
        model.append(nn.BatchNorm1d(3))
    with pytest.raises(ArgumentError, match=r"not made within this recording.*'2.weight', '2.bias', '2.running_mean'"):
        recording.replay(model)
    assert model[0].weight.is_meta
    for change in (copy.deepcopy, lambda each: each.double()):
        model, recording = built()
        with pytest.raises(ArgumentError, match=r"'0.weight', '0.bias', '1.weight', '1.bias'"):
            recording.replay(change(model))


def test_changes_that_would_be_lost() -> None:
    """On the meta device a change does nothing; a model initialised after the context would silently not be."""
    model, recording = built()
    nn.init.ones_(model[1].weight)
    with pytest.raises(OrderError, match=r"'1.weight' was changed in place after the recording had ended"):
        recording.replay(model)
    with pytest.raises(OrderError, match=r"'1.weight' was changed in place"):
        recording.whole(model[1].weight)
    source = torch.ones(4)
    with deferred() as recording:
        model = nn.Linear(4, 4)
        model.bias.data.copy_(source)
    source.zero_()
    with pytest.raises(OrderError, match=r"shape \(4,\).*existed before the recording.*aten.copy_"):
        recording.replay(model)


def test_wrong_time() -> None:
    """Within the context, twice, after an exception, after to_empty."""
    with deferred() as recording:
        model = nn.Linear(4, 4)
        with pytest.raises(OrderError, match="still within"):
            recording.replay(model)
        with pytest.raises(OrderError, match="already within"), deferred():
            pass
    recording.replay(model)
    with pytest.raises(ZeroDivisionError), deferred() as recording:
        1 / 0  # noqa: B018
    with pytest.raises(OrderError, match="left by an exception"):
        recording.replay(model)
    assert not torch.empty(2).is_meta
    model, recording = built()
    model.to_empty(device="cpu")
    with pytest.raises(OrderError, match=r"instead of to_empty"):
        recording.replay(model)
    with pytest.raises(ArgumentError, match=r"whole: expected a tensor that was made within this recording"):
        recording.whole(torch.ones(3))


def test_unsupported_kinds() -> None:
    """Sparse tensors, and tensors on the meta device on purpose."""
    with pytest.raises(UnsupportedError, match="layout"), deferred():
        torch.eye(3).to_sparse()
    with deferred():
        model, empty = nn.Linear(4, 4), torch.empty(4, device="meta")
        with pytest.raises(UnsupportedError, match=r"aten.copy_.*shape \(4,\).*on purpose"):
            model.bias.data.copy_(empty)


@on_ranks(2)
def test_sharding_within_the_context(rank: int, world_size: int) -> None:
    """Sharding comes after. A weight that was tied after the context, before sharding, has the values of its object."""
    with pytest.raises(UnsupportedError, match=r"'0.weight' was distributed or sharded within the context"), deferred():
        fully_shard(nn.Sequential(nn.Linear(4, 4)))
    eager, model, recording = eager_and_deferred(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[1].weight = model[0].weight
    eager[1].weight = eager[0].weight
    recording.replay(fully_shard(model))
    assert_same(model, eager)
    model, recording = built()
    model.to_empty(device="cpu")
    with pytest.raises(OrderError, match="instead of to_empty"):
        recording.replay(shard_all(model))
