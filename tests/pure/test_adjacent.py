"""`fsdp2.adjacent`: neighbours in memory are found where they are, and only there."""

from __future__ import annotations

import io
import math

import pytest
import torch

from fsdp2.adjacent import carve, runs_of, span_of


def views(flat: torch.Tensor, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Views of `flat` end to end."""
    sizes = [math.prod(shape) for shape in shapes]
    return [piece.view(shape) for piece, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


def indices(tensors: list[torch.Tensor]) -> list[list[int]]:
    return sorted(run.indices for run in runs_of(tensors))


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


def test_carved_neighbours_are_one_run() -> None:
    pieces = carve(torch.arange(12.0), [4, 6, 2])
    shaped = [pieces[0].view(2, 2), pieces[1].view(3, 2).t(), pieces[2]]
    (run,) = runs_of(shaped)
    assert run.indices == [0, 1, 2]
    run.tensor.mul_(2)
    assert torch.equal(shaped[1].t().flatten(), 2.0 * torch.arange(4, 10))


def test_views_of_one_tensor_in_any_order() -> None:
    one, two, three, four = views(torch.zeros(20), (2, 3), (4,), (5,), (5,))
    assert indices([three, one, two]) == [[1, 2, 0]]
    assert indices([one, four, three]) == [[0], [2, 1]], "a gap"
    assert indices([one, two.clone(), three]) == [[0], [1], [2]]


def test_what_is_no_neighbour() -> None:
    flat = torch.zeros(12)
    one, two = views(flat, (2, 3), (2, 3))
    assert span_of(flat) is None, "nothing that it lies in"
    assert indices([one[:, :2], two]) == [[0], [1]], "gaps inside"
    assert indices([one, one, two]) == [[0], [1, 2]], "overlaps"
    assert indices([one, two.view(torch.int32)]) == [[0], [1]], "another dtype"
    assert indices([one, torch.zeros(0), two]) == [[0, 2], [1]]
    other = carve(torch.zeros(12), [6, 6])
    assert indices([other[0], carve(torch.zeros(12), [6, 6])[1]]) == [[0], [1]], "another piece of memory"


def test_a_run_of_one_is_the_tensor_itself() -> None:
    tensor = torch.zeros(2, 3)
    (run,) = runs_of([tensor])
    assert run.tensor is tensor


def _in_disorder(sizes: list[int], first: float = 0.0) -> list[torch.Tensor]:
    """Neighbours in two flat tensors, in another order than that of memory."""
    pieces = [
        piece
        for part in (sizes[::2], sizes[1::2])
        for piece in (torch.arange(sum(part), dtype=torch.float32) + first).split(part)
    ]
    return pieces[::3] + pieces[1::3] + pieces[2::3]


@pytest.mark.parametrize("change", ["none", "a copy", "swapped", "a part", "another dtype", "one flat", "longer flat"])
def test_a_list_like_the_last_one_is_looked_at_all_the_same(change: str) -> None:
    """The runs of a list are guessed from those of the last one of its length, which saves sorting it."""
    sizes = [3, 1, 4, 2, 5, 3, 2, 6, 2, 4]
    assert len(runs_of(_in_disorder(sizes))) == 2
    tensors, num_runs = _in_disorder(sizes, 100.0), 2
    if change == "a copy":
        tensors[4], num_runs = tensors[4].clone(), 4
    elif change == "swapped":
        tensors[0], tensors[1] = tensors[1], tensors[0]
    elif change == "a part":
        tensors[5], num_runs = tensors[5][1:], 3
    elif change == "another dtype":
        tensors[2], num_runs = tensors[2].view(torch.int32), 4
    elif change == "one flat":
        tensors, num_runs = list(torch.arange(32.0).split(sizes)), 1
    elif change == "longer flat":
        whole = torch.arange(40.0)
        tensors, num_runs = list(whole[4:36].split(sizes)), 1
    runs = runs_of(tensors)
    assert len(runs) == num_runs
    assert sorted(index for run in runs for index in run.indices) == list(range(len(tensors)))
    for run in runs:
        members = [tensors[index] for index in run.indices]
        assert run.tensor.tolist() == [value for each in members for value in each.tolist()]
        assert run.tensor.data_ptr() == members[0].data_ptr() and run.tensor.dtype == members[0].dtype
