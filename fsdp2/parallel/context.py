"""Context parallelism for any model that calls `F.scaled_dot_product_attention`, by replacing it with ring attention.
Layer: parallel.

The first use replaces the function, under all names under which loaded modules have imported it, for the life of the
process. The replacement only forwards calls unless a context group is active. (A `TorchFunctionMode` would not do: it
is disabled in functions that it intercepts, such as `Tensor.backward`, where checkpoints recompute attention.)

The active group is a property of the process, because on CUDA another thread recomputes checkpoints. So only one thread
at a time may run models with context parallelism.
"""

import sys
from functools import partial
from typing import Any
from warnings import warn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fsdp2.errors import MisuseError, UnsupportedError
from fsdp2.parallel.ring_attention import context_group, num_ring_attentions, ring_attention_over

__all__ = ["apply_context_parallel"]


class _Active:
    """The group over which attention currently runs ("" for none), and the module whose forward activated it."""

    group_name = ""
    owner: nn.Module | None = None


_active = _Active()
_original = F.scaled_dot_product_attention
_NO_ATTENTION = (
    "no F.scaled_dot_product_attention ran, so the model's attention has seen only this rank's rows. With "
    "transformers load the model with attn_implementation='sdpa'; call nn.MultiheadAttention with need_weights=False; "
    "in your own models call fsdp2.parallel.ring_attention"
)
_UNSUPPORTED = (
    "ring attention supports is_causal alone. Set the model's attention dropout to 0. Padding on the right needs no "
    "mask under a causal one: pass an attention_mask of ones, and ignore the padding's labels. Pass it with "
    "position_ids too: from these alone transformers takes a cut sequence for packed ones, and makes a mask."
)


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh, *, is_stage: bool = False) -> None:
    """Make `F.scaled_dot_product_attention` ring attention over `mesh` whenever a module of `model` runs its forward:
    in the model's own forward, and when a checkpointed part of it is recomputed during backward.

    Adds two hooks to each module. It does not communicate or change parameters. Every rank must call it, after tensor
    parallelism is applied and before `fully_shard`, as `parallelize` does.

    Args:
        model: a model whose inputs, including position ids and labels, are split by `shard_sequence`.
        mesh: the 1-D context axis, such as ``mesh["cp"]``.
        is_stage: `model` is a pipeline stage, which may have no attention: then this is only a warning.

    Raises:
        MisuseError: in the model's first forward no attention ran; or another context axis is active.
        UnsupportedError: in a forward, attention has a mask or dropout.

    Example::

        apply_context_parallel(model, mesh["cp"])
        for block in model.blocks:
            fully_shard(block, mesh=data_mesh)  # shard x context, flattened
        fully_shard(model, mesh=data_mesh)
    """
    group_name = context_group(mesh)
    if not group_name:
        return
    _install()
    for module in model.modules():
        module.register_forward_pre_hook(partial(_enter, group_name))
        module.register_forward_hook(_leave, always_call=True)
    model.register_forward_hook(partial(_check_ran, group_name, num_ring_attentions[group_name], is_stage))


# --- hooks ------------------------------------------------------------------------------------------------------------


def _enter(group_name: str, module: nn.Module, args: Any) -> None:
    """Activate the group when the outermost module of the model runs."""
    if _active.group_name != group_name:
        if _active.group_name:
            both = f"groups '{_active.group_name}' and '{group_name}'"
            raise MisuseError(f"context parallelism over {both} at once; a model has one context axis")
        _active.group_name, _active.owner = group_name, module


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    """Deactivate the group. Also runs if forward raised."""
    if _active.owner is module:
        _active.group_name, _active.owner = "", None


def _check_ran(group_name: str, before: int, is_stage: bool, module: nn.Module, args: Any, output: Any) -> None:
    """After a forward of the model: raise or warn if ring attention has not run since it was applied."""
    if not torch.compiler.is_compiling() and num_ring_attentions[group_name] == before:
        message = f"apply_context_parallel: in the first forward of {type(module).__name__} {_NO_ATTENTION}"
        if not is_stage:
            raise MisuseError(message)
        warn(f"{message}. This is fine for a stage without attention.", stacklevel=2)


# --- the replacement --------------------------------------------------------------------------------------------------


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention`, or ring attention while a context group is active."""
    if not _active.group_name:
        return _original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None or dropout_p > 0:
        given = f"dropout_p={dropout_p}" if attn_mask is None else f"a mask {list(attn_mask.shape)}"
        raise UnsupportedError(f"context parallelism: attention got {given}; {_UNSUPPORTED}")
    heads = [each.unsqueeze(0) if each.ndim == 3 else each for each in (query, key, value)]
    output = ring_attention_over(_active.group_name, heads[0], heads[1], heads[2], is_causal, scale, enable_gqa)
    return output.squeeze(0) if query.ndim == 3 else output


def _install() -> None:
    """Replace the function by `_attention` in all loaded modules. Modules loaded later import it from torch."""
    if F.scaled_dot_product_attention is _attention:
        return
    for name, module in list(sys.modules.items()):
        names: dict[str, Any] = getattr(module, "__dict__", {})
        if names.get("scaled_dot_product_attention") is _original and not name.startswith("torch._"):
            names["scaled_dot_product_attention"] = _attention
    # In eval mode without gradients nn.MultiheadAttention would call a separate kernel.
    torch.backends.mha.set_fastpath_enabled(False)
