"""The hooks that change the all-gather of one parameter: `fsdp_pre_all_gather` and `fsdp_post_all_gather`. Layer:
extras.

A sharded parameter's local tensor may have these methods, from its subclass (an fp8 or a quantised weight) or as
attributes. Then its all-gather sends the tensors that `pre` returns, and `post` makes the unsharded tensor from the
received ones::

    pre(mesh, outer_size, outer_stride, module, mp_policy) -> (tensors, metadata)
    post(gathered tensors, metadata, param_dtype)          -> (unsharded tensor, tensors that hold its data)
    post(gathered tensors, metadata, param_dtype, out=unsharded tensor) -> None    from the second time on

Dim 0 of a gathered tensor is that of the sent one times the number of shards. The interface is that of torch's FSDP2::

    shard --pre--> tensors ==collective==> `raw` --post--> unsharded parameter
                                           (its data may be in `raw` or in tensors that `post` made)
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from fsdp2.api import Draft
from fsdp2.arguments import Placing
from fsdp2.errors import MisuseError, UnsupportedError
from fsdp2.layout import ShardLayout
from fsdp2.runtime import hooks
from fsdp2.runtime.bucket import Bucket
from fsdp2.runtime.gather import Gather
from fsdp2.runtime.geometry import is_wrapper
from fsdp2.runtime.parameter import ManagedParameter, Plan
from fsdp2.runtime.source import Shards
from fsdp2.runtime.storage import FlatStorage

_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


class Extension(Protocol):
    """See the module's docstring."""

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., tuple[Sequence[torch.Tensor], Any]]:
        """Returns the tensors that this rank sends."""

    @property
    def fsdp_post_all_gather(self) -> Callable[..., Any]:
        """Makes the unsharded tensor from the received ones."""


class HookedShards(Shards):
    """Shards of which some have hooks. Those are gathered into separate memory, which `post` may have chosen."""

    def __init__(self, group: Bucket):
        with torch.inference_mode(False), torch.no_grad():
            self._hooked: dict[ManagedParameter, _Hooked] = {}
            super().__init__(group)
            self._hooked = {param: _Hooked(param) for param in group.params if param.extension is not None}

    def alloc(self) -> None:
        super().alloc()
        for each in self._hooked.values():
            each.alloc()

    def free(self) -> None:
        super().free()
        for each in self._hooked.values():
            each.free()

    def start(self, group: Bucket) -> Callable[[], None]:
        self.alloc()
        for each in self._hooked.values():
            each.alloc_raw()
        sent = []
        for param, flat in zip(group.params, group.seen.flats, strict=True):
            if (hooked := self._hooked.get(param)) is None:
                sent.append(flat.to(group.roles.device, non_blocking=True))
            else:
                sent += [each.view(-1) for each in hooked.sources()]
        return partial(self._finish, group, (self.gather or self._plan(group)).start(sent, False, self))

    def _plan(self, group: Bucket) -> Gather:
        layouts, fulls = [], []
        for param in group.params:
            hooked = self._hooked.get(param)
            if hooked is not None:
                layouts += hooked.layouts
                # Separate version counters, because tensors that `post` made may be views of them.
                fulls += [full.data for full in hooked.fulls]
            else:
                assert param.whole is not None
                layouts.append(param.layout)
                fulls.append(param.whole)
        with torch.inference_mode(False), torch.no_grad():
            self.gather = Gather(layouts, fulls, group.roles.shard, group.channel)
        return self.gather

    def _finish(self, group: Bucket, finish_gather: Callable[[], None]) -> None:
        finish_gather()
        with torch.inference_mode(False), torch.no_grad():
            for each in self._hooked.values():
                each.finish()
        group.changes.forget()  # `post` fills the parameters themselves


class _Hooked:
    """The gather of one parameter. The all-gather stream owns `raw` and what `post` allocates.

    Attributes:
        layouts: the layouts of the gathered tensors.
        fulls: the gathered tensors, each with its own storage, as in torch: some subclasses do not accept offsets.
    """

    def __init__(self, param: ManagedParameter):
        self.param = param
        self._metadata: Any = None
        self._is_made = False
        self._inner: list[tuple[torch.UntypedStorage, int]] = []
        shares = self._call_pre()
        self._first: list[torch.Tensor] | None = shares
        size = param.roles.shard_size
        self.layouts = [ShardLayout((size * share.shape[0], *share.shape[1:]), 0, size) for share in shares]
        self._raw = [FlatStorage(size * share.nbytes, param.roles.device) for share in shares]
        self.alloc_raw()
        self.fulls = [
            raw.view(0, layout.shape, share.dtype)
            for raw, layout, share in zip(self._raw, self.layouts, shares, strict=True)
        ]

    @property
    def _extension(self) -> Extension:
        """The hooks of the current sharded parameter, which the user may have replaced."""
        assert self.param.extension is not None
        found: Extension = self.param.extension
        return found

    def sources(self) -> list[torch.Tensor]:
        """The tensors that this rank sends; the hook runs once per all-gather. Raises like `_call_pre`."""
        first, self._first = self._first, None
        return self._call_pre() if first is None else first

    def _call_pre(self) -> list[torch.Tensor]:
        """Run `fsdp_pre_all_gather`. Raises `MisuseError` if, with uneven shards, it omitted the padding on a rank that
        has some."""
        param, specs, pre = self.param, self.param.plan.specs, self._extension.fsdp_pre_all_gather
        if len(inspect.signature(pre).parameters) == 1:
            shares, self._metadata = pre(param.roles.shard_mesh)
        else:
            shape, module = torch.Size(specs.shape), param.slots[0].module
            shares, self._metadata = pre(param.roles.shard_mesh, shape, tuple(specs.stride), module, param.plan.policy)
        layout, rank = param.geometry.local
        rows = layout.local_size(rank)
        for share in shares:
            if rows != layout.chunk and share.shape[0] == rows:
                raise MisuseError(
                    f"'{param.fqn}': fsdp_pre_all_gather returned a tensor of shape {tuple(share.shape)} on shard rank "
                    f"{rank}; with uneven sharding it must return the padded size, {layout.local_shape(0)}"
                )
        return [share.contiguous() for share in shares]

    def finish(self) -> None:
        """After the gather: create the unsharded parameter, or fill it."""
        param, post = self.param, self._extension.fsdp_post_all_gather
        if not self._is_made:
            self._is_made = True
            tensor, inner = post(tuple(self.fulls), self._metadata, param.compute_dtype)
            gathered = {each.untyped_storage().data_ptr() for each in self.fulls}
            storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in inner}
            self._inner = [(each, each.nbytes()) for pointer, each in storages.items() if pointer not in gathered]
            specs = param.plan.specs
            if specs.inner_mesh is None and tensor.shape != specs.shape:  # without the padding
                tensor = torch.as_strided(tensor, specs.shape, specs.stride, 0)
            param.make_unsharded(tensor)
            if type(tensor) is torch.Tensor:
                param.whole = param.geometry.to_memory(tensor.detach().data)
        else:
            post(tuple(self.fulls), self._metadata, param.compute_dtype, out=param.unsharded)
        if _releases_outputs(param.fqn, self._extension):
            for raw in self._raw:
                raw.free()

    def alloc(self) -> None:
        """Allocate the tensors that `post` made."""
        for storage, nbytes in self._inner:
            if storage.nbytes() != nbytes:  # torch reallocates even if the size does not change
                storage.resize_(nbytes)

    def alloc_raw(self) -> None:
        """Allocate the tensors that a gather fills. (A gather on the smaller mesh does not need them.)"""
        for raw in self._raw:
            raw.alloc()

    def free(self) -> None:
        for raw in self._raw:
            raw.free()
        for storage, _ in self._inner:
            storage.resize_(0)


def hooks_of(fqn: str, local: torch.Tensor) -> Extension | None:
    """`local`, if it has the hooks. Raises `MisuseError` for one hook without the other, or one that cannot be called
    as described above."""
    found: Any = local
    pre, post = getattr(local, "fsdp_pre_all_gather", None), getattr(local, "fsdp_post_all_gather", None)
    if (pre is None) != (post is None):
        has, lacks = ("pre", "post") if post is None else ("post", "pre")
        raise MisuseError(f"'{fqn}' has fsdp_{has}_all_gather but no fsdp_{lacks}_all_gather; it needs both or none")
    if pre is None:
        if getattr(local, _RELEASE, None) is not None:
            raise MisuseError(f"'{fqn}' has {_RELEASE} but no fsdp_pre_all_gather and fsdp_post_all_gather")
        return None
    num_args = len(inspect.signature(pre).parameters)
    if num_args not in (1, 5):
        raise MisuseError(
            f"'{fqn}': fsdp_pre_all_gather takes {num_args} arguments; expected (mesh, outer_size, outer_stride, "
            "module, mp_policy), or (mesh)"
        )
    _releases_outputs(fqn, found)
    return found  # type: ignore[no-any-return]


def _releases_outputs(fqn: str, extension: Any) -> bool:
    """Whether the gathered tensors may be freed once `post` has read them."""
    ask = getattr(extension, _RELEASE, None)
    answer = False if ask is None else ask()
    if not isinstance(answer, bool):
        raise MisuseError(f"'{fqn}': {_RELEASE} must return a bool, got {answer!r}")
    return answer


def _source_of(group: Bucket) -> HookedShards | None:
    return HookedShards(group) if any(param.extension is not None for param in group.params) else None


def _check_drafts(drafts: Sequence[Draft]) -> None:
    """Raise `UnsupportedError` for tensor subclasses and tensors with hooks that cannot be sharded as requested."""
    for draft in drafts:
        for param, plan in draft.planned:
            _check(draft.places[param][0], draft.placing.local(param), plan, draft.placing)


def _check(fqn: str, local: torch.Tensor, plan: Plan, placing: Placing) -> None:
    if is_wrapper(local) and not local.is_contiguous():
        raise UnsupportedError(
            f"'{fqn}' is a {type(local).__name__} of shape {tuple(local.shape)} that is not contiguous, stride "
            f"{local.stride()}; tensor subclasses must be: call .contiguous() on it"
        )
    if is_wrapper(local) and plan.offload.in_files:
        raise UnsupportedError(
            f"'{fqn}' is a {type(local).__name__}, which cannot be kept in a file; pass Offload(params=True, ...)"
        )
    if hooks_of(fqn, local) is None:
        return
    if plan.roles.shard_axis is None:
        raise UnsupportedError(f"'{fqn}' has hooks for its all-gather, but nothing is gathered on {plan.roles.mesh}")
    keeps_on_host = placing.zero is not None and placing.zero.keep_frozen == "host"
    if keeps_on_host or not (placing.reshard_to is None or isinstance(placing.reshard_to, bool)):
        raise UnsupportedError(
            f"'{fqn}' has hooks for its all-gather, which work neither with an int for reshard_after_forward nor with "
            'keep_frozen="host"; pass a bool'
        )


hooks.gather_hooks.append(hooks_of)
hooks.units_drafted.append(_check_drafts)
hooks.sources.append(_source_of)
