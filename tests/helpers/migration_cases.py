"""A model, its step and what is compared, in ours and in torch's DDP and FSDP1; and the tables of a document."""

from __future__ import annotations

import itertools
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp.wrap as torch_wrap
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

import fsdp2
from fsdp2 import auto_shard, events, fully_shard
from tests.helpers.parity_models import batch, full

DIM, LAYERS = 8, 3
MICROBATCHES = 5


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(path: Path) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(heading of level 2, header, rows) of each table."""
    section, lines = "", [*path.read_text(encoding="utf-8").splitlines(), ""]
    for index, line in enumerate(lines):
        if line.startswith("## "):
            section = line[3:]
        if re.fullmatch(r"\|(-+:?\|)+", line):
            rows = itertools.takewhile(lambda row: row.startswith("|"), lines[index + 1 :])
            yield section, cells(lines[index - 1]), [cells(row) for row in rows]


def stack(dim: int = DIM) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(LAYERS)))


def shard(model: nn.Module | None = None, **options: Any) -> Any:
    """Each child is a unit, and then the root; of `stack()` without a model."""
    model = stack() if model is None else model
    for child in model.children():
        fully_shard(child, **options)
    return fully_shard(model, **options)


def run(model: nn.Module, rank: int, index: int = 0) -> Tensor:
    """Forward and backward of one batch."""
    loss = model(batch(index, rank)).float().square().mean()
    loss.backward()
    return loss.detach()


def step_with_flag(model: Any, rank: int) -> None:
    """The microbatches of a step under a `ZeroPolicy`."""
    for index in range(MICROBATCHES):
        model.set_is_last_backward(index == MICROBATCHES - 1)
        run(model, rank, index)


def counts(log: list[events.Event]) -> dict[str, int]:
    return dict(Counter(event.kind for event in log if event.group_size))


def torch_counts(mode: CommDebugMode) -> dict[str, int]:
    """The same from torch's own count."""
    found: Counter[str] = Counter()
    for operation, times in mode.get_comm_counts().items():
        name = str(operation).replace("_", "")
        kind = next(kind for kind in ("all_gather", "reduce_scatter", "all_reduce") if kind.replace("_", "") in name)
        found[kind] += times
    return dict(found)


@contextmanager
def quiet() -> Iterator[None]:
    """torch's FSDP1 warns of itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fsdp1(model: nn.Module | None = None, **options: Any) -> Any:
    options.setdefault("auto_wrap_policy", torch_wrap.ModuleWrapPolicy({nn.Linear}))
    options.setdefault("use_orig_params", True)
    with quiet():
        return FullyShardedDataParallel(stack() if model is None else model, device_id=torch.device("cpu"), **options)


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Whole gradients in the order of the parameters, of ours, DDP's or FSDP1's."""
    sharded1 = isinstance(model, FullyShardedDataParallel)
    if not sharded1 or model.sharding_strategy is ShardingStrategy.NO_SHARD:
        return [None if param.grad is None else full(param.grad) for param in model.parameters()]
    with quiet(), FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def same(rank: int, ours: Any, theirs: Any, *, collectives: bool = True, tolerance: float = 1e-5) -> None:
    """One batch: the loss, the gradients with their dtypes, and how many collectives of each kind."""
    with events.record() as log:
        loss = run(ours, rank)
    mode = CommDebugMode()
    with quiet(), mode if collectives else nullcontext():
        their_loss = run(theirs, rank)
    assert_close(loss, their_loss, rtol=tolerance, atol=tolerance)
    for mine, other in zip(gradients(ours), gradients(theirs), strict=True):
        assert_close(mine, other, rtol=tolerance, atol=tolerance)
    if collectives:
        assert counts(log) == torch_counts(mode)


def units_of(report: fsdp2.WrapReport) -> list[str]:
    return [unit.fqn for unit in report.units]


class Net(nn.Module):
    """Two blocks of a small and a large layer."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(DIM, DIM), nn.Linear(DIM, 4 * DIM)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.large(self.small(x))).chunk(4, -1)[0]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Net.Block() for _ in range(2))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def their_units(policy: Any) -> list[str]:
    """The modules that FSDP1 wraps in `Net`, without its root."""
    model = fsdp1(Net(), auto_wrap_policy=policy)
    names = [name for name, module in model.named_modules() if isinstance(module, FullyShardedDataParallel)]
    return sorted(name.replace("_fsdp_wrapped_module.", "").replace("._fsdp_wrapped_module", "") for name in names[1:])


def our_units(policy: Any) -> list[str]:
    return sorted(units_of(auto_shard(Net(), policy, dry_run=True)))[1:]
