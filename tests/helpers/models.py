"""Small models that several test files share, and what those files look at in a sharded module.

Inputs are `batch(step, rank, dim)` of `parity_models`: a function of step and rank, so any rank can make the others'.
"""

import copy
import textwrap
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.helpers.parity_models import assert_gradients, batch, local, mean_gradients


def mlp(*features: int, bias: bool = True) -> nn.Sequential:
    """Linear layers with these features, a ReLU after each but the last. Layers are at even indices."""
    layers: list[nn.Module] = []
    for first, second in pairwise(features):
        layers += [nn.Linear(first, second, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def linears(num: int, dim: int = 4, bias: bool = True) -> nn.Sequential:
    """Square linear layers, nothing between them."""
    return nn.Sequential(*[nn.Linear(dim, dim, bias=bias) for _ in range(num)])


class TransformerBlock(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = mlp(dim, 3 * dim + 1, dim)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:-1], 3, self.num_heads, x.shape[-1] // self.num_heads)
        q, k, v = self.qkv(self.attention_norm(x)).view(split).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """(batch, length) token numbers -> (batch, length, vocab) logits."""

    def __init__(
        self,
        vocab: int = 11,
        dim: int = 8,
        num_blocks: int = 2,
        tied: bool = False,
        use_reentrant: bool | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(TransformerBlock(dim, 2) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.use_reentrant = use_reentrant

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the head is applied to."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


def tokens(step: int, rank: int, vocab: int = 11) -> Tensor:
    """(2, 5) token numbers that depend on step and rank only."""
    return torch.randint(vocab, (2, 5), generator=torch.Generator().manual_seed(1000 * step + rank))


def run_step(model: nn.Module, rank: int, step: int = 0, dim: int = 4) -> Tensor:
    """Forward and backward of `rank`'s batch of this step; the loss."""
    dtype = next((param.dtype for param in model.parameters()), torch.float32)
    loss = model(batch(step, rank, dim, dtype)).square().mean()
    loss.backward()
    return loss.detach()


def reference_grads(plain: nn.Module, world_size: int, step: int = 0, dim: int = 4) -> dict[str, Tensor | None]:
    """The mean over all ranks' batches of the unsharded model's gradients."""
    return mean_gradients(plain, world_size, lambda model, rank: run_step(model, rank, step, dim))


def check_step(model: nn.Module, plain: nn.Module, rank: int, world_size: int, step: int = 0, dim: int = 4) -> None:
    """One step of the sharded model (gradients cleared) gives the reference gradients and leaves it sharded."""
    model.zero_grad()
    run_step(model, rank, step, dim)
    assert is_sharded(model)
    assert_gradients(model, reference_grads(plain, world_size, step, dim))


def sharded_copy(plain: nn.Module, shard: Callable[[Any], object]) -> Any:
    """A deep copy of `plain`, sharded in place by `shard`."""
    model = copy.deepcopy(plain)
    shard(model)
    return model


def is_sharded(module: nn.Module) -> bool:
    """All parameters are DTensors."""
    return all(isinstance(param, DTensor) for param in module.parameters())


def is_unsharded(module: nn.Module) -> bool:
    """All parameters are plain tensors with their data."""
    params = list(module.parameters())
    has_data = all(param.untyped_storage().nbytes() >= param.nbytes for param in params)
    return has_data and not any(isinstance(param, DTensor) for param in params)


def units(log: Iterable[Any], kind: str) -> list[str]:
    """The units of all events of this kind, in order; the root is ``""``."""
    return [event.unit for event in log if event.kind == kind]


def numels(log: Iterable[Any], kind: str) -> list[tuple[str, int]]:
    """Unit and numel of all events of this kind, in order."""
    return [(event.unit, event.numel) for event in log if event.kind == kind]


def error_of(kind: type[BaseException], call: Callable[[], object]) -> str:
    """The text of the exception of this kind that `call` raises."""
    with pytest.raises(kind) as info:
        call()
    return str(info.value)


def wrapped(text: str) -> str:
    """`text` in lines that fit into a test, to be pinned there."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False) + "\n"


class Dot(nn.Module):
    """Its parameters' gradients are what is passed in: `grad of weights[i] == x[i]`, None where x[i] is None."""

    def __init__(self, num: int = 1, size: int = 4) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(size) for _ in range(num))

    def forward(self, *values: float | None) -> Tensor:
        pairs = zip(self.weights, values, strict=True)
        return sum((weight * value).sum() for weight, value in pairs if value is not None)


def add(model: Any, *values: float | None, sync: bool = True, all_reduce: bool = True) -> None:
    """Backward such that the parameters' gradients on every rank are `values`."""
    model.set_requires_gradient_sync(sync)
    if not all_reduce:
        model.set_requires_all_reduce(False)
    model(*values).float().backward()


def grads(model: Any) -> list[float | None]:
    """The sharded gradients, constant over elements and ranks."""
    result = []
    for weight in model.weights:
        values = None if weight.grad is None else local(weight.grad)
        result.append(None if values is None else values.flatten()[0].item())
        assert values is None or (values == values.flatten()[0]).all()
    return result
