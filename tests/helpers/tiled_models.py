"""Models of which one has its large layers in tiles, and the comparison of both."""

import copy
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from fsdp2 import fully_shard, tile

__all__ = ["DIM", "OUT", "VOCAB", "Small", "assert_same", "equalise", "local", "pair", "row_error", "run", "tokens_of"]

VOCAB, DIM, OUT = 51, 12, 37  # neither ranks nor tiles divide them


class Small(nn.Module):
    """An embedding, a layer, and a head that may run within a checkpoint."""

    def __init__(self, use_reentrant: bool | None = None, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=40)
        self.middle = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, OUT, bias=bias)
        self.use_reentrant = use_reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.middle(self.embed(tokens)))
        if self.use_reentrant is None:
            return self.head(x)
        return checkpoint(self.head, x, use_reentrant=self.use_reentrant)


def tokens_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, 6), generator=torch.Generator().manual_seed(100 * step + rank))


def pair(tiles: int = 3, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    """Two equal models: of one, embedding and head are gathered whole; of the other, in tiles."""
    torch.manual_seed(0)
    whole: Any = Small() if model is None else model
    tiled = copy.deepcopy(whole)
    tile(tiled.embed, 2 * tiles)
    tile(tiled.head, tiles)
    for layer in (whole.embed, whole.head, whole.middle, tiled.middle):
        fully_shard(layer, **options)
    return fully_shard(whole, **options), fully_shard(tiled, **options)  # tiled layers become units of their own


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local()


@cache
def row_error() -> float:
    """By how much a row of a matrix product may differ from the same row among fewer: not at all on most CPUs, where
    tests hold tiles to the bits of the whole layer; on some, by the last bit."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, DIM, generator=generator) for rows in (24, OUT))
    whole = linear(x, weight)
    alike = (torch.equal(linear(x, weight[:rows]), whole[:, :rows]) for rows in range(2, OUT))
    return 0.0 if all(alike) else 1e-6


def assert_same(whole: nn.Module, tiled: nn.Module, atol: float = 0.0) -> None:
    """The same parameters and gradients. `atol`: for biases, and what comes before the inputs of a tiled Linear."""
    pairs = zip(whole.named_parameters(), tiled.named_parameters(), strict=True)
    for (name, one), (other_name, other) in pairs:
        assert name == other_name and one.placements == other.placements and one.shape == other.shape
        exact = row_error() if name == "head.weight" else atol
        torch.testing.assert_close(local(other), local(one), rtol=0, atol=exact, msg=name)
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert one.grad.placements == other.grad.placements and one.grad.dtype == other.grad.dtype
            torch.testing.assert_close(local(other.grad), local(one.grad), rtol=0, atol=exact, msg=name)


def run(models: tuple[Any, Any], rank: int, step: int = 0, atol: float = 1e-6) -> None:
    """One batch; the parameters are equal before it."""
    outputs = [each(tokens_of(step, rank)) for each in models]
    torch.testing.assert_close(*outputs, rtol=0, atol=row_error())
    assert outputs[0].is_contiguous() == outputs[1].is_contiguous()
    for output in outputs:
        output.float().square().mean().backward()
    assert_same(*models, atol=atol)


def equalise(models: tuple[Any, Any]) -> None:
    """Give the second model the parameters of the first, bit by bit."""
    with torch.no_grad():
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            other.copy_(one)
