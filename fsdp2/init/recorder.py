"""`Recorder`: the mode that creates tensors without memory and records the operations on them on a tape. Layer: init.

A tensor that a factory creates within the mode is a *stand-in*: a plain tensor on the meta device. Operations on
stand-ins run on the meta device, which knows shapes, strides and aliases, and are recorded on the tape. Where a value
is needed (`item()`, `nonzero()`, operations without a meta kernel), it is restored at once. Tensors from outside are
ordinary tensors: operations on these alone are executed, and so are writes to them from a stand-in.

Random operations: the eager model draws from one stream, so an operation can only be replayed alone if the state of the
generator before it is known. This state is recorded, and the operation is run on scratch memory, which is reused, so
that the generator is then in the state in which the eager model would have left it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fsdp2._torch import TorchDispatchMode, takes_device, version, written_arguments
from fsdp2.errors import UnsupportedError
from fsdp2.init.restore import drawing, generator_state, restore
from fsdp2.init.tape import Cell, Constant, Draw, Entry, Tape, map_args
from fsdp2.runtime.tree import tensors_in

__all__ = ["Recorder"]

_aten = torch.ops.aten

# These write every element of their first argument and read none of its values.
_REPLACING = frozenset(
    getattr(_aten, name)
    for name in (
        "bernoulli_",
        "cauchy_",
        "copy_",
        "exponential_",
        "fill_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
    )
)

# These create a tensor with the shape or device of their first argument, and read none of its values.
_SHAPED = frozenset(
    getattr(_aten, name)
    for name in (
        "empty_like",
        "full_like",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "rand_like",
        "randint_like",
        "randn_like",
        "zeros_like",
    )
)


class Recorder(TorchDispatchMode):
    """The mode.

    Args:
        tape: to write to.
        seed: None: random operations draw what the eager model would. Otherwise each has its own stream, derived from
            the seed and its number, and recording draws nothing (except from generators that the model passes itself).

    Attributes:
        is_paused: whether recording and disguise are off.
        meta_means: during an operation on stand-ins, the device of what they stand for. torch creates intermediate
            scalars and buffers on the device that the stand-ins appear to be on.
    """

    def __init__(self, tape: Tape, seed: int | None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.meta_means: torch.device | None = None
        self._seed = seed
        self._num_draws = 0
        self._scratch = _Scratch()
        self.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context, operations behave as outside of the mode."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The current value of a stand-in as a real tensor; any other tensor unchanged. Call it while paused."""
        window = self.tape.window_of(tensor)
        return tensor if window is None else restore(self.tape, [window], self.tape.now)[0]

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """A stand-in for a copy of a real tensor, which must not change from now on. Call it while paused."""
        return self._record(_aten.clone.default, (tensor.detach(),), {})  # type: ignore[no-any-return]

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return op(*args, **kwargs)
        with self.paused():
            return self._dispatch(op, args, kwargs)

    def _dispatch(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        if op is _aten.lift_fresh.default and not tensors[0].is_meta:
            return self.adopt(tensors[0].clone())  # from torch.tensor or torch.from_numpy: others may hold it too
        if op.overloadpacket is _aten.set_ and self._is_stand_in(tensors[0]) and _is_real_storage(*args[1:2]):
            real = torch.empty(0, dtype=tensors[0].dtype, device=args[1].device)
            return _aten.set_.source_Tensor(tensors[0], self.adopt(real.set_(*args[1:])))  # as torch.load does
        if not tensors and takes_device(op) and (device := self._wanted_device(kwargs)).type != "meta":
            return self._record(op, args, {**kwargs, "device": device})
        if op.overloadpacket in _SHAPED and (device := self._device_of(args[:1], kwargs)).type != "meta":
            return self._record(op, (_shape_of(args[0]), *args[1:]), {**kwargs, "device": device})
        if not any(map(self._is_stand_in, tensors)):
            return op(*args, **kwargs)
        _check_supported(op, tensors, self._is_stand_in)
        written = tensors_in(_split(op, args, kwargs)[0])
        if not all(map(self._is_stand_in, written)) or torch.Tag.data_dependent_output in op.tags:
            return op(*map_args(torch.Tensor, self.value, args), **map_args(torch.Tensor, self.value, kwargs))
        if op.name() == "aten::_to_copy" and self._moves_nowhere(tensors[0], kwargs):
            return _aten.alias.default(tensors[0])  # in the eager model, `to` would return the tensor itself
        return self._record(op, args, kwargs)

    def _wanted_device(self, kwargs: dict[str, Any]) -> torch.device:
        """The device on which a factory must create its result."""
        device = torch.device(kwargs.get("device") or "cpu")
        return self.meta_means if device.type == "meta" and self.meta_means is not None else device

    def _is_stand_in(self, tensor: torch.Tensor) -> bool:
        return self.tape.cell_of(tensor) is not None

    def _moves_nowhere(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether torch copies only because the stand-in is on another device than the tensor that it stands for."""
        cell, device = self.tape.cell_of(tensor), kwargs.get("device")
        return (
            cell is not None
            and device == cell.device
            and kwargs.get("dtype") in (None, tensor.dtype)
            and kwargs.get("memory_format") in (None, torch.preserve_format)
        )

    # --- putting on the tape -----------------------------------------------------------------------------------------

    def _record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = self._device_of(args, kwargs)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": device}
        draw = self._draw(op, args, kwargs, device)
        args, kwargs = map_args(torch.Generator, lambda _: None, (args, kwargs))
        outputs = self._on_meta(op, args, kwargs, draw)
        if torch.Tag.inplace_view in op.tags:
            return outputs  # only a window has moved; the tape records contents
        results, made = [], set()
        for output in tensors_in(outputs):
            is_known = self._is_stand_in(output)
            if not is_known:
                made.add(self.tape.add_cell(output, device))
            results.append(None if is_known else self.tape.window_of(output))
        written, others = _split(op, args, kwargs)
        windows = [window for tensor in tensors_in(written) if (window := self.tape.window_of(tensor)) is not None]
        if not made and not windows:
            return outputs  # a view
        if any(window.is_neg for window in windows):
            raise UnsupportedError(f"deferred: {op} writes to the imaginary part of a conjugate; write to the original")
        replaces = getattr(op, "overloadpacket", None) in _REPLACING
        reads = tensors_in(others if replaces else (written, others))
        self.tape.append(
            Entry(
                self.tape.now,
                op,
                map_args(torch.Tensor, self._noted, args),
                map_args(torch.Tensor, self._noted, kwargs),
                tuple(results),
                frozenset(cell for tensor in reads if (cell := self.tape.cell_of(tensor)) is not None),
                frozenset(made | {window.cell for window in windows if replaces and window.covers_cell}),
                torch.get_default_dtype(),
                draw,
            ),
            made | {window.cell for window in windows},
        )
        return outputs

    def _noted(self, tensor: torch.Tensor) -> Any:
        return self.tape.window_of(tensor) or Constant(tensor, version(tensor))

    def _device_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        """The device of the results in the eager model: the requested one, else that of the first tensor with dims."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "meta":
            return torch.device(device)
        tensors = sorted(tensors_in((args, kwargs)), key=lambda tensor: tensor.ndim == 0)
        if not tensors:
            return torch.device("cpu")
        cell: Cell | None = self.tape.cell_of(tensors[0])
        return tensors[0].device if cell is None else cell.device

    def _on_meta(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], draw: Draw | None) -> Any:
        """The results as stand-ins."""
        told = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if told.get("device") is not None:
            told["device"] = torch.device("meta")
        if torch.Tag.dynamic_output_shape not in op.tags:
            try:
                args_on_meta = map_args(torch.Tensor, _stand_in_for, args)
                return _checked(op, op(*args_on_meta, **map_args(torch.Tensor, _stand_in_for, told)))
            except NotImplementedError:
                if 0 in written_arguments(op)[0]:  # in place
                    return args[0]
        args, kwargs = map_args(torch.Tensor, self.value, (args, kwargs))
        with drawing(draw):  # again, for the shapes of the results: the generator already has its final state
            return map_args(torch.Tensor, _stand_in_for, _checked(op, op(*args, **kwargs)))

    # --- random numbers ----------------------------------------------------------------------------------------------

    def _draw(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Draw | None:
        """The source of a random operation's numbers. Leaves the generator as the eager operation would."""
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return None
        generator = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)), None)
        if generator is None and self._seed is not None:
            self._num_draws += 1
            return Draw(device, seed=_mixed(self._seed, self._num_draws))
        state = generator_state(device) if generator is None else generator.get_state()
        written, _ = _split(op, args, kwargs)
        unread = {id(t) for t in tensors_in(written)} if op.overloadpacket in _REPLACING else set()

        def real(tensor: torch.Tensor) -> torch.Tensor:
            return self._scratch.like(tensor, device) if id(tensor) in unread else self.value(tensor)

        with torch.no_grad():
            op(*map_args(torch.Tensor, real, args), **map_args(torch.Tensor, real, kwargs))
        return Draw(device, state)


def _checked(op: Any, outputs: Any) -> Any:
    for output in tensors_in(outputs):
        if output.layout is not torch.strided:
            raise UnsupportedError(
                f"deferred: {op} makes a tensor of layout {output.layout}; expected strided. Make it after replay."
            )
    return outputs


class _Scratch:
    """Memory for results that are not used, one buffer per device. A separate allocation for each would fragment the
    heap of a CPU process between small objects that stay: gigabytes, for a model that needs no memory."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, torch.Tensor] = {}

    def like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor on `device` with the shape and strides of `tensor`."""
        nbytes = _shape_of(tensor).untyped_storage().nbytes()
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < nbytes:
            self._buffers.pop(device, None)
            buffer = self._buffers[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        scratch = torch.empty(0, dtype=tensor.dtype, device=device)
        return scratch.set_(buffer.untyped_storage(), 0, tensor.shape, tensor.stride())


def _is_real_storage(value: Any = None) -> bool:
    """Whether this is the storage of a tensor with values."""
    return isinstance(value, torch.UntypedStorage) and value.device.type != "meta"


def _stand_in_for(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the shape and strides of `tensor`; `tensor` itself if it is on the meta device."""
    return tensor if tensor.is_meta else _shape_of(tensor)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _split(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The arguments that `op` writes to, and the others."""
    positions, names = written_arguments(op)
    written = [value for index, value in enumerate(args) if index in positions]
    written += [value for name, value in kwargs.items() if name in names]
    others = [value for index, value in enumerate(args) if index not in positions]
    others += [value for name, value in kwargs.items() if name not in names]
    return written, others


def _check_supported(op: Any, tensors: Sequence[torch.Tensor], is_stand_in: Callable[[torch.Tensor], bool]) -> None:
    for tensor in tensors:
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise UnsupportedError(
                f"deferred: {op} on a {type(tensor).__name__}; within the context there must be plain tensors only. "
                "Distribute, shard or quantise the model after it."
            )
        if tensor.is_meta and not is_stand_in(tensor):
            raise UnsupportedError(
                f"deferred: {op} reads a tensor of shape {tuple(tensor.shape)} that was made on the meta device on "
                "purpose, which has no values; make it on a real device, the context defers that"
            )


def _mixed(seed: int, number: int) -> int:
    """A seed for stream `number`: two rounds of splitmix64, so that its low 32 bits, which are all that torch's CPU
    generator uses, depend on every bit of both."""
    mask = (1 << 64) - 1
    state = seed & mask
    for _ in range(2):
        state = (state + number * 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1
