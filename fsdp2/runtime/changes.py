"""Detects what users do to parameters between steps. Layer: runtime, below the bucket.

`Seen` records the sharded parameters as they were when a step began. `Changes` finds in-place changes of unsharded
ones, by their version counters, which a gather does not touch.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any
from warnings import warn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._torch import backward_is_running, local_of, local_tensor, storage_id, version
from fsdp2.errors import ArgumentError, OrderError
from fsdp2.runtime import hooks
from fsdp2.runtime.geometry import is_wrapper
from fsdp2.runtime.gradients import Gradients
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.slot import SlotTable

grad_dtype_of: Callable[[torch.Tensor], torch.dtype | None] = attrgetter("grad_dtype")


class Seen:
    """The sharded parameters of a group as they were at the last look.

    Attributes:
        sharded: the sharded parameters.
        at_rest: what the modules hold while the group is sharded.
        flats: this rank's rows of each, 1-D, without padding.
        ids: the ids of their local tensors.
        versions: the versions of the DTensors. All ranks run the same operators on these. Local tensors may change on
            some ranks only, and a gather that only some ranks issue would hang.
        known: the `fingerprint` at that time.
        grad_dtypes: their `grad_dtype`.
        slots: where the modules hold the parameters.
    """

    def __init__(self, params: Sequence[ManagedParameter]):
        self._params = params
        self.sharded = [param.sharded for param in params]
        self.at_rest: list[nn.Parameter | None] = [param.at_rest for param in params]
        self.slots = SlotTable(params)
        self.flats = [param.flat[: param.geometry.local_numel] for param in params]
        self._plain = [flat for flat in self.flats if not is_wrapper(flat)]
        self._locals = list(map(local_of, self.sharded))  # kept alive, so that their ids are not reused
        self.ids = list(map(id, self._locals))
        self.known = self.fingerprint()
        self.grad_dtypes = list(map(grad_dtype_of, self.sharded))
        self.versions = self.now()

    def fingerprint(self) -> list[Any]:
        """Storages, local tensors and addresses (`share_memory_` changes these). Equal to `known` until something is
        moved, converted or assigned."""
        addresses = map(torch.Tensor.data_ptr, self._plain)
        local_tensors = map(id, map(local_of, self.sharded))
        return [*map(storage_id, self.sharded), *local_tensors, *addresses]

    def now(self) -> list[int]:
        """The current versions."""
        try:
            return list(map(version, self.sharded))
        except RuntimeError:  # tensors made in inference mode have no versions
            return []

    def is_converted(self) -> bool:
        """Whether a submodule that is not a unit was converted by itself (`model.head.float()`). Then its parameters
        have new local tensors, and the unit was not notified."""
        return not all(map(is_, map(local_of, self.sharded), self._locals))

    def warn_of_assigned_data(self) -> None:
        """Warn after ``param.data = ...``, which changes nothing that a gather reads. (Not an error: transformers
        assigns padded biases, usually with a padding of zero.)"""
        pairs = zip(self._params, map(storage_id, self.sharded), self.known, strict=False)
        fqn = next((param.fqn for param, new, before in pairs if new != before), None)
        if fqn is not None and not self.is_converted():
            warn(
                f"'{fqn}': its .data was assigned, which does not change the values of a DTensor. In torch.no_grad() "
                "call param.copy_(value), with a DTensor of the same placements; or use fsdp2.full_params(model).",
                stacklevel=2,
            )


class Changes:
    """In-place changes of a group's unsharded parameters.

    Attributes:
        versions: their versions when they last had the values of the shards.
    """

    def __init__(self, params: Sequence[ManagedParameter], gradients: Gradients):
        self._params = params
        self._gradients = gradients
        self.versions: list[int] = []
        self._used_at: list[int] | None = None  # versions of shards used in place, when forward used them

    def forget(self) -> None:
        """Treat the current values as equal to the shards."""
        self.versions = list(map(version, self._gradients.unsharded))

    def found(self) -> list[ManagedParameter]:
        """The parameters that were changed."""
        now = list(map(version, self._gradients.unsharded))
        if now == self.versions:
            return []
        return [param for param, new, old in zip(self._params, now, self.versions, strict=True) if new != old]

    def check_none(self) -> None:
        """In forward or backward: raise if a parameter was changed."""
        for param in self.found():
            raise OrderError(
                f"'{param.fqn}' was changed in place within the forward or backward of its unit, as "
                "Embedding(max_norm=...) does. Ranks see different data, so their changes may differ, and no shard has "
                "them. Change parameters between forward and backward, in the same way on all ranks. After this error "
                "call model.reset_iter_state(), which drops the change."
            )

    def adopt(self, changed: Sequence[ManagedParameter], is_stale: bool) -> None:
        """Copy the changes of these parameters into their shards.

        Raises:
            OrderError: the shards were changed too (`is_stale`), or hooks gather something else than the shards.
        """
        if is_stale:
            raise OrderError(
                f"'{changed[0].fqn}' was changed in place while it was unsharded, and its shards were changed too. "
                "Call reshard() on the module that holds it between the two. After this error call "
                "model.reset_iter_state(), which drops the change of the unsharded parameter."
            )
        copy_back = hooks.implementation(hooks.in_place, "copy_back", "changing unsharded parameters in place")
        for param in changed:
            if not param.aliases:
                copy_back(param)
        self.forget()

    def converted(self) -> Iterator[ManagedParameter]:
        """The parameters that are no longer in the memory that gathers fill."""
        return filter(_is_elsewhere, self._params)

    def check_unconverted(self) -> None:
        """Raise if trainable parameters were converted while they were unsharded. (Frozen ones are ignored: some
        modules change their dtype in each forward.)"""
        for param in self.converted():
            if param.sharded.requires_grad:
                raise OrderError(
                    f"'{param.fqn}' was moved or converted while it was unsharded, by a call on a module that is not "
                    "a unit, so its shards did not change. Call reshard() on the model before such a call."
                )

    def check_use(self, fqn: str) -> None:
        """Replicated parameters without a cast or move are used in place. Changing them between forward and backward
        makes gradients wrong. For a plain model autograd raises; here it does not see the change, so raise instead."""
        versions = [version(param.sharded) for param in self._params if param.aliases]
        if not backward_is_running():
            self._used_at = versions
        elif self._used_at is not None and versions != self._used_at:
            raise OrderError(
                f"unit '{fqn or '(root)'}': parameters changed between forward and backward; they are replicated and "
                "used without a copy, so backward needs the values of forward. Step the optimizer after backward."
            )

    def forget_use(self) -> None:
        """No backward of the forwards so far will follow."""
        self._used_at = None


def _is_elsewhere(param: ManagedParameter) -> bool:
    form: Any = param.unsharded
    if form is None or param.whole is None or param.extension is not None:
        return False
    local = local_tensor(form) if isinstance(form, DTensor) else form
    return local.untyped_storage() is not param.whole.untyped_storage()


def check_stand_in(param: ManagedParameter, found: torch.Tensor | None) -> None:
    """`param` is about to replace `found`, which a module holds in its place. Raise if `found` may have other values or
    requires a gradient."""
    if found is not None and param.is_among({id(found)}):
        return
    local = local_tensor(found) if isinstance(found, DTensor) and not found.requires_grad else None
    if local is not None and not is_wrapper(local) and local.untyped_storage() is param.flat.untyped_storage():
        return
    kind = "None" if found is None else f"a {type(found).__name__} of shape {tuple(found.shape)}"
    raise ArgumentError(
        f"'{param.fqn}' is sharded, and its module holds {kind} in its place, which the all-gathered parameter would "
        "replace. torch.func.functional_call with other parameters needs a module that is not sharded; to replace the "
        "parameter itself, call load_state_dict(..., assign=True)."
    )
