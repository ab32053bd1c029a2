"""Tensors that lie end to end in memory: carved ones, and gradients that are clipped as one."""

import io
import math

import pytest
import torch

from fsdp2.optim.flats import joined
from fsdp2.placement.carving import carve


def views(flat: torch.Tensor, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Views of `flat` end to end."""
    sizes = [math.prod(shape) for shape in shapes]
    return [piece.view(shape) for piece, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_carved_tensors_are_tensors_like_any(dtype: torch.dtype) -> None:
    """Storage, version counter and file of their own, on one piece of memory that lives as long as one of them."""
    flat = torch.arange(12).to(dtype)
    expected = flat.clone()
    pieces = carve(flat, [4, 1, 7])
    assert [piece.data_ptr() - flat.data_ptr() for piece in pieces] == [n * dtype.itemsize for n in (0, 4, 5)]
    assert [piece.untyped_storage().nbytes() for piece in pieces] == [n * dtype.itemsize for n in (4, 1, 7)]
    del flat
    assert torch.equal(torch.cat([piece.view(torch.uint8) for piece in pieces]), expected.view(torch.uint8))
    before = pieces[1]._version
    pieces[0].zero_()
    assert pieces[1]._version == before
    file = io.BytesIO()
    torch.save(pieces[2], file)
    assert file.tell() < 2000
    file.seek(0)
    assert torch.equal(torch.load(file).view(torch.uint8), pieces[2].view(torch.uint8))


CHANGES = {"none": 2, "a copy": 4, "missing": 3, "twice": 4, "a part": 3, "another dtype": 4, "other data": 4, "gap": 3}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_that_lie_end_to_end_are_joined(change: str) -> None:
    """Two units' gradients, in another order than that of memory. What differs in the first is taken by itself."""
    one, two, three = views(torch.arange(9.0), (2, 2), (2,), (3,))
    tensors = [three, one, two, *views(torch.arange(10.0, 16.0), (3,), (3,))]
    if change == "a copy":
        tensors[2] = two.clone()
    elif change == "missing":
        del tensors[2]
    elif change == "twice":
        tensors[2] = one
    elif change == "a part":
        tensors[0] = three[1:]
    elif change == "another dtype":
        tensors[2] = two.view(torch.int32)
    elif change == "other data":
        tensors[2].data = torch.ones(2)
    elif change == "gap":
        tensors[1] = one[:, :1]
    _, found = joined(tensors)
    assert len(found) == CHANGES[change]
    expected = [value for tensor in tensors for value in tensor.flatten().tolist()]
    assert sorted(value for each in found for value in each.flatten().tolist()) == sorted(expected)
