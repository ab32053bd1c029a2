"""`QuantisedGather`: the extension behind ``MixedPrecisionPolicy(all_gather_dtype=torch.int8)``. Layer: runtime, above
the parameter.

::

    padded shard --quantise--> int8 and scales ==collective==> those of all ranks --dequantise--> unsharded parameter

Every rank dequantises the same numbers, including its own rows, so all ranks compute with the same parameters.
"""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch

from fsdp2._torch import foreach_copy
from fsdp2.comm.quantise import DEFAULT_BLOCK, dequantise, quantise
from fsdp2.runtime.packing import interleave
from fsdp2.runtime.parameter import ManagedParameter


class QuantisedGather:
    """The `Extension` of one floating-point parameter, which holds it; see `runtime.extension`."""

    def __init__(self, param: ManagedParameter):
        self._param = ref(param)

    def fsdp_pre_all_gather(self, _mesh: Any) -> tuple[Sequence[torch.Tensor], None]:
        """int8 ``[padded shard numel]`` and fp32 ``[number of blocks]``."""
        param = self._param()
        assert param is not None
        flat = param.flat.to(param.roles.device, non_blocking=True)
        return quantise(flat, DEFAULT_BLOCK), None

    def fsdp_post_all_gather(
        self,
        gathered: Sequence[torch.Tensor],
        _metadata: None,
        param_dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]] | None:
        """Dequantise into the parameter."""
        param = self._param()
        assert param is not None
        whole = (
            param.whole
            if out is not None
            else torch.empty(param.layout.shape, dtype=param_dtype, device=gathered[0].device)
        )
        assert whole is not None
        size, layout = param.layout.parts, param.layout
        ints, scales = gathered[0].view(size, -1), gathered[1].view(size, -1)
        if layout.dim == 0 and layout.even:
            dequantise(ints, scales, DEFAULT_BLOCK, whole.view(size, -1))
        else:
            rows = torch.empty(size, layout.padded_numel, dtype=param_dtype, device=whole.device)
            dequantise(ints, scales, DEFAULT_BLOCK, rows)
            pairs = interleave(rows, 0, whole, layout)
            foreach_copy([destination for _, destination in pairs], [source for source, _ in pairs])
        if out is not None:
            return None
        tensor = param.geometry.from_memory(whole)
        return tensor, [tensor]

    @staticmethod
    def fsdp_should_release_all_gather_outputs_after_post_all_gather() -> bool:
        """The integers are not needed once they are dequantised."""
        return True
