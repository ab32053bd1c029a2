"""`deferred`: build any model without memory, shard it, and fill it with the values of the eager model. Layer: init.

::

    with deferred() as recording:     every new tensor is a stand-in; the operations on it are recorded
        model = Model(config)
    fully_shard(...)                  parameters are DTensors on the meta device
    recording.replay(model)           one parameter at a time: its operations run, and this rank keeps its rows

Source: the deferred initialisation of PyTorch FSDP, https://arxiv.org/abs/2304.11277, section 3.1.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from fsdp2.errors import ArgumentError, OrderError
from fsdp2.init.disguise import Disguise
from fsdp2.init.ledger import Ledger, ModuleWatch
from fsdp2.init.recorder import Recorder
from fsdp2.init.replay import fill
from fsdp2.init.restore import restore
from fsdp2.init.tape import Tape

__all__ = ["Recording", "deferred"]

_is_recording: ContextVar[bool] = ContextVar("_is_recording", default=False)


class Recording:
    """The operations that were recorded within `deferred`, which creates it. It holds no data of the model, but keeps
    alive real tensors from outside that were read.

    Args:
        tape: a recorder writes to it until the context ends.
    """

    def __init__(self, tape: Tape):
        self._tape = tape
        self._ledger: Ledger | None = None

    def end(self, modules: Iterable[nn.Module]) -> None:
        """Called by `deferred` at the end of the context, with the modules that were built in it."""
        self._ledger = Ledger(self._tape, modules)

    def _ended(self, what: str) -> Ledger:
        if self._ledger is None or _is_recording.get():
            raise OrderError(f"{what}: still within deferred(), or it was left by an exception; leave it first")
        return self._ledger

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor that was created within the context and is still on the meta device, whether a module
        holds it or not. Returns a new tensor, on the device that the tensor would have been on. No communication.

        Raises:
            ArgumentError: the tensor is not in the recording.
            OrderError: still within the context, or the tensor was changed in place after it.

        Example::

            with deferred() as recording:
                model = Model(config)
            recording.whole(model.embed.weight).std()
        """
        ledger = self._ended("whole")
        window = self._tape.window_of(tensor)
        if window is None:
            raise ArgumentError(
                f"whole: expected a tensor that was made within this recording, got one of shape "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
        recorded = ledger.get(tensor)
        if recorded is not None:
            recorded.check(recorded.fqn, tuple(tensor.shape))
        return restore(self._tape, [window], self._tape.now)[0]

    def replay(self, module: nn.Module, *, device: torch.device | str | None = None) -> None:
        """Give all parameters and buffers at and below `module` that are on the meta device the values that they would
        have without `deferred`, bit for bit on every mesh. Other tensors are not changed.

        Call it after `fully_shard`, on the root or on one unit after another, on every rank; it does not communicate.
        Each rank runs the operations of one parameter at a time on whole tensors, keeps its rows and frees the rest. In
        addition to the shards it needs memory for these operations: one whole parameter for most, several for some
        (`orthogonal_`, a copy of another layer's weight). A model that is not sharded gets whole parameters. Parameters
        keep their identity, so an optimizer may already hold them. Tensors that modules hold as plain attributes, also
        within lists, tuples and dicts, are filled too.

        Memory that the model never initialised is filled with zeros; in an eager model its values are arbitrary.

        Args:
            device: the device of buffers, and of parameters that are not sharded. None: the mesh's device for buffers
                if there are units, otherwise the device that the model asked for.

        Raises:
            ArgumentError: a tensor on the meta device was not created within this recording, or was converted or
                replaced afterwards (all are named, and nothing is changed); or different parameters were tied
                afterwards.
            OrderError: still within the context; or a parameter, or a real tensor that was read, was changed in place
                after it; or all parameters were already given memory (by `to_empty`).
            UnsupportedError: a tensor-parallel parameter has a placement that is neither `Shard` nor `Replicate`.

        Example::

            with deferred() as recording:
                model = Model(config)
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            recording.replay(model)
            optimizer = torch.optim.AdamW(model.parameters())
        """
        fill(module, self._tape, self._ended("replay"), None if device is None else torch.device(device))


@contextmanager
def deferred(*, seed: int | None = None) -> Iterator[Recording]:
    """Within this context models are built without memory: new tensors are on the meta device, whatever device was
    requested, and the operations on them are recorded. `Recording.replay` runs them later. It works with unmodified
    third-party modules.

    The model's own code sees tensors on the device that it requested. When it reads a value (`item()`, `tolist()`, `if
    tensor:`), the operations that produce it run at once. Tensors that were created before are ordinary tensors, and
    operations that involve only these run normally. Everything that creates, ties, copies, converts or initialises
    parameters belongs in the context; parallelize_module and fully_shard come after it. All ranks must build the same
    model with the same seed.

    Random numbers: the values are those that the eager model draws from the same generator states, and after the
    context the generators are in the state in which the eager model leaves them. For that, each random operation also
    runs while it is recorded, on scratch memory (of the size of the largest such tensor), and a copy of the generator's
    state is kept (5 KB on the CPU). So recording takes the time of the eager model's random numbers, and replay the
    time of those that were not overwritten later. With a `seed`, recording draws nothing and replay draws what it
    needs.

    Args:
        seed: None: see above. An int: each random operation has its own stream, derived from `seed` and its position
            among the random operations. Values are the same on every mesh, but are not those of an eager model.

    Raises:
        OrderError: within another `deferred`.
        UnsupportedError: an operation creates or reads anything but plain strided tensors, or reads a tensor that was
            deliberately put on the meta device; or a parameter was distributed or sharded within the context.

    Example::

        torch.manual_seed(0)
        with deferred() as recording:
            model = transformers.LlamaForCausalLM(config)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        recording.replay(model)
    """
    if _is_recording.get():
        raise OrderError("deferred: already within a deferred(); one is enough for everything that is built in it")
    tape = Tape()
    recording, recorder = Recording(tape), Recorder(tape, seed)
    token = _is_recording.set(True)
    try:
        with ModuleWatch() as watch, recorder, Disguise(recorder):
            yield recording
    finally:
        _is_recording.reset(token)
    recording.end(watch.modules)
