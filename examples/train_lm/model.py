"""The language model that the examples train: a small decoder-only transformer.

Nothing here knows about sharding except `SeededNormal`, which draws the same initial weights at every world size.
This file is imported by `train_lm.py`; it is not run on its own.

    tokens -> embedding -> blocks (attention, then SwiGLU, each behind an RMSNorm) -> RMSNorm -> head -> logits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True)
class LMConfig:
    """Everything that decides the parameters' shapes and meaning: two models with equal configs can share weights."""

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 384
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab", "dim", "layers", "heads", "kv_heads", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"dim ({self.dim}) must be an even multiple of heads ({self.heads})")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class SeededNormal:
    """Fills parameters with normal noise from one seeded stream: the same model at every world size.

    `nn.init.normal_` on a sharded parameter would let each rank draw its own rows: equal rows on all ranks if they
    are seeded alike, and another model at another world size if they are not. So every rank draws the whole tensor
    and keeps its rows. One tensor is whole at a time, which bounds the extra memory by the largest parameter.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    @torch.no_grad()
    def __call__(self, parameter: Tensor, std: float) -> None:
        whole = torch.empty(parameter.shape).normal_(0.0, std, generator=self._generator)
        if isinstance(parameter, DTensor):
            # src_data_rank=None: each rank cuts its rows from its own copy; nothing is sent.
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(whole)


class Rotary(nn.Module):
    """Rotary position embedding; its tables are buffers that no checkpoint holds."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, seq_len: int) -> None:
        super().__init__()
        self.head_dim, self.seq_len = head_dim, seq_len
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(seq_len, head_dim // 2), persistent=False)

    def init_weights(self) -> None:
        """Compute the tables: after `to_empty` a buffer holds whatever was in that memory before."""
        exponents = torch.arange(0, self.head_dim, 2, device=self.cos.device) / self.head_dim
        angles = torch.outer(torch.arange(self.seq_len, device=self.cos.device), 10_000.0**-exponents)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Rotate `x` [batch, heads, seq, head_dim]; the tables stay float32 in mixed precision, so compute in it."""
        chosen = slice(x.shape[-2]) if positions is None else positions
        cos, sin = self.cos[chosen], self.sin[chosen]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one key/value head."""

    def __init__(self, config: LMConfig, seq_len: int) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.kv_heads * config.head_dim
        self.q = nn.Linear(config.dim, config.dim, bias=False)
        self.k = nn.Linear(config.dim, kv_dim, bias=False)
        self.v = nn.Linear(config.dim, kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.rotary = Rotary(config.head_dim, seq_len)

    def init_weights(self, normal: SeededNormal) -> None:
        std = self.config.dim**-0.5
        for linear in (self.q, self.k, self.v):
            normal(linear.weight, std)
        # What is added to the residual stream starts smaller, so that the stream keeps its size in deep models.
        normal(self.out.weight, std * (2 * self.config.layers) ** -0.5)
        self.rotary.init_weights()

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        # -1: with tensor parallelism this rank's layers make only some of the heads.
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        grouped = self.config.kv_heads != self.config.heads
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return cast(Tensor, self.out(y.transpose(1, 2).flatten(2)))


class SwiGLU(nn.Module):
    """The feed-forward half of a block: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def init_weights(self, normal: SeededNormal) -> None:
        normal(self.gate.weight, self.config.dim**-0.5)
        normal(self.up.weight, self.config.dim**-0.5)
        normal(self.down.weight, self.config.hidden**-0.5 * (2 * self.config.layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    """One transformer layer: the unit that `train_lm.py` shards."""

    def __init__(self, config: LMConfig, seq_len: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config, seq_len)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = SwiGLU(config)

    def init_weights(self, normal: SeededNormal) -> None:
        nn.init.ones_(self.attention_norm.weight)
        self.attention.init_weights(normal)
        nn.init.ones_(self.mlp_norm.weight)
        self.mlp.init_weights(normal)

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class LM(nn.Module):
    """`forward` maps token ids [batch, seq] to logits [batch, seq, vocab], for seq up to `seq_len`. A rank that has
    a part of each sequence gives the places of its tokens too, [seq].

    Build it under `torch.device("meta")`, shard it, then `to_empty(device=...)` and `init_weights(seed)`.
    """

    def __init__(self, config: LMConfig, seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, seq_len) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        # A tied head is no second name for the embedding's parameter (`to_empty` would split the two) but no
        # parameter at all: forward uses the embedding's weight, which the root unit keeps gathered meanwhile.
        self.head = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)

    def init_weights(self, seed: int) -> None:
        """Give every parameter and buffer its first value; safe on plain and on sharded parameters."""
        normal = SeededNormal(seed)
        normal(self.embed.weight, 0.02 if self.head is None else 1.0)
        for block in self.blocks:
            cast(Block, block).init_weights(normal)
        nn.init.ones_(self.norm.weight)
        if self.head is not None:
            normal(self.head.weight, 0.02)  # small: the first prediction is close to uniform

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return F.linear(self.norm(x), self.embed.weight if self.head is None else self.head.weight)
