"""`Disguise`: the mode in which stand-ins look like the tensors that they stand for, to the model's code. Layer: init.

Code that reads `weight.device` gets the device that the eager model's weight has, and so takes the same branches. Code
that needs values in Python (`tolist`, `numpy`) gets them. The mode sees calls by the model, not those inside torch's
own Python functions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fsdp2.init.recorder import Recorder
from fsdp2.runtime.tree import tensors_in

__all__ = ["Disguise"]

_T = torch.Tensor
_DEVICE_ANSWERS: dict[Any, Callable[[torch.device], Any]] = {
    _T.device.__get__: lambda device: device,
    _T.is_meta.__get__: lambda device: device.type == "meta",  # type: ignore[attr-defined]
    _T.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    _T.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
}
_VALUE_METHODS = frozenset([_T.tolist, _T.numpy, _T.__array__, _T.__format__])
_SET_DATA = _T.data.__set__  # type: ignore[attr-defined]


class Disguise(TorchFunctionMode):
    """The mode.

    Args:
        recorder: the recorder of the stand-ins.
    """

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if recorder.is_paused:
            return func(*args, **kwargs)
        cells = (recorder.tape.cell_of(tensor) for tensor in tensors_in((args, kwargs)))
        cell = next((cell for cell in cells if cell is not None), None)
        if cell is None:
            return func(*args, **kwargs)
        if func in _DEVICE_ANSWERS:
            return _DEVICE_ANSWERS[func](cell.device)
        if func in _VALUE_METHODS:
            with recorder.paused():
                return func(recorder.value(args[0]), *args[1:], **kwargs)
        if func == _SET_DATA and not args[1].is_meta:
            with recorder.paused():
                args = (args[0], recorder.adopt(args[1]))
        before, recorder.meta_means = recorder.meta_means, cell.device
        try:
            result = func(*args, **kwargs)
            # The recorder cannot tell a requested copy from one that only the meta device makes necessary.
            return result.clone() if func == _T.to and kwargs.get("copy") else result
        finally:
            recorder.meta_means = before
