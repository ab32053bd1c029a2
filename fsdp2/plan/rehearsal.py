"""`predict`: runs a step of the real library with fake tensors, absent ranks and simulated time. Layer: plan.

So a plan cannot drift from the runtime: units, schedule, layouts, lanes and reductions are the runtime's own. Three
things are replaced: the ranks (`absent`), the time (`clock`), and the memory of an accelerator, for which fake CPU
tensors are used. (torch cannot make fake CUDA tensors without CUDA.) Host memory is then a second CPU device.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import events
from fsdp2._torch.plan import FAKE_ERRORS, FakeTensorMode, MemoryMode
from fsdp2._torch.shared import group_named
from fsdp2.comm.flat import NcclComm
from fsdp2.comm.gloo import GlooComm
from fsdp2.errors import UnsupportedError
from fsdp2.extras.activations import offload_activations
from fsdp2.extras.host_memory import standing_for_host
from fsdp2.extras.simulation import simulated
from fsdp2.module import FSDPModule
from fsdp2.optim.offloaded import OffloadedOptimizer, offload_optimizer
from fsdp2.optim.pending import PendingTensor
from fsdp2.parallel import ParallelConfig, build_meshes, parallelize
from fsdp2.parallel.blocks import units_of
from fsdp2.plan.absent import absent_ranks
from fsdp2.plan.clock import Clock
from fsdp2.plan.fake import build_on_meta, make_fake
from fsdp2.plan.machine import Machine, nbytes_of, seconds_of
from fsdp2.plan.memory import Kind, Memory
from fsdp2.plan.prediction import Plan, name_of
from fsdp2.plan.workload import Workload
from fsdp2.runtime.root import units_below
from fsdp2.runtime.tree import tensors_in
from fsdp2.trace.timeline import Timeline, follow

__all__ = ["predict"]

HOST = torch.device("cpu", 1)


def predict(
    workload: Workload, config: ParallelConfig, machine: Machine, world_size: int, rank: int = 0, **options: Any
) -> Plan:
    """Predict the second step of `rank` (the first one creates states and buffers).

    The library itself runs, with fake tensors and absent ranks: this needs no device, no process group and no memory
    for the model. Call it before `init_process_group`, or in a separate process.

    Args:
        workload: model, batch, loss and optimizer.
        config: the degrees and what is applied; ``shard="auto"`` is resolved against `world_size`.
        machine: one of `MACHINES`, or your own.
        options: options of `parallelize`, such as `tp_plan`, `blocks` and `zero`; and `activation_budget`, the bytes of
            saved activations that `fsdp2.offload_activations` leaves on the device.

    With the config's `offload`, the optimizer is one of `fsdp2.offload_optimizer`, of the workload's kind. Its step
    overlaps with the next forward, so the predicted time is that from one step to the next.

    Raises:
        ArgumentError: the degrees do not fit, or no module can be a unit (see `ParallelConfig`, `parallelize`).
        UnsupportedError: the model needs values (the message names the operator); or the config has pipeline stages,
            context parallelism, or state in files.
        OrderError: this process has a process group.

    Example::

        plan = predict(workload, ParallelConfig(mixed_precision="bf16"), MACHINES["h100"], world_size=512)
        print(plan)
        assert plan.fits
    """
    config = config.resolve(world_size)
    if config.pipeline > 1:
        raise UnsupportedError("plan: no pipelines; plan one stage as a model, with pipeline = 1")
    if config.context > 1:  # ring attention is one operator, which does not run inside under fake tensors
        raise UnsupportedError("plan: no context parallelism; plan with context = 1 and shorter sequences")
    if getattr(options.get("offload_policy"), "folders", ()):
        raise UnsupportedError("plan: no files; plan with tier='cpu', and subtract the state from host memory")
    comm = NcclComm() if machine.is_accelerator else GlooComm()
    model = build_on_meta(workload.build)
    with events.record() as log, warnings.catch_warnings():
        # Neighbours are found by their addresses; those of fake tensors are 0, so there are none.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        observer = Observer(machine, log)
        with (
            absent_ranks(world_size, rank, comm, observer.send),
            simulated(observer.clock),
            standing_for_host(HOST) if machine.is_accelerator else nullcontext(),
            FakeTensorMode(allow_non_fake_inputs=True),
            observer,
        ):
            try:
                return _rehearse(model, workload, config, observer, options)
            except FAKE_ERRORS as error:
                raise UnsupportedError(
                    f"plan: '{getattr(error, 'func', None) or error}' cannot run without the values of its inputs"
                ) from error


class Observer(MemoryMode):
    """Sees every operator, its cost and its storages. It is also the `Wire` of the absent ranks."""

    def __init__(self, machine: Machine, log: list[events.Event]) -> None:
        super().__init__()
        self.machine = machine
        self.clock = Clock(lazy=not machine.is_accelerator)
        self.memory = Memory(HOST)
        self.sent: Counter[str] = Counter()
        self.groups: set[dist.ProcessGroup] = set()
        self.phase = ""
        self.log = log
        self._num_seen = 0
        self._running: list[str] = []

    # --- operators ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor in types or PendingTensor in types:
            return NotImplemented  # it becomes operators of local tensors, which come here too
        if function.namespace == "prim" or getattr(function, "is_view", False):  # half of all: neither memory nor time
            return function(*args, **kwargs)
        function = self.as_without(function, args)
        self.tick()
        result = function(*args, **kwargs)
        name = function.__name__
        for leaf in tensors_in((args, kwargs, result)):
            self.memory.mark(leaf)
        if name.startswith("set_"):  # while stepping: states that are on the device for the time of their step
            self.memory.mark(result, Kind.STATES if self.clock.is_stepping else Kind.ACTIVATIONS, elastic=True)
        self.memory.tick += 1  # storages that die now were alive together with the result
        if function.namespace == "_c10d_functional":
            self._functional(name, args)
        else:
            self._compute(function, args, kwargs, result)
        return result

    def tick(self) -> None:
        """The next operator begins."""
        self.memory.tick += 1
        self.memory.seconds = self.clock.elapsed
        self.memory.record_sizes()

    def _compute(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors = tensors_in((args, kwargs, result))
        lane = "optimizer" if self.phase == "optimizer" else "compute"
        on_host = [tensor.device == HOST for tensor in tensors]
        if tensors and all(on_host):
            seconds = nbytes_of(tensors) / self.machine.host_memory_bandwidth
        elif any(on_host):
            seconds = max(tensor.numel() * tensor.element_size() for tensor in tensors) / self.machine.host_link
        else:
            seconds = seconds_of(self.machine, function, args, kwargs, result, tensors)
        self.clock.work(lane, self._label(), max(seconds, self.machine.op_seconds) if seconds else 0.0)

    def _label(self) -> str:
        """The unit whose forward or backward is running, by the events so far."""
        for event in self.log[self._num_seen :]:
            follow(self._running, event)
        self._num_seen = len(self.log)
        return self._running[-1] if self._running else self.phase

    # --- messages -----------------------------------------------------------------------------------------------------

    def send(
        self, kind: str, tensors: Sequence[torch.Tensor], nbytes: int, group: dist.ProcessGroup, both: bool
    ) -> Callable[[], None]:
        """See `Wire`."""
        for tensor in tensors:
            self.memory.mark(tensor, Kind.COMMUNICATION)
        # An all-reduce in messages sends its second half during the wait.
        issued = next((e for e in reversed(self.log) if e.group_size or e.kind.endswith("_wait")), None)
        unit = issued.unit if issued is not None and kind != "all_reduce" else ""
        if kind in ("send", "recv"):
            kind = issued.kind.removesuffix("_wait") if issued is not None else kind
        return self._send(kind, unit, nbytes, group, both)

    def _functional(self, name: str, args: Any) -> None:
        """A collective of DTensor, which is waited for at once."""
        kind = name.partition(".")[0]
        names = [arg for arg in args if isinstance(arg, str)]
        if kind == "wait_tensor" or not names:
            return
        group = group_named(names[-1])
        share = (group.size() - 1) / group.size()
        nbytes = nbytes_of(tensors_in(args))
        factor = {"all_gather_into_tensor": group.size(), "all_reduce": 2}.get(kind.removesuffix("_"), 1)
        self._send("tensor parallel", "", int(nbytes * factor * share), group, True)()

    def _send(self, kind: str, unit: str, nbytes: int, group: dist.ProcessGroup, both: bool) -> Callable[[], None]:
        self.groups.add(group)
        if both:
            self.sent[kind] += nbytes
        seconds = self.machine.message_seconds(nbytes, dist.get_process_group_ranks(group), dist.get_rank())
        end = self.clock.message(group, kind.replace("_", "-"), unit, seconds, both)
        return lambda: self.clock.arrive(end)


def _rehearse(
    model: nn.Module, workload: Workload, config: ParallelConfig, observer: Observer, options: dict[str, Any]
) -> Plan:
    """Two steps, of which the second counts; see `predict`."""
    make_fake(model)
    num_params = sum(param.numel() for param in model.parameters())
    _apply(model, config, **options)
    for tensor in (*model.parameters(), *model.buffers()):
        observer.memory.mark(tensor, Kind.PARAMETERS)
    optimizer = workload.optimizer(param for param in model.parameters() if param.requires_grad)
    if config.offload != "none" and not isinstance(optimizer, OffloadedOptimizer):
        optimizer = offload_optimizer(type(optimizer), [{**group} for group in optimizer.param_groups])
    # A stage of ZeRO decides what waits for the last backward; without one all reductions do.
    assert isinstance(model, FSDPModule)
    set_last = model.set_requires_gradient_sync if options.get("zero") is None else model.set_is_last_backward
    in_background = isinstance(optimizer, OffloadedOptimizer)
    batches = [workload.batch(workload.batch_size) for _ in range(workload.microbatches)]

    def step() -> None:
        for index, batch in enumerate(batches):
            set_last(index == len(batches) - 1)
            observer.phase = "loss"
            workload.loss(model, batch).backward()
        for param in model.parameters():
            observer.memory.mark(param.grad, Kind.GRADIENTS)
        observer.phase = "optimizer"
        optimizer.step()
        optimizer.zero_grad()
        observer.phase = ""

    step()
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.wait()  # so that parameters can be read
    observer.memory.mark_what_stays(model, optimizer)
    clock = observer.clock
    clock.arrive(clock.end)
    if in_background:  # the measured step begins while the last one is running
        step()
    clock.restart()
    observer.sent.clear()
    observer.tick()
    since, first_event = observer.memory.tick, len(observer.log)
    step()
    samples, host_samples = (observer.memory.samples(since, is_host) for is_host in (False, True))
    return Plan(
        workload,
        config,
        observer.machine,
        options,
        observer.log[first_event:],
        observer.sent,
        Timeline(f"predicted: {name_of(workload, config, options)}", clock.spans, samples),
        host_samples,
        clock.elapsed if in_background else clock.end - clock.origin,
        clock.exposed,
        num_params,
        sum(bool(unit.groups) for unit in units_below(model)),
        len(observer.groups),
        sum(tensors[0].numel() for batch in batches if (tensors := tensors_in(batch))),
    )


def _apply(model: nn.Module, config: ParallelConfig, activation_budget: int | None = None, **options: Any) -> None:
    chosen = () if activation_budget is None else units_of(model, options.get("blocks") or config.blocks or None)
    parallelize(model, config, meshes=build_meshes(config, "cpu"), **options)
    if activation_budget is not None:
        blocks = [model.get_submodule(unit.fqn) for unit in chosen[:-1]]
        inside = {module for block in blocks for module in block.modules() if module is not block}
        offload_activations([block for block in blocks if block not in inside], budget=activation_budget)
