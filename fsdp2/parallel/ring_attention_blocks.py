"""Attention of some queries to one block of keys, and its gradients, with the log-sum-exp that lets blocks be merged.
Layer: parallel.

All tensors are ``[batch, heads, rows, head dim]``; a log-sum-exp is ``[batch, heads, query rows, 1]``, in float32, or
float64 for float64. Outputs have the queries' dtype.

The forward returns a block's own output and log-sum-exp, which `merge` adds to those of all blocks so far. The backward
gets those of the *whole* row: a key's share of a row is ``exp(score - lse)``, whatever its block. So the gradients of
blocks simply add up, and no block needs the results of another one.

The kernel depends on device, dtype and head dims: ``flash_cpu`` on CPUs; ``flash`` on CUDA from Ampere on, for float16
and bfloat16 and head dims up to 256; otherwise ``math``, which computes the scores of some query rows at a time, in
float32 or float64.

Sources of the merge, and of the fused backward from a given log-sum-exp: FlashAttention-2,
https://arxiv.org/abs/2307.08691, 3.1, and Ring Attention, https://arxiv.org/abs/2310.01889.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp2._torch.parallel import attention_op

__all__ = ["accumulation_dtype", "block_forward", "block_gradients", "merge"]

_MATH_SCORES = 1 << 24  # scores of one piece of the math kernel: 64 MiB in float32

Tensors = tuple[Tensor, ...]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over blocks."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(so_far: Tensor, lse_so_far: Tensor, output: Tensor, lse: Tensor) -> None:
    """Add the result of one more block to that of the blocks so far, weighted by its share of all scores (*online
    softmax*). Start with 0 and log(0): the first block's result then stays bitwise unchanged."""
    so_far.lerp_(output.to(so_far.dtype), torch.sigmoid(lse - lse_so_far))
    lse_so_far.copy_(torch.logaddexp(lse_so_far, lse))


def block_forward(inputs: Tensors, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a query over one block of key and value (`inputs`). The number of key heads divides
    that of the query heads."""
    query, key, value = inputs
    key, value = _for_each_head(query, key), _for_each_head(query, value)
    kind = _kernel(query, key, value)
    if kind == "math":
        return _math_forward(query, key, value, is_causal, scale)
    op = attention_op("flash_attention_for_cpu" if kind == "flash_cpu" else "flash_attention")
    output, lse = op(query, key, value, 0.0, is_causal, scale=scale)[:2]
    return output, lse.unsqueeze(-1)


def block_gradients(rows: Tensors, inputs: Tensors, is_causal: bool, scale: float) -> Tensors:
    """The block's parts of the gradients of query, key and value.

    Args:
        rows: of the query's rows, over all blocks: the output's gradient, the output in the query's dtype, and the
            log-sum-exp.
        inputs: the query, and the block's key and value.
    """
    query, key, value = inputs
    heads = key.shape[1]
    inputs = query, _for_each_head(query, key), _for_each_head(query, value)
    if (kind := _kernel(*inputs)) == "math":
        dq, dk, dv = _math_gradients(rows, inputs, is_causal, scale)
    else:
        grad, output, lse = rows
        state: list[Any] = [0.0, is_causal]  # and no dropout
        if kind == "flash":
            # The state of the random generator, in the form that the forward returns; it is not read without dropout.
            seed, offset = (torch.empty(size, dtype=torch.uint64, device=grad.device) for size in ((2,), ()))
            state = [None, None, query.shape[2], key.shape[2], *state, seed, offset]
        op = attention_op("flash_attention_for_cpu_backward" if kind == "flash_cpu" else "flash_attention_backward")
        dq, dk, dv = op(grad, *inputs, output, lse.squeeze(-1).contiguous(), *state, scale=scale)[:3]
    if query.shape[1] != heads:  # the sum over the query heads that share a key head
        dtype = accumulation_dtype(query.dtype)
        dk, dv = (each.unflatten(1, (heads, -1)).sum(2, dtype=dtype) for each in (dk, dv))
    return dq, dk, dv


def _for_each_head(query: Tensor, key: Tensor) -> Tensor:
    """Repeat key heads to one per query head, since not all kernels accept fewer. The copy lives as long as the
    block."""
    groups = query.shape[1] // key.shape[1]
    return key if groups == 1 else key.repeat_interleave(groups, dim=1)


def _kernel(query: Tensor, key: Tensor, value: Tensor) -> str:
    """The kernel; see the module docstring. "meta" counts as CUDA, because it must give the same shapes."""
    head_dim, device = query.shape[-1], query.device
    if value.shape[-1] != head_dim or any(each.stride(-1) != 1 for each in (query, key, value)):
        return "math"
    if device.type == "cpu":
        return "flash_cpu"
    fits = query.dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 256
    is_new = device.type == "meta" or (query.is_cuda and torch.cuda.get_device_capability(device) >= (8, 0))
    return "flash" if fits and is_new else "math"


# --- without a fused kernel -------------------------------------------------------------------------------------------


def _pieces(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Iterator[tuple[slice, Any]]:
    """Pieces of query rows, with their scores in the accumulation dtype."""
    dtype = accumulation_dtype(query.dtype)
    batch, heads, rows, _ = query.shape
    keys = key.to(dtype).mT
    num = max(1, _MATH_SCORES // (batch * heads * key.shape[2]))
    columns = torch.arange(key.shape[2], device=query.device)
    for start in range(0, rows, num):
        piece = slice(start, min(start + num, rows))
        scores = (query[:, :, piece].to(dtype) @ keys) * scale
        if is_causal:
            scores.masked_fill_(columns > columns[piece, None], float("-inf"))
        yield piece, scores


def _math_forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    outputs, lses, values = [], [], value.to(accumulation_dtype(query.dtype))
    for _, scores in _pieces(query, key, is_causal, scale):
        lses.append(scores.logsumexp(-1, keepdim=True))
        outputs.append((torch.exp(scores - lses[-1]) @ values).to(query.dtype))
    return torch.cat(outputs, 2), torch.cat(lses, 2)


def _math_gradients(rows: Tensors, inputs: Tensors, is_causal: bool, scale: float) -> Tensors:
    dtype = accumulation_dtype(inputs[0].dtype)
    grad, output, lse = (each.to(dtype) for each in rows)
    query, keys, values = (each.to(dtype) for each in inputs)
    weighted = (grad * output).sum(-1, keepdim=True)
    dq, dk, dv = torch.empty_like(query), torch.zeros_like(keys), torch.zeros_like(values)
    for piece, scores in _pieces(query, keys, is_causal, scale):
        shares = torch.exp(scores - lse[:, :, piece])
        dv += shares.mT @ grad[:, :, piece]
        slopes = shares * (grad[:, :, piece] @ values.mT - weighted[:, :, piece]) * scale
        dq[:, :, piece] = slopes @ keys
        dk += slopes.mT @ query[:, :, piece]
    return dq, dk, dv
