"""Models that FSDP2 of torch 2.13 refuses or breaks, and that train here."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from tests.helpers.parity_models import Block


class Experts(nn.Module):
    """A router in one dtype, which weighs two experts in another; their parameters make one unit."""

    def __init__(self, router: torch.dtype, experts: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=experts)
        self.router = nn.Linear(8, 2, dtype=router)
        self.experts = nn.ParameterList(torch.randn(8, 8, dtype=experts) / 3 for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x.to(self.norm.weight.dtype))
        weights = self.router(x.to(self.router.weight.dtype)).softmax(-1)
        out = torch.stack([torch.tanh(inner @ expert) for expert in self.experts], -1)
        return x + (out * weights.to(out.dtype).unsqueeze(-2)).sum(-1).to(x.dtype)


class Scaled(nn.Module):
    """A linear layer, and a scalar that multiplies its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        assert self.scale.shape == () and not isinstance(self.scale, DTensor)
        return torch.tanh(self.linear(x) * self.scale)


class Convolutions(nn.Module):
    """channels_last convolutions, of 6 and 5 output channels, and a linear layer with a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 5, 3)
        self.out = nn.Linear(10, 7)
        self.to(memory_format=torch.channels_last)
        self.out.weight = nn.Parameter(torch.randn(10, 7).t() / 3)

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, :, None].expand(-1, -1, 5).reshape(-1, 2, 4, 5).contiguous(memory_format=torch.channels_last)
        hidden = torch.tanh(self.second(torch.tanh(self.first(image))))
        return self.out(hidden.mean(3).flatten(1))


class QuantState:
    """What a quantised weight needs to be unpacked."""

    def __init__(self, scale: Tensor, shape: tuple[int, int]) -> None:
        self.scale = scale
        self.shape = shape


class Packed(nn.Parameter):
    """Two 4-bit numbers a byte, as (numel / 2, 1) bytes of any dtype, with a python attribute; as bitsandbytes does."""

    quant_state: QuantState

    @staticmethod
    def __new__(cls, data: Tensor, quant_state: Any = None) -> Any:
        self = torch.Tensor._make_subclass(cls, data, False)
        self.quant_state = quant_state
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(self.data.clone(), self.quant_state)


def pack(weight: Tensor, storage: torch.dtype) -> Packed:
    """A weight in 15 steps a column, packed."""
    scale = weight.abs().amax(0) / 7
    numbers = (weight / scale).round().clamp(-7, 7).add(8).to(torch.uint8).flatten()
    packed = (numbers[::2] << 4) | numbers[1::2]
    return Packed(packed.view(storage).view(-1, 1), QuantState(scale, tuple(weight.shape)))


class PackedLinear(nn.Module):
    """A frozen packed weight, and a trainable low-rank change of it."""

    def __init__(self, storage: torch.dtype, rows: int = 8) -> None:
        super().__init__()
        self.weight = pack(torch.randn(rows, 8) / 3, storage)
        self.lora_a = nn.Parameter(torch.randn(2, 8) / 3)
        self.lora_b = nn.Parameter(torch.randn(rows, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        state = self.weight.quant_state
        packed = self.weight.view(torch.uint8).flatten()
        numbers = torch.stack([packed >> 4, packed & 15], 1).view(state.shape)
        weight = (numbers.to(x.dtype) - 8) * state.scale.to(x.dtype)
        return torch.tanh(linear(x, weight) + linear(linear(x, self.lora_a), self.lora_b))


class Tied(nn.Module):
    """Embedding and head of one weight, 7 x 8, and two blocks between them."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList([Block(8, 5), Block(8, 5)])
        self.head = nn.Linear(8, 7)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        run = (
            (lambda f, *args: checkpoint(f, *args, use_reentrant=False))
            if self.recompute
            else lambda f, *args: f(*args)
        )
        hidden = run(self.embed, x.abs().mul(100).long() % 7).mean(1)
        for block in self.blocks:
            hidden = run(block, hidden)
        return run(self.head, hidden)


# The units in the order of the calls; "" is the root.
ORDERS = {
    "embed": ["embed", "blocks.0", "blocks.1", ""],
    "head": ["blocks.0", "blocks.1", "head", ""],
    "embed_head": ["embed", "blocks.0", "blocks.1", "head", ""],
    "head_embed": ["head", "embed", "blocks.1", "blocks.0", ""],
    "neither": ["blocks.0", "blocks.1", ""],
}


def shard_in_order(api: Any, model: nn.Module, order: str, root_raf: bool | None = None, **given: Any) -> None:
    for name in ORDERS[order]:
        raf = {} if name or root_raf is None else {"reshard_after_forward": root_raf}
        api.fully_shard(model.get_submodule(name), **{**given, **raf})
