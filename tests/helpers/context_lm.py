"""A language model for context parallelism, and its training on whole batches in one process."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fsdp2.parallel import (
    Meshes,
    ParallelConfig,
    build_meshes,
    next_token_labels,
    parallelize,
    shard_sequence,
    token_mean,
)
from tests.helpers.parity_models import Gradients, assert_gradients

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


def attend(**options: Any) -> Callable[[], Tensor]:
    """A call of attention with these options, in a shape that no other test has."""
    q = torch.ones(1, 1, 6, 3)
    return lambda: F.scaled_dot_product_attention(q, q, q, **options)
