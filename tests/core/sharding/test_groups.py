"""Units of several modules: they gather and reduce together, whichever of them run (tests/behaviour.md, section J)."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, events, fully_shard
from tests.helpers.models import is_sharded, is_unsharded, linears, mlp, reference_grads, run_step, tokens, units
from tests.helpers.one_process import check
from tests.helpers.parity_models import assert_gradients, batch, count, local
from tests.helpers.ranks import on_ranks
from tests.helpers.schedules import order


@on_ranks(2)
def test_first_member_unshards_last_reshards(rank: int, world_size: int) -> None:
    """Behaviour 82: in forward the group is whole from its first member's start to its last member's end."""
    plain = linears(4)
    model = copy.deepcopy(plain)
    fully_shard([model[1], model[3]])
    fully_shard([model[0], model[2]])
    fully_shard(model)
    with events.record() as log:
        run_step(model, rank)
    forward = log[: [event.kind for event in log].index("pre_backward")]
    assert order(forward) == "+0, 2 +1, 3 -0, 2 -1, 3"
    assert units(log, "reduce_scatter").count("0, 2") == 1 and units(log, "reduce_scatter").count("1, 3") == 1
    assert is_sharded(model)
    assert_gradients(model, reference_grads(plain, world_size))


@on_ranks(2)
def test_casts_apply_to_each_member(rank: int, world_size: int) -> None:
    """Behaviour 82, 116, 117: inputs and outputs of every member are cast."""
    model, dtypes = linears(3), []
    for layer in model:  # before fully_shard: the hooks see what it has cast
        layer.register_forward_pre_hook(lambda module, args: dtypes.append((args[0].dtype, module.weight.dtype)))
    fully_shard(list(model), mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64))
    fully_shard(model)
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    model(batch(0, rank, 4)).sum().backward()
    assert dtypes == [(torch.bfloat16, torch.bfloat16), torch.float64] * 3


class Halves(nn.Module):
    """Two pairs of layers; of each pair the second runs only if told so."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = linears(4)
        self.run_all = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[2](self.layers[0](x)) * self.scale
        return self.layers[3](self.layers[1](x)) if self.run_all else x


def shard_halves(model: Halves, **options: Any) -> Halves:
    """Units "layers.0, layers.1" and "layers.2, layers.3"."""
    fully_shard([model.layers[0], model.layers[1]], **options)
    fully_shard([model.layers[2], model.layers[3]], **options)
    return fully_shard(model, **options)


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [None, True, False, 2])
def test_members_that_never_run(rank: int, world_size: int, raf: bool | int | None) -> None:
    """Behaviour 83: the root completes the group; unused members keep no gradient; a later full forward works."""
    plain = Halves()
    model = shard_halves(copy.deepcopy(plain), reshard_after_forward=raf)
    for step, run_all in enumerate((False, False, True, False)):
        model.run_all = plain.run_all = run_all
        model.zero_grad()
        loss = model(batch(step, rank, 4)).square().mean()
        assert (is_unsharded if raf is False else is_sharded)(model.layers)
        loss.backward()
        assert is_sharded(model)
        assert (model.layers[1].weight.grad is None) == (not run_all)
        assert_gradients(model, reference_grads(plain, world_size, step))


@on_ranks(2)
def test_order_with_partial_groups(rank: int, world_size: int) -> None:
    """Behaviour 84: backward unshards group 1, then group 0; group 1 finishes by autograd, the others at the end."""
    model = shard_halves(Halves())
    loss = model(batch(0, rank, 4)).square().mean()
    with events.record() as log:
        loss.backward()
    assert units(log, "unshard") == ["layers.2, layers.3", "layers.0, layers.1"]
    assert units(log, "post_backward") == ["layers.2, layers.3", "", "layers.0, layers.1"]
    assert count(log, "reduce_scatter") == {"reduce_scatter": 3}


class ChunkedLm(nn.Module):
    """Hidden states from forward; norm and head are then run by hand, chunk by chunk."""

    def __init__(self, tied: bool = False, use_checkpoint: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.block = mlp(4, 5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.use_checkpoint = use_checkpoint

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return checkpoint(self.block, x, use_reentrant=False) if self.use_checkpoint else self.block(x)


def shard_chunked(model: ChunkedLm, raf: bool | None) -> ChunkedLm:
    """Norm and head (and a tied embedding) are one unit."""
    fully_shard(model.block, reshard_after_forward=raf)
    tied = [model.embed] if model.head.weight is model.embed.weight else []
    fully_shard([model.norm, model.head, *tied], reshard_after_forward=raf)
    return fully_shard(model)


def chunked_backward(
    model: ChunkedLm, which: int, step: int = 0, each_chunk: Callable[[], None] = lambda: None
) -> None:
    """Forward, loss and backward of three chunks of rows, then backward of the rest."""
    hidden = model(tokens(step, which)).flatten(0, 1)
    detached = hidden.detach().requires_grad_()
    for chunk in detached.chunk(3):
        model.head(model.norm(chunk)).square().mean().backward()
        each_chunk()
    hidden.backward(detached.grad)


@on_ranks(2)
@pytest.mark.parametrize("raf", [None, True, False])
@pytest.mark.parametrize("kind", ["plain", "tied", "checkpoint"])
def test_chunked_loss(rank: int, world_size: int, raf: bool | None, kind: str) -> None:
    """Behaviour 85: N chunks, N reductions of the group, each changes `.grad`; the sum is that of one process."""
    plain = ChunkedLm(tied=kind == "tied", use_checkpoint=kind == "checkpoint")
    model = shard_chunked(copy.deepcopy(plain), raf)
    seen: list[Tensor] = []
    with events.record() as log:
        chunked_backward(model, rank, each_chunk=lambda: seen.append(local(model.head.weight.grad).clone()))
    name = "norm, head" + (", embed" if kind == "tied" else "")
    assert units(log, "reduce_scatter").count(name) == (4 if kind == "tied" else 3)
    assert len({tuple(grad.flatten().tolist()) for grad in seen}) == 3 or seen[0].numel() == 0
    assert is_sharded(model.norm) and is_sharded(model.block)
    check(model, plain, rank, world_size, chunked_backward)


@on_ranks(2)
def test_keeping_the_group_between_chunks(rank: int, world_size: int) -> None:
    """Behaviour 86: with both reshards off around the loop, one gather serves all chunks; `reshard` ends it."""
    plain = ChunkedLm()
    model = shard_chunked(copy.deepcopy(plain), True)

    def keep(value: bool) -> None:
        model.norm.set_reshard_after_forward(not value)
        model.norm.set_reshard_after_backward(not value)

    def keeps(m: Any, r: int) -> None:
        if m is plain:
            return chunked_backward(m, r)
        whole: list[bool] = []
        keep(True)
        with events.record() as log:
            chunked_backward(m, r, each_chunk=lambda: whole.append(is_unsharded(m.norm) and is_unsharded(m.head)))
        assert whole == [True] * 3
        assert units(log, "all_gather").count("norm, head") == 1
        assert units(log, "reduce_scatter").count("norm, head") == 3
        model.head.reshard()
        keep(False)
        assert is_sharded(model.norm) and is_sharded(model.head)

    check(model, plain, rank, world_size, keeps, times=2)
