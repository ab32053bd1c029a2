"""Models, batches and references of the parity tests.

The reference is one process that runs the plain model on every rank's batch: per-rank gradients are computed apart,
summed in rank order and divided by the number of ranks. Batches are functions of (step, rank), so each rank can make
all of them.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2._torch.shared import full_tensor
from tests.helpers.meshes import shared_mesh

Gradients = dict[str, Tensor | None]

# What torch's own FSDP2 and pipelining can do depends on it.
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def mesh_2d(replicas: int, shards: int) -> DeviceMesh:
    """The HSDP mesh of the pool's ranks."""
    return shared_mesh((replicas, shards), ("replicate", "shard"))


class Block(nn.Module):
    """(batch, dim) -> (batch, dim); `hidden` need not divide by anything."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """An input layer of its own, `depth` blocks, an output layer. `use_reentrant` not None checkpoints each block."""

    def __init__(self, dim: int = 8, hidden: int = 11, depth: int = 3, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(depth))
        self.out = nn.Linear(dim, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.out(x)


class Layers(nn.Module):
    """Bias-free square layers one by one, and computation of the root before and after: the model of the schedule logs.

    With `root_weight` the root has a parameter, used first, so that every layer's input requires a gradient.
    `use_reentrant` not None checkpoints each layer.
    """

    def __init__(
        self, num_layers: int = 3, dim: int = 4, root_weight: bool = True, use_reentrant: bool | None = None
    ) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.scale = nn.Parameter(torch.ones(dim)) if root_weight else None
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            x = x * self.scale
        for layer in self.layers:
            x = layer(x) if self.use_reentrant is None else checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return 2 * x


class TiedLm(nn.Module):
    """Tied embedding and head; 7 rows divide by neither 2 nor 4."""

    def __init__(self, vocab: int = 7, dim: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([Block(dim, 5), Block(dim, 5)])
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.abs().mul(100).long() % 7).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, rank: int, dim: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    """Three rows of `dim` values that depend on step and rank only."""
    return torch.randn(3, dim, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=dtype)


def shard_blocks(api: ModuleType, model: nn.Module, **options: Any) -> nn.Module:
    """`fully_shard` every block (or layer), then the root, with the same options. `api`: `fsdp2` or torch's."""
    for child in getattr(model, "blocks", None) or getattr(model, "layers", None) or ():
        api.fully_shard(child, **options)
    return api.fully_shard(model, **options)


def local(tensor: Any) -> Any:
    """The local shard of a DTensor; anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Any) -> Any:
    """The whole tensor, on every rank (collective for DTensors)."""
    return full_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def shard_like(whole: Tensor | None, param: Tensor) -> Tensor | None:
    """What this rank holds of `whole` when it is laid out like `param`. No communication.

    A `_StridedShard` cuts what the axes to its right have left, so it is applied after all others.
    """
    if whole is None or not isinstance(param, DTensor):
        return whole
    cuts = [(axis, p) for axis, p in enumerate(param.placements) if isinstance(p, (Shard, _StridedShard))]
    for axis, placement in sorted(cuts, key=lambda cut: isinstance(cut[1], _StridedShard)):
        chunks = whole.chunk(param.device_mesh.size(axis), placement.dim)
        index = param.device_mesh.get_local_rank(axis)
        whole = chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


def assert_same(
    what: str, actual: Tensor | None, expected: Tensor | None, exact: bool, rtol: float, atol: float
) -> None:
    """Equal bit by bit, or within the tolerance; None only equals None."""
    assert (actual is None) == (expected is None), f"{what}: got {actual}, expected {expected}"
    if actual is None or expected is None:
        return
    assert_close(
        actual.detach(),
        expected.detach(),
        rtol=0 if exact else rtol,
        atol=0 if exact else atol,
        msg=lambda text: f"{what} ({'exact' if exact else 'close'}): {text}",
    )


def mean_gradients(model: nn.Module, world_size: int, backward: Callable[[nn.Module, int], Any]) -> Gradients:
    """Run `backward(model, rank)` for every rank; the mean gradient by name (None where no rank had one)."""
    total: Gradients = {name: None for name, _ in model.named_parameters()}
    previous = {name: param.grad for name, param in model.named_parameters()}
    for rank in range(world_size):
        for param in model.parameters():
            param.grad = None
        backward(model, rank)
        for name, param in model.named_parameters():
            if param.grad is not None:
                so_far = total[name]
                total[name] = param.grad if so_far is None else so_far + param.grad
    for name, param in model.named_parameters():
        param.grad = previous[name]
    return {name: None if grad is None else grad / world_size for name, grad in total.items()}


def assert_gradients(model: nn.Module, expected: Gradients, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """This rank's gradients of a sharded model against `mean_gradients` of the plain one."""
    for name, param in model.named_parameters():
        wanted = shard_like(expected[name], param)
        assert_same(f"gradient of {name}", local(param.grad), wanted, False, rtol, atol)


Backward = Callable[[nn.Module, int, int], Tensor]


def one_batch(model: nn.Module, step: int, rank: int) -> Tensor:
    """Forward and backward of one batch; the loss."""
    first = next(model.parameters())
    loss = model(batch(step, rank, dtype=first.dtype)).float().square().mean()
    loss.backward()
    return loss.detach()


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warning that a unit's output is a view, as every `to_local` of a DTensor is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        yield


@dataclass
class Race:
    """The same training by fsdp2, by torch's FSDP2 and (unless `plain` is off) by one process, compared at every step.

    Attributes:
        build: makes the model; called once, then copied.
        shard: `shard(api, model)` shards in place, `api` being the `fsdp2` or the torch module.
        backward: `backward(model, step, rank)` runs forward and backward and returns the loss.
        exact: fsdp2 and torch must agree bit by bit (the order of all sums is the same).
        torch: off where torch's FSDP2 cannot run the case.
        rtol: tolerance where they need not agree exactly; the plain model is always compared with it.
        by_norm: hold the norm of a difference, not each element, against the tolerance (where elements may cancel).
    """

    rank: int
    world_size: int
    build: Callable[[], nn.Module]
    shard: Callable[[ModuleType, nn.Module], Any]
    backward: Backward = one_batch
    optim: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = field(
        default=lambda params: torch.optim.Adam(params, lr=1e-2)
    )
    exact: bool = False
    torch: bool = True
    plain: bool = True
    by_norm: bool = False
    rtol: float = 1e-4
    atol: float = 1e-5

    @quiet()
    def run(self, steps: int) -> nn.Module:
        """Train; returns the model that fsdp2 trained."""
        plain = self.build()
        ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
        self.shard(fsdp2, ours)
        if self.torch:
            self.shard(torch_fsdp, theirs)
        models = [ours, *([theirs] if self.torch else []), *([plain] if self.plain else [])]
        optims = [self.optim(model.parameters()) for model in models]
        for step in range(steps):
            loss = self.backward(ours, step, self.rank)
            if self.torch:
                their_loss = self.backward(theirs, step, self.rank)
                self._same(f"loss of step {step}, against torch", loss, their_loss, self.exact)
                self._compare_with_torch(f"step {step}", ours, theirs)
            if self.plain:
                self._compare_with_plain(f"step {step}", ours, plain, loss, step)
            for optim in optims:
                optim.step()
                optim.zero_grad(set_to_none=step % 2 == 0)
        for (name, param), plain_param in zip(ours.named_parameters(), plain.parameters(), strict=True):
            whole = full(param)
            assert whole.shape == plain_param.shape, name
            if self.plain:
                self._same(f"after training: {name}, against one process", whole, plain_param, False)
        return ours

    def _same(self, what: str, actual: Tensor | None, expected: Tensor | None, exact: bool) -> None:
        if exact or not self.by_norm or actual is None or expected is None:
            assert_same(what, actual, expected, exact, self.rtol, self.atol)
            return
        error, size = (actual - expected).norm().item(), expected.norm().item()
        assert error <= self.rtol * size + self.atol, (
            f"{what}: the norm of the error is {error}, that of the value {size}"
        )

    def _compare_with_torch(self, when: str, ours: nn.Module, theirs: nn.Module) -> None:
        pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
        for (name, param), (their_name, their_param) in pairs:
            assert name == their_name
            assert (type(param.grad), local(param).shape) == (type(their_param.grad), local(their_param).shape), name
            self._same(
                f"{when}: gradient of {name}, against torch", local(param.grad), local(their_param.grad), self.exact
            )
            self._same(f"{when}: {name}, against torch", local(param), local(their_param), self.exact)

    def _compare_with_plain(self, when: str, ours: nn.Module, plain: nn.Module, loss: Tensor, step: int) -> None:
        losses = []
        mean = mean_gradients(
            plain, self.world_size, lambda model, rank: losses.append(self.backward(model, step, rank))
        )
        self._same(f"{when}: loss, against one process", loss, losses[self.rank], False)
        for (name, param), (_, plain_param) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
            if (new := mean[name]) is not None:
                plain_param.grad = new if plain_param.grad is None else plain_param.grad + new
            wanted = shard_like(plain_param.grad, param)
            self._same(f"{when}: gradient of {name}, against one process", local(param.grad), wanted, False)
            self._same(f"{when}: {name}, against one process", local(param), shard_like(plain_param, param), False)


def count(log: Iterable[fsdp2.events.Event], *kinds: str) -> dict[str, int]:
    """How often each kind happened."""
    names = [event.kind for event in log]
    return {kind: names.count(kind) for kind in kinds}
