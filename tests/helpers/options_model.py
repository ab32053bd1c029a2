"""The model of the tests of options, with the parameters that an option asks for, and collectives of a user's own."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM, HIDDEN, DEPTH = 6, 5, 2


BF16 = torch.bfloat16


OVERRIDE = "param_dtype_override_fn"


class Part(nn.Module):
    """(rows, DIM) -> (rows, DIM), with the parameters that the features ask for."""

    def __init__(self, features: frozenset[str], index: int) -> None:
        super().__init__()
        self.features = features
        self.use_side = False
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        if "scalars" in features:
            self.gain = nn.Parameter(torch.tensor(0.7))
        if "conv" in features:
            self.conv = nn.Conv2d(2, 2, (3, 1), padding=(1, 0)).to(memory_format=torch.channels_last)
        if "packed" in features:
            packed = torch.randint(0, 256, (DIM, DIM // 2), dtype=torch.uint8)
            self.packed = nn.Parameter(packed, requires_grad=False)
        if "dtypes" in features:
            self.shift = nn.Parameter(torch.randn(DIM, dtype=torch.float64))
        if "unused" in features:
            self.side = nn.Linear(DIM, DIM)
            self.never = nn.Linear(DIM, 2)
        if "frozen" in features:
            self.up.bias.requires_grad_(False)
            (self.norm.weight if index == 0 else self.down.weight).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        if "scalars" in self.features:
            y = y * self.gain.to(y.dtype)
        if "conv" in self.features:
            image = y.reshape(-1, 2, 3, 1)
            y = y + self.conv(image).reshape(y.shape)
        if "packed" in self.features:
            halves = torch.cat((self.packed & 15, self.packed >> 4), 1)
            y = y + y @ (halves.to(y.dtype) - 8) / 16
        if "dtypes" in self.features:
            y = y * self.shift.to(y.dtype)
        if self.use_side:
            y = y + self.side(x.to(self.side.weight.dtype)).to(y.dtype)
        return x + y


class Mix(nn.Module):
    """An input layer, parts, an output layer, which may have the input layer's weight."""

    def __init__(self, features: frozenset[str] = frozenset(), use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.parts = nn.ModuleList(Part(features, index) for index in range(DEPTH))
        self.out = nn.Linear(DIM, DIM)
        self.use_reentrant = use_reentrant
        if "tied" in features:
            self.out.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        """A second entry point."""
        x = self.inp(x)
        for part in self.parts:
            plain = self.use_reentrant is None or not torch.is_grad_enabled()
            x = part(x) if plain else checkpoint(part, x, use_reentrant=self.use_reentrant)
        return self.out(x)


def build(features: frozenset[str], use_reentrant: bool | None = None) -> Mix:
    """The same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Mix(features, use_reentrant)


def norms_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that some options treat differently, by name."""
    return {name: param for name, param in model.named_parameters() if ".norm." in name}


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gathers(_Allocates):
    """All-gather by the backend's list form, as users write it for torch's FSDP2."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        outputs = list(output_tensor.chunk(group.size()))
        return dist.all_gather(outputs, input_tensor.clone(), group=group, async_op=async_op)


class Scatters(_Allocates):
    """Reduce-scatter as an all-reduce of everything."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        whole = input_tensor.clone()
        dist.all_reduce(whole, group=group, op=dist.ReduceOp.SUM)
        if op == dist.ReduceOp.AVG:
            whole /= group.size()
        output_tensor.copy_(whole.chunk(group.size())[group.rank()])
        return None
