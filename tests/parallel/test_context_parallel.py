"""Context parallelism with everything else: sharded parameters, tensor parallelism, checkpointing, models of others.

The reference is one process with the plain model on all batches and whole sequences, in float64; the loss is the mean
over all tokens that count, of which ranks have different numbers.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing import assert_close

from fsdp2.errors import ArgumentError, MisuseError, UnsupportedError
from fsdp2.parallel import (
    ParallelConfig,
    apply_context_parallel,
    build_meshes,
    next_token_labels,
    parallelize,
    positions,
    shard_sequence,
    unshard_sequence,
)
from tests.helpers.context_lm import (
    DIM,
    attend,
    check_lm,
    local_loss,
    parallel_lm,
    plain_lm,
    reference,
)
from tests.helpers.models import error_of
from tests.helpers.parallel_models import compiling
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import quiet

# --- with the other kinds of parallelism ------------------------------------------------------------------------------


@on_ranks(4)
def test_parity(rank: int, world_size: int) -> None:
    for degrees in ({"shard": 2, "context": 2}, {"context": 2, "tensor": 2}):
        with quiet():
            plain, model, meshes = parallel_lm(ParallelConfig(**{"shard": 1, **degrees}))
            check_lm(model, plain, meshes)
        assert model.blocks[0].q.weight.to_local().shape == (DIM // 4, DIM)  # sharded over context, too


# --- checkpointing and compiling --------------------------------------------------------------------------------------


@on_ranks(2, timeout_s=150)
@pytest.mark.parametrize("kind", ["reentrant", "outside_of_compiled"])
def test_recomputed(rank: int, world_size: int, kind: str) -> None:
    """What is recomputed in backward is ring attention again, whoever wraps it."""
    meshes = build_meshes(ParallelConfig(context=2))
    plain = plain_lm()
    model = plain_lm(use_reentrant=True if kind == "reentrant" else None)
    apply_context_parallel(model, meshes.context)
    if kind == "outside_of_compiled":
        for block in model.blocks:
            block.compile(backend="eager")
        model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    _, gradients = reference(plain, 1)
    with compiling():
        loss = local_loss(model, meshes)
        attend(dropout_p=0.1)()  # not active any more
        loss.backward()
    for (_, param), grad in zip(model.named_parameters(), gradients.values(), strict=True):
        total = param.grad.clone()
        torch.distributed.all_reduce(total)
        assert_close(total / 2, grad, rtol=1e-9, atol=1e-11)


# --- models of others -------------------------------------------------------------------------------------------------


def sum_over_context(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of an unsharded model, summed over the ranks."""
    total = {name: param.grad.clone() for name, param in model.named_parameters()}
    for grad in total.values():
        torch.distributed.all_reduce(grad)
    return total


@on_ranks(2, timeout_s=150)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_llama_of_transformers(rank: int, world_size: int, checkpointing: bool) -> None:
    """Grouped heads, its own rotary embedding from position_ids, its own loss from shift_labels."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa", dtype="float64",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    ids = torch.randint(32, (2, 48), generator=torch.Generator().manual_seed(5))
    model(input_ids=ids, labels=ids).loss.backward()
    wanted = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    mesh = build_meshes(ParallelConfig(context=2)).context
    if checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the name changes in transformers 6
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
    apply_context_parallel(model, mesh)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    batch |= {"shift_labels": next_token_labels(ids), "position_ids": torch.arange(48).expand(2, -1)}
    batch = shard_sequence(batch, mesh)
    tokens = 2 * 47
    model(
        **batch, use_cache=False, num_items_in_batch=tokens
    ).loss.backward()  # the sum of this rank's losses, over all tokens
    found = sum_over_context(model)
    for name, grad in wanted.items():
        assert_close(found[name], grad, rtol=1e-5, atol=1e-7, msg=name)  # its norms and loss compute in float32
    # Without the mask of ones it takes the jump in rank 0's positions for a second sequence, and makes a mask.
    if rank == 0:
        batch = {"input_ids": ids[:, :20], "position_ids": positions(40, mesh).expand(2, -1)}
        message = error_of(UnsupportedError, lambda: model(**batch, use_cache=False))
        assert "pass an attention_mask of ones" in message


@on_ranks(2)
@pytest.mark.parametrize("training", [True, False])
def test_encoder_of_torch(rank: int, world_size: int, training: bool) -> None:
    """`nn.TransformerEncoderLayer`: its attention calls ours by a name within torch; in eval mode its kernel is off."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, dtype=torch.float64).train(training)
    x = torch.randn(2, 32, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(32, dtype=torch.float64)
    with torch.set_grad_enabled(training):
        wanted = layer(x, src_mask=causal, is_causal=True)
        mesh = build_meshes(ParallelConfig(context=2)).context
        apply_context_parallel(layer, mesh)
        mine = layer(shard_sequence(x, mesh), src_mask=causal[:16, :16], is_causal=True)
        unbatched = layer(shard_sequence(x[0], mesh, 0), src_mask=causal[:16, :16], is_causal=True)
    assert_close(unshard_sequence(mine, mesh), wanted, rtol=1e-10, atol=1e-12)
    assert_close(unshard_sequence(unbatched, mesh, 0), wanted[0], rtol=1e-10, atol=1e-12)


# --- sequences --------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_shard_and_unshard(rank: int, world_size: int) -> None:
    """Head and tail chunks, along any dim, and back; what has no sequence stays."""
    mesh = build_meshes(ParallelConfig(context=world_size)).context
    rows = 4 * world_size
    whole = {"x": torch.arange(3 * rows).view(3, rows), "y": torch.randn(rows, 2), "weight": torch.ones(3)}
    torch.distributed.broadcast(whole["y"], 0)
    mine = shard_sequence(whole, mesh, {"x": 1, "y": -2})
    places = positions(rows, mesh)
    assert places.tolist() == [*range(2 * rank, 2 * rank + 2), *range(rows - 2 * rank - 2, rows - 2 * rank)]
    assert torch.equal(mine["x"], whole["x"][:, places]) and torch.equal(mine["y"], whole["y"][places])
    assert mine["x"].is_contiguous() and mine["weight"] is whole["weight"]
    back = unshard_sequence(mine, mesh, {"x": 1, "y": 0})
    assert all(torch.equal(back[name], whole[name]) for name in whole)
    assert torch.equal(unshard_sequence(shard_sequence(whole["x"], mesh), mesh), whole["x"])
    assert torch.equal(shard_sequence(torch.arange(rows), mesh, 0), places)


# --- mistakes ---------------------------------------------------------------------------------------------------------


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
    assert "the ranks must agree" in message
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


@on_ranks(4)
def test_without_any_attention(rank: int, world_size: int) -> None:
    """Attention that is not found would see a rank's own rows only: an error; for a stage of a pipeline, which may have
    none, a warning."""
    model = nn.Sequential(NoAttention(2, 2))
    apply_context_parallel(model, build_meshes(ParallelConfig(shard=2, context=2)).context)
    assert "in the first forward of Sequential no F." in error_of(MisuseError, lambda: model(torch.ones(1, 2)))
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
