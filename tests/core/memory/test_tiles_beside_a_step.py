"""`tile`: what is done with a model outside of forward and backward knows no tiles."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

import fsdp2
import fsdp2.checkpoint as fc
from fsdp2 import Offload, fully_shard, tile
from tests.helpers.ranks import on_ranks, run_on_ranks
from tests.helpers.tiled_models import Small, equalise, pair, run, tokens_of


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
