"""A decoder-only language model in the manner of Llama, of 1 or 3 billion parameters, and what its step computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Of the model and of a rank's batch.

    Attributes:
        hidden: of the gated MLP.
        recomputes: activations of a block are computed again in backward.
    """

    dim: int
    blocks: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 32768
    batch: int = 4
    length: int = 4096
    recomputes: bool = True


SHAPES = {
    "tiny": Shape(32, 2, 4, 2, 64, vocab=64, batch=2, length=16),
    "small": Shape(512, 4, 8, 4, 1408, vocab=2048, batch=2, length=256),
    "1b": Shape(2048, 16, 32, 8, 8192),
    "3b": Shape(3072, 28, 24, 8, 8192),
}


class Attention(nn.Module):
    """Causal attention with rotary positions; several query heads share a key and a value head."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.head_dim = shape.dim // shape.heads
        kv_dim = shape.kv_heads * self.head_dim
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, kv_dim, bias=False)
        self.value = nn.Linear(shape.dim, kv_dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``[batch, length, dim]`` to the same."""
        batch, length, dim = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        shared = query.shape[1] != key.shape[1]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        return self.out(attended.transpose(1, 2).reshape(batch, length, dim))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Positions as angles, the halves of a head's dim being pairs."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Norm(nn.Module):
    """RMS norm with a weight."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), 1e-5)


class Block(nn.Module):
    """Attention and a gated MLP, nine parameters. Recomputes itself, so that a unit's parameters serve backward."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.recomputes = shape.recomputes
        self.attention_norm, self.attention = Norm(shape.dim), Attention(shape)
        self.mlp_norm = Norm(shape.dim)
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``[batch, length, dim]`` to the same."""
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(self.compute, x, cos, sin, use_reentrant=False)
        return self.compute(x, cos, sin)

    def compute(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Once."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Token numbers ``[batch, length]`` to logits."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = Norm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        for param in self.parameters():
            if param.ndim > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[batch, length, vocab]``."""
        x = self.tokens(tokens)
        half = self.shape.dim // self.shape.heads // 2
        rates = 10000.0 ** -(torch.arange(half, device=x.device) / half)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * rates
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def flops_per_token(shape: Shape) -> float:
    """Of forward and backward, as "model FLOPs" are counted: matrix products only, half of the attention matrix, and
    nothing for what is computed again (PaLM, arXiv:2204.02311, appendix B)."""
    kv_dim = shape.dim // shape.heads * shape.kv_heads
    block = shape.dim * (2 * shape.dim + 2 * kv_dim + 3 * shape.hidden)
    attention = shape.dim * shape.length  # two products of length/2 each on average
    return 6.0 * (shape.blocks * (block + attention) + shape.dim * shape.vocab)
