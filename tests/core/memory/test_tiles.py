"""`tile`: a layer that is gathered tile by tile computes and trains as one that is gathered whole."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.utils.checkpoint import checkpoint

import fsdp2
import fsdp2.checkpoint as fc
from fsdp2 import MixedPrecisionPolicy, Offload, ZeroPolicy, events, fully_shard, tile
from fsdp2.errors import ArgumentError, MisuseError, UnsupportedError
from fsdp2.extras.comm_memory import FlatAllGather
from fsdp2.runtime.storage import FlatStorage
from tests.helpers.parity_models import mesh_2d
from tests.helpers.ranks import on_ranks, run_on_ranks
from tests.helpers.tiled_models import (
    DIM,
    OUT,
    VOCAB,
    Small,
    assert_same,
    equalise,
    local,
    pair,
    row_error,
    run,
    tokens_of,
)
from tests.instruments.races.detector import detecting


@pytest.mark.parametrize("tiles", [1, 3])
@on_ranks(2, 1, 3)
def test_trains_as_the_layer_without_tiles(rank: int, world_size: int, tiles: int) -> None:
    """Outputs and weight gradients of the head are the same bits; the optimizer sees the parameters of the layer."""
    models = pair(tiles)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in models]
    for step in range(3):
        run(models, rank, step)
        norms = [fsdp2.clip_grad_norm_(each.parameters(), 0.1) for each in models]
        torch.testing.assert_close(norms[1], norms[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(local(other), local(one), rtol=0, atol=1e-4)  # the norm has another last bit
        equalise(models)
    states = [get_optimizer_state_dict(*each)["state"] for each in zip(models, optimizers, strict=True)]
    assert list(states[0]) == list(states[1]) and states[1]["head.weight"]["exp_avg"].shape == (OUT, DIM)
    assert list(get_model_state_dict(models[1])) == list(models[0].state_dict()) == list(models[1].state_dict())


def test_without_sharding_nothing_changes() -> None:
    torch.manual_seed(0)
    model = Small()
    expected = model(tokens_of(0, 0))
    assert tile(model.head, 3) is model.head and isinstance(tile(model.embed, 4), nn.Embedding)
    assert torch.equal(model(tokens_of(0, 0)), expected)
    assert [*model.state_dict()] == [*Small().state_dict()]


@on_ranks(2)
def test_an_embedding_is_exact(rank: int, world_size: int) -> None:
    """Also for repeated, padded and negative indices, and in the gradient, which is dense and has no row of padding."""
    whole = nn.Embedding(VOCAB, DIM, padding_idx=40)
    tiled = tile(copy.deepcopy(whole), 7)
    models = (fully_shard(whole), fully_shard(tiled))
    indices = torch.tensor([[0, 40, 50, 25], [25, 26, 40, 26]])
    for each in models:
        (each(indices) * torch.arange(DIM)).sum().backward()
        assert (each.weight.grad.full_tensor()[40] == 0).all()
    assert_same(*models)
    assert torch.equal(whole(indices), tiled(indices))
    for wrong in (VOCAB, -1):
        with pytest.raises(IndexError):
            tiled(torch.tensor([3, wrong]))
        tiled.reset_iter_state()
    assert torch.equal(whole(indices), tiled(indices))


@pytest.mark.parametrize(
    "options",
    [
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)},
        {"reshard_after_forward": False},
        {"zero": ZeroPolicy(stage=2)},
        {"zero": ZeroPolicy(stage=0)},
        {"offload_policy": fsdp2.CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["bf16", "keeps", "stage2", "stage0", "offload"],
)
@on_ranks(2)
def test_options(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Every unit of a tile has the options of the layer."""
    models = pair(**options)
    for step in range(2):
        run(models, rank, step, atol=1e-2 if "bfloat16" in str(options) else 1e-6)
    assert [name for name, _ in models[1].named_parameters() if "tiles" in name] == []


@pytest.mark.parametrize("kind", ["hsdp", "smaller", "accumulation", "unused", "last", "reentrant"])
@on_ranks(4)
def test_meshes_and_accumulation(rank: int, world_size: int, kind: str) -> None:
    options: dict[str, Any] = {"mesh": mesh_2d(2, 2)} if kind in ("hsdp", "last") else {}
    if kind == "smaller":
        options["reshard_after_forward"] = 2
    models = pair(3, Small(True if kind == "reentrant" else None), **options)
    if kind == "unused":
        for each in models:
            each.set_reduce_scatter_unused_params(True)
    for step in range(3):
        for each in models:
            if kind == "accumulation":
                each.set_requires_gradient_sync(step == 2)
            if kind == "last":
                each.set_is_last_backward(step == 2)
                each.set_requires_all_reduce(step == 2)
            each(tokens_of(step, rank)).square().mean().backward()
    assert_same(*models, atol=1e-6)


@on_ranks(2)
def test_frozen_weights_and_no_bias(rank: int, world_size: int) -> None:
    """A frozen weight has no gradient, and its inputs have theirs; it may be frozen later."""
    models = pair(3, Small(bias=False))
    for step, trains in enumerate((True, False, True)):
        for each in models:
            each.head.weight.requires_grad_(trains)
            each.zero_grad()
        run(models, rank, step)
        assert (models[1].head.weight.grad is not None) == trains
    with torch.no_grad():
        outputs = [each(tokens_of(0, rank)) for each in models]
    torch.testing.assert_close(*outputs, rtol=0, atol=row_error())


@contextmanager
def counting(found: list[int]) -> Iterator[None]:
    """Append the bytes that all gathered parameters and buffers of gathers take, whenever some are allocated."""
    alive: dict[int, int] = {}
    alloc, free = FlatStorage.alloc, FlatStorage.free

    def counted_alloc(self: FlatStorage) -> None:
        alloc(self)
        alive[id(self)] = self.nbytes
        found.append(sum(alive.values()))

    def counted_free(self: FlatStorage) -> None:
        free(self)
        alive.pop(id(self), None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatStorage, "alloc", counted_alloc)
        patch.setattr(FlatStorage, "free", counted_free)
        yield


@pytest.mark.parametrize("has_streams", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
@on_ranks(2)
def test_two_tiles_are_in_memory_at_most(rank: int, world_size: int, recomputes: bool, has_streams: bool) -> None:
    """The tile that computes, and another one. (With streams a recomputation had three.)"""
    out, dim, tiles = 8192, 256, 8  # large enough for the direct lane: the packed one has a buffer of its own
    head = tile(nn.Linear(dim, out, bias=False), tiles)
    one_tile = out * dim * 4 // tiles

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.loss, x, use_reentrant=False) if recomputes else self.loss(x)

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x).logsumexp(-1).sum()

    model = fully_shard(Root())
    found: list[int] = []
    with counting(found), detecting() if has_streams else nullcontext():
        for _ in range(2):
            model(torch.randn(3, dim, requires_grad=True)).backward()
    assert one_tile < max(found) <= 2 * one_tile, max(found) / one_tile


@on_ranks(2)
def test_tiles_are_gathered_one_after_the_other(rank: int, world_size: int) -> None:
    """In forward each is gathered while the one before it computes; backward takes them in the reverse order."""
    head = tile(nn.Linear(DIM, OUT), 3)
    model = fully_shard(nn.Sequential(nn.Tanh(), head))
    model(torch.randn(2, DIM)).sum().backward()
    with events.record() as log:
        model(torch.randn(2, DIM, requires_grad=True)).sum().backward()
    gathers = [event.unit[-1:] for event in log if event.kind == "all_gather"]
    assert gathers == ["0", "1", "2", "2", "1", "0"]
    forward = [(event.kind, event.unit[-1:]) for event in log if event.kind in ("unshard", "reshard")][:4]
    assert forward == [("unshard", "0"), ("unshard", "1"), ("reshard", "0"), ("unshard", "2")]


@on_ranks(2)
def test_ways_to_shard(rank: int, world_size: int) -> None:
    """A tiled layer is a unit of its own, whoever shards it: a policy, a list, or a module around it."""
    plain = Small()
    results = []
    for way in ("around", "list", "policy"):
        model: Any = copy.deepcopy(plain)
        tile(model.head, 3)
        if way == "list":
            fully_shard([model.middle, model.head])
        if way == "policy":
            fsdp2.auto_shard(model, fsdp2.by_class(nn.Linear))
        else:
            fully_shard(model)
        with events.record() as log:
            model(tokens_of(0, rank)).sum().backward()
        gathered = {event.unit for event in log if event.kind == "all_gather"}
        assert {f"head.tiles.{index}" for index in range(3)} <= gathered and "head" not in gathered, way
        results.append([param.grad.full_tensor() for param in model.parameters()])
    for result in results[1:]:
        for one, other in zip(results[0], result, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-5)


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_what_tile_refuses() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(ArgumentError, match=r"expected an nn\.Linear or nn\.Embedding .* got Own"):
        tile(Own(2, 2), 2)
    for wrong in (0, 5, True, 2.0):
        with pytest.raises(ArgumentError, match="from 1 to the 4 rows"):
            tile(nn.Linear(3, 4), wrong)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="max_norm"):
        tile(nn.Embedding(4, 2, max_norm=1.0), 2)
    with pytest.raises(MisuseError, match="tiled already"):
        tile(tile(nn.Linear(3, 4), 2), 2)


def tied_and_tiled() -> Any:
    model: Any = Small()
    model.head = nn.Linear(DIM, VOCAB, bias=False)
    model.head.weight = model.embed.weight
    tile(model.head, 3)
    return model


@on_ranks(2)
def test_what_fully_shard_refuses(rank: int, world_size: int) -> None:
    """Before anything is changed."""
    model = tied_and_tiled()
    with pytest.raises(UnsupportedError, match="'weight' of this tiled TiledLinear is tied to another module's"):
        fully_shard(model)
    assert type(model.head.weight) is nn.Parameter and not isinstance(model, fsdp2.FSDPModule)
    model = tied_and_tiled()
    fully_shard(model.head)
    with pytest.raises(UnsupportedError, match=r"'embed\.weight' is tied to 'weight' of a tiled layer"):
        fully_shard(model)
    layer = tile(nn.Linear(4, 6), 2)
    with pytest.raises(UnsupportedError, match="dim 0"):
        fully_shard(layer, shard_placement_fn=lambda param: torch.distributed.tensor.Shard(param.ndim - 1))
    with pytest.raises(UnsupportedError, match="ignored_params"):
        fully_shard(layer, ignored_params={layer.bias})
    with pytest.raises(MisuseError, match="sharded already"):
        tile(fully_shard(nn.Linear(4, 6)), 2)
    untiled = fully_shard(layer, ignored_params=set(layer.parameters()))
    assert untiled(torch.randn(2, 4)).shape == (2, 6)


@on_ranks(2)
def test_settings_of_the_layer_are_those_of_its_tiles(rank: int, world_size: int) -> None:
    """They reached the layer's own unit alone, which reduces nothing: no factor, no hook, no collectives."""
    models = pair(3)
    gathered: list[int] = []

    class Memory:
        def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            gathered.append(numel)
            return torch.empty(numel, dtype=dtype, device=device)

    for each in models:
        each.head.set_gradient_divide_factor(1.0)
        each.head.set_all_reduce_hook(lambda flat: flat.mul_(3))
        each.embed.set_reduce_scatter_divide_factor(4.0)
    models[1].head.set_custom_all_gather(FlatAllGather(Memory()))
    run(models, rank)
    assert len(gathered) >= 3
    for each in models:
        each.zero_grad()
        each.head.set_requires_gradient_sync(False, recurse=False)
        each(tokens_of(1, rank)).square().mean().backward()
    assert models[0].head.weight.grad is None and models[1].head.weight.grad is None


@on_ranks(2)
def test_a_tiled_root_is_finalised_by_hand(rank: int, world_size: int) -> None:
    """The setting is the root's, and must not reach its tiles."""
    layer: Any = tile(nn.Linear(DIM, OUT), 3)
    fully_shard(layer)
    layer.set_manual_backward_finalization(True)
    layer(torch.ones(2, DIM)).sum().backward()
    layer.finalize_backward()
    torch.testing.assert_close(layer.bias.grad.full_tensor(), torch.full((OUT,), 2.0))


# --- outside of forward and backward nothing knows tiles --------------------------------------------------------------


def saves(rank: int, world_size: int, folder: str, tiles: int, dcp: bool) -> None:
    _, model = pair(tiles) if tiles else pair()[::-1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(tokens_of(0, 0)).square().mean().backward()
    optimizer.step()
    if dcp:
        torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
    else:
        fc.save(folder, model=model, optimizer=optimizer)


def loads(rank: int, world_size: int, folder: str, tiles: int, dcp: bool) -> dict[str, Any]:
    """Everything whole, after a load into a model with other values."""
    _, model = pair(tiles) if tiles else pair()[::-1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9)
    if dcp:
        state = model.state_dict()
        torch.distributed.checkpoint.load({"model": state}, checkpoint_id=folder)
    else:
        fc.load(folder, model=model, optimizer=optimizer)
    output = model(tokens_of(0, 0))  # reads the tiles
    moments = {} if dcp else {str(i): each["exp_avg"].full_tensor() for i, each in enumerate(optimizer.state.values())}
    return {"output": output.detach(), **{n: p.full_tensor().detach() for n, p in model.named_parameters()}, **moments}


@pytest.mark.parametrize("dcp", [False, True], ids=["own", "dcp"])
@pytest.mark.parametrize(("before", "after"), [(3, 0), (0, 5), pytest.param(3, 5, marks=pytest.mark.exhaustive)])
def test_checkpoints_know_no_tiles(tmp_path: Any, dcp: bool, before: int, after: int) -> None:
    """Saved with tiles and loaded without, and the other way round, on another number of ranks."""
    folder = str(tmp_path / "saved")
    run_on_ranks(saves, 2, folder=folder, tiles=before, dcp=dcp)
    expected = run_on_ranks(loads, 2, folder=folder, tiles=before, dcp=dcp)[0]
    for result in run_on_ranks(loads, 3, folder=folder, tiles=after, dcp=dcp):
        assert result.keys() == expected.keys() and len(expected) == 6 + (0 if dcp else 5)
        for name, tensor in expected.items():
            torch.testing.assert_close(result[name], tensor, rtol=0, atol=1e-6 if name == "output" else 0, msg=name)


@on_ranks(2)
def test_from_the_meta_device(rank: int, world_size: int) -> None:
    """`materialize` gives the values of the model without tiles."""
    models = []
    for tiles in (0, 4):
        with torch.device("meta"):
            model: Any = Small()
        if tiles:
            tile(model.embed, tiles)
            tile(model.head, 3)
        models.append(fully_shard(model))
        fsdp2.init.materialize(model, seed=0)
    for one, other in zip(*(each.parameters() for each in models), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
    output = model(tokens_of(0, rank))
    output.sum().backward()
    with fsdp2.full_params(model):
        assert torch.allclose(model(tokens_of(0, rank)), output, atol=1e-6)


@on_ranks(2)
def test_whole_parameters_copies_and_conversions(rank: int, world_size: int) -> None:
    """`full_params`, `deepcopy`, `load_state_dict`, `to`: the tiles follow the layer's parameter."""
    models = pair()
    run(models, rank)
    for each in models:
        with fsdp2.full_params(each), torch.no_grad():
            each.head.weight.mul_(2)
            each.embed.weight.add_(1)
    run(models, rank, 1)
    copies = copy.deepcopy(models[0]), copy.deepcopy(models[1])
    for each in models:
        with torch.no_grad():
            each.head.weight.zero_()
    run(copies, rank, 2)
    assert models[1](tokens_of(0, rank)).abs().max() <= models[1].head.bias.full_tensor().abs().max()
    for assign in (False, True):
        for one, other in zip(models, copies, strict=True):
            state = {name: tensor.detach().clone() for name, tensor in other.state_dict().items()}
            one.load_state_dict(state, assign=assign)
            one.zero_grad()
        run(models, rank, 3)
    for each in models:
        each.zero_grad()
        each.to(torch.float64)
    run(models, rank, 4)
    assert models[1].head.weight.dtype is torch.float64


@pytest.mark.parametrize("kind", ["local", "in_backward", "offload"])
@on_ranks(2)
def test_optimizers(rank: int, world_size: int, kind: str) -> None:
    """A layer is stepped when the last of its tiles has its gradient, as one parameter."""
    policy = {"offload_policy": Offload(grads=True)} if kind == "offload" else {}
    models = pair(**policy)
    make: Callable[..., Any] = fsdp2.offload_optimizer if kind == "offload" else fsdp2.local_optimizer
    optimizers = [make(torch.optim.AdamW, each.parameters(), lr=1e-2) for each in models]
    hooked: list[str] = []
    models[1].head.weight.register_post_accumulate_grad_hook(lambda param: hooked.append(str(param.grad.shape)))
    if kind == "in_backward":
        for optimizer in optimizers:
            fsdp2.step_in_backward(optimizer)
    for step in range(3):
        for each, optimizer in zip(models, optimizers, strict=True):
            each(tokens_of(step, rank)).square().mean().backward()
            if kind != "in_backward":
                optimizer.step()
                optimizer.zero_grad()
        assert len(hooked) == step + 1
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(other.full_tensor(), one.full_tensor(), rtol=0, atol=2e-3)
        equalise(models)
        assert all(len(each.state) == 5 for each in optimizers)


@on_ranks(2)
def test_a_failing_step_leaves_nothing_behind(rank: int, world_size: int) -> None:
    """Some tiles have reduced their gradients when backward raises; the next step begins anew."""
    models = pair()
    hooked: list[int] = []
    models[1].head.weight.register_post_accumulate_grad_hook(lambda param: hooked.append(1))

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    middle = models[1].head.tiles[1].register_forward_pre_hook(lambda _, args: args[0].register_hook(fail) and None)
    with pytest.raises(RuntimeError, match="on purpose"):
        models[1](tokens_of(0, rank)).sum().backward()
    middle.remove()
    models[1].reset_iter_state()
    models[1].zero_grad()
    run(models, rank)
    assert hooked == [1]
