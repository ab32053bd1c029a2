"""`sequence_cost`: the work of a sequence as a function of its length. Layer: plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2._torch.plan import FAKE_ERRORS, FakeTensorMode
from fsdp2._torch.shared import TorchDispatchMode
from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.module import FSDPModule
from fsdp2.plan.fake import build_on_meta, make_fake
from fsdp2.plan.machine import count_flops
from fsdp2.plan.workload import default_loss

__all__ = ["SequenceCost", "sequence_cost"]


@dataclass(frozen=True)
class SequenceCost:
    """Floating-point operations of a forward and backward. For a sequence, ``cost(length)`` is ``token * length + pair
    * length ** 2``.

    Attributes:
        token: operations per token, in matrix products with parameters.
        pair: operations per pair of tokens, in attention.
    """

    token: float
    pair: float

    def __call__(self, length: int) -> float:
        return self.token * length + self.pair * length**2


def sequence_cost(
    build: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    loss: Callable[[nn.Module, Any], torch.Tensor] = default_loss,
    lengths: tuple[int, int] = (512, 1024),
) -> SequenceCost:
    """Count the operations of a model without computing anything: the model runs on fake tensors.

    Args:
        build: makes the model, on any device.
        batch: makes one sequence with a given number of tokens.
        loss: the loss of the model on it (see `Workload`).
        lengths: two lengths that the model accepts. The result is right for other lengths if the cost is a sum over
            tokens and pairs of tokens, as with full attention. For a sliding window use lengths above its size.

    Raises:
        ArgumentError: the model is sharded, or has no matrix products to count.
        UnsupportedError: the model needs values (the message names the operator).

    Example::

        cost = sequence_cost(lambda: LlamaForCausalLM(config), lambda length: torch.zeros(1, length, dtype=torch.long))
        microbatches = fsdp2.balance(lengths, num_ranks, 16384, cost)
    """
    short, long = lengths
    model = build_on_meta(build)
    if isinstance(model, FSDPModule):
        raise ArgumentError("sequence_cost: expected build to make a model that is not sharded, got a sharded one")
    with FakeTensorMode(allow_non_fake_inputs=True):
        put_back = make_fake(model)  # the builder may return a model that is in use
        try:
            per_token = [_count(model, batch(length), loss) / length for length in (short, long)]
        except FAKE_ERRORS as error:
            raise UnsupportedError(
                f"sequence_cost: '{getattr(error, 'func', None) or error}' cannot run without the values of its inputs"
            ) from error
        finally:
            put_back()
    if not per_token[0]:
        raise ArgumentError("sequence_cost: expected a model with matrix products, got one without any")
    pair = (per_token[1] - per_token[0]) / (long - short)
    return SequenceCost(per_token[0] - pair * short, pair)


def _count(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], torch.Tensor]) -> float:
    counter = _Counter()
    with counter:
        loss(model, batch).backward()
    model.zero_grad()
    return counter.flops


class _Counter(TorchDispatchMode):
    """Adds up floating-point operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    def __torch_dispatch__(self, function: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.flops += count_flops(function, args, kwargs or {}, result)
        return result
