"""Context parallelism: what is refused, ranks that differ, and forwards that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2.errors import ArgumentError, MisuseError, UnsupportedError
from fsdp2.parallel import (
    ParallelConfig,
    apply_context_parallel,
    build_meshes,
    next_token_labels,
    parallelize,
    positions,
    shard_sequence,
)
from tests.helpers.context_lm import attend
from tests.helpers.models import error_of
from tests.helpers.ranks import on_ranks


@on_ranks(2)
def test_mistakes_with_sequences(rank: int, world_size: int) -> None:
    mesh = build_meshes(ParallelConfig(context=2)).context
    ids = torch.zeros(2, 10)

    def error(batch: Any, dims: Any = 1) -> str:
        return error_of(ArgumentError, lambda: shard_sequence(batch, mesh, dims))

    assert error({"input_ids": ids}) == (
        "a sequence of 10 rows cannot be cut into 2 x 2 = 4 equal chunks for 2 context ranks: pad it to 12"
    )
    assert error({"a": ids}, {"b": 1}) == "sequence dims are given for ['b'], but the batch has ['a']"
    assert "'a' [2, 10] has no dim 2" in error({"a": ids}, 2)
    assert "a sequence of 10 rows" in error_of(ArgumentError, lambda: positions(10, mesh))


def other_batch(rank: int, what: str) -> dict[str, Tensor]:
    ids = torch.arange(32).view(2, 16) + (1000 if what == "contents" and rank == 1 else 0)
    batch = {"ids": ids[:, :8] if what == "length" and rank == 1 else ids, "mask": torch.ones(2, 16)}
    if what == "length" and rank == 1:
        batch["mask"] = batch["mask"][:, :8]
    if what == "names" and rank == 1:
        del batch["mask"]
    return batch


@on_ranks(2)
@pytest.mark.parametrize("what", ["contents", "length", "names"])
def test_ranks_with_other_batches_all_raise(rank: int, world_size: int, what: str) -> None:
    """The mistake that everybody makes once: a data loader that goes by the global rank."""
    group = torch.distributed.new_group([0, 1])  # nothing has been compared over it yet
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    message = error_of(ArgumentError, lambda: shard_sequence(other_batch(rank, what), mesh))
    assert "the ranks must have the same" in message
    assert "let the data loader go by the data-parallel rank" in message
    assert ("contents of 'ids'" if what != "names" else "'mask'=") in message
    assert "rank 0: " in message and "rank 1: " in message
    assert torch.equal(
        shard_sequence(other_batch(0, what), mesh)["ids"], other_batch(0, what)["ids"][:, positions(16, mesh)]
    )


def test_labels_are_shifted_within_the_last_dim() -> None:
    ids = torch.arange(6).view(2, 3)
    assert next_token_labels(ids).tolist() == [[1, 2, -100], [4, 5, -100]]
    assert next_token_labels(ids[0], ignore_index=-1).tolist() == [1, 2, -1]


@on_ranks(2)
def test_what_ring_attention_cannot_do(rank: int, world_size: int) -> None:
    mesh = build_meshes(ParallelConfig(context=2)).context
    model, mask = Calls(), torch.ones(6, 6, dtype=torch.bool)
    apply_context_parallel(model, mesh)
    assert "attention got a mask [6, 6]" in error_of(UnsupportedError, lambda: model(attend(attn_mask=mask)))
    assert "dropout_p=0.1" in error_of(UnsupportedError, lambda: model(attend(dropout_p=0.1)))
    model(attend())
    attend(attn_mask=mask, dropout_p=0.1)()


class Calls(nn.Module):
    """Its forward calls what it is given."""

    def forward(self, call: Callable[[], Tensor]) -> Tensor:
        return call()


class NoAttention(nn.Linear):
    """Whose forward raises if told."""

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        if fail:
            raise ZeroDivisionError
        return super().forward(x)


@on_ranks(2)
def test_without_any_attention(rank: int, world_size: int) -> None:
    """An option without effect says so: attention that is not found would see a rank's own rows only."""
    mesh = build_meshes(ParallelConfig(context=2)).context
    model = nn.Sequential(NoAttention(2, 2))
    apply_context_parallel(model, mesh)
    assert "in the first forward of Sequential no F." in error_of(MisuseError, lambda: model(torch.ones(1, 2)))


@on_ranks(4)
def test_a_stage_without_attention(rank: int, world_size: int) -> None:
    """Of a pipeline that has its attention in other stages: its first forward raised, as if it were a whole model. It
    is a warning, because the attention of a stage may be one of its own, which sees this rank's rows only."""
    stage = parallelize(nn.Sequential(NoAttention(2, 2)), ParallelConfig(pipeline=2, context=2), blocks=NoAttention)
    with pytest.warns(UserWarning, match="no F.scaled_dot_product_attention ran"):
        stage(torch.ones(1, 2)).sum().backward()


@on_ranks(2)
def test_a_forward_that_fails_leaves_nothing_active(rank: int, world_size: int) -> None:
    mesh = build_meshes(ParallelConfig(context=2)).context
    model = NoAttention(2, 2)
    apply_context_parallel(model, mesh)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 2), fail=True)
    attend(dropout_p=0.1)()


@on_ranks(4)
def test_one_context_axis_at_a_time(rank: int, world_size: int) -> None:
    meshes = build_meshes(ParallelConfig(shard=2, context=2))
    outer, inner = Calls(), Calls()
    apply_context_parallel(outer, meshes.context)
    apply_context_parallel(inner, meshes.root["dp_shard"])
    message = error_of(MisuseError, lambda: outer(lambda: inner(attend())))
    assert "a model has one context axis" in message
    assert "needs the context axis alone" in error_of(ArgumentError, lambda: apply_context_parallel(inner, meshes.root))
