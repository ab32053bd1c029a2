"""int8 blocks, the format of ZeRO++'s qwZ: the error is what it promises, and does not depend on a block's place."""

import pytest
import torch

from fsdp2.extras.int8 import dequantise, quantise


def there_and_back(values: torch.Tensor, block: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full(values.shape, -7, dtype=dtype)
    dequantise(*quantise(values, block), block, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("block", [1, 7, 256])
@pytest.mark.parametrize("numel", [1, 7, 255, 256, 257, 1000])
def test_error_is_half_a_scale(numel: int, block: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).mul_(3).to(dtype)
    q, scales = quantise(values, block)
    assert q.dtype == torch.int8 and q.shape == values.shape
    assert scales.dtype == torch.float32 and scales.shape == (-(-numel // block),)
    for index, part in enumerate(values.float().split(block)):
        assert torch.allclose(scales[index], part.abs().max() / 127)  # of this block alone
    each = scales.repeat_interleave(block)[:numel]
    error = (there_and_back(values, block) - values.float()).abs()
    assert (error <= 0.5001 * each).all()
    assert numel < 1000 or block < 256 or error.max() > 0.4 * each.min(), "the bound is near what happens"


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1.0, 1e30, 3e38])
def test_all_magnitudes_and_zero(scale: float) -> None:
    """Zeros come back as zeros, also beside others; neither end of fp32's range breaks the bound."""
    values = torch.tensor([0.0] * 4 + [scale, -scale, 0.0, scale / 2])
    out, scales = there_and_back(values, 4), quantise(values, 4)[1]
    assert out[:4].tolist() == [0, 0, 0, 0] and out[6] == 0
    assert (out.double() - values.double()).abs().max() <= 0.5001 * scales[1]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    values = torch.ones(12)
    values[5] = bad
    q, scales = quantise(values, 4)
    assert scales.isnan().tolist() == [False, True, False]
    assert q.tolist() == [127] * 4 + [0] * 4 + [127] * 4
    out = there_and_back(values, 4)
    assert out[4:8].isnan().all() and out[:4].eq(1).all() and out[8:].eq(1).all()


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_a_batch_is_its_rows(out_dtype: torch.dtype) -> None:
    """What several ranks sent is dequantised in one call, also into a view; blocks never reach over a row's end."""
    values = torch.randn(3, 2, 100, generator=torch.Generator().manual_seed(1))
    q, scales = quantise(values, 32)
    assert scales.shape == (3, 2, 4) and q.is_contiguous()
    target = torch.zeros(3, 2, 120, dtype=out_dtype)
    dequantise(q, scales, 32, target[..., 10:110])
    assert not target[..., :10].any() and not target[..., 110:].any()
    for i in range(3):
        for j in range(2):
            own_q, own_scales = quantise(values[i, j], 32)
            assert torch.equal(own_q, q[i, j]) and torch.equal(own_scales, scales[i, j])
            want = there_and_back(values[i, j], 32).to(out_dtype)
            assert torch.equal(target[i, j, 10:110], want)
