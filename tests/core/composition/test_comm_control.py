"""What users may change in the communication (tests/behaviour.md, section P): collectives of their own, buffers,
process groups, shared streams; and how much is communicated by default."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2 import events
from tests.helpers.collectives import Gathers, Scatters
from tests.helpers.models import check_step, linears, run_step
from tests.helpers.mortal_ranks import Case, run_cases
from tests.helpers.one_process import check, in_units
from tests.helpers.parity_models import (
    Layers,
    Stack,
    assert_gradients,
    batch,
    count,
    full,
    mean_gradients,
    mesh_2d,
    shard_blocks,
)
from tests.helpers.ranks import on_ranks


class Noted:
    """A collective as users write it for torch's FSDP2, and what it was asked for."""

    def __init__(self, inner: Any, asynchronous: bool = False) -> None:
        self.inner, self.asynchronous = inner, asynchronous
        self.allocated: list[Tensor] = []
        self.calls: list[dict[str, Any]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated.append(self.inner.allocate(size, dtype=dtype, device=device))
        assert self.allocated[-1].ndim == 1, f"size must be that of a flat tensor, got {size}"
        return self.allocated[-1]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False, **op: Any
    ) -> dist.Work | None:
        self.calls.append({"output": output_tensor, "source": input_tensor, "group": group})
        work = self.inner(output_tensor, input_tensor, group, async_op=async_op and self.asynchronous, **op)
        assert work is None or self.asynchronous
        return work


class Reused(Gathers):
    """Gathers into one buffer for life, and spoils what the last all-gather left there."""

    buffer: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.buffer is None:
            self.buffer = super().allocate(size, dtype=dtype, device=device)
        return self.buffer.fill_(torch.nan)


# --- collectives of one's own -----------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dim", [4, 5], ids=["even", "uneven"])
def test_custom_all_gather(rank: int, world_size: int, asynchronous: bool, dim: int) -> None:
    """Behaviour 134: on this unit alone, with its buffer, in place: the input is this rank's part of the output."""
    plain = Layers(2, dim)
    model = in_units(plain, reshard_after_forward=True)
    gather = Noted(Gathers(), asynchronous)
    model.layers[0].set_custom_all_gather(gather)
    for step in range(2):
        check_step(model, plain, rank, world_size, step, dim)
    assert len(gather.calls) == len(gather.allocated) == 4, "forward and backward of two steps"
    shard_numel = -(-dim // world_size) * dim
    for call, buffer in zip(gather.calls, gather.allocated, strict=True):
        assert call["output"].data_ptr() == buffer.data_ptr()
        assert call["output"].shape == (world_size * shard_numel,) and call["source"].shape == (shard_numel,)
        assert call["source"].data_ptr() == buffer.data_ptr() + rank * shard_numel * buffer.itemsize
        assert dist.get_process_group_ranks(call["group"]) == list(range(world_size))


@on_ranks(2, 4)
@pytest.mark.parametrize("dim", [4, 5], ids=["even", "uneven"])
def test_custom_reduce_scatter(rank: int, world_size: int, dim: int) -> None:
    """Behaviour 135: two buffers, for the unit's whole input first, then for this rank's part of the result."""
    plain = Layers(2, dim)
    model = in_units(plain)
    reduce = Noted(Scatters())
    model.layers[0].set_custom_reduce_scatter(reduce)
    for step in range(2):
        check_step(model, plain, rank, world_size, step, dim)
    shard_numel = -(-dim // world_size) * dim
    assert [buffer.numel() for buffer in reduce.allocated] == [world_size * shard_numel, shard_numel] * 2
    for call, source, output in zip(reduce.calls, reduce.allocated[::2], reduce.allocated[1::2], strict=True):
        assert call["source"].data_ptr() == source.data_ptr() and call["source"].shape == source.shape
        assert call["output"].data_ptr() == output.data_ptr() and call["output"].shape == output.shape


@on_ranks(2, 4)
def test_reused_buffer(rank: int, world_size: int) -> None:
    """Behaviour 134: a collective may hand out one buffer: nothing of a gather lives there when the next one starts."""
    plain = Layers(3, 5)
    model = in_units(plain, reshard_after_forward=True)
    for module in (model, *model.layers):
        module.set_custom_all_gather(Reused())
    for step in range(3):
        check_step(model, plain, rank, world_size, step, 5)


@on_ranks(4)
def test_unit_with_several_groups(rank: int, world_size: int) -> None:
    """Behaviour 136, 137: it would not be clear which group is meant; a hook may ask for the mesh of each."""
    pair, everyone = mesh_2d(2, 2)["shard"], mesh_2d(1, 4)["shard"]
    model: Any = linears(2)
    experts = set(model[1].parameters())
    fsdp2.fully_shard(
        model,
        mesh=everyone,
        shard_placement_fn=lambda p: fsdp2.ShardPlacementResult(Shard(0), pair if p in experts else everyone),
    )
    with pytest.raises(ValueError, match="set_custom_all_gather"):
        model.set_custom_all_gather(Noted(Gathers()))
    with pytest.raises(ValueError, match="set_custom_reduce_scatter"):
        model.set_custom_reduce_scatter(Noted(Scatters()))
    with pytest.raises(ValueError, match="set_all_reduce_hook"):
        model.set_all_reduce_hook(lambda flat: None)
    seen: list[tuple[int, int]] = []
    model.set_all_reduce_hook(lambda flat, mesh: seen.append((mesh.size(), flat.numel())))
    run_step(model, rank)
    assert sorted(seen) == [(2, 10), (4, 5)]


# --- buffers, groups, streams -----------------------------------------------------------------------------------------


def groups_used(model: Any, rank: int) -> tuple[list[Any], list[Any]]:
    """The process groups of the layers' all-gathers and reduce-scatters in one step."""
    gathers, reduces = [Noted(Gathers()) for _ in model.layers], [Noted(Scatters()) for _ in model.layers]
    for layer, gather, reduce in zip(model.layers, gathers, reduces, strict=True):
        layer.set_custom_all_gather(gather)
        layer.set_custom_reduce_scatter(reduce)
    run_step(model, rank)
    return [each.calls[0]["group"] for each in gathers], [each.calls[0]["group"] for each in reduces]


@on_ranks(4)
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_separate_reduce_scatter_group(rank: int, world_size: int, hsdp: bool) -> None:
    """Behaviour 106, 140: one group more over the same ranks, the same when asked again; False goes back."""
    plain = Layers(2)
    model = in_units(plain, mesh=mesh_2d(2, 2) if hsdp else None)
    (gather, _), (reduce, _) = groups_used(model, rank)
    assert reduce is gather
    model.set_separate_reduce_scatter_group(True)
    gathers, (separate, other) = groups_used(model, rank)
    assert gathers == [gather] * 2 and other is separate and separate != gather
    ranks = dist.get_process_group_ranks(separate)
    assert ranks == dist.get_process_group_ranks(gather) and len(ranks) == (2 if hsdp else 4)
    check(model, plain, rank, world_size)
    model.set_separate_reduce_scatter_group()
    assert groups_used(model, rank)[1] == [separate] * 2
    model.set_separate_reduce_scatter_group(False)
    assert groups_used(model, rank) == ([gather] * 2, [gather] * 2)
    check(model, plain, rank, world_size)


def pipeline(parts: Any, which: int, flagged: bool) -> None:
    """Two microbatches through two chunks. `flagged`: only the last of all backwards is the last."""
    hidden = [parts[0](batch(step, which, 4)) for step in range(2)]
    cut = [each.detach().requires_grad_() for each in hidden]
    losses = [parts[1](leaf).square().mean() for leaf in cut]
    flagged = flagged and isinstance(parts[0], fsdp2.FSDPModule)
    for step in range(2):
        for part in parts if flagged else ():
            part.set_is_last_backward(False)
        losses[step].backward()
        for part in parts if flagged else ():
            part.set_is_last_backward(step == 1)
        hidden[step].backward(cut[step].grad)


@on_ranks(2, 4)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("flagged", [True, False], ids=["one_last_backward", "all_last_backwards"])
def test_share_comm_ctx(rank: int, world_size: int, when: str, flagged: bool) -> None:
    """Behaviour 141: chunks of a pipeline whose forwards and backwards interleave. (Without flags torch fails.)"""
    plain = nn.ModuleList([linears(2), linears(2)])
    chunks: list[Any] = [copy.deepcopy(each) for each in plain]
    for chunk in chunks:
        fsdp2.fully_shard(chunk[0])
        fsdp2.fully_shard(chunk)
    if when == "after":
        for chunk in chunks:
            chunk(batch(0, rank, 4)).sum().backward()
    fsdp2.share_comm_ctx(chunks)
    expected = mean_gradients(plain, world_size, lambda parts, which: pipeline(parts, which, flagged))
    for _ in range(2):
        for chunk in chunks:
            chunk.zero_grad()
        pipeline(chunks, rank, flagged)
        for index, chunk in enumerate(chunks):
            assert_gradients(chunk, {name[2:]: grad for name, grad in expected.items() if name[0] == str(index)})


@on_ranks(2, 4)
def test_post_optim_event(rank: int, world_size: int) -> None:
    """Behaviour 142: a new event after each optimizer step; losses are those without."""
    losses: list[float] = []
    model, twin = in_units(plain := Stack()), in_units(plain)
    for each in (model, twin):
        optim = torch.optim.Adam(each.parameters(), lr=1e-2)
        for step in range(4):
            losses.append(run_step(each, rank, step, 8).item())
            optim.step()
            optim.zero_grad()
            if each is model:
                event = torch.cpu.Event()
                event.record()
                model.set_post_optim_event(event)
    assert losses[:4] == losses[4:]


def leads(rank: int) -> list[list[float]]:
    """Ranks 0 and 2 are in a group more than the others, when groups of ranks 0, 1 and 2, 3 are made."""
    dist.new_group([0, 2])
    torch.manual_seed(0)
    model: Any = fsdp2.fully_shard(nn.Linear(4, 4), reshard_after_forward=2)
    root: Any = fsdp2.fully_shard(nn.Sequential(model))
    root.set_separate_reduce_scatter_group(True)
    root(torch.full((1, 4), 1.0 + rank)).sum().backward()
    return full(model.weight.grad).tolist()


def test_ranks_that_are_in_different_numbers_of_groups() -> None:
    """torch names a group after the number of groups of the process: its ranks waited for each other."""
    for outcome in run_cases([Case(leads, 4, limit_s=60.0)])[0]:
        assert outcome.ok and outcome.value == [[2.5] * 4] * 4, outcome


# --- how much is communicated by default ------------------------------------------------------------------------------


def counts(log: list[events.Event]) -> tuple[int, ...]:
    return tuple(count(log, "all_gather", "reduce_scatter", "all_reduce").values())


@on_ranks(2, 4)
@pytest.mark.parametrize("root_weight", [True, False], ids=["root_has_parameters", "empty_root"])
@pytest.mark.parametrize("raf", [True, None, False, 2])
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_one_step(rank: int, world_size: int, raf: bool | int | None, root_weight: bool, hsdp: bool) -> None:
    """Behaviour 74, 107, 132: N groups: N gathers forward; N, N-1 or 0 backward; N reduce-scatters, N all-reduces."""
    if hsdp and world_size == 2:
        return
    mesh = mesh_2d(2, 2) if hsdp else None
    model = shard_blocks(fsdp2, Layers(3, root_weight=root_weight), mesh=mesh, reshard_after_forward=raf)
    num_groups = 4 if root_weight else 3
    in_backward = {True: num_groups, 2: num_groups, None: 3, False: 0}[raf]
    for _ in range(2):
        with events.record() as forward:
            loss = model(batch(0, rank, 4)).sum()
        with events.record() as backward:
            loss.backward()
        assert counts(forward) == (num_groups, 0, 0)
        assert counts(backward) == (in_backward, num_groups, num_groups if hsdp else 0)


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("raf", "keep", "gathers"), [(True, False, 24), (None, False, 21), (False, False, 12), (False, True, 4)]
)
def test_accumulation(rank: int, world_size: int, raf: bool | None, keep: bool, gathers: int) -> None:
    """Behaviour 97: three microbatches, N = 4: N reductions; 2NM, NM or N gathers, kept until the last."""
    model = shard_blocks(fsdp2, Layers(3), reshard_after_forward=raf)
    for _ in range(2):
        with events.record() as log:
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                if keep:
                    model.set_reshard_after_backward(micro == 2)
                model(batch(micro, rank, 4)).sum().backward()
        assert counts(log) == (gathers, 4, 0)


@on_ranks(2)
def test_one_rank(rank: int, world_size: int) -> None:
    """Behaviour 133: nothing is communicated; parameters are DTensors all the same, copied to be unsharded."""
    alone = mesh_2d(2, 1)["shard"]
    model: Any = shard_blocks(fsdp2, Layers(2), mesh=alone, reshard_after_forward=True)
    shards = [param.to_local().data_ptr() for param in model.parameters()]
    for step in range(2):
        with events.record() as log:
            loss = model(batch(step, rank, 4)).sum()
            loss.backward()
        assert counts(log) == (0, 0, 0)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.grad is not None
    for module in (model, *model.layers):
        module.unshard()
    assert not set(shards) & {param.data_ptr() for param in model.parameters()}
