"""`ExtendedGather`: the all-gather of one parameter that has all-gather hooks; see `extension`. Layer: runtime, below
the param group.

::

    shard --pre--> tensors ==collective==> `raw` --post--> unsharded parameter
                                           (its data may be in `raw` or in tensors that `post` made)
"""

from typing import Any

import torch

from fsdp2.errors import MisuseError
from fsdp2.layout import ShardLayout
from fsdp2.runtime.extension import Extension, call_pre, releases_outputs
from fsdp2.runtime.parameter import ManagedParameter
from fsdp2.runtime.storage import FlatStorage


class ExtendedGather:
    """The gather of one parameter. It is a `Storage`: allocated before the gather, freed when the group reshards. The
    all-gather stream owns `raw` and what `post` allocates.

    Attributes:
        layouts: of the gathered tensors.
        fulls: the gathered tensors, each with a storage of its own, as in torch: some subclasses refuse offsets.
    """

    def __init__(self, param: ManagedParameter):
        self.param = param
        make = param.plan.extension
        self._made = make(param) if make is not None and param.extension is None else None
        self._metadata: Any = None
        self._is_made = False
        self._inner: list[tuple[torch.UntypedStorage, int]] = []
        shares = self._call_pre()
        self._first: list[torch.Tensor] | None = shares
        size = param.roles.shard_size
        self.layouts = [ShardLayout((size * share.shape[0], *share.shape[1:]), 0, size) for share in shares]
        self._raw = [FlatStorage(size * share.nbytes, param.roles.device) for share in shares]
        self._allocate_raw()
        self.fulls = [
            raw.view(0, layout.shape, share.dtype)
            for raw, layout, share in zip(self._raw, self.layouts, shares, strict=True)
        ]

    @property
    def _extension(self) -> Extension:
        """The hooks of the current sharded parameter, which may have been replaced by another of its kind."""
        found = self._made or self.param.extension
        assert found is not None
        return found

    def sources(self) -> list[torch.Tensor]:
        """The tensors that this rank sends; the hook runs once per all-gather. Raises like `_call_pre`."""
        first, self._first = self._first, None
        return self._call_pre() if first is None else first

    def _call_pre(self) -> list[torch.Tensor]:
        """Run `fsdp_pre_all_gather`. Raises `MisuseError` if, with uneven shards, it omitted the padding on a rank that
        has some."""
        param, specs = self.param, self.param.plan.specs
        shares, self._metadata = call_pre(
            self._extension,
            param.roles.shard_mesh,
            specs.shape,
            specs.stride,
            param.slots[0].module,
            param.plan.policy,
        )
        layout, rank = param.geometry.local
        rows = layout.local_size(rank)
        for share in shares:
            if param.extension is not None and rows != layout.chunk and share.shape[0] == rows:
                raise MisuseError(
                    f"'{param.fqn}': fsdp_pre_all_gather returned a tensor of shape {tuple(share.shape)} on shard rank "
                    f"{rank}; with uneven sharding it must return the padded size, {layout.local_shape(0)}"
                )
        return [share.contiguous() for share in shares]

    def finish(self) -> None:
        """After the gather: create the unsharded parameter, or fill it."""
        param = self.param
        if not self._is_made:
            self._is_made = True
            tensor, inner = self._extension.fsdp_post_all_gather(tuple(self.fulls), self._metadata, param.compute_dtype)
            raw = {each.untyped_storage().data_ptr() for each in self.fulls}
            storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in inner}
            self._inner = [(each, each.nbytes()) for pointer, each in storages.items() if pointer not in raw]
            specs = param.plan.specs
            if specs.inner_mesh is None and tensor.shape != specs.shape:  # without the padding
                tensor = torch.as_strided(tensor, specs.shape, specs.stride, 0)
            param.make_unsharded(tensor)
            if type(tensor) is torch.Tensor:
                param.whole = param.geometry.to_memory(tensor.detach().data)
        else:
            self._allocate_inner()
            self._extension.fsdp_post_all_gather(
                tuple(self.fulls), self._metadata, param.compute_dtype, out=param.unsharded
            )
        if releases_outputs(param.fqn, self._extension):
            self._free_raw()

    def alloc(self) -> None:
        """Tensors that `post` made are allocated right before they are filled."""
        self._allocate_raw()

    def _allocate_raw(self) -> None:
        for raw in self._raw:
            raw.alloc()

    def _free_raw(self) -> None:
        for raw in self._raw:
            raw.free()

    def take_inner(self) -> None:
        """Allocate the tensors that `post` made, which a gather from the smaller mesh fills without the hooks and
        without `raw`."""
        self._free_raw()
        self._allocate_inner()

    def _allocate_inner(self) -> None:
        for storage, nbytes in self._inner:
            if storage.nbytes() != nbytes:  # torch moves memory even if it has this size already
                storage.resize_(nbytes)

    def free(self) -> None:
        self._free_raw()
        for storage, _ in self._inner:
            storage.resize_(0)
