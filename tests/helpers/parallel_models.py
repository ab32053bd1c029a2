"""What the tests of `fsdp2.parallel` share: a model, the combinations of degrees, and a race against one process.

In the race all ranks together work on one global batch a step: each data rank on its rows. The reference is the plain
model on the whole of it, in one process. Losses, gradients and parameters are compared at every step.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from fsdp2.parallel import Meshes, ParallelConfig, build_meshes, parallelize, shard_sequence
from tests.helpers.parity_models import full, local, shard_like
from tests.helpers.tp_models import quiet

VOCAB, DIM, HEADS, LENGTH, SEQUENCES = 16, 8, 4, 8, 8


class Attention(nn.Module):
    """Causal. Splits what it has into heads of a fixed size, so that it may have a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for layer in self._inputs()]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))

    def _inputs(self) -> Sequence[nn.Module]:
        return self.query, self.key, self.value


class DecoderBlock(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.up, self.down = nn.Linear(DIM, 12), nn.Linear(12, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Lm(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, VOCAB]. No positions: the causal mask alone tells rows apart."""

    def __init__(self, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(DecoderBlock() for _ in range(depth))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tensor_plan() -> dict[str, ParallelStyle]:
    """The usual one: what makes heads and hidden features by columns, what reads them by rows."""
    return {
        **{f"blocks.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }


# Every combination of degrees but pipelines, by the number of ranks.
COMBINATIONS: dict[int, list[dict[str, int]]] = {
    2: [{"shard": 2}, {"replicate": 2}, {"tensor": 2}, {"context": 2}],
    4: [
        {"shard": 4},
        {"replicate": 4},
        {"tensor": 4},
        {"replicate": 2, "shard": 2},
        {"shard": 2, "tensor": 2},
        {"replicate": 2, "tensor": 2},
        {"context": 4},
        {"shard": 2, "context": 2},
        {"replicate": 2, "context": 2},
        {"context": 2, "tensor": 2},
    ],
}


def name_of(degrees: dict[str, int]) -> str:
    return "-".join(f"{name}{degree}" for name, degree in degrees.items())


def config_of(degrees: dict[str, int], **more: Any) -> ParallelConfig:
    """The degrees given, and 1 for the others, `shard` included."""
    return ParallelConfig(**{"shard": 1, **degrees}, **more)


def global_batch(step: int) -> Tensor:
    """[SEQUENCES, LENGTH + 1] tokens: inputs and, one to the right, targets."""
    return torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def part_of(meshes: Meshes, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets of this rank: its data rank's sequences of the global batch, its context rank's tokens."""
    rows = batch.chunk(meshes.data_ranks)[meshes.data_rank]
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    if meshes.context is None:
        return inputs, targets
    return shard_sequence(inputs, meshes.context), shard_sequence(targets, meshes.context)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def mean_over(mesh: DeviceMesh, value: Tensor) -> Tensor:
    """The mean over the ranks of a 1-D mesh."""
    total = value.detach().clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total / mesh.size()


def race(
    config: ParallelConfig,
    build: Callable[[], nn.Module] = Lm,
    *,
    steps: int = 3,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    **options: Any,
) -> nn.Module:
    """Train with `parallelize(..., **options)` and in one process; returns the parallel model."""
    torch.manual_seed(0)
    plain = build()
    model = copy.deepcopy(plain)
    meshes = build_meshes(config, "cpu")
    options.setdefault("tp_plan", tensor_plan())
    parallelize(model, config, meshes=meshes, **options)
    optims = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (model, plain)]
    for step in range(steps):
        batch = global_batch(step)
        with quiet():
            loss = loss_of(model, *part_of(meshes, batch))
            loss.backward()
        expected = loss_of(plain, batch[:, :-1], batch[:, 1:])
        expected.backward()
        check(f"step {step}: loss", mean_over(meshes.loss, loss), expected, rtol, atol)
        for (name, param), (plain_name, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert name == plain_name
            check(f"step {step}: gradient of {name}", local(param.grad), shard_like(other.grad, param), rtol, atol)
        for optim in optims:
            optim.step()
            optim.zero_grad()
    for (name, param), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        check(f"trained: {name}", full(param), other, rtol, 10 * atol)
    return model


def check(what: str, actual: Any, expected: Any, rtol: float, atol: float) -> None:
    """Close, or an error that says what is not."""
    assert actual is not None and expected is not None, f"{what}: got {actual}, expected {expected}"
    assert_close(actual.detach(), expected.detach(), rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


@contextmanager
def compiling() -> Iterator[None]:
    """From a clean slate, without what dynamo reports that it does not trace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compiler.reset()
        counters.clear()
        try:
            yield
        finally:
            torch.compiler.reset()
