"""Waits, records and keep-alives of the library, taken out one at a time on the lagging device.

The list is that of the race detector (`races/mutants.py`), and some more in what the detector has stand-ins for.
A mutant is found if training or a scenario gives other numbers than on the CPU, or an error, under one of the seeds.
"""

import torch
import torch.distributed as dist

from tests.helpers.mutants import Mutant
from tests.helpers.ranks import RanksFailed, run_on_ranks
from tests.instruments.device import lagging
from tests.instruments.device.ranks import SEEDS
from tests.instruments.device.scenarios import SCENARIOS
from tests.instruments.device.training import ON_FOUR, differs, expected_of
from tests.instruments.races.mutants import MEMORY, MUTANTS

__all__ = ["MUTANTS_HERE", "found"]

# What has the same at stake here as a mutant's program, where that is not a feature or a scenario, or not the only one.
TRAININGS: dict[str, tuple[str, ...]] = {
    "plain": ("plain", "coalesced"),
    "mixed precision, coalesced": ("coalesced",),
    "16 bits on the wire, coalesced": ("16 bits on the wire",),
    "replicas, reduced in 16 bits": ("replicas, reduced in 16 bits", "replicas, mixed precision"),
    "offload": ("offload", "offload, mixed precision"),
    "stepped_aside": ("states in host memory", "states in host memory, stepped in backward"),
    "staged_states": ("states in host memory, loaded", "states in host memory, zeroed"),
    "stepped_by_host": ("states and gradients in host memory", "all in host memory"),
    "activations": ("activations", "activations, in part"),
    "states_on_disk": ("states on disk, looked at", "states on disk", "states on disk, all else in host memory"),
    "saved": ("saved", "saved in the background"),
    "saved twice": ("saved twice in the background",),
    "ring": ("context parallel",),
}

DISK = "optim.on_disk"

MORE: tuple[Mutant, ...] = (
    Mutant(
        "streams: nobody waits",
        "runtime.streams",
        "() == self._device.index:\n            event.wait()\n",
        "() == self._device.index:\n            pass\n",
        "plain",
    ),
    Mutant(
        "streams: events are those of the default stream",
        "runtime.streams",
        "torch.accelerator.current_stream(self._device).record_event()",
        "torch.Stream(self._device).record_event()",
        "plain",
    ),
    Mutant(
        "release: one unit more is kept",
        MEMORY,
        "while self.released and (prefetching or self.released[0][2] != self.released[-1][2]):",
        "while len(self.released) > (1 if prefetching else 2):",
        "two units",
    ),
    Mutant(
        "checkpoint: a background save does not wait for its copies",
        "checkpoint.run.background",
        "    wait_for(ends)",
        "    pass",
        "saved in the background",
    ),
    Mutant(
        "checkpoint: nobody waits for the device",
        "checkpoint.io.memory",
        "            torch.accelerator.current_stream(device).record_event().synchronize()",
        "            pass",
        "saved",
    ),
    Mutant(
        "checkpoint: values are read before the step has come",
        "checkpoint.saving",
        "        _wait_for({entry.local.device for entry in every})\n",
        "        pass\n",
        "saved",
    ),
    Mutant(
        "checkpoint: values are loaded while the device writes",
        "checkpoint.loading",
        "                wait_for({need.entry.local.device for need in matching.needs})\n",
        "                pass\n",
        "loaded",
    ),
    Mutant(
        "checkpoint: a copy to the host does not block",
        "checkpoint.io.memory",
        ".copy_(part_of(values, box))",
        ".copy_(part_of(values, box), non_blocking=True)",
        "saved",
    ),
    Mutant(
        "checkpoint: a save does not wait for the one before",
        "checkpoint.saving",
        "        in_flight.settle()  # report",
        "        pass  # report",
        "saved twice",
    ),
    Mutant(
        "step: nobody waits until it has been given to the device",
        "optim.offloaded_part",
        "            future.result()\n",
        "            pass\n",
        "stepped_aside",
    ),
    Mutant(
        "disk: files are written while the device copies",
        DISK,
        "self._there.to(HOST)",
        "self._there.to(HOST, non_blocking=True)",
        "states_on_disk",
    ),
    Mutant(
        "disk: what is read is not waited for",
        DISK,
        "        wait(self._begun)\n        for read in self._begun:\n            read.result()\n",
        "",
        "states_on_disk",
    ),
    Mutant("disk: it is read before it has been written", DISK, "wait([self._written])", "pass", "states_on_disk"),
    Mutant(
        "disk: memory is freed while it is written",
        DISK,
        "            wait(writes)\n            for write in writes:\n                write.result()\n",
        "",
        "states_on_disk",
    ),
    Mutant(
        "disk: who looks does not wait",
        DISK,
        '        """Read some bytes, after the step is complete."""\n        self._wait()\n',
        "",
        "states_on_disk",
    ),
    Mutant("disk: there is always room", DISK, "        _threads().room.acquire()\n", "", "states_on_disk"),
    Mutant("ring attention: messages are not waited for", "parallel.ring_attention", "work.wait()", "pass", "ring"),
    Mutant(
        "agree_on_step: what others have begun is not waited for",
        "watch.joint_step",
        "            finish()\n",
        "            pass\n",
        "bad batch",
    ),
)

# They change no number here. The gather writes the values that compute reads there, for between steps it waits for
# compute. What is copied to the host too late is not used. The CPU's messages are not used.
NOT_HERE = {
    "gather: no wait for kept memory",
    "release: taken back without a wait",
    "activations: used and freed while a copy reads them",
    "comm: messages are not waited for",
    "comm: the sum is gathered before it is there",
}
# Mutants that something else shows than the program of the detector.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "gather: no room is made": ("two units",),
    "offload: the host does not wait after a forward without gradients": ("offload, evaluated",),
}

MUTANTS_HERE = tuple(mutant for mutant in (*MUTANTS, *MORE) if mutant.name not in NOT_HERE)


def names_of(mutant: Mutant) -> tuple[str, ...]:
    """The features and scenarios that run with the mutant."""
    return ELSEWHERE.get(mutant.name, TRAININGS.get(mutant.program, (mutant.program,)))


def body(rank: int, world_size: int, index: int) -> str:
    """What differs with the mutant, as all ranks see it; "" under no seed. Errors, and what scenarios assert, are
    raised."""
    mutant = MUTANTS_HERE[index]
    names = names_of(mutant)
    expected = {name: expected_of(name, rank, world_size) for name in names if name not in SCENARIOS}
    with mutant.planted():
        for seed in range(SEEDS):
            for name in names:
                if name in SCENARIOS:
                    SCENARIOS[name](rank, world_size, seed)
                    continue
                text = differs(name, rank, world_size, seed, expected[name])
                wrong = torch.tensor([float(bool(text))])
                dist.all_reduce(wrong)
                if wrong.item():
                    return f"{name}, seed {seed}: {text or 'another rank'}"
    return ""


def num_ranks(mutant: Mutant) -> int:
    return 4 if any(name in ON_FOUR for name in names_of(mutant)) else 2


def found(mutant: Mutant) -> str:
    """What is wrong with the mutant; ranks that hang or die count too. "" for one that survives."""
    ranks, index = num_ranks(mutant), MUTANTS_HERE.index(mutant)
    try:
        answers: list[str] = run_on_ranks(body, ranks, index=index, timeout_s=100, device=lagging.__name__)
    except RanksFailed as error:
        return f"raised: {last_line(str(error))}"
    return answers[0]


def last_line(text: str) -> str:
    """The error of a rank, without its traceback."""
    lines = [line for line in text.splitlines() if "Error" in line or "hung" in line or "died" in line]
    return lines[-1] if lines else text[:200]
