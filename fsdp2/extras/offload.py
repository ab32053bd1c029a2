"""`Offload`: optimizer state, gradients and parameters in host memory or in files. Layer: extras.

The core only knows the attributes of an `OffloadPolicy`: where parameters and gradients live. `fsdp2.optim` steps them.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from fsdp2.disk import mapped
from fsdp2.errors import ArgumentError
from fsdp2.extras.host_memory import host
from fsdp2.extras.simulation import simulation
from fsdp2.policies import OffloadPolicy, boolean
from fsdp2.runtime import hooks
from fsdp2.runtime.source import Around, Group, Source


@dataclass(frozen=True)
class Offload(OffloadPolicy):
    """Keep the optimizer's state, and optionally also gradients and sharded parameters, in host memory. Step with
    `offload_optimizer`, which keeps the state there and overlaps the step with compute.

    The step runs where the gradient lives; everything else is copied there and back. If there is an accelerator, host
    memory is page-locked, except for data read from files. Each setting includes those before it::

        Offload()                            state in host memory; the device steps, on copies of one unit's state
        Offload(grads=True)                  gradients too; the host steps a copy of the parameters
        Offload(grads=True, params=True)     everything: as `CPUOffloadPolicy`, with a step that overlaps
        Offload(tier="/nvme/0")              state in files; each of these may have a tier
        Offload(grads=True, params="files", tier="/nvme/0")     sharded parameters in files too

    Attributes:
        states: the optimizer's state lives in host memory.
        grads: sharded gradients live in host memory. Needs `states`.
        params: sharded parameters live in host memory; ``"files"``: in files of the `tier`, and only those of a few
            units are in memory. Needs `grads`.
        fraction: the part of each unit's bytes, 0 to 1, to which this applies: whole parameters, the largest first. The
            others stay on the device, and are gathered and reduced separately.
        overlap: `offload_optimizer` steps in the background. False: within ``step()``.
        tier: where the state is kept: ``"cpu"`` for host memory, or one or several folders for files, used in turn.
            With files the state of three units is in memory at a time. The files have no names, and disappear with the
            process.
        threads: threads of this rank that step in host memory, bound to their own cores if ``LOCAL_RANK`` and
            ``LOCAL_WORLD_SIZE`` are set and there are enough cores. None: as many as compute has, and not bound.

    Raises:
        ArgumentError: a setting without one that it needs, a fraction outside of 0 to 1, or fewer than one thread.
        OSError: (later, when parameters are allocated) a folder has no room for them.

    Example::

        for block in model.blocks:
            fully_shard(block, offload_policy=Offload(grads=True))
        fully_shard(model, offload_policy=Offload(grads=True))
        optimizer = fsdp2.offload_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)

    Source: ZeRO-Offload, https://arxiv.org/abs/2101.06840.
    """

    states: bool = True
    grads: bool = False
    params: bool | Literal["files"] = False
    fraction: float = 1.0
    overlap: bool = True
    threads: int | None = None
    tier: str | Path | Sequence[str | Path] = "cpu"

    def __post_init__(self) -> None:
        tiers = [self.tier] if isinstance(self.tier, (str, Path)) else self.tier
        are_paths = isinstance(tiers, (list, tuple)) and all(isinstance(each, (str, Path)) for each in tiers)
        if not are_paths or not tiers:
            raise ArgumentError(f"Offload: tier: expected 'cpu', a folder or a list of folders, got {self.tier!r}")
        if self.tier != "cpu":  # files are made later; the working directory may have changed by then
            object.__setattr__(self, "tier", tuple(map(os.path.abspath, tiers)))  # a tuple: policies are hashable
        for name in ("states", "grads", "overlap"):
            boolean(f"Offload: {name}", getattr(self, name))
        if self.params != "files":
            boolean("Offload: params", self.params)
        elif self.tier == "cpu":
            raise ArgumentError('Offload: params="files" needs a folder: tier="/a/fast/disk"; got tier="cpu"')
        if not self.states or (self.params and not self.grads):
            raise ArgumentError(
                f"Offload: gradients need states=True, and parameters grads=True; got states={self.states}, "
                f"grads={self.grads}, params={self.params}. For no offload leave offload_policy out."
            )
        if type(self.fraction) not in (int, float) or not 0 <= self.fraction <= 1:
            raise ArgumentError(f"Offload: fraction: expected a number from 0 to 1, got {self.fraction!r}")
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise ArgumentError(f"Offload: threads: expected a number of at least 1 or None, got {self.threads!r}")

    @property
    def folders(self) -> tuple[str, ...]:
        """Where the files are; empty without any."""
        tiers = (self.tier,) if isinstance(self.tier, (str, Path)) else self.tier
        return () if self.tier == "cpu" else tuple(map(str, tiers))

    @property
    def home(self) -> torch.device | None:
        """Where the sharded parameters live."""
        return host() if self.params else None

    @property
    def grad_home(self) -> torch.device | None:
        """Where their gradients live."""
        return host() if self.grads else None

    @property
    def pins(self) -> bool:
        """Whether host memory is page-locked."""
        return torch.accelerator.is_available()

    @property
    def in_files(self) -> bool:
        """Whether `home` is memory mapped from files. (A plan counts it as host memory.)"""
        return self.params == "files" and simulation() is None

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory in `home`, 1-D."""
        return mapped.zeros(numel, dtype, self.folders) if self.in_files else super().zeros(numel, dtype)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor on the device `home` is of the kind that `zeros` returns."""
        return not self.in_files or mapped.file_of(tensor) is not None

    def of_params(self, sizes: Sequence[int]) -> Sequence[OffloadPolicy]:
        """This policy for the largest parameters that fit into the fraction, and none for the others."""
        left = self.fraction * sum(sizes)
        policies = [OffloadPolicy() for _ in sizes]
        for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
            if sizes[index] <= left:
                left -= sizes[index]
                policies[index] = self
        return policies


class FileShards(Around):
    """The shards are in `files`, whose memory is released once they have been read."""

    def __init__(self, inner: Source, files: Sequence[mapped.MappedFile]):
        super().__init__(inner)
        self._files = mapped.ShardFiles(files)

    def start(self, group: Group) -> Callable[[], None]:
        self._files.check()
        finish = self.inner.start(group)
        self._files.used()
        return finish


def _with_files(source: Source, group: Group) -> Source:
    files = [file for flat in group.seen.flats if (file := mapped.file_of(flat)) is not None]
    return FileShards(source, files) if files else source


hooks.around_sources.append(_with_files)
