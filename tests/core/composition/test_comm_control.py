"""What users may change in the communication (tests/behaviour.md, section P): collectives of their own, the all-reduce
hook, buffers, process groups, shared streams. How much is communicated by default: `test_comm_counts.py`.

`FSDP_API=torch` runs this file on torch's own FSDP2, which shows that what is expected here is what users know.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fsdp2
from tests.helpers.either_api import ON_TORCH, api, sharded, train
from tests.helpers.models import linears, reference_grads, run_step
from tests.helpers.mortal_ranks import Case, run_cases
from tests.helpers.parity_models import (
    Layers,
    Stack,
    assert_gradients,
    batch,
    full,
    mean_gradients,
    mesh_2d,
)
from tests.helpers.ranks import on_ranks


class Allocates:
    """The half of a collective that makes its buffers, and what the tests look at.

    Attributes:
        allocated: every tensor that `allocate` returned.
        calls: the tensors, the group and the op of every call.
    """

    def __init__(self, log: list[Any] | None = None) -> None:
        self.allocated: list[Tensor] = []
        self.calls: list[dict[str, Any]] = []
        self.log: list[Any] = [] if log is None else log

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert device == torch.device("cpu")
        buffer = torch.empty(*size, dtype=dtype, device=device)
        assert buffer.ndim == 1, f"size must be that of a flat tensor, got {size}"
        self.allocated.append(buffer)
        return buffer

    def note(self, output: Tensor, source: Tensor, group: dist.ProcessGroup, op: Any = None) -> None:
        self.calls.append({"output": output, "source": source, "group": group, "op": op})
        self.log.append(self)


class ListGather(Allocates):
    """An all-gather by `dist.all_gather`. `asynchronous`: returns its work when asked for an asynchronous one."""

    def __init__(self, asynchronous: bool = False, log: list[Any] | None = None) -> None:
        super().__init__(log)
        self.asynchronous = asynchronous

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        assert isinstance(async_op, bool)
        self.note(output_tensor, input_tensor, group)
        async_op = async_op and self.asynchronous
        return dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group=group, async_op=async_op)


class SumAndCut(Allocates):
    """A reduce-scatter by an all-reduce of a copy. Sums, and divides where it is told to average."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.note(output_tensor, input_tensor, group, op)
        total = input_tensor / group.size() if op == dist.ReduceOp.AVG else input_tensor.clone()
        work = dist.all_reduce(total, group=group, async_op=False)
        output_tensor.copy_(total.chunk(group.size())[group.rank()])
        return work


class Reused(ListGather):
    """Gathers into one buffer for life, and spoils what the last all-gather left there."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self.allocated:
            super().allocate(size, dtype=dtype, device=device)
        return self.allocated[0].fill_(torch.nan)


# --- collectives of one's own -----------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dim", [4, 5], ids=["even", "uneven"])
def test_custom_all_gather(rank: int, world_size: int, asynchronous: bool, dim: int) -> None:
    """Behaviour 134: on this unit alone, with its buffer, in place: the input is this rank's part of the output."""
    plain = Layers(2, dim)
    model = sharded(plain, reshard_after_forward=True)
    gather = ListGather(asynchronous)
    model.layers[0].set_custom_all_gather(gather)
    train(model, plain, rank, world_size, dim)
    assert len(gather.calls) == len(gather.allocated) == 4, "forward and backward of two steps"
    shard_numel = -(-dim // world_size) * dim
    for call, buffer in zip(gather.calls, gather.allocated, strict=True):
        assert call["output"].data_ptr() == buffer.data_ptr()
        assert call["output"].shape == (world_size * shard_numel,)
        assert call["source"].shape == (shard_numel,)
        assert call["source"].data_ptr() == buffer.data_ptr() + rank * shard_numel * buffer.itemsize
        assert buffer.dtype == torch.float32
        assert dist.get_process_group_ranks(call["group"]) == list(range(world_size))


@on_ranks(2, 4)
@pytest.mark.parametrize("dim", [4, 5], ids=["even", "uneven"])
def test_custom_reduce_scatter(rank: int, world_size: int, dim: int) -> None:
    """Behaviour 135: two buffers, for the unit's whole input first, then for this rank's part of the result."""
    plain = Layers(2, dim)
    model = sharded(plain)
    reduce = SumAndCut()
    model.layers[0].set_custom_reduce_scatter(reduce)
    train(model, plain, rank, world_size, dim)
    shard_numel = -(-dim // world_size) * dim
    assert [buffer.numel() for buffer in reduce.allocated] == [world_size * shard_numel, shard_numel] * 2
    assert len(reduce.calls) == 2
    for call, source, output in zip(reduce.calls, reduce.allocated[::2], reduce.allocated[1::2], strict=True):
        assert call["source"].data_ptr() == source.data_ptr() and call["source"].shape == source.shape
        assert call["output"].data_ptr() == output.data_ptr() and call["output"].shape == output.shape
        assert call["op"] in (dist.ReduceOp.AVG, dist.ReduceOp.SUM)


@on_ranks(2, 4)
def test_reused_buffer(rank: int, world_size: int) -> None:
    """Behaviour 134: a collective may hand out the same buffer each time: nothing of a gather lives in it when the next
    one of this unit starts."""
    plain = Layers(3, 5)
    model = sharded(plain, reshard_after_forward=True)
    for module in (model, *model.layers):
        module.set_custom_all_gather(Reused())
    train(model, plain, rank, world_size, 5, steps=3)


@on_ranks(4)
def test_custom_collectives_with_hsdp(rank: int, world_size: int) -> None:
    """Behaviour 106, 134, 135: over the shard axis; the all-reduce over the replicate axis stays."""
    plain = Layers(2)
    mesh = mesh_2d(2, 2)
    model = sharded(plain, mesh=mesh)
    gather, reduce = ListGather(), SumAndCut()
    model.layers[0].set_custom_all_gather(gather)
    model.layers[0].set_custom_reduce_scatter(reduce)
    train(model, plain, rank, world_size, 4)
    pair = [rank // 2 * 2, rank // 2 * 2 + 1]
    for call in gather.calls + reduce.calls:
        assert dist.get_process_group_ranks(call["group"]) == pair


@on_ranks(2)
@pytest.mark.skipif(ON_TORCH, reason="torch quietly uses plain buffers")
def test_process_group_buffers_on_gloo(rank: int, world_size: int) -> None:
    """gloo has no allocator of its own: a warning says so, and nothing has changed. Programs that were written for
    torch, where it quietly has no effect, died of our error."""
    plain = Layers(2)
    model = sharded(plain)
    with pytest.warns(UserWarning, match="no effect: .*gloo"):
        model.layers[0].set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(NotImplementedError, match="NCCL"):
        model.layers[0].set_symm_mem_for_comm()
    model.layers[0].set_allocate_memory_from_process_group_for_comm(False)
    train(model, plain, rank, world_size, 4)


@on_ranks(4)
@pytest.mark.skipif(ON_TORCH, reason="torch's ShardPlacementResult is private and takes no mesh")
@pytest.mark.parametrize("setter", ["set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"])
def test_unit_with_several_groups(rank: int, world_size: int, setter: str) -> None:
    """Behaviour 136, 137: it would not be clear which group is meant."""
    pair, everyone = mesh_2d(2, 2)["shard"], mesh_2d(1, 4)["shard"]
    model: Any = linears(2)
    experts = set(model[1].parameters())
    fsdp2.fully_shard(
        model,
        mesh=everyone,
        shard_placement_fn=lambda p: fsdp2.ShardPlacementResult(Shard(0), pair if p in experts else everyone),
    )
    value: Any = {
        "set_custom_all_gather": ListGather(),
        "set_custom_reduce_scatter": SumAndCut(),
        "set_all_reduce_hook": lambda flat: None,
    }
    with pytest.raises(ValueError, match=setter):
        getattr(model, setter)(value[setter])
    if setter == "set_all_reduce_hook":  # which is told the mesh of each group
        seen: list[tuple[int, int]] = []
        model.set_all_reduce_hook(lambda flat, mesh: seen.append((mesh.size(), flat.numel())))
        run_step(model, rank)
        assert sorted(seen) == [(2, 10), (4, 5)]


# --- buffers, groups, streams -----------------------------------------------------------------------------------------


def groups_used(model: Any, rank: int) -> tuple[list[Any], list[Any]]:
    """The process groups of the layers' all-gathers and reduce-scatters in one step."""
    gathers, reduces = [ListGather() for _ in model.layers], [SumAndCut() for _ in model.layers]
    for layer, gather, reduce in zip(model.layers, gathers, reduces, strict=True):
        layer.set_custom_all_gather(gather)
        layer.set_custom_reduce_scatter(reduce)
    model.zero_grad()
    run_step(model, rank)
    return [each.calls[0]["group"] for each in gathers], [each.calls[0]["group"] for each in reduces]


@on_ranks(2, 4)
@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_separate_reduce_scatter_group(rank: int, world_size: int, hsdp: bool) -> None:
    """Behaviour 140: one more group over the same ranks, for all units; asking again makes no other; False goes
    back."""
    if hsdp and world_size == 2:
        return
    plain = Layers(2)
    model = sharded(plain, mesh=mesh_2d(2, 2) if hsdp else None)
    (gather, _), (reduce, _) = groups_used(model, rank)
    assert reduce is gather
    model.set_separate_reduce_scatter_group(True)
    gathers, reduces = groups_used(model, rank)
    assert gathers == [gather] * 2
    separate = reduces[0]
    assert reduces == [separate] * 2 and separate != gather
    assert dist.get_process_group_ranks(separate) == dist.get_process_group_ranks(gather)
    assert_gradients(model, reference_grads(plain, world_size))
    model.set_separate_reduce_scatter_group()
    assert groups_used(model, rank)[1] == [separate] * 2
    model.set_separate_reduce_scatter_group(False)
    assert groups_used(model, rank) == ([gather] * 2, [gather] * 2)
    assert_gradients(model, reference_grads(plain, world_size))


def pipeline(parts: Any, which: int, flagged: bool) -> None:
    """Two microbatches through two chunks, the backwards cut between the chunks. `flagged`: only the last of all is
    the last backward."""
    hidden = [parts[0](batch(step, which, 4)) for step in range(2)]
    cut = [each.detach().requires_grad_() for each in hidden]
    losses = [parts[1](leaf).square().mean() for leaf in cut]
    flagged = flagged and isinstance(parts[0], api.FSDPModule)
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
    """Behaviour 141: several roots, one set of streams, set up before or after the first forward: the chunks of a
    pipeline, whose forwards and backwards interleave, get the gradients of one process.

    Without the flags torch 2.13 fails: the end of one root's backward forgets the other's order of forwards."""
    if ON_TORCH and not flagged:
        pytest.skip("IndexError in torch 2.13")
    plain = nn.ModuleList([linears(2), linears(2)])
    chunks: list[Any] = [copy.deepcopy(each) for each in plain]
    for chunk in chunks:
        api.fully_shard(chunk[0])
        api.fully_shard(chunk)
    if when == "after":
        for chunk in chunks:
            chunk(batch(0, rank, 4)).sum().backward()
    api.share_comm_ctx(chunks)
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

    def losses(set_event: Callable[[Any], None]) -> list[float]:
        torch.manual_seed(0)
        model = sharded(Stack())
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        found = []
        for step in range(4):
            found.append(run_step(model, rank, step, 8).item())
            optim.step()
            optim.zero_grad()
            set_event(model)
        return found

    def record(model: Any) -> None:
        event = torch.cpu.Event()
        event.record()
        model.set_post_optim_event(event)

    assert losses(record) == losses(lambda model: None)


def leads(rank: int) -> list[list[float]]:
    """Ranks 0 and 2 are in a group more than the others, when groups of ranks 0, 1 and 2, 3 are made."""
    dist.new_group([0, 2])
    torch.manual_seed(0)
    model: Any = fsdp2.fully_shard(nn.Linear(4, 4), reshard_after_forward=2)
    root: Any = fsdp2.fully_shard(nn.Sequential(model))
    root.set_separate_reduce_scatter_group(True)
    root(torch.full((1, 4), 1.0 + rank)).sum().backward()
    return full(model.weight.grad).tolist()


@pytest.mark.skipif(ON_TORCH, reason="torch has no groups for reduce-scatters")
def test_ranks_that_are_in_different_numbers_of_groups() -> None:
    """torch names a group that its ranks make alone after the number of groups of the process. The ranks of one group
    had different names for it, and waited for each other."""
    for outcome in run_cases([Case(leads, 4, limit_s=60.0)])[0]:
        assert outcome.ok and outcome.value == [[2.5] * 4] * 4, outcome
