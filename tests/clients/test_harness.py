"""The comparison notices a difference, what stands still, and a library that is not in place."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.clients.clients import Both, Run, library_of, run_both, run_script


def script(rates: tuple[float, ...] = ()) -> Run:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    for rate, param in zip(rates, model.parameters(), strict=False):
        torch.optim.SGD([param], lr=rate).step()
    return Run([loss.item()], library_of(model), {"gradient": model.weight.grad.full_tensor()})


def test_a_difference_is_noticed() -> None:
    both = run_both(script, 2)
    both.assert_equal(trains=False)
    both.ours[1].values["gradient"][0, 0] += 1e-6
    with pytest.raises(AssertionError, match="rank 1: gradient"):
        both.assert_equal(trains=False)


def test_a_parameter_that_stands_still_is_noticed() -> None:
    """Both libraries agree about a program that trains nothing, or not all that its optimizers have."""
    run_both(script, 2, rates=(0.1, 0.1)).assert_equal()
    with pytest.raises(AssertionError, match="1 of 2 tensors were not trained"):
        run_both(script, 2, rates=(0.1, 0.0)).assert_equal()
    with pytest.raises(AssertionError, match="optimizers were given 0 tensors"):
        run_both(script, 2).assert_equal()


def test_the_wrong_library_is_noticed() -> None:
    theirs, ours = (run_script(script, 2, library) for library in ("torch", "fsdp2"))
    assert ours[0].events["reduce_scatter"] == 1 and not theirs[0].events
    for wrong in (Both(theirs, theirs), Both(ours, ours)):
        with pytest.raises(AssertionError, match="'torch'"):
            wrong.assert_equal(trains=False)
