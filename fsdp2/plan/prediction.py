"""`Plan`: the predicted step of one rank, in bytes and seconds. Layer: plan."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp2.events import Event
from fsdp2.parallel import ParallelConfig
from fsdp2.plan.machine import Machine
from fsdp2.plan.workload import Workload
from fsdp2.trace.timeline import Sample, Timeline

__all__ = ["Plan", "amount", "duration", "name_of"]


@dataclass(frozen=True)
class Plan:
    """The predicted step of one rank.

    Attributes:
        workload, machine: what runs, and on what.
        config: the resolved config.
        options: the options passed to `predict`.
        events: what the runtime reported, in order.
        sent: bytes that this rank sends, by the kind of collective; ``tensor parallel`` for those of DTensor.
        timeline: what ran when, and bytes by kind in device memory; for `fsdp2.trace`.
        host_samples: bytes by kind in host memory.
        seconds: the time of the step.
        exposed: the part of it in which compute waited for communication, copies, or steps on the host.
        num_params: elements of all parameters of the whole model.
        num_units: units with parameters.
        num_groups: process groups used for communication.
        tokens: elements of the first tensor of all microbatches of this rank.
    """

    workload: Workload
    config: ParallelConfig
    machine: Machine
    options: Mapping[str, Any]
    events: Sequence[Event]
    sent: Mapping[str, int]
    timeline: Timeline
    host_samples: Sequence[Sample]
    seconds: float
    exposed: float
    num_params: int
    num_units: int
    num_groups: int
    tokens: int

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def peak(self) -> Sample:
        """The moment with the most bytes in tensors on the device: bytes by kind."""
        return max(self.timeline.samples, key=lambda sample: sample.total)

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        """The use of device memory at the peak: tensors by kind, context, communicators."""
        communicators = self.machine.communicator * self.num_groups
        return {**self.peak.nbytes, "context": self.machine.context, "communicators": communicators}

    @property
    def device_bytes(self) -> int:
        """The sum of `peak_bytes`."""
        return sum(self.peak_bytes.values())

    @property
    def host_bytes(self) -> int:
        """The most bytes in host memory, for this rank."""
        return max(sample.total for sample in self.host_samples)

    @property
    def fits(self) -> bool:
        """Whether this is less than the machine has."""
        return self.device_bytes <= self.machine.memory

    # --- communication and time ---------------------------------------------------------------------------------------

    @property
    def collectives(self) -> Mapping[str, int]:
        """The number of collectives of each kind."""
        return Counter(event.kind for event in self.events if event.group_size)

    @property
    def tokens_per_second(self) -> float:
        """Tokens that one rank processes per second. (Ranks of a tensor-parallel group process the same ones.)"""
        return self.tokens / self.seconds

    # --- in words -----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Its distinctive settings: ``shard 8, full checkpointing``."""
        return name_of(self.workload, self.config, self.options)

    @property
    def size(self) -> str:
        """``402 M parameters in 26 units over 8 ranks``."""
        ranks = f"{self.config.world_size} rank{'s' * (self.config.world_size > 1)}"
        millions = self.num_params / 1e6
        return f"{millions:,.{0 if millions >= 10 else 1}f} M parameters in {self.num_units} units over {ranks}"

    def __str__(self) -> str:
        lines = [
            f"{self.size} of {self.machine.name}: {self.name}",
            "",
            f"{'memory at the peak':32}{amount(self.device_bytes):>12} of {amount(self.machine.memory)}, "
            + ("fits" if self.fits else "DOES NOT FIT"),
        ]
        lines += [f"  {kind:30}{amount(nbytes):>12}" for kind, nbytes in self.peak_bytes.items() if nbytes]
        if self.host_bytes:
            lines.append(f"{'host memory':32}{amount(self.host_bytes):>12}")
        lines += ["", f"{'step':32}{duration(self.seconds):>12}, {self.tokens_per_second:,.0f} tokens/s a rank"]
        lines.append(f"  {'exposed communication':30}{duration(self.exposed):>12}")
        lines += ["", f"{'sent in a step':32}{amount(sum(self.sent.values())):>12}"]
        for kind, nbytes in self.sent.items():
            count = self.collectives.get(kind)
            lines.append(f"  {kind.replace('_', '-'):30}{amount(nbytes):>12}" + (f" in {count}" if count else ""))
        return "\n".join(lines)


def name_of(workload: Workload, config: ParallelConfig, options: Mapping[str, Any]) -> str:
    """The distinctive settings of a plan with a resolved config."""
    parts = [f"{name} {degree}" for name, degree in config.degrees.items() if degree > 1] or ["one rank"]
    every = {0: [], 1: ["full checkpointing"]}.get(config.checkpoint_every)
    parts += [f"checkpointing 1 of {config.checkpoint_every}"] if every is None else every
    if (zero := options.get("zero")) is not None and zero.stage < 3:
        parts.append(f"ZeRO {zero.stage}")
    if config.reshard_after_forward is not None:
        parts.append(f"reshard {config.reshard_after_forward}")
    parts += ["offload"] * config.cpu_offload
    parts += [f"offload {config.offload}"] * (config.offload != "none")
    if (budget := options.get("activation_budget")) is not None:
        parts.append("activations offloaded" + f" beyond {amount(budget)}" * (budget > 0))
    parts += [config.mixed_precision] * (config.mixed_precision != "no")
    return ", ".join([*parts, f"{workload.microbatches} x {workload.batch_size}"])


def amount(nbytes: float) -> str:
    """Bytes in a suitable unit: ``11.2 GiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Seconds in a suitable unit: ``12.3 ms``."""
    if seconds >= 1 or not seconds:
        return f"{seconds:.2f} s" if seconds else "0"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
