"""`ManagedParameter`: one parameter in its forms. Layer: runtime, below the bucket.

==========  ===================================  ==================================================================
form        what the module holds                memory
==========  ===================================  ==================================================================
sharded     `sharded`, a DTensor on the mesh     this rank's rows, padded to the size of a full shard
unsharded   `unsharded`, a plain parameter (or   a view of the group's flat storage
            a model-parallel DTensor)
resharded   `resharded`, a DTensor on the post-  this rank's rows of the smaller group, compute dtype
            forward mesh
==========  ===================================  ==================================================================

`sharded` and `unsharded` stay the same objects, unless the user replaces a parameter: optimizers hold `sharded`,
autograd graphs hold `unsharded`. The group knows which form the module currently holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2._torch import (
    base_of,
    local_tensor,
    make_parameter,
    move_hooks,
    set_local_tensor,
    subclassed_parameter,
    version,
)
from fsdp2.errors import ArgumentError
from fsdp2.layout import ShardLayout
from fsdp2.mesh import MeshRoles
from fsdp2.policies import MixedPrecisionPolicy, OffloadPolicy
from fsdp2.runtime import hooks
from fsdp2.runtime.geometry import Geometry, is_wrapper
from fsdp2.runtime.slot import Slot, tie_again
from fsdp2.specs import ParamSpecs

# Maps original, unsharded and replaced sharded parameters to their managed parameter. Weak on both sides, so that a
# later parameter at the same address is not mistaken for an earlier one.
_managed = WeakIdKeyDictionary()
_num_replaced = 0


def managed_by(tensor: torch.Tensor) -> "ManagedParameter | None":
    """The managed parameter to which `tensor` belongs, as the original from before `fully_shard`, a sharded parameter
    that was replaced since, or the unsharded form."""
    weak = _managed.get(tensor)
    return None if weak is None else weak()


def num_replaced() -> int:
    """How often a sharded parameter was replaced in this process. If it grew, optimizers may hold stale parameters."""
    return _num_replaced


@dataclass(frozen=True)
class Plan:
    """How one parameter will be managed; computed and checked by `fully_shard` before anything changes.

    Attributes:
        roles: mesh and axes.
        specs: the specs of the DTensors.
        dim: the dim to shard, in the user's order of dims.
        policy: mixed precision.
        param_dtype: compute dtype of this parameter; None for the original dtype.
        offload: where the sharded parameter lives.
        gather_dtype: the dtype that an all-gather sends instead of the compute dtype (`all_gather_dtype`).
    """

    roles: MeshRoles
    specs: ParamSpecs
    dim: int
    policy: MixedPrecisionPolicy
    param_dtype: torch.dtype | None
    offload: OffloadPolicy
    gather_dtype: torch.dtype | None = None

    @property
    def home(self) -> torch.device:
        """Where the sharded parameter lives."""
        return self.offload.home or self.roles.device

    @property
    def grad_home(self) -> torch.device:
        """Where its gradient lives."""
        return self.offload.grad_home or self.roles.device

    @property
    def pins(self) -> bool:
        """Whether `home` is page-locked host memory."""
        return self.offload.home is not None and self.offload.pins and not self.offload.in_files

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for sharded parameters, 1-D."""
        if device == self.offload.home:
            return self.offload.zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device)


class ManagedParameter:
    """One parameter that a unit manages, under all its names.

    Args:
        original: the parameter that the slots hold before `fully_shard`.
        data: its whole values (with tensor parallelism: its whole local tensor).

    Attributes:
        slots: every place that holds it.
        fqn: relative to the unit's module; from the root's first forward on, relative to the root.
        sharded, unsharded, resharded: see the table above; the last two are None while they do not exist.
        flat: 1-D storage of the local shard, padded.
        whole: a second tensor on the memory of `unsharded`, dims in memory order, in no autograd graph.
        writes_on_meta: how often the original was written to on the meta device, where values are not kept.
        extension: the user's hooks that change the all-gather of this parameter, if any.
        kind: the class and attributes of the user's parameter, given to the unsharded one too. (A tensor subclass that
            is only marked as a parameter counts as plain: its data keeps the class.)
    """

    def __init__(self, slots: list[Slot], fqn: str, original: nn.Parameter, data: torch.Tensor, plan: Plan):
        self.slots = slots
        self.fqn = fqn
        self.plan = plan
        self.geometry = Geometry(data, plan.dim, plan.roles)
        is_param = nn.Parameter in type(original).__mro__
        self.kind = (type(original), dict(original.__dict__)) if is_param else (nn.Parameter, {})
        local, self.flat = self._padded(self.geometry.cut(data))
        self.extension = extension_of(fqn, local)
        self.sharded = make_parameter(local, plan.specs.sharded(local.dtype), original.requires_grad)
        self.sharded.__dict__.update(self.kind[1])
        move_hooks(original, self.sharded)
        if original.grad_dtype != original.dtype:
            self.sharded.grad_dtype = original.grad_dtype
        self.unsharded: nn.Parameter | None = None
        self.whole: torch.Tensor | None = None
        self.resharded: nn.Parameter | None = None
        self.writes_on_meta = version(original) if original.is_meta else 0
        _managed[original] = ref(self)
        self.put(self.sharded)

    @property
    def roles(self) -> MeshRoles:
        """Mesh and axes."""
        return self.plan.roles

    @property
    def layout(self) -> ShardLayout:
        """How it is split over the shard axis, dims in memory order."""
        return self.geometry.layout

    def _padded(self, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy a local shard to the start of new storage of full size. Returns the shard with the user's dims, and the
        flat storage."""
        home = chunk.device if chunk.is_meta else self.plan.home
        layout, _ = self.geometry.local
        if is_wrapper(chunk):
            padded = chunk.new_zeros(list(layout.local_shape(0)), device=home)
            local = padded.narrow(layout.dim, 0, chunk.size(layout.dim)) if chunk.shape != padded.shape else padded
            return local.copy_(chunk), padded.view(-1)
        flat = self.plan.zeros(layout.padded_numel, chunk.dtype, home)
        if self.plan.pins and not chunk.is_meta:
            flat = flat.pin_memory()
        local = self.geometry.local_view(flat)
        self.geometry.to_memory(local).copy_(chunk)
        return local, flat

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the original, of the sharded parameter and of the optimizer's state."""
        return self.flat.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the unsharded parameter, and so of what an all-gather sends."""
        wanted = self.plan.param_dtype
        return wanted if wanted is not None and self.dtype.is_floating_point else self.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype of the sharded gradient: the user's `grad_dtype` if set, otherwise the original dtype."""
        return self.sharded.grad_dtype or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which gradients wait and are summed."""
        wanted = self.plan.policy.reduce_dtype
        return wanted if wanted is not None and self.dtype.is_floating_point else self.grad_dtype

    @property
    def is_extended(self) -> bool:
        """Whether an all-gather sends something other than the shard."""
        return self.extension is not None or self.plan.gather_dtype is not None

    @property
    def aliases(self) -> bool:
        """Whether `unsharded` can use the memory of `flat`: nothing is sharded, cast or moved (as in DDP)."""
        is_moved = self.compute_dtype != self.dtype or self.plan.home != self.roles.device
        return self.roles.shard_axis is None and not is_moved and not self.is_extended

    # --- forms -------------------------------------------------------------------------------------------------------

    @property
    def at_rest(self) -> nn.Parameter | None:
        """What the slots hold while sharded; None if the parameter shares the `sharded` of another one."""
        return self.sharded

    def put(self, form: nn.Parameter) -> None:
        """Make every slot hold `form`."""
        for slot in self.slots:
            slot.put(form)

    def make_unsharded(self, data: torch.Tensor) -> nn.Parameter:
        """Create `unsharded` on `data`, which has the compute dtype and the user's unsharded shape."""
        before, trainable, specs = self.unsharded, self.sharded.requires_grad, self.plan.specs
        if specs.inner_mesh is not None:
            self.unsharded = make_parameter(data, specs.unsharded(data.dtype), trainable)
        elif self.kind[0] is not nn.Parameter:
            self.unsharded = subclassed_parameter(self.kind[0], data, trainable)
        else:
            self.unsharded = nn.Parameter(data, requires_grad=trainable)
        self.unsharded.__dict__.update(self.kind[1])
        _managed[self.unsharded] = ref(self)
        self.follow_grad_dtype()
        if before is not None:  # converted
            move_hooks(before, self.unsharded)
            if before.grad is not None:  # not yet reduced
                self.unsharded.grad = before.grad.to(data.device, self.reduce_dtype)
        return self.unsharded

    def follow_grad_dtype(self) -> None:
        """Let autograd cast each gradient of `unsharded` to the reduce dtype as it arrives. This is the only copy
        between the two dtypes, and gradients of several backwards add up in the reduce dtype."""
        form, is_any = self.unsharded, self.sharded.grad_dtype is None  # None: a custom backward may write any dtype
        wanted = None if is_any else self.reduce_dtype
        if form is not None and self.dtype.is_floating_point and form.grad_dtype != wanted:
            grad, form.grad = form.grad, None
            form.grad_dtype = wanted
            form.grad = grad if grad is None or is_any else grad.to(self.reduce_dtype)

    def is_among(self, ids: set[int]) -> bool:
        """Whether one of its forms has one of these ids."""
        return id(self.sharded) in ids or id(self.unsharded) in ids or id(self.resharded) in ids

    # --- following the module ----------------------------------------------------------------------------------------

    @property
    def held(self) -> torch.Tensor:
        """What the module holds now."""
        current = self.slots[0].get()
        return self.sharded if current is None else current

    def refresh(self) -> bool:
        """Adopt the tensor that the module now holds: another device, dtype or parameter, or storage without padding
        (after `to`, `to_empty`, `load_state_dict`). Only while sharded. Returns whether anything changed.

        Raises:
            ArgumentError: the module holds something that is not this parameter sharded the same way.
        """
        slot, before = self.slots[0], self.extension
        current = self.sharded if slot.module is None else slot.get()  # the module may have been freed
        if current is self.sharded and _is_current(self, local_tensor(current)):
            tie_again(self.slots, current, partial(_check_replacement, self))
            self.extension = extension_of(self.fqn, local_tensor(current))  # users may add hooks later
            return before is not self.extension
        _check_replacement(self, current)
        assert isinstance(current, nn.Parameter)
        local, numel = local_tensor(current), self.geometry.local[0].padded_numel
        in_memory = local if is_wrapper(local) else self.geometry.to_memory(local)
        own = None if is_wrapper(local) or not in_memory.is_contiguous() else _flat_of(in_memory)
        is_home = local.is_meta or (self.plan.offload.has(in_memory) and (local.is_pinned() or not self.plan.pins))
        if own is not None and own.numel() == numel and is_home:
            self.flat = own
        else:
            local, self.flat = self._padded(in_memory)
        self.extension = extension_of(self.fqn, local)
        set_local_tensor(current, local, self.plan.specs.sharded(local.dtype))
        if current is not self.sharded:
            self._replace_sharded(current)
        self.put(current)
        return True

    def _replace_sharded(self, current: nn.Parameter) -> None:
        """The user has replaced the parameter (`load_state_dict(assign=True)`, an EMA). An optimizer may still hold the
        old one."""
        global _num_replaced
        _num_replaced += 1
        if self.sharded.grad_dtype != self.sharded.dtype:
            current.grad_dtype = self.sharded.grad_dtype
        _managed.pop(current, None)
        _managed[self.sharded] = ref(self)
        self.sharded = current


def extension_of(fqn: str, local: torch.Tensor) -> Any:
    """The object whose hooks change the all-gather of `local`, or None. Raises `MisuseError` if they are unusable."""
    return next((found for find in hooks.gather_hooks if (found := find(fqn, local)) is not None), None)


sharded_of: Callable[[ManagedParameter], nn.Parameter] = attrgetter("sharded")


def _flat_of(local: torch.Tensor) -> torch.Tensor:
    """The flat memory of a contiguous shard, with padding if a feature has allocated it with padding."""
    base = base_of(local)
    is_ours = base is not None and any(made(base) for made in hooks.has_padding)
    return base if is_ours and base.data_ptr() == local.data_ptr() else local.reshape(-1)  # type: ignore[return-value, union-attr]


def _is_current(param: ManagedParameter, local: torch.Tensor) -> bool:
    if is_wrapper(local):
        return local.dtype == param.flat.dtype and local.device == param.flat.device
    return local.untyped_storage() is param.flat.untyped_storage()


def _check_replacement(param: ManagedParameter, current: Any) -> None:
    shape, placements = param.plan.specs.shape, param.plan.specs.placements
    expected = f"a DTensor of shape {shape} with placements {placements}"
    if not isinstance(current, DTensor) or not isinstance(current, nn.Parameter):
        raise ArgumentError(
            f"{param.fqn}: expected the module to hold an nn.Parameter that is {expected}, got "
            f"{type(current).__name__}. Distribute full tensors first (torch.distributed.tensor.distribute_tensor) "
            "or load them with torch.distributed.checkpoint.state_dict.set_model_state_dict."
        )
    if tuple(current.shape) != shape or tuple(current.placements) != placements:
        raise ArgumentError(
            f"{param.fqn}: expected {expected}, got shape {tuple(current.shape)} with placements "
            f"{current.placements}. Distribute it like the parameter that it replaces."
        )
