"""`predict` and `Plan`: what a step of one rank takes, in bytes and seconds. Layer: plan."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp2.parallel import ParallelConfig
from fsdp2.plan.machine import Machine
from fsdp2.plan.rehearsal import Rehearsal, rehearse
from fsdp2.plan.workload import Workload
from fsdp2.trace.timeline import Sample, Timeline

__all__ = ["Plan", "amount", "duration", "predict"]


def amount(nbytes: float) -> str:
    """Bytes in the unit that suits them: ``11.2 GiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them: ``12.3 ms``."""
    if seconds >= 1 or not seconds:
        return f"{seconds:.2f} s" if seconds else "0"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


@dataclass(frozen=True)
class Plan:
    """What a step of one rank takes.

    Attributes:
        config: resolved.
        machine: on which.
        batch_size, microbatches: of the workload.
        rehearsal: what the rank did, in order.
        options: of `predict`.
    """

    config: ParallelConfig
    machine: Machine
    batch_size: int
    microbatches: int
    rehearsal: Rehearsal
    options: Mapping[str, Any] = field(default_factory=dict)

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def peak(self) -> Sample:
        """The moment with the most bytes in tensors on the device, and what they are."""
        return max(self.rehearsal.samples, key=lambda sample: sample.total)

    @property
    def communicators(self) -> int:
        """Bytes of the communicators of all process groups that were used."""
        return self.machine.communicator * self.rehearsal.num_groups

    @property
    def device_bytes(self) -> int:
        """All that is taken of the device's memory at the peak: tensors, context, communicators."""
        return self.peak.total + self.machine.context + self.communicators

    @property
    def host_bytes(self) -> int:
        """The most bytes in host memory, on one rank."""
        return max(sample.total for sample in self.rehearsal.host_samples)

    @property
    def fits(self) -> bool:
        """Whether that is less than there is."""
        node = self.host_bytes * min(self.machine.ranks_per_node, self.config.world_size)
        enough = not self.machine.host_memory or node <= self.machine.host_memory
        return self.device_bytes <= self.machine.memory and enough

    # --- communication ------------------------------------------------------------------------------------------------

    @property
    def collectives(self) -> Mapping[str, int]:
        """How many collectives of each kind."""
        return Counter(event.kind for event in self.rehearsal.events if event.group_size)

    @property
    def sent(self) -> Mapping[str, int]:
        """Bytes that this rank sends, by the kind of collective."""
        found: Counter[str] = Counter()
        for message in self.rehearsal.messages:
            found[message.kind] += message.sent
        return found

    # --- time ---------------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.rehearsal.seconds

    @property
    def tokens_per_second(self) -> float:
        """Elements of the batch's first tensor that one rank goes through. (Ranks of one tensor-parallel group go
        through the same ones.)"""
        return self.rehearsal.tokens / self.seconds

    @property
    def timeline(self) -> Timeline:
        """For `fsdp2.trace`."""
        return Timeline(f"predicted: {self.name}", self.rehearsal.spans, self.rehearsal.samples)

    # --- in words -----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """What is special about it: ``shard 8, full checkpointing``."""
        degrees = [f"{name} {degree}" for name, degree in self.config.degrees.items() if degree > 1] or ["one rank"]
        every = {0: [], 1: ["full checkpointing"]}.get(self.config.checkpoint_every)
        degrees += [f"checkpointing 1 of {self.config.checkpoint_every}"] if every is None else every
        if (zero := self.options.get("zero")) is not None and zero.stage < 3:
            degrees.append(f"ZeRO {zero.stage}")
        if self.config.reshard_after_forward is not None:
            degrees.append(f"reshard {self.config.reshard_after_forward}")
        degrees += ["offload"] * self.config.cpu_offload
        degrees += [f"offload {self.config.offload}"] * (self.config.offload != "none")
        if (budget := self.options.get("activation_budget")) is not None:
            degrees.append("activations offloaded" + f" beyond {amount(budget)}" * (budget > 0))
        degrees += [self.config.mixed_precision] * (self.config.mixed_precision != "no")
        return ", ".join([*degrees, f"{self.microbatches} x {self.batch_size}"])

    @property
    def size(self) -> str:
        """``402 M parameters in 26 units over 8 ranks``."""
        ranks = f"{self.config.world_size} rank{'s' * (self.config.world_size > 1)}"
        millions = self.rehearsal.num_params / 1e6
        return (
            f"{millions:,.{0 if millions >= 10 else 1}f} M parameters in {self.rehearsal.num_units} units over {ranks}"
        )

    def __str__(self) -> str:
        done = self.rehearsal
        lines = [
            f"{self.size} of {self.machine.name}: {self.name}",
            "",
            f"{'memory at the peak':32}{amount(self.device_bytes):>12} of {amount(self.machine.memory)}, "
            + ("fits" if self.fits else "DOES NOT FIT"),
        ]
        shown = {**self.peak.nbytes, "context": self.machine.context, "communicators": self.communicators}
        lines += [f"  {kind:30}{amount(nbytes):>12}" for kind, nbytes in shown.items() if nbytes]
        if self.host_bytes:
            lines.append(f"{'host memory':32}{amount(self.host_bytes):>12}")
        lines += ["", f"{'step':32}{duration(self.seconds):>12}, {self.tokens_per_second:,.0f} tokens/s a rank"]
        lines.append(f"  {'exposed communication':30}{duration(done.exposed):>12}")
        lines += ["", f"{'sent in a step':32}{amount(sum(self.sent.values())):>12}"]
        for kind, nbytes in self.sent.items():
            count = self.collectives.get(kind)
            of = f" in {count}" if count else ""
            lines.append(f"  {kind.replace('_', '-'):30}{amount(nbytes):>12}{of}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: bytes and seconds, without the time line."""
        return {
            "name": self.name,
            "machine": self.machine.name,
            "world_size": self.config.world_size,
            "degrees": self.config.degrees,
            "parameters": self.rehearsal.num_params,
            "units": self.rehearsal.num_units,
            "fits": self.fits,
            "device_bytes": self.device_bytes,
            "peak": {**self.peak.nbytes, "context": self.machine.context, "communicators": self.communicators},
            "host_bytes": self.host_bytes,
            "seconds": self.seconds,
            "exposed_seconds": self.rehearsal.exposed,
            "tokens_per_second": self.tokens_per_second,
            "sent_bytes": dict(self.sent),
            "collectives": dict(self.collectives),
        }


def predict(
    workload: Workload, config: ParallelConfig, machine: Machine, world_size: int, rank: int = 0, **options: Any
) -> Plan:
    """What the second step of `rank` takes (the first one makes states and buffers).

    The library itself runs, on fake tensors and with ranks that do not exist: it needs no device, no process group and
    no memory for the model. It must be called before `init_process_group`, or in a process of its own.

    Args:
        workload: model, batch, loss and optimizer.
        config: the degrees and what is applied; ``shard="auto"`` is resolved against `world_size`.
        machine: one of `MACHINES`, or your own.
        options: of `parallelize`, such as `tp_plan`, `blocks` and `zero`; and `activation_budget`, the bytes of saved
            activations that `fsdp2.offload_activations` leaves on the device.

    With the config's `offload` the optimizer is that of `fsdp2.offload_optimizer`, of the workload's kind. Its step
    goes on beside the next forward, so the time is that from one step to the next.

    Raises:
        ArgumentError: the degrees do not fit (see `ParallelConfig`), or the model has no blocks.
        UnsupportedError: the model needs values (the message names the operator), or there are pipeline stages.
        OrderError: this process has a process group.

    Example::

        plan = predict(workload, ParallelConfig(mixed_precision="bf16"), MACHINES["h100"], world_size=512)
        print(plan)
        assert plan.fits
    """
    config = config.resolve(world_size)
    done = rehearse(workload, config, machine, world_size, rank, **options)
    return Plan(config, machine, workload.batch_size, workload.microbatches, done, options)
