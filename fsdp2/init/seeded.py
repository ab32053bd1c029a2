"""Random initialisation that does not depend on the number of ranks: the context, and the operations that it replaces.

Layer: init. `sequential` and `blocks` describe how the two modes generate values. Within the context they fill sharded
tensors instead of DTensor. With DTensor each rank would fill its part from its own generator: with equal seeds all
ranks would get the same rows, and the model would depend on the number of ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor
from fsdp2._torch.shared import TorchDispatchMode
from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.init.blocks import fill_blocks
from fsdp2.init.operands import as_dtensors, copy_own, number_of, operand_of, write_on_whole
from fsdp2.init.sequential import Target, fill_sequential
from fsdp2.init.slices import SLICING, Slices, cuts_sliced_dim, viewed
from fsdp2.placement.box import whole
from fsdp2.placement.tiling import own_box

__all__ = ["Mode", "seeded"]

Mode = Literal["sequential", "blocks"]

aten = torch.ops.aten


@contextmanager
def seeded(seed: int | None = None, *, mode: Mode = "sequential") -> Iterator[None]:
    """Within this context, random initialisation of sharded parameters gives bitwise the model that one process would
    get, on any number of ranks and with any sharding::

        with torch.device("meta"):
            model = Model()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        model.to_empty(device="cpu")
        with fsdp2.init.seeded(0):
            model.apply(init_weights)  # as for one process: reset_parameters, nn.init, param.normal_(), ...

    Every rank must enter it and do what the single process would do, which may use the same context. Every in-place
    random operation on a DTensor is replaced: `normal_`, `uniform_`, `bernoulli_`, `random_`, `exponential_`,
    `cauchy_`, `log_normal_`, `geometric_`, and so all of `torch.nn.init`; also `randn_like`, `rand_like`,
    `randint_like` and `bernoulli`. Placements may be Shard of any dim (even or not, empty parts too) and Replicate:
    FSDP, HSDP, TP under FSDP.

    ==============  =======================================================  =========================================
    `mode`          "sequential"                                             "blocks"
    ==============  =======================================================  =========================================
    values          those of torch's own operation, on a plain tensor, with  those of torch's own operation, on blocks
                    the same generator                                       of 32768 elements, each with its own seed
    equal to        plain torch on one process, with `torch.manual_seed`     one process in the same context
    a rank draws    all values, and keeps its own                            the blocks that its elements touch
    extra memory    CPU: 1 MiB of float32; elsewhere one whole tensor        one block
    generator       is in the state of the single process's                  moves by one value per operation
    ==============  =======================================================  =========================================

    "blocks" is faster if tensors are sharded along their rows: a rank draws its own elements, and less than two blocks
    more per tensor. If they are sharded along another dim, every rank needs most blocks. In both modes, random
    operations on plain tensors work as usual (in mode "blocks" the replaced operations use blocks for plain tensors
    too), and later operations still agree.

    Plain tensors are assumed to be equal on all ranks: they may be operands together with DTensors, and may be copied
    into them whole. Writes through a slice of a DTensor (``weight[pad] = 0``), which DTensor alone loses, take effect.
    `nn.init.orthogonal_` computes the whole matrix on every rank: `new_empty` of a DTensor returns a plain tensor here.
    (The bits of the QR decomposition depend on the number of threads, as in plain torch.) Only these communicate:
    `trunc_normal_`, an all-reduce to find out whether any element must be drawn again; a slice along a sharded dim, an
    all-reduce of its size; writes with an index tensor (as in `nn.init.sparse_`), which gather the written tensor; and
    views that merge a sharded dim with an earlier one, which gather their tensor.

    Leave the context before training, when ranks need different dropout masks.

    Args:
        seed: passed to `torch.manual_seed`. On exit the default generators (of the CPU and of the current accelerator)
            are restored, so ranks may have different seeds for everything else. None: continue with the default
            generators, which must be in the same state on all ranks. (This is not checked, because it would need
            communication.)
        mode: see above. The two give different values. An operation's `generator` argument replaces the default one,
            and must be in the same state on all ranks. "blocks" draws the 64 bits of the operation's key from it, or,
            without one, from the CPU's default generator, whatever the device.

    Raises:
        ArgumentError: an unknown mode; or (within the context) a random operation on a DTensor with other placements.
        UnsupportedError: (within the context) a random operation on a DTensor that is not named above, or a write into
            a gathered view of a DTensor that is not a slice.
    """
    if mode not in get_args(Mode):
        raise ArgumentError(f"seeded: expected mode to be one of {get_args(Mode)}, got {mode!r}")
    with ExitStack() as stack:
        if seed is not None:
            stack.enter_context(_kept_generators())
            torch.manual_seed(seed)
        stack.enter_context(_Filling(mode))
        yield


@contextmanager
def _kept_generators() -> Iterator[None]:
    """Restore the default generators of the CPU and of the current accelerator on exit."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        devices = [torch.accelerator.current_device_index()]
        with torch.random.fork_rng(devices=devices, device_type=accelerator.type):
            yield


def _filled_by(name: str, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """For a random operation that creates a tensor like its first argument: the in-place operation that fills it, with
    its arguments."""
    if name == "randn_like":
        return aten.normal_.default, ()
    if name == "rand_like":
        return aten.uniform_.default, ()
    if name == "randint_like":
        return (aten.random_.to if len(args) == 2 else getattr(aten.random_, "from")), args[1:]
    probabilities = args[1] if len(args) > 1 else args[0]
    is_tensor = isinstance(probabilities, torch.Tensor)
    return (aten.bernoulli_.Tensor if is_tensor else aten.bernoulli_.float), (probabilities,)


DISTRIBUTIONS = (
    "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_"
)  # fmt: skip
LIKE = ("randn_like", "rand_like", "randint_like", "bernoulli")
# In-place operations that DTensor does not support for some placements; they run on the whole tensor.
ON_WHOLE = (aten.index_put_.default, aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor)


class _Filling(TorchDispatchMode):
    """Replaces random operations: all on DTensors, and in mode "blocks" the supported ones on plain tensors too.

    It also corrects other operations in initialisation that DTensor gets wrong or rejects: writes through slices, and
    plain operands.
    """

    def __init__(self, mode: Mode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._mode = mode
        self._slices = Slices()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sharded = any(issubclass(kind, DTensor) for kind in types)
        if torch.Tag.nondeterministic_seeded in func.tags and (sharded or self._mode == "blocks"):
            name = func.overloadpacket.__name__
            if name in DISTRIBUTIONS:
                self._fill(func, args[0], args[1:], kwargs.get("generator"))
                self._slices.wrote(args[0])
                return args[0]
            if sharded or (name in LIKE and "out" not in kwargs):
                return self._like(func, args, dict(kwargs))
        return self._on_dtensors(func, args, kwargs) if sharded else func(*args, **kwargs)

    def _on_dtensors(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A non-random operation with a DTensor among its arguments."""
        first = args[0] if args else None
        out = kwargs.get("out")
        if func is aten.eye.m_out and isinstance(out, DTensor):
            copy_own(torch.eye(*args, dtype=out.dtype, device=local_tensor(out).device), out)
            return out
        if not isinstance(first, DTensor):
            return func(*args, **kwargs)
        if func is aten.new_empty.default:
            return local_tensor(first).new_empty(args[1], **kwargs)  # see seeded: for orthogonal_
        if func.overloadpacket.__name__ == "_local_scalar_dense":  # item(), bool()
            return number_of(first)
        if func in ON_WHOLE:
            write_on_whole(func, args[1:], first)
            self._slices.wrote(first)
            return first
        if func in SLICING and cuts_sliced_dim(func, args):
            return self._slices.take(func, args)
        if func is aten.fill_.Tensor and not isinstance(args[1], DTensor):  # ``weight[pad] = 0``; DTensor has no rule
            func, args = aten.fill_.Scalar, (first, args[1].item())
        if func is aten.view.default:
            result: Any = viewed(first, args[1])
        else:
            result = func(first, *as_dtensors(args[1:], first), **kwargs)
        if func.overloadpacket.__name__.endswith("_"):  # in place
            self._slices.wrote(first)
        elif func.is_view:
            self._slices.note(func, args, result)
        return result

    def _like(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        name = func.overloadpacket.__name__
        if name not in LIKE or "out" in kwargs:
            raise UnsupportedError(
                f"{func} on a DTensor within seeded(): expected an operation in place ({', '.join(DISTRIBUTIONS)}), or "
                f"without an out argument one of {', '.join(LIKE)}. The context is for initialisation only: leave it "
                "before forward."
            )
        fill, arguments = _filled_by(name, args)
        generator = kwargs.pop("generator", None)
        result: torch.Tensor = aten.empty_like.default(args[0], **kwargs)
        self._fill(fill, result, arguments, generator)
        return result

    def _fill(self, func: Any, tensor: torch.Tensor, args: Sequence[Any], generator: torch.Generator | None) -> None:
        """Run one random operation in place."""
        local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        if local.is_meta:
            return  # nothing is drawn, as on one process
        box = own_box(tensor) if isinstance(tensor, DTensor) else whole(tensor.shape)
        operand = None
        if args and isinstance(args[0], torch.Tensor):
            operand, args = operand_of(args[0], tensor), ()

        def draw(values: torch.Tensor, of_operand: torch.Tensor | None, source: torch.Generator | None) -> None:
            operands = args if of_operand is None else (of_operand,)
            func(values, *operands, generator=source)

        target = Target(local, box, tuple(tensor.shape), tensor.stride(), operand)
        if self._mode == "sequential":
            fill_sequential(target, draw, generator)
            return
        # Raise torch's own error for a dtype or an argument on every rank, also on those that draw nothing.
        one = local.new_empty(1)
        of_one = None if operand is None else torch.full_like(one, 0.5, dtype=operand.dtype)
        draw(one, of_one, torch.Generator(local.device))
        fill_blocks(target, draw, _key(generator))


def _key(generator: torch.Generator | None) -> int:
    """64 bits from the given generator, or from the CPU's default one, whatever the tensor's device."""
    device = torch.device("cpu") if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(-(2**63), None, generator=generator).item())
