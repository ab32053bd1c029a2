"""Context parallelism with everything else: sharded parameters, tensor parallelism, checkpointing, models of others.

The reference is one process with the plain model on all batches and whole sequences, in float64; the loss is the mean
over all tokens that count, of which ranks have different numbers.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointError, checkpoint, create_selective_checkpoint_contexts

from fsdp2.errors import ArgumentError, FSDPError, MisuseError, UnsupportedError
from fsdp2.optim import clip_grad_norm_
from fsdp2.parallel import (
    Meshes,
    ParallelConfig,
    apply_context_parallel,
    build_meshes,
    context_parallel,
    next_token_labels,
    parallelize,
    positions,
    shard_sequence,
    token_mean,
    unshard_sequence,
)
from fsdp2.parallel.ring_attention import context_group, num_ring_attentions
from tests.helpers.models import error_of, wrapped
from tests.helpers.parity_models import Gradients, assert_gradients, full
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import quiet

VOCAB, DIM, HEADS, KEY_HEADS, ROWS = 17, 16, 4, 2, 64
PLAN = {f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")} | {
    f"blocks.*.{name}": "rowwise" for name in ("o", "down")
}
IGNORED = -100


def rotated(x: Tensor, position_ids: Tensor) -> Tensor:
    """Rotary embedding of ``[batch, heads, rows, head dim]`` by ``[rows]`` positions."""
    half = x.shape[-1] // 2
    angles = position_ids[:, None] * torch.arange(1, half + 1, dtype=x.dtype) * 0.1
    first, second = x.split(half, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


class ContextBlock(nn.Module):
    """Causal attention with grouped heads and rotary positions, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        size = DIM // HEADS
        self.q, self.o = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = (nn.Linear(DIM, KEY_HEADS * size, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        normed, size = self.norms[0](x), DIM // HEADS
        q, k, v = (each(normed).unflatten(-1, (-1, size)).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = rotated(q, position_ids), rotated(k, position_ids)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(self.norms[1](x))))


class ContextLm(nn.Module):
    """Tokens and their positions -> logits."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(ContextBlock() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)
        self.use_reentrant = use_reentrant

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x, position_ids)
            else:
                x = checkpoint(block, x, position_ids, use_reentrant=self.use_reentrant)
        return self.head(x)


def plain_lm(**options: Any) -> ContextLm:
    torch.manual_seed(3)
    return ContextLm(**options).double()


def whole_batch(data_rank: int, step: int = 0, rows: int = ROWS) -> dict[str, Tensor]:
    """Two sequences; a third of the first one's labels is ignored, and half of data rank 1's."""
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    ids = torch.randint(VOCAB, (2, rows), generator=generator)
    labels = next_token_labels(ids, IGNORED)
    labels[0, : rows // 3] = IGNORED
    if data_rank == 1:
        labels[:, rows // 2 :] = IGNORED
    return {"ids": ids, "labels": labels, "positions": torch.arange(rows)}


DIMS = {"ids": 1, "labels": 1, "positions": 0}


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"], batch["positions"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")


def reference(model: nn.Module, data_ranks: int, step: int = 0) -> tuple[Tensor, Gradients]:
    """One process: the mean loss over all tokens of all batches, and its gradients."""
    model.zero_grad()
    batches = [whole_batch(rank, step) for rank in range(data_ranks)]
    tokens = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    loss = torch.stack([loss_sum(model, batch) for batch in batches]).sum() / tokens
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters()}


def local_loss(model: nn.Module, meshes: Meshes, step: int = 0) -> Tensor:
    """This rank's loss of its part of its data rank's batch."""
    batch = whole_batch(meshes.data_rank, step)
    assert meshes.context is not None
    batch = shard_sequence(batch, meshes.context, DIMS)
    return token_mean(loss_sum(model, batch), (batch["labels"] != IGNORED).sum(), meshes.loss)


def check_lm(model: nn.Module, plain: nn.Module, meshes: Meshes, step: int = 0) -> None:
    """One step (gradients cleared) gives one process' loss and gradients."""
    loss, gradients = reference(plain, meshes.data_ranks, step)
    model.zero_grad()
    mine = local_loss(model, meshes, step)
    mine.backward()
    assert_gradients(model, gradients, rtol=1e-9, atol=1e-11)
    total = mine.detach().clone()
    torch.distributed.all_reduce(total, group=meshes.loss.get_group())
    assert_close(total / meshes.loss.size(), loss, rtol=1e-10, atol=0)


def parallel_lm(config: ParallelConfig, **options: Any) -> tuple[ContextLm, nn.Module, Meshes]:
    """The plain model, a parallel copy, and the meshes."""
    plain, meshes = plain_lm(), build_meshes(config)
    model = parallelize(copy.deepcopy(plain), config, meshes=meshes, blocks=ContextBlock, tp_plan=PLAN, **options)
    return plain, model, meshes


# --- with the other kinds of parallelism ------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize(
    "degrees",
    [
        {"context": 4},
        {"shard": 2, "context": 2},
        {"replicate": 2, "context": 2},
        {"tensor": 2, "context": 2},
        {"shard": 2, "context": 2, "activation_checkpointing": "full"},
        {"tensor": 2, "context": 2, "activation_checkpointing": "full"},
        {"shard": 2, "context": 2, "reshard_after_forward": False},
    ],
    ids=lambda degrees: "-".join(f"{name[:9]}_{value}" for name, value in degrees.items()),
)
def test_parity(rank: int, world_size: int, degrees: dict[str, Any]) -> None:
    with quiet():
        plain, model, meshes = parallel_lm(ParallelConfig(**{"shard": 1, **degrees}))
        for step in range(2):
            check_lm(model, plain, meshes, step)


@pytest.mark.exhaustive
@on_ranks(8)
@pytest.mark.parametrize(
    "degrees",
    [{"shard": 2, "context": 2, "tensor": 2}, {"replicate": 2, "shard": 2, "context": 2}],
    ids=["fsdp_cp_tp", "hsdp_cp"],
)
def test_parity_on_eight_ranks(rank: int, world_size: int, degrees: dict[str, int]) -> None:
    with quiet():
        plain, model, meshes = parallel_lm(ParallelConfig(**degrees))
        check_lm(model, plain, meshes)


@on_ranks(4)
def test_training(rank: int, world_size: int) -> None:
    """Ten steps with clipping and two micro-batches each: the losses, and the parameters at the end, of one process."""
    config = ParallelConfig(shard=2, context=2)
    plain, model, meshes = parallel_lm(config)
    assert model.blocks[0].q.weight.to_local().shape == (DIM // 4, DIM)  # sharded over shard x context
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (model, plain))
    for step in range(10):
        ours.zero_grad()
        micro_losses = []
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss = local_loss(model, meshes, 2 * step + micro) / 2
            loss.backward()
            micro_losses.append(loss.detach())
        clip_grad_norm_(model.parameters(), 0.5)
        ours.step()
        references = [reference(plain, 2, 2 * step + micro) for micro in range(2)]
        for name, param in plain.named_parameters():
            param.grad = sum(gradients[name] for _, gradients in references) / 2
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        mean = torch.stack(micro_losses).sum()
        torch.distributed.all_reduce(mean, group=meshes.loss.get_group())
        assert_close(mean / 4, sum(loss for loss, _ in references) / 2, rtol=1e-9, atol=0)
    for (name, param), (_, value) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert_close(full(param.detach()), value.detach(), rtol=1e-8, atol=1e-9, msg=name)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Parameters in the compute dtype: gradients as near to float64's as one process in that dtype, within a factor."""
    config = ParallelConfig(context=2)
    plain, meshes = plain_lm(), build_meshes(config)
    _, exact = reference(plain, 1)
    alone = copy.deepcopy(plain).to(dtype)
    _, single = reference(alone, 1)
    model = parallelize(copy.deepcopy(plain).to(dtype), config, meshes=meshes, blocks=ContextBlock)
    local_loss(model, meshes).backward()
    for name, param in model.named_parameters():
        target = exact[name]
        error = (full(param.grad).double() - target).norm() / target.norm()
        limit = 2 * (single[name].double() - target).norm() / target.norm()
        assert error <= limit + 4 * torch.finfo(dtype).eps, name


@contextmanager
def compiling() -> Iterator[None]:
    """torch 2.13: Dynamo asks inputs that are no leaves for their .grad, under a filter that "error" overrides."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        yield
    torch.compiler.reset()


# --- checkpointing and compiling --------------------------------------------------------------------------------------


@on_ranks(2, timeout_s=150)
@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant", "wrapper", "outside_of_compiled"])
@pytest.mark.parametrize("way", ["applied", "block"])
def test_recomputed(rank: int, world_size: int, kind: str, way: str) -> None:
    """What is recomputed in backward is ring attention again, whoever wraps it."""
    meshes = build_meshes(ParallelConfig(context=2))
    plain = plain_lm()
    model = plain_lm(use_reentrant={"reentrant": True, "non_reentrant": False}.get(kind))
    if way == "applied":
        apply_context_parallel(model, meshes.context)
    if kind == "outside_of_compiled":
        for block in model.blocks:
            block.compile(backend="eager")
    if kind in ("wrapper", "outside_of_compiled"):
        model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    _, gradients = reference(plain, 1)
    with compiling():
        if way == "applied":
            loss = local_loss(model, meshes)
            attend(dropout_p=0.1)()  # not active any more
            loss.backward()
        else:
            with context_parallel(meshes.context):
                local_loss(model, meshes).backward()
    for (_, param), grad in zip(model.named_parameters(), gradients.values(), strict=True):
        total = param.grad.clone()
        torch.distributed.all_reduce(total)
        assert_close(total / 2, grad, rtol=1e-9, atol=1e-11)


@on_ranks(2)
def test_a_checkpoint_can_keep_attention(rank: int, world_size: int) -> None:
    """Selective checkpointing by operator: the ring, the dearest of all, does not run again in backward."""
    meshes = build_meshes(ParallelConfig(context=2))
    model, name = plain_lm(use_reentrant=False), context_group(meshes.context)
    policy = partial(create_selective_checkpoint_contexts, [torch.ops.fsdp2.ring_attention.default])
    batch = shard_sequence(whole_batch(0), meshes.context, DIMS)
    x = model.embed(batch["ids"])
    ran = num_ring_attentions(name)
    with context_parallel(meshes.context):
        for options, runs in (({}, 2), ({"context_fn": policy}, 1)):
            checkpoint(
                model.blocks[0], x.detach().requires_grad_(), batch["positions"], use_reentrant=False, **options
            ).sum().backward()
            ran += runs
            assert num_ring_attentions(name) == ran


@on_ranks(2)
def test_backward_outside_of_the_block_is_noticed(rank: int, world_size: int) -> None:
    """The block ended before backward, which recomputes attention without a ring: an error, not other gradients."""
    meshes = build_meshes(ParallelConfig(context=2))
    model = plain_lm(use_reentrant=False)
    with context_parallel(meshes.context):
        loss = local_loss(model, meshes)
    assert "metadata" in error_of(CheckpointError, loss.backward)


@on_ranks(2, timeout_s=150)
@pytest.mark.parametrize("checkpointing", [pytest.param("none", marks=pytest.mark.exhaustive), "full"])
def test_compiled_blocks(rank: int, world_size: int, checkpointing: str) -> None:
    """`parallelize` compiles the blocks, with ring attention inside."""
    config = ParallelConfig(context=2, compile="aot_eager", activation_checkpointing=checkpointing)
    plain, model, meshes = parallel_lm(config)
    with compiling():
        for step in range(2):
            check_lm(model, plain, meshes, step)


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
    # Without the mask of ones it takes the jump in rank 0's positions for a second sequence, and makes a mask. Rank 1,
    # whose chunks are neighbours, sees nothing amiss; and raises too. (In a shape that has not run yet.)
    batch = {"input_ids": ids[:, :20], "position_ids": positions(40, mesh).expand(2, -1)}
    message = error_of(FSDPError, lambda: model(**batch, use_cache=False))
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
        with context_parallel(mesh):
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


@on_ranks(2)
def test_mistakes_with_sequences(rank: int, world_size: int) -> None:
    mesh = build_meshes(ParallelConfig(context=2)).context
    ids = torch.zeros(2, 10)

    def error(batch: Any, dims: Any = 1) -> str:
        return wrapped(error_of(ArgumentError, lambda: shard_sequence(batch, mesh, dims)))

    assert error({"input_ids": ids}) == (
        "shard_sequence: 'input_ids' [2, 10] has 10 rows along the sequence, which cannot be cut into 2 x 2 =\n"
        "4 equal chunks for 2 context ranks (10 = 2 x 4 + 2): pad it to 12 or cut it to 8\n"
    )
    assert error({"a": ids}, {"b": 1}) == "sequence dims are given for ['b'], but the batch has ['a']\n"
    assert "'a' [2, 10] has no dim 2" in error({"a": ids}, 2)
    assert "a sequence has 10 rows" in error_of(ArgumentError, lambda: positions(10, mesh))


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
    assert "the ranks of a context group must have the same" in message
    assert "let the data loader go by the data-parallel rank" in message
    assert ("contents of 'ids'" in message) == (what != "names") and "rank 0: " in message and "rank 1: " in message
    assert torch.equal(
        shard_sequence(other_batch(0, what), mesh)["ids"], other_batch(0, what)["ids"][:, positions(16, mesh)]
    )


def test_labels_are_shifted_within_the_last_dim() -> None:
    ids = torch.arange(6).view(2, 3)
    assert next_token_labels(ids).tolist() == [[1, 2, -100], [4, 5, -100]]
    assert next_token_labels(ids[0], ignore_index=-1).tolist() == [1, 2, -1]


# --- mistakes ---------------------------------------------------------------------------------------------------------


def attend(**options: Any) -> Callable[[], Tensor]:
    """A call of attention with these options, in a shape that no other test has."""
    q = torch.ones(1, 1, 6, 3)
    return lambda: F.scaled_dot_product_attention(q, q, q, **options)


@on_ranks(2)
def test_what_ring_attention_cannot_do(rank: int, world_size: int) -> None:
    mesh = build_meshes(ParallelConfig(context=2)).context
    with context_parallel(mesh):
        mask = torch.ones(6, 6, dtype=torch.bool)
        assert "attention got a mask [6, 6]" in error_of(UnsupportedError, attend(attn_mask=mask))
        assert "dropout_p=0.1" in error_of(UnsupportedError, attend(dropout_p=0.1))
        error = error_of(FSDPError, attend(dropout_p=0.5) if rank else attend(scale=2.0))
        assert "dropout_p=0.5" in error  # on the rank without, too
        attend()()
    attend(attn_mask=mask, dropout_p=0.1)()


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
    with pytest.warns(UserWarning, match="no F.scaled_dot_product_attention ran"), context_parallel(mesh):
        pass
    model = nn.Sequential(NoAttention(2, 2))
    apply_context_parallel(model, mesh)
    assert "in the first forward of Sequential no F." in error_of(MisuseError, lambda: model(torch.ones(1, 2)))


@on_ranks(2)
def test_a_forward_that_fails_leaves_nothing_active(rank: int, world_size: int) -> None:
    mesh = build_meshes(ParallelConfig(context=2)).context
    model = NoAttention(2, 2)
    apply_context_parallel(model, mesh)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 2), fail=True)
    attend(dropout_p=0.1)()
    with pytest.raises(ZeroDivisionError), context_parallel(mesh):
        raise ZeroDivisionError
    attend(dropout_p=0.1)()


@on_ranks(4)
def test_one_context_axis_at_a_time(rank: int, world_size: int) -> None:
    meshes = build_meshes(ParallelConfig(shard=2, context=2))
    model = NoAttention(2, 2)
    apply_context_parallel(model, meshes.root["dp_shard"])
    with pytest.warns(UserWarning, match="no F.scaled"), context_parallel(meshes.context):
        message = error_of(MisuseError, lambda: model(torch.ones(1, 2)))
    assert "a model has one context axis" in message
    assert "needs the context axis alone" in error_of(ArgumentError, lambda: apply_context_parallel(model, meshes.root))


@on_ranks(2)
def test_copies_and_lifetime(rank: int, world_size: int) -> None:
    """The hooks hold on to nothing: copies work, and the model is freed with its last name."""
    mesh = build_meshes(ParallelConfig(context=2)).context
    model = plain_lm()
    apply_context_parallel(model, mesh)
    batch = shard_sequence(whole_batch(0), mesh, DIMS)
    twin = copy.deepcopy(model)
    assert torch.equal(loss_sum(model, batch), loss_sum(twin, batch))
    freed = []
    weakref.finalize(model, freed.append, True)
    del model
    gc.collect()
    assert freed
