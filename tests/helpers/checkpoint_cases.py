"""A model with awkward tensors, the ways to shard it, and what must be where: for the tests of `fsdp2.checkpoint`.

Every value is a function of its name, so any rank of any world knows what it should hold after a load, without having
seen what was saved: `value_of` makes the whole tensor, `shard_like` cuts this rank's part out of it.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import ZeroPolicy, fully_shard
from tests.helpers.meshes import shared_mesh
from tests.helpers.parity_models import local, shard_like

NAMES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES: list[torch.dtype] = [getattr(torch, name) for name in NAMES.split()]

by_form = pytest.mark.parametrize("options", [{}, {"consolidated": True}], ids=["ranks", "consolidated"])

BF16 = torch.bfloat16
DIM, HIDDEN, VOCAB = 5, 6, 7


# --- values -----------------------------------------------------------------------------------------------------------


def value_of(name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The whole tensor of that name: the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    if dtype == torch.bool:
        return torch.randint(2, tuple(shape), generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        values = torch.randn(tuple(shape), generator=generator, dtype=wide)
        return (values.abs() if "_sq/" in name else values).to(dtype)  # squares, so that one can train on them
    return torch.randint(100, tuple(shape), generator=generator).to(dtype)


def random_bits(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `value_of`, but any bits at all: NaNs with payloads, infinities, negative zeros."""
    if dtype == torch.bool:
        return value_of(name, shape, dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    numel = torch.Size(shape).numel()
    raw = torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(tuple(shape))


def bits(tensor: Tensor) -> Tensor:
    """Its values as bytes, in logical order."""
    part = local(tensor).detach()
    return torch.empty(part.numel(), dtype=part.dtype).copy_(part.reshape(-1)).view(torch.uint8)


def assert_bits(name: str, got: Tensor, expected: Tensor) -> None:
    got, expected = local(got).detach(), local(expected).detach()
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), name
    assert torch.equal(bits(got), bits(expected)), f"{name}: got\n{got}\nexpected\n{expected}"


def assert_part(name: str, got: Tensor, seed: int = 0) -> None:
    """This rank has its part of the value of that name."""
    assert_bits(name, got, shard_like(value_of(name, got.shape, got.dtype, seed), got))


def fill(name: str, tensor: Tensor, seed: int = 0) -> None:
    """Give this rank its part of the value of that name. No communication."""
    with torch.no_grad():
        local(tensor).copy_(shard_like(value_of(name, tensor.shape, tensor.dtype, seed), tensor))


def spoil(tensor: Tensor) -> None:
    """Values that no load gives, so that what was not loaded shows."""
    with torch.no_grad():
        local(tensor).fill_(True if tensor.dtype == torch.bool else 77)


def put(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """This rank's shard of a whole tensor that all ranks have, of any dtype. No communication."""
    shape = DTensor.from_local(
        torch.empty(0), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    part = shard_like(whole, shape)
    assert part is not None
    return DTensor.from_local(
        part.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )


def mesh_of(*sizes: int) -> DeviceMesh:
    """The mesh of those sizes of the pool's ranks."""
    return shared_mesh(sizes, ("a", "b", "c")[: len(sizes)])


# --- the model --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """(rows, DIM) -> (rows, DIM); tensor parallel on `up` and `down`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Awkward(nn.Module):
    """Sizes that divide by nothing, fewer rows than ranks, none at all; scalars; other dtypes and orders in memory; a
    tied weight; frozen parameters; buffers. Trains on rows of DIM numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(2, 3, (3, 2)).to(memory_format=torch.channels_last)
        self.few = nn.Parameter(torch.zeros(2, 3))
        self.gain = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.bf16 = nn.Parameter(torch.zeros(9, 2, dtype=BF16))
        self.f64 = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.packed = nn.Parameter(torch.zeros(5, 3, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(3, 2, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain + self.mean.to(x.dtype))


def column(param: nn.Parameter) -> Shard | None:
    """A `shard_placement_fn`: dim 1 where there is one."""
    return Shard(1) if param.ndim > 1 else None


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})


def tp_fsdp(model: nn.Module, *dp_sizes: int, **options: Any) -> nn.Module:
    """TP of two ranks within data parallelism."""
    mesh = mesh_of(*dp_sizes, 2)
    axes = mesh.mesh_dim_names or ()
    tensor_parallel(model, mesh[axes[-1]])
    return shard(model, mesh=mesh[axes[0]] if len(dp_sizes) == 1 else mesh[axes[:-1]], **options)


@dataclass(frozen=True)
class Layout:
    """A number of ranks, and what they make of a plain model."""

    world_size: int
    apply: Callable[[nn.Module], nn.Module]


LAYOUTS = {
    "plain-1": Layout(1, lambda model: model),
    "fsdp-1": Layout(1, shard),
    "fsdp-2": Layout(2, shard),
    "dim1-2": Layout(2, lambda model: shard(model, shard_placement_fn=column)),
    "ddp-2": Layout(2, lambda model: shard(model, zero=ZeroPolicy(0))),
    "tp-2": Layout(2, lambda model: tensor_parallel(model, mesh_of(2))),
    "hsdp2x1-2": Layout(2, lambda model: shard(model, mesh=mesh_of(2, 1))),
    "fsdp-3": Layout(3, shard),
    "dim1-3": Layout(3, lambda model: shard(model, shard_placement_fn=column)),
    "zero2-3": Layout(3, lambda model: shard(model, zero=ZeroPolicy(2))),
    "fsdp-4": Layout(4, shard),
    "hsdp2x2-4": Layout(4, lambda model: shard(model, mesh=mesh_of(2, 2))),
    "tp-fsdp-4": Layout(4, lambda model: tp_fsdp(model, 2)),
    "tp-dim1-4": Layout(4, lambda model: tp_fsdp(model, 2, shard_placement_fn=column)),
    "tp-hsdp-4": Layout(4, lambda model: tp_fsdp(model, 2, 1)),
    "zero1-4": Layout(4, lambda model: shard(model, zero=ZeroPolicy(1, shard_size=2))),
    "secondary-4": Layout(4, lambda model: shard(model, zero=ZeroPolicy(3, secondary_shard_size=2))),
    "replicas-4": Layout(4, lambda model: shard(model, zero=ZeroPolicy(3, shard_size=2, shard_replicas=True))),
}


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, once each, and the buffers that are saved."""
    yield from model.named_parameters()
    saved = model.state_dict()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the optimizer's state that have the shape of their parameter, as ``exp_avg/<fqn>``."""
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.shape == param.shape and key != "step":
                yield f"{key}/{name}", value


def with_state(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    """An optimizer that has made a step, with known state."""
    optimizer = kind([param for param in model.parameters() if param.requires_grad], **options)
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    for name, value in state_of(model, optimizer):
        fill(name, value)
    return optimizer


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with the values of `value_of`."""
    for name, value in tensors_of(model):
        fill(name, value, seed)
    return model


def check(model: nn.Module, seed: int = 0) -> None:
    """Its values are those."""
    for name, value in tensors_of(model):
        assert_part(name, value, seed)
