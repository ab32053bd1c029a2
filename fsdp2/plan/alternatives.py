"""`compare`: plans with one setting changed, and the change that helps most. Layer: plan."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp2.extras.zero import ZeroPolicy
from fsdp2.parallel import ParallelConfig
from fsdp2.plan.machine import Machine
from fsdp2.plan.prediction import Plan, amount, duration, name_of
from fsdp2.plan.rehearsal import predict
from fsdp2.plan.workload import Workload

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """Several plans of one workload.

    Attributes:
        asked: the requested plan.
        plans: all plans: first those that fit, then the others, each sorted by time per token.
        failed: changes that could not be planned, with the reasons.
    """

    asked: Plan
    plans: Sequence[Plan]
    failed: Sequence[tuple[str, str]]

    @property
    def best(self) -> Plan | None:
        """The fastest plan that fits."""
        return self.plans[0] if self.plans[0].fits else None

    @property
    def advice(self) -> str:
        """What to do, in a sentence or two."""
        if self.best is self.asked:
            return "Of these, what you asked for is the fastest that fits."
        if self.best is not None:
            gain = f"{_rate(self.best) / _rate(self.asked) - 1:+.0%} tokens/s, " if self.asked.fits else ""
            does_not = "" if self.asked.fits else "What you asked for does not fit. "
            return f"{does_not}Choose '{self.best.name}': {gain}peak {amount(self.best.device_bytes)}."
        least = min(self.plans, key=lambda plan: plan.device_bytes)
        saved = self.asked.device_bytes - least.device_bytes
        if not saved:
            return "Nothing here fits, and no change of one setting takes less memory. Use more ranks."
        return f"Nothing here fits. '{least.name}' saves most: {amount(saved)}. Change more, or use more ranks."

    @property
    def line(self) -> str:
        """For a run's start: ``402 M parameters in 26 units over 8 ranks; peak 11.2 GiB of 79.1 GiB predicted.
        Choose 'shard 8, bf16, 1 x 2': +31% tokens/s, peak 9.4 GiB.``"""
        peak = f"peak {amount(self.asked.device_bytes)} of {amount(self.asked.machine.memory)} predicted"
        return f"{self.asked.size}; {peak}. {self.advice}"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("settings", "tokens/s", "step", "exposed", "peak", "host", "")]
        for plan in self.plans:
            host = amount(plan.host_bytes) if plan.host_bytes else ""
            times = f"{_rate(plan):,.0f}", duration(plan.seconds), duration(plan.exposed)
            rows.append((plan.name, *times, amount(plan.device_bytes), host, "" if plan.fits else "does not fit"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [f"{name}: cannot be planned: {why}" for name, why in self.failed]
        return "\n".join([*lines, "", self.advice])


def _rate(plan: Plan) -> float:
    """Tokens per second per rank. The ranks of a tensor-parallel group process the same tokens, and share them here."""
    return plan.tokens_per_second / plan.config.tensor


def changes(plan: Plan) -> Iterator[tuple[Workload, ParallelConfig, Mapping[str, Any]]]:
    """Workloads, configs and options that differ from `plan` in one setting."""
    workload, config, machine, options = plan.workload, plan.config, plan.machine, plan.options
    for wanted in ("none", "selective", "full"):
        yield workload, replace(config, activation_checkpointing=wanted), options
    if config.degrees["shard"] > 1:
        yield workload, replace(config, reshard_after_forward=False), options
    if config.mixed_precision == "no":
        yield workload, replace(config, mixed_precision="bf16"), options
    if machine.is_accelerator:
        yield workload, replace(config, cpu_offload=not config.cpu_offload, offload="none"), options
        for offload in ("none", "states", "gradients", "all"):
            yield workload, replace(config, cpu_offload=False, offload=offload), options
    whole, node = config.degrees["replicate"] * config.degrees["shard"], machine.ranks_per_node
    if whole > node and whole % node == 0:
        yield workload, replace(config, replicate=whole // node, shard=node), options
    yield workload, replace(config, replicate=1, shard=whole), options
    if "tp_plan" in options:
        for tensor in (1, 2, 4, 8):
            if config.world_size % tensor == 0 and tensor <= node:
                yield workload, replace(config, tensor=tensor, replicate=1, shard="auto"), options
    if workload.batch_size % 2 == 0:
        half = replace(workload, batch_size=workload.batch_size // 2, microbatches=2 * workload.microbatches)
        yield half, config, options
    if workload.microbatches % 2 == 0:
        double = replace(workload, batch_size=2 * workload.batch_size, microbatches=workload.microbatches // 2)
        yield double, config, options
    if config.degrees["shard"] > 1 and config.reshard_after_forward is None and "zero" not in options:
        for stage in (2, 1) if workload.microbatches > 1 else (2,):  # they differ in what waits between backwards
            yield workload, config, {**options, "zero": ZeroPolicy(stage=stage)}
    if machine.is_accelerator and "activation_budget" not in options:
        yield workload, config, {**options, "activation_budget": 0}


def compare(
    workload: Workload, config: ParallelConfig, machine: Machine, world_size: int, **options: Any
) -> Comparison:
    """Plan `config`, and the configs that differ from it in one setting: checkpointing, the stage of ZeRO,
    `reshard_after_forward`, precision, offload (of states, gradients, parameters, activations), replicas, tensor
    parallelism (with a `tp_plan`) and the size of microbatches.

    It has the arguments and errors of `predict`, and takes as long as fifteen calls of that. Configs that cannot be
    planned are listed with the reason.

    Example::

        comparison = compare(workload, ParallelConfig.load("run.toml"), MACHINES["h100"], world_size=64)
        print(comparison)
        print(comparison.best)
    """
    asked = predict(workload, config, machine, world_size, **options)
    plans, failed, seen = [asked], [], {asked.name}
    for other_workload, other, chosen in changes(asked):
        name = name_of(other_workload, other.resolve(world_size), chosen)
        if name in seen:
            continue
        seen.add(name)
        try:
            plans.append(predict(other_workload, other, machine, world_size, **chosen))
        except Exception as error:  # also the model's own errors: it may not allow the change
            failed.append((name, str(error)))
    plans.sort(key=lambda plan: (not plan.fits, -float(f"{_rate(plan):.6g}")))  # stable for equal ones
    return Comparison(asked, plans, failed)
