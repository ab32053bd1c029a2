"""Models, meshes and references of the tensor-parallel tests: TP first, then `fully_shard` on the data-parallel axes.

The reference is one process with the plain model. Ranks that differ only on the TP axis work on the same batch, so a
data-parallel rank, not a global one, names a batch.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.helpers.meshes import shared_mesh
from tests.helpers.parity_models import (
    Gradients,
    Race,
    assert_same,
    count,
    full,
    local,
    mean_gradients,
    quiet,  # noqa: F401 - for the tests of tensor parallelism
    shard_blocks,
    shard_like,
)

DIM, VOCAB = 8, 8


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...], device_type: str = "cpu") -> DeviceMesh:
    return shared_mesh(sizes, names, device_type)


def dp_tp(dp: int = 2, tp: int = 2) -> DeviceMesh:
    """The 2-D mesh of most tests."""
    return mesh_of((dp, tp), ("dp", "tp"))


def hsdp_tp(replicas: int, shards: int, tp: int = 2) -> DeviceMesh:
    """The 3-D mesh of HSDP with TP."""
    return mesh_of((replicas, shards, tp), ("dp_replicate", "dp_shard", "tp"))


def dp_axes(mesh: DeviceMesh) -> DeviceMesh:
    """What `fully_shard` gets: all axes but the TP one."""
    names = mesh.mesh_dim_names or ()
    rest = tuple(name for name in names if name != "tp")
    return mesh[rest[0]] if len(rest) == 1 else mesh[rest]


def data_rank(mesh: DeviceMesh) -> int:
    """Which batch this rank works on: its position among the ranks that differ on the axes but the TP one."""
    position = 0
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name != "tp":
            position = position * mesh.size(axis) + mesh.get_local_rank(axis)
    return position


def data_ranks(mesh: DeviceMesh) -> int:
    """How many batches there are."""
    return mesh.size() // mesh["tp"].size()


class TpBlock(nn.Module):
    """(..., DIM) -> (..., DIM). The hidden size 6 divides by tp=2, its halves do not by dp=2."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TpLm(nn.Module):
    """Tokens (batch, time) -> logits (batch, time, VOCAB). `use_reentrant` not None checkpoints each block."""

    def __init__(self, depth: int = 2, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(TpBlock() for _ in range(depth))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.use_reentrant = use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(self.norm(x))


# Which layers are tensor parallel. "plain_norms": embedding, norms and head are left alone, and are plain tensors
# beside DTensors in their units. "sequence": all are TP, activations between blocks are DTensors sharded over time, and
# the norms' gradients arrive as Partial.
PLANS = ["plain_norms", "sequence"]


def parallelize(model: nn.Module, tp_mesh: DeviceMesh, plan: str = "plain_norms") -> nn.Module:
    """Tensor parallelism in place, by torch's own API."""
    time = Shard(1)
    if plan == "plain_norms":
        styles: dict[str, Any] = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    else:
        styles = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=time, use_local_output=False),
            "blocks.*.norm": SequenceParallel(),
            "blocks.*.up": ColwiseParallel(input_layouts=time),
            "blocks.*.down": RowwiseParallel(output_layouts=time, use_local_output=False),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=time, output_layouts=Replicate()),
        }
    return parallelize_module(model, tp_mesh, styles)


def placements_after(name: str, plan: str = "plain_norms") -> tuple[Placement, ...]:
    """Behaviour 158: the placements over ("dp", "tp") of a parameter of `TpLm` with tp=2."""
    strided = (_StridedShard(0, split_factor=2), Shard(0))
    if ".up." in name:
        return strided
    if name.endswith("down.weight"):
        return (Shard(0), Shard(1))
    if name.endswith("down.bias"):
        return (Shard(0), Replicate())
    if plan == "plain_norms":
        return (Shard(0),)
    return (Shard(0), Replicate()) if "norm" in name else strided


def tp_shard(
    api: ModuleType, model: nn.Module, mesh: DeviceMesh | None = None, plan: str = "plain_norms", **options: Any
) -> Any:
    """TP, then `fully_shard` of every block and the root."""
    mesh = mesh or dp_tp()
    parallelize(model, mesh["tp"], plan)
    return shard_blocks(api, model, mesh=dp_axes(mesh), **options)


def tokens(step: int, rank: int) -> Tensor:
    """Two rows of four tokens that depend on step and data-parallel rank only."""
    return torch.randint(VOCAB, (2, 4), generator=torch.Generator().manual_seed(1000 * step + rank))


def token_batch(model: nn.Module, step: int, rank: int) -> Tensor:
    """Forward and backward of one batch; the loss."""
    inputs = tokens(step, rank)
    loss = cross_entropy(model(inputs).float().flatten(0, 1), inputs.flatten())
    loss.backward()
    return loss.detach()


def assert_tp_gradients(model: nn.Module, expected: Gradients, *, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Every gradient lies as its parameter does, and is this rank's part of the expected one (Behaviour 26)."""
    for name, param in model.named_parameters():
        grad: Any = param.grad
        if grad is not None and isinstance(param, DTensor):
            assert isinstance(grad, DTensor), name
            assert (grad.device_mesh, grad.placements) == (param.device_mesh, param.placements), name
            assert (grad.shape, grad.dtype) == (param.shape, param.dtype), name
            assert grad.to_local().is_contiguous(), name
        assert_same(f"gradient of {name}", local(grad), shard_like(expected[name], param), False, rtol, atol)


def check_step(model: nn.Module, plain: nn.Module, mesh: DeviceMesh, step: int = 0) -> None:
    """Values and, after one batch, gradients are those of one process with `plain`."""
    for (name, param), (_, value) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert_same(name, full(param), value, False, 1e-6, 1e-6)
    model.zero_grad()
    token_batch(model, step, data_rank(mesh))
    assert_tp_gradients(model, mean_gradients(plain, data_ranks(mesh), lambda m, r: token_batch(m, step, r)))


def tp_race(
    mesh: DeviceMesh,
    build: Callable[[], nn.Module] = TpLm,
    shard: Callable[[ModuleType, nn.Module], Any] | None = None,
    **options: Any,
) -> Race:
    """Race of `tp_shard` (or `shard`) on `mesh`; `plan` and fully_shard's options, or Race's own, as keywords."""
    of_race = {field.name: options.pop(field.name) for field in fields(Race) if field.name in options}
    shard = shard or (lambda api, model: tp_shard(api, model, mesh, **options))
    of_race.setdefault("backward", token_batch)
    return Race(data_rank(mesh), data_ranks(mesh), build, shard, **of_race)


@contextmanager
def count_comms() -> Iterator[dict[str, int]]:
    """How many collectives of sharded data parallelism the block issues; TP's own do not count. Filled at its end."""
    counts: dict[str, int] = {}
    with fsdp2.events.record() as log:
        yield counts
    counts.update(count(log, "all_gather", "reduce_scatter", "all_reduce"))


def tp_pair(mesh: DeviceMesh | None = None, plan: str = "plain_norms", **options: Any) -> tuple[TpLm, Any]:
    """The plain model and a copy with TP and `fully_shard`."""
    plain = TpLm()
    return plain, tp_shard(fsdp2, copy.deepcopy(plain), mesh, plan, **options)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Unlike Adam it does not make large differences from small ones."""
    return torch.optim.SGD(params, lr=0.1)
