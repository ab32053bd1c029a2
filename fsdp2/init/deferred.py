"""`deferred`: build any model without memory, shard it, fill it with the values that it would have had. Layer: init.

::

    with deferred() as recording:     every tensor that is made is a stand-in; what is done to it is recorded
        model = Model(config)
    fully_shard(...)                  parameters are DTensors on the meta device
    recording.replay(model)           one parameter at a time: its operations run again, this rank keeps its rows

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
    """What was recorded within `deferred`, which makes it. Holds no data of the model, but keeps alive the real tensors
    from outside that were read.

    Args:
        tape: to which a recorder writes until the context ends.
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
        """The values of a tensor that was made within the context and is on the meta device still, whether a module
        holds it or not: a new tensor, on the device where it would have been. No communication.

        Raises:
            ArgumentError: the recording does not know it.
            OrderError: still within the context; it was changed in place since.

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
        """Give all parameters and buffers of `module` and below that are on the meta device the values that they would
        have if the model had been built without `deferred`: bit for bit, whatever the mesh. What is not on the meta
        device is left alone.

        Call it after `fully_shard`, on the root or on one unit after another, on every rank; no communication. Each
        rank runs the operations of one parameter at a time, on whole tensors, keeps its rows and frees the rest. Beside
        the shards, memory holds what those operations need: one whole parameter for most, several for some
        (`orthogonal_`, a copy of another layer's weight). A model that is not sharded gets whole parameters.
        Parameters stay the objects that they are, so that an optimizer may hold them already. Tensors that modules hold
        as plain attributes, also within lists, tuples and dicts, are filled too.

        Memory that nobody initialised holds zeros, where an eager model holds anything.

        Args:
            device: of buffers, and of parameters that are not sharded. None: the mesh's device for buffers where there
                are units, otherwise where the model would have put them.

        Raises:
            ArgumentError: something is on the meta device, but was not made within this recording, or was converted
                or replaced since (all are named, and nothing is changed); different parameters were tied since.
            OrderError: still within the context; a parameter was changed in place after it, or a real tensor that it
                had read; all parameters were materialised otherwise (by `to_empty`).
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
    """Within this context models are built without memory: the tensors that are made are on the meta device, whatever
    device was asked for, and the operations on them are recorded. `Recording.replay` runs them later. For modules that
    anyone wrote, as they are.

    The model's own code sees tensors of the device that it asked for. Where it wants a value (`item()`, `tolist()`, `if
    tensor:`), the operations that lead to it run at once. Tensors that were made before stay as they are, and what is
    done to them alone is done. Everything that makes, ties, copies, converts or initialises parameters belongs in the
    context; parallelize_module and fully_shard come after it. All ranks must build the same model, with the same seed.

    Random numbers: the values are those that the eager model draws from the same state of the generators, and after
    the context these are where the eager model leaves them. For that, each random operation is run while it is
    recorded, on scratch memory (of the largest such tensor's size), and a copy of the generator's state is kept (5 KB
    on the CPU): recording costs the time of the eager model's random numbers, and replay the time of those that were
    not overwritten later. With a `seed`, recording draws nothing and replay draws what it needs.

    Args:
        seed: None: see above. An int: each random operation has a stream of its own, made of `seed` and its position
            among the random operations. Values are the same on every mesh, but are not those of an eager model.

    Raises:
        OrderError: within another `deferred`.
        UnsupportedError: an operation makes or reads something else than plain strided tensors, or reads a tensor that
            was put on the meta device on purpose; a parameter was distributed or sharded within the context.

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
