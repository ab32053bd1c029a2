"""Private names of torch for `fsdp2.parallel`. Ground layer."""

from typing import Any

import torch


def attention_op(name: str) -> Any:
    """One of aten's fused attentions, which return the log-sum-exp that `F.scaled_dot_product_attention` drops:
    ``flash_attention_for_cpu``, ``flash_attention``, ``efficient_attention``, each with ``_backward``. No public
    function takes the log-sum-exp of a whole row for the backward of a part of it."""
    return getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
