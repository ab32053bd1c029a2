"""`ManagedParameter`: one parameter in its forms. Layer: runtime, below the param group.

==========  ==============================================  =====================================================
form        what the module holds                           memory
==========  ==============================================  =====================================================
sharded     `sharded`, a DTensor on the mesh                this rank's rows, padded to the size of a full shard
unsharded   `unsharded`, a plain parameter                  a view of the group's flat storage
resharded   `resharded`, a DTensor on the post-forward mesh this rank's rows of the smaller group, compute dtype
==========  ==============================================  =====================================================

`sharded` and `unsharded` keep their identity for life: optimizers hold the one, autograd graphs the other. Which form
the module holds now is the group's to know.
"""

from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2._torch import (
    allows_direct_slots,
    local_tensor,
    make_dtensor,
    make_parameter,
    parameter_slots,
    set_local_tensor,
)
from fsdp2.errors import ArgumentError
from fsdp2.layout import ShardLayout
from fsdp2.mesh import MeshRoles
from fsdp2.policies import MixedPrecisionPolicy

__all__ = ["ManagedParameter", "Slot", "known_origin", "origin_of"]

# A token for each parameter that was ever sharded and still lives elsewhere, so that a weight that is tied over two
# units is found although neither unit sees the other. Weak: a later parameter at the same address gets a new token.
_origins = WeakIdKeyDictionary()


def origin_of(param: torch.Tensor) -> object:
    """A token that is the same for all names of one original parameter and for nothing else."""
    return _origins.setdefault(param, object())


def known_origin(param: torch.Tensor) -> object:
    """The token of a parameter that `origin_of` was asked for before; otherwise a token like no other."""
    return _origins.get(param, object())


class Slot:
    """One place where a module holds a parameter. Holds the module weakly: modules own units, not the reverse."""

    def __init__(self, module: nn.Module, name: str):
        self.name = name
        self._module = ref(module)
        self._direct = allows_direct_slots(module)

    def get(self) -> torch.Tensor | None:
        """What the module holds now."""
        module = self._module()
        return None if module is None else parameter_slots(module)[self.name]

    def put(self, param: nn.Parameter) -> None:
        """Make the module hold `param`."""
        module = self._module()
        if module is None:
            return
        if self._direct:
            parameter_slots(module)[self.name] = param
        else:
            setattr(module, self.name, param)

    @property
    def module(self) -> nn.Module | None:
        """The module, while it lives."""
        return self._module()


class ManagedParameter:
    """One parameter that a unit manages, under all its names.

    Args:
        original: what the slots hold until now.
        data: its values, whole, on the mesh's device.
        dim: to shard.

    Attributes:
        slots: every place that holds it.
        fqn: its name, first relative to the unit's module, from the root's first forward on relative to the root.
        roles: mesh and axes.
        origin: see `origin_of`.
        layout: how it is cut over the shard axis.
        spec: DTensor spec of `sharded` and of its gradient.
        sharded: see the table above.
        flat: 1-D storage of the local shard, padded to `layout.padded_numel`.
        unsharded: see the table above; None until the first unshard.
        resharded: see the table above; None unless resharded to a smaller mesh.
        partial: with HSDP, the reduce-scattered gradient that still waits for its all-reduce (1-D, padded).
        policy: mixed precision.
    """

    def __init__(
        self,
        slots: list[Slot],
        fqn: str,
        original: nn.Parameter,
        data: torch.Tensor,
        roles: MeshRoles,
        dim: int,
        policy: MixedPrecisionPolicy,
    ):
        self.slots = slots
        self.fqn = fqn
        self.roles = roles
        self.policy = policy
        self.origin = origin_of(original)
        self.layout = ShardLayout(tuple(data.shape), dim, roles.shard_size)
        self.spec = roles.spec(data.shape, dim, data.dtype)
        start, size = self.layout.bounds[roles.shard_rank], self.layout.local_size(roles.shard_rank)
        local, self.flat = self._padded(data.narrow(dim, start, size))
        self.sharded = make_parameter(local, self.spec, original.requires_grad)
        if original.grad_dtype != original.dtype:
            self.sharded.grad_dtype = original.grad_dtype
        self.unsharded: nn.Parameter | None = None
        self.resharded: nn.Parameter | None = None
        self.partial: torch.Tensor | None = None
        self.put(self.sharded)

    @property
    def dtype(self) -> torch.dtype:
        """Original dtype: of the sharded parameter, its gradient and the optimizer's state."""
        return self.flat.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the unsharded parameter, hence on the wire of an all-gather."""
        wanted = self.policy.param_dtype
        return wanted if wanted is not None and self.dtype.is_floating_point else self.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype of the sharded gradient: what the user set as `grad_dtype`, otherwise the original dtype."""
        return self.sharded.grad_dtype or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which gradients wait and are reduced."""
        wanted = self.policy.reduce_dtype
        return wanted if wanted is not None and self.dtype.is_floating_point else self.grad_dtype

    @property
    def local_numel(self) -> int:
        """Elements of this rank's shard, without padding."""
        return self.layout.local_numel(self.roles.shard_rank)

    def put(self, form: nn.Parameter) -> None:
        """Make every slot hold `form`."""
        for slot in self.slots:
            slot.put(form)

    def grad_from(self, flat: torch.Tensor) -> DTensor:
        """A gradient for `sharded`: the DTensor on this rank's (padded, 1-D) reduced gradient."""
        local = flat[: self.local_numel].view(self.layout.local_shape(self.roles.shard_rank))
        spec = self.spec
        if flat.dtype != self.dtype:
            spec = self.roles.spec(self.layout.shape, self.layout.dim, flat.dtype)
        return make_dtensor(local, spec)

    def make_unsharded(self, data: torch.Tensor) -> nn.Parameter:
        """Create `unsharded` on `data`, which has the global shape and the compute dtype."""
        before = self.unsharded
        self.unsharded = nn.Parameter(data, requires_grad=self.sharded.requires_grad)
        if self.unsharded.grad_dtype != self.reduce_dtype and self.dtype.is_floating_point:
            # Autograd then casts each gradient as it arrives: the one copy between compute and reduce dtype, and
            # gradients of several backwards add up in the reduce dtype.
            self.unsharded.grad_dtype = self.reduce_dtype
        if before is not None and before.grad is not None:  # converted while gradients wait to be reduced
            self.unsharded.grad = before.grad.to(data.device, self.reduce_dtype)
        return self.unsharded

    def make_resharded(self, roles: MeshRoles) -> None:
        """Create `resharded` from `unsharded`: this rank's rows on the smaller mesh, copied."""
        assert self.unsharded is not None
        dim = self.layout.dim
        layout = ShardLayout(self.layout.shape, dim, roles.shard_size)
        rank = roles.shard_rank
        chunk = self.unsharded.detach().narrow(dim, layout.bounds[rank], layout.local_size(rank))
        local = chunk.clone(memory_format=torch.contiguous_format)
        spec = roles.spec(self.layout.shape, dim, local.dtype)
        self.resharded = make_parameter(local, spec, self.sharded.requires_grad)

    def refresh(self) -> bool:
        """Take up what the module holds now in place of `sharded`: another device, dtype, parameter, or storage without
        padding (after `to`, `to_empty`, `load_state_dict`). Only while sharded. Returns whether anything changed.

        Raises:
            ArgumentError: the module holds something that is not this parameter sharded the same way.
        """
        current = self.slots[0].get()
        if current is self.sharded and local_tensor(current).untyped_storage() is self.flat.untyped_storage():
            return False
        expected = f"a DTensor of shape {self.layout.shape} with placements {self.spec.placements}"
        if not isinstance(current, DTensor) or not isinstance(current, nn.Parameter):
            raise ArgumentError(
                f"{self.fqn}: expected the module to hold an nn.Parameter that is {expected}, got "
                f"{type(current).__name__}. Distribute full tensors first (torch.distributed.tensor.distribute_tensor) "
                "or load them with torch.distributed.checkpoint.state_dict.set_model_state_dict."
            )
        if tuple(current.shape) != self.layout.shape or current.placements != self.spec.placements:
            raise ArgumentError(
                f"{self.fqn}: expected {expected}, got shape {tuple(current.shape)} with placements "
                f"{current.placements}. Distribute it like the parameter that it replaces."
            )
        local = local_tensor(current)
        if local.is_contiguous() and local.numel() == self.layout.padded_numel:
            self.flat = local.view(-1)
        else:
            local, self.flat = self._padded(local)
        self.spec = self.roles.spec(self.layout.shape, self.layout.dim, current.dtype)
        set_local_tensor(current, local, self.spec)
        if current is not self.sharded and self.sharded.grad_dtype != self.sharded.dtype:
            current.grad_dtype = self.sharded.grad_dtype
        self.sharded = current
        self.put(current)
        return True

    def _padded(self, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy a local shard to the start of fresh storage for a full one: the shard there, and all of it flat."""
        flat = torch.zeros(self.layout.padded_numel, dtype=chunk.dtype, device=chunk.device)
        local = flat[: chunk.numel()].view(chunk.shape)
        local.copy_(chunk)
        return local, flat
