"""What an operator reads and writes: by its schema, or by a table for those of ``c10d``, whose schemas do not say."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch

__all__ = ["Access", "Effects", "effects_of", "tensors_in"]


class Access(Enum):
    READ = "read"
    WRITE = "write"
    UPDATE = "update"  # read and write


# Operators that write into their first argument without reading it.
FILLS = {
    *("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_", "random_", "bernoulli_"),
    *("exponential_", "log_normal_", "geometric_", "cauchy_", "eye_"),
}
# These change a tensor's shape, strides or storage, or look at them.
OF_METADATA = {
    *("set_", "resize_", "resize_as_", "as_strided_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_"),
    *("_wrap_tensor_autograd", "detach_", "_unsafe_view", "_reshape_alias", "_resize_output_", "is_pinned", "sym_size"),
    *("sym_stride", "sym_numel", "sym_storage_offset", "is_contiguous", "dim", "size", "stride"),
    "_has_compatible_shallow_copy_type",
}
# Their result has memory with any content; of the argument only shape, dtype and device count.
MAKES_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
OF_SHAPE = {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full"}
# The host needs the result, and waits for the current stream.
SYNCHRONISES = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "_unique2", "unique_dim"}
MOVES = {"clone", "cat", "stack"}
READS, FILLS_IT, UPDATES = Access.READ, Access.WRITE, Access.UPDATE
OF_C10D: dict[str, dict[str, Access]] = {
    "send": {"tensors": READS},
    "recv_": {"tensors": FILLS_IT},
    "recv_any_source_": {"tensors": FILLS_IT},
    "allreduce_": {"tensors": UPDATES},
    "allreduce_coalesced_": {"tensors": UPDATES},
    "broadcast_": {"tensors": UPDATES},
    "reduce_": {"tensors": UPDATES},
    "_allgather_base_": {"output_tensor": FILLS_IT, "input_tensor": READS},
    "allgather_": {"output_tensors": FILLS_IT, "input_tensors": READS},
    "allgather_coalesced_": {"output_lists": FILLS_IT, "input_list": READS},
    "allgather_into_tensor_coalesced_": {"outputs": FILLS_IT, "inputs": READS},
    "_reduce_scatter_base_": {"output_tensor": FILLS_IT, "input_tensor": READS},
    "reduce_scatter_": {"output_tensors": FILLS_IT, "input_tensors": READS},
    "reduce_scatter_tensor_coalesced_": {"outputs": FILLS_IT, "inputs": READS},
    "alltoall_base_": {"output": FILLS_IT, "input": READS},
    "alltoall_": {"output_tensors": FILLS_IT, "input_tensors": READS},
    "gather_": {"output_tensors": FILLS_IT, "input_tensors": READS},
    "scatter_": {"output_tensors": FILLS_IT, "input_tensors": READS},
}


@dataclass(frozen=True)
class Effects:
    """What an operator does.

    Attributes:
        name: without namespace and overload.
        namespace: ``aten``, ``c10d``, ...
        arguments: (position, name, access) of each argument that may hold tensors which are read or written.
        makes_outputs: whether its outputs may have new memory.
        fills_outputs: whether new memory has its content afterwards.
        synchronises: whether the host waits for it.
        async_at: the position of ``async_op``, of a collective that has it.
        moves: whether it only takes bytes from one place to another, whatever they are.
    """

    name: str
    namespace: str
    arguments: tuple[tuple[int, str, Access], ...]
    makes_outputs: bool = True
    fills_outputs: bool = True
    synchronises: bool = False
    moves: bool = False
    async_at: int = -1

    def accesses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[torch.Tensor, Access]]:
        """The tensors of a call, and how it uses them."""
        for position, name, access in self.arguments:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in tensors_in(value):
                yield tensor, access

    def is_blocking(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a collective was called with ``async_op=False``."""
        value = args[self.async_at] if 0 <= self.async_at < len(args) else kwargs.get("async_op", True)
        return value is False


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


@cache
def effects_of(operator: torch._ops.OpOverload) -> Effects:
    """See `Effects`."""
    schema = operator._schema
    namespace, _, name = schema.name.partition("::")
    positions = {argument.name: index for index, argument in enumerate(schema.arguments)}
    if namespace == "c10d":
        table = OF_C10D.get(name, {})
        used = tuple((positions[key], key, access) for key, access in table.items())
        return Effects(name, namespace, used, async_at=positions.get("async_op", -1))
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    if is_view or name in OF_METADATA:
        return Effects(name, namespace, (), makes_outputs=False)
    if name in MAKES_EMPTY:
        return Effects(name, namespace, (), fills_outputs=False)
    if name in OF_SHAPE:
        return Effects(name, namespace, ())
    arguments: list[tuple[int, str, Access]] = []
    for index, argument in enumerate(schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        access = Access.READ
        if argument.alias_info is not None and argument.alias_info.is_write:
            access = Access.WRITE if argument.is_out or (index == 0 and name in FILLS) else Access.UPDATE
        arguments.append((index, argument.name, access))
    # Written first, then read, would hide that an update needs its old content.
    arguments.sort(key=lambda each: each[2] is not Access.READ)
    moves = "copy" in name or name in MOVES
    return Effects(name, namespace, tuple(arguments), synchronises=name in SYNCHRONISES, moves=moves)
