"""AdamW with moments of 8 bits, whose steps do not depend on how the parameters are sharded. Layer: optim.

A parameter of at least two dims and `min_quantised_numel` elements keeps its moments as codes (see `eight_bits`); its
*global* shape decides that. Smaller ones, and vectors, keep them in fp32: rows of one element have no blocks. The
blocks are cut inside rows, dim 0 of a parameter with its other dims flattened::

    param   [rows, ...]              Shard(0) over the ranks
    codes   uint8 [rows, ...]        the same placements
    scales  fp32 [rows, blocks]      the same placements

All arithmetic is in fp32, on a part of the rows at a time, in operations that round once. So every element gets, bit
for bit, what one process would give it.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Shard

from fsdp2._torch import full_tensor, local_tensor, make_dtensor, make_spec, shard_dim, spec_of, split_factor
from fsdp2.errors import ArgumentError, UnsupportedError
from fsdp2.init.owned import Owned, owned_of
from fsdp2.layout import strides
from fsdp2.optim.eight_bits import BLOCK, SIGNED, UNSIGNED, num_blocks
from fsdp2.optim.loading import load_with_dtypes, own_part
from fsdp2.optim.rounding import key_of, round_to_bfloat16
from fsdp2.optim.run import local_grad

__all__ = ["AdamW8bit"]

MOMENTS = ("exp_avg", "exp_avg_sq")
LEAST_ROW = 16  # elements; a scale for fewer would take more memory than it saves
SPAN_NUMEL = {"cpu": 1 << 16}  # elements computed at a time: the temporary tensors for these stay in the cache
LARGE_SPAN_NUMEL = 1 << 24  # on accelerators

State = dict[str, Any]


class AdamW8bit(torch.optim.Optimizer):
    """AdamW that keeps both moments in 8 bits: 2.03 bytes of state per element instead of 8. On any number of ranks,
    and with any sharding of dim 0, its steps equal those of one process bit for bit, if the gradients are equal.

    It is torch's AdamW but for the rounding of the state. It steps on local shards, without communication. The state
    consists of DTensors like their parameters, so that state dicts and checkpoints work at any number of ranks.

    Args:
        params: as for torch's optimizers; DTensors and plain tensors, of any floating-point dtype.
        lr: as for `torch.optim.AdamW`, like the next three; may be a tensor.
        betas: likewise.
        eps: likewise.
        weight_decay: likewise.
        min_quantised_numel: parameters with fewer elements (in all ranks together), those with less than two dims, and
            those with fewer than 16 elements in a row of dim 0 keep their moments in fp32.
        rounding_seed: an integer rounds bfloat16 parameters stochastically, with random bits that depend on this
            number, the parameter's position in the optimizer (in its group of a `matrix_optimizer`), the step and the
            element, not on the ranks. None rounds to nearest.

    Each can be an option of a param group.

    State of a parameter: ``step`` (0-dim, fp32, on the CPU); ``exp_avg_code`` and ``exp_avg_sq_code`` (uint8, the
    parameter's shape), ``exp_avg_scale`` and ``exp_avg_sq_scale`` (fp32 ``[rows, blocks]``), of which those of
    ``exp_avg_sq`` are of its square root; or ``exp_avg`` and ``exp_avg_sq`` (fp32).

    Raises:
        ArgumentError: an option out of range; in `step`: a gradient that is not distributed like its parameter.
        UnsupportedError: in `step`: a sharding of another dim than 0 cuts a block.

    Example::

        optimizer = fsdp2.AdamW8bit(model.parameters(), lr=1e-3)
        fsdp2.step_in_backward(optimizer)  # if the gradients shall take no memory either

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        min_quantised_numel: int = 4096,
        rounding_seed: int | None = None,
    ):
        self._numbers: dict[torch.Tensor, int] = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "min_quantised_numel": min_quantised_numel,
            "rounding_seed": rounding_seed,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose options default to those of the constructor.

        Raises:
            ArgumentError: an option is out of range.
        """
        super().add_param_group(param_group)
        _check(self.param_groups[-1])
        self.number_params()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called after a copy, and by `load_state_dict`."""
        super().__setstate__(state)
        self.number_params()

    def number_params(self) -> None:
        """Number the parameters of all groups, for `rounding_seed`: after they were replaced by `adopt_optimizer`."""
        self._numbers = dict(zip((param for group in self.param_groups for param in group["params"]), count()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but it keeps the dtypes of the state, which torch's casts to the parameter's."""
        load_with_dtypes(self, super().load_state_dict, state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. No communication.

        Args:
            closure: computes the loss and the gradients again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if param not in self._numbers:
                        self.number_params()
                    _Step(param, self.state[param], group).run(self._numbers[param])
                    stepped.append(param)
        # As after operations on the DTensors: tells autograd that tensors it may have saved have changed.
        sharded = [param for param in stepped if isinstance(param, DTensor)]
        torch.autograd.graph.increment_version([*sharded, *map(local_tensor, sharded)])
        return loss


class _Step:
    """The step of one parameter.

    Args:
        state: of the parameter; filled if it is empty.
        group: its options.
    """

    def __init__(self, param: torch.Tensor, state: State, group: dict[str, Any]):
        self._param = param
        self._state = state
        self._group = group
        self._local = _local(param).detach()
        if not self._local.is_floating_point():
            raise ArgumentError(f"AdamW8bit: expected a real floating-point parameter, got {param.dtype}")

    def run(self, number: int) -> None:
        """Step the parameter, which has this number in the optimizer."""
        param, state, local = self._param, self._state, self._local
        assert param.grad is not None
        grad = local_grad(param, param.grad) if isinstance(param, DTensor) else param.grad
        if not state:
            self._fill_state()
        state["step"] += 1
        step = int(state["step"].item())
        seed = self._group["rounding_seed"]
        key = key_of(seed, number, step) if seed is not None and local.dtype == torch.bfloat16 else None
        owned = _owned(param) if key is not None else None
        step_rows = self._step_quantised() if "exp_avg_code" in state else self._step_exact()
        if not local.ndim:
            local, grad = local.view(1), grad.view(1)
        for rows in _spans(local):
            new = local[rows].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            step_rows(rows, new, grad[rows].to(torch.float32), step)
            if owned is not None and key is not None:
                new = round_to_bfloat16(new.view(new.shape[: param.ndim]), owned, rows.start, key)
            local[rows] = new

    def _step_exact(self) -> Callable[..., object]:
        """A function that steps some rows with moments in fp32."""
        mean, square = map(self._own, MOMENTS)
        if not mean.ndim:
            mean, square = mean.view(1), square.view(1)
        return lambda rows, new, grad, step: self._update(new, grad, mean[rows], square[rows], step)

    def _step_quantised(self) -> Callable[..., object]:
        """A function that steps some rows with quantised moments."""
        codes = [self._own(f"{name}_code") for name in MOMENTS]
        scales = [self._own(f"{name}_scale") for name in MOMENTS]

        def step_rows(rows: slice, new: torch.Tensor, grad: torch.Tensor, step: int) -> None:
            flat = [code[rows].flatten(1) for code in codes]
            mean = SIGNED.decode(flat[0], scales[0][rows])
            root = UNSIGNED.decode(flat[1], scales[1][rows])
            root = self._update(new.flatten(1), grad.flatten(1), mean, root.mul_(root), step)
            for code, scale, made in zip(codes, scales, (SIGNED.encode(mean), UNSIGNED.encode(root)), strict=True):
                code[rows] = made[0].view(new.shape)
                scale[rows] = made[1]

        return step_rows

    def _update(
        self, new: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, step: int
    ) -> torch.Tensor:
        """Change the parameter and both moments in place; returns the square root of the second one. Every operation
        rounds once: a multiply-add may round differently at the ends of a vector register."""
        first, second = self._group["betas"]
        lr = float(self._group["lr"])
        mean.mul_(first).add_(grad * (1 - first))
        square.mul_(second).add_(grad.mul(grad).mul_(1 - second))
        root = square.sqrt()
        divisor = root.div((1 - second**step) ** 0.5).add_(self._group["eps"])
        new.mul_(1 - lr * self._group["weight_decay"])
        new.sub_(mean.div(divisor).mul_(lr / (1 - first**step)))
        return root

    # --- state -------------------------------------------------------------------------------------------------------

    def _fill_state(self) -> None:
        param, local = self._param, self._local
        self._state["step"] = torch.tensor(0.0, dtype=torch.float32)
        is_quantised = (
            param.ndim >= 2
            and param.numel() >= self._group["min_quantised_numel"]
            and param.numel() >= LEAST_ROW * param.shape[0]
        )
        for name in MOMENTS:
            if not is_quantised:
                self._state[name] = self._like(torch.zeros_like(local, dtype=torch.float32))
                continue
            self._state[f"{name}_code"] = self._like(torch.zeros_like(local, dtype=torch.uint8))
            self._state[f"{name}_scale"] = self._new_scale()

    def _like(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor distributed like the parameter."""
        param = self._param
        if not isinstance(param, DTensor):
            return local
        spec = make_spec(param.device_mesh, param.placements, param.shape, param.stride(), local.dtype)
        return make_dtensor(local, spec)

    def _new_scale(self) -> torch.Tensor:
        """The scales of zeros.

        Raises:
            UnsupportedError: a block would be on two ranks.
        """
        param, local = self._param, self._local
        blocks = num_blocks(prod(param.shape[1:]))
        zeros = local.new_zeros(local.shape[0], num_blocks(prod(local.shape[1:])), dtype=torch.float32)
        if not isinstance(param, DTensor):
            return zeros
        shape = (param.shape[0], blocks)
        placements = [_of_scale(placement) for placement in param.placements]
        scale = make_dtensor(zeros, make_spec(param.device_mesh, placements, shape, strides(shape), torch.float32))
        if not _cuts_between_blocks(param):
            raise UnsupportedError(
                f"AdamW8bit: a parameter of shape {tuple(param.shape)} with placements {param.placements}: blocks of "
                f"{BLOCK} elements of its rows would be cut, and the step would depend on the number of ranks. Shard "
                "dim 0, or parts of dim 1 that are multiples of a block, or put it into a param group with a larger "
                "min_quantised_numel."
            )
        return scale

    def _own(self, name: str) -> torch.Tensor:
        """This rank's part of a state. What was loaded whole, or saved or made with another sharding, is cut first."""
        value, param = self._state[name], self._param
        if isinstance(param, DTensor):
            is_scale = name.endswith("_scale")
            placements = [_of_scale(each) for each in param.placements] if is_scale else list(param.placements)
            at_home = isinstance(value, DTensor) and value.device_mesh == param.device_mesh
            if not at_home or list(value.placements) != placements:
                like = self._new_scale() if is_scale else param
                assert isinstance(like, DTensor)
                whole = full_tensor(value) if isinstance(value, DTensor) else value
                part = own_part(whole, like)
                value = self._state[name] = make_dtensor(part, spec_of(like)) if is_scale else self._like(part)
        return _local(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _owned(tensor: torch.Tensor) -> Owned:
    if isinstance(tensor, DTensor):
        return owned_of(tensor, local_tensor(tensor).shape)
    return Owned.of(tensor.shape, [])


def _of_scale(placement: Placement) -> Placement:
    """How the scales are placed: their dim 1 goes along with any dim of the parameter but the first."""
    if placement.is_replicate() or placement.is_partial() or shard_dim(placement) == 0:
        return placement
    return Shard(1)


def _cuts_between_blocks(param: DTensor) -> bool:
    """Whether every rank owns whole blocks, and `torch.chunk` gives it their scales."""
    mesh = param.device_mesh
    cuts = [
        (mesh.size(axis), placement)
        for axis, placement in enumerate(param.placements)
        if mesh.size(axis) > 1 and split_factor(placement) is not None and shard_dim(placement) > 0
    ]
    if not cuts:
        return True
    parts, placement = cuts[0]
    if len(cuts) > 1 or shard_dim(placement) != 1 or split_factor(placement) != 1:
        return False
    numel = -(-param.shape[1] // parts) * prod(param.shape[2:])  # of a row, on all ranks but the last
    return numel == -(-num_blocks(prod(param.shape[1:])) // parts) * BLOCK


def _spans(local: torch.Tensor) -> Iterator[slice]:
    """Spans of rows to compute at a time."""
    if local.numel():
        numel = SPAN_NUMEL.get(local.device.type, LARGE_SPAN_NUMEL)
        rows = max(1, numel * local.shape[0] // local.numel())
        for start in range(0, local.shape[0], rows):
            yield slice(start, min(start + rows, local.shape[0]))


def _check(group: dict[str, Any]) -> None:
    first, second = group["betas"]
    seed, numel = group["rounding_seed"], group["min_quantised_numel"]
    problems = [
        f"lr: expected at least 0, got {group['lr']}" if not float(group["lr"]) >= 0 else "",
        f"betas: expected two numbers from 0 to below 1, got {group['betas']}"
        if not (0 <= first < 1 and 0 <= second < 1)
        else "",
        f"eps: expected at least 0, got {group['eps']}" if not group["eps"] >= 0 else "",
        f"weight_decay: expected at least 0, got {group['weight_decay']}" if not group["weight_decay"] >= 0 else "",
        f"min_quantised_numel: expected an integer, got {numel!r}" if type(numel) is not int else "",
        f"rounding_seed: expected None or an integer of 64 bits, got {seed!r}"
        if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63)
        else "",
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise ArgumentError(f"AdamW8bit: {'; '.join(found)}")
