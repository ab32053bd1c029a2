"""Detects replicas that start from different parameters, before the first forward. Layer: checks.

Reductions do not make replicas equal if they start out different. Ranks that built their models from different seeds,
or loaded different files, silently train different models, and each loss falls. So one checksum per unit is compared
once over the replicate axis, and one flag is exchanged over the shard axis, so that all ranks learn the result.

Along a shard axis no two ranks hold the same data. There `fully_shard` records the first values of each whole
parameter, and the first forward compares them through the store, unless the shards have changed since.
"""

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp2._torch import local_tensor
from fsdp2._torch.shared import is_fake
from fsdp2.errors import ArgumentError
from fsdp2.mesh import MeshRoles
from fsdp2.runtime.bucket import Bucket
from fsdp2.runtime.geometry import is_wrapper
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.step import Step
from fsdp2.watch.exchange import Exchange, at_once
from fsdp2.watch.trail import trail_of
from fsdp2.watch.watchdog import watchdog

_WORD = 8  # bytes
_MOST_COMPARED = 1000  # parameters; the store takes values of some MiB
# Samples of each whole parameter and of this rank's shard, from when it was sharded.
_samples: WeakKeyDictionary[ManagedParameter, tuple[torch.Tensor, torch.Tensor | None]] = WeakKeyDictionary()
_num_compared: Counter[str] = Counter()


@dataclass(frozen=True)
class _Replicated:
    """Groups on one mesh that has replicas."""

    roles: MeshRoles
    groups: list[Bucket]

    def find_differences(self) -> str:
        """A description of the differences; "" if there are none. Collective over the mesh, with the same result on all
        its ranks."""
        ours = _differing(self.roles, [[_checksum(param) for param in group.params] for group in self.groups])
        flag = torch.tensor([len(ours)], device=self.roles.device)
        shard_group = self.roles.shard_group
        if shard_group is not None:
            exchange = Exchange("comparison of replicas", None, shard_group, device=flag.device)
            with at_once(exchange):
                dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=shard_group)
        if not flag.item():
            return ""
        lines = self._describe([self.groups[index] for index in ours])
        if shard_group is None:
            return "; ".join(lines)
        all_lines: list[list[str]] = [[] for _ in range(self.roles.shard_size)]
        dist.all_gather_object(all_lines, lines, group=shard_group)
        return "; ".join(dict.fromkeys(line for lines in all_lines for line in lines))

    def _describe(self, groups: Sequence[Bucket]) -> list[str]:
        """Which parameters differ between this rank's replicas, and on which ranks."""
        if not groups:
            return []
        params = [param for group in groups for param in group.params]
        differing = _differing(self.roles, [[_checksum(param)] for param in params])
        ranks = dist.get_process_group_ranks(self.roles.replicate.group)
        lines = []
        for index in list(differing)[:5]:
            others = [ranks[other] for other in differing[index]]
            lines.append(f"'{params[index].fqn}' of rank {ranks[0]} differs on {_ranks(others)}")
        return [*lines, "..."] if len(differing) > 5 else lines


def check_root(step: Step) -> None:
    """Compare the initial parameters of the ranks of a new root. Raises and warns as the two functions below."""
    groups = [group for unit in step.units for group in unit.groups]
    check_replicas(groups)
    warn_of_different_models(groups)


def check_replicas(groups: Sequence[Bucket]) -> None:
    """Compare the sharded parameters of `groups` over their replicate axes. Collective over their meshes.

    Raises:
        ArgumentError: replicas differ; raised on all ranks of the mesh.
    """
    by_roles: dict[MeshRoles, _Replicated] = {}
    for group in groups:
        if group.roles.replicate_size == 1 or group.roles.sharded_replicas or is_fake(group.params[0].flat):
            continue
        by_roles.setdefault(group.roles, _Replicated(group.roles, [])).groups.append(group)
    with torch.no_grad():
        # Compare all meshes before raising: ranks of one may wait for those of another.
        found = [text for each in by_roles.values() if (text := each.find_differences())]
    if found:
        raise ArgumentError(
            f"the first forward: replicas start from different parameters: {'; '.join(found)}. Training would not make "
            "them equal. Build the model from the same seed on every rank (torch.manual_seed(0) before it), load the "
            "same checkpoint everywhere, or broadcast the sharded parameters over the replicate axis."
        )


def sample_of(data: torch.Tensor) -> torch.Tensor | None:
    """The first bytes of a whole parameter, which should be equal on all ranks; None if they cannot be read."""
    if data.is_meta or not data.numel() or is_wrapper(data) or is_fake(data):
        return None
    row = data.detach()[(0,) * (data.ndim - 1)] if data.ndim else data.detach().view(1)
    return row[:8].clone(memory_format=torch.contiguous_format).view(torch.uint8)


def note_sample(param: ManagedParameter, data: torch.Tensor) -> None:
    """Record samples of a parameter that has been sharded; `data`: its whole values."""
    if param.roles.shard_group is not None and (sample := sample_of(data)) is not None:
        _samples[param] = sample, sample_of(param.flat[: param.geometry.local_numel])


def warn_of_different_models(groups: Sequence[Bucket]) -> None:
    """Warn if another rank of a shard axis has sharded other values. Parameters whose shard has changed since
    (initialised again, or loaded) are skipped."""
    if (dog := watchdog()) is None:
        return
    by_group: dict[dist.ProcessGroup, dict[str, list[int]]] = {}
    for param in [param for group in groups for param in group.params if param in _samples]:
        whole, before = _samples.pop(param)
        now = sample_of(param.flat[: param.geometry.local_numel])
        assert param.roles.shard_group is not None
        values = by_group.setdefault(param.roles.shard_group, {})
        is_same = before is not None and now is not None and before.tolist() == now.tolist()
        if is_same and len(values) < _MOST_COMPARED:
            values[param.fqn] = whole.tolist()
    for process_group, values in by_group.items():
        model = repr([(param.fqn, param.layout.shape) for group in groups for param in group.params])
        key = f"model/{trail_of(process_group).name}/{blake2b(model.encode(), digest_size=8).hexdigest()}"
        _num_compared[key] += 1
        mine = dist.get_rank(), values
        with suppress(RuntimeError):  # the store is gone
            other, theirs = json.loads(dog.board.claim(f"{key}/{_num_compared[key]}", json.dumps(mine)))
            differing = [fqn for fqn, value in values.items() if theirs.get(fqn, value) != value]
            if differing:
                warnings.warn(
                    f"the first forward: rank {mine[0]} has sharded other values than rank {other} (of "
                    f"'{differing[0]}'), and each keeps its own rows. Build the model from the same seed on every "
                    "rank (torch.manual_seed(0) before it), or load a checkpoint.",
                    stacklevel=2,
                )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _differing(roles: MeshRoles, checksums: Sequence[Sequence[torch.Tensor]]) -> dict[int, list[int]]:
    """For each list of checksums that differs from the first replica's: its index, and the replicas that differ."""
    ours = torch.stack([_combined(each) for each in checksums]).to(roles.device)
    gathered = [ours.clone() for _ in range(roles.replicate_size)]  # a fake process group does not change them
    exchange = Exchange("comparison of replicas", None, roles.replicate.group, len(ours), device=ours.device)
    with at_once(exchange):
        dist.all_gather(gathered, ours, group=roles.replicate.group)
    table = torch.stack(gathered)
    differs = (table != table[0]).T.tolist()
    return {index: [rank for rank, other in enumerate(row) if other] for index, row in enumerate(differs) if any(row)}


def _combined(checksums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine several checksums into one number that depends on their order."""
    weights = torch.arange(1, 2 * len(checksums), 2, device=checksums[0].device)
    return (torch.stack(list(checksums)) * weights).sum()


def _checksum(param: ManagedParameter) -> torch.Tensor:
    """The sum of the shard's bits as 64-bit integers, with wraparound; one pass at memory speed."""
    flat = param.flat[: param.geometry.local_numel]
    if is_wrapper(local_tensor(param.sharded)) or is_wrapper(flat):
        return torch.zeros((), dtype=torch.int64, device=param.plan.home)  # only its own operators may read its memory
    data = flat.view(torch.uint8)
    whole = data.numel() // _WORD * _WORD
    if data.storage_offset() % _WORD or data.data_ptr() % _WORD:
        data = data.clone()
    return data[:whole].view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64)
