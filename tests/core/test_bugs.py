"""Each bug that was found and fixed, told as a story: what was done, what happened, why."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy, OrderError, events, fully_shard
from tests.helpers.ranks import on_ranks


class Either(nn.Module):
    """Ranks take different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(4, 4)
        self.odd = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.even(x) if rank % 2 == 0 else self.odd(x)


class TwoEither(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Either()
        self.second = Either()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.second(self.first(x, rank), rank)


@on_ranks(2, 4)
def test_zeros_for_unused_parameters_were_sent_twice(rank: int, world_size: int) -> None:
    """With set_reduce_scatter_unused_params, a unit sent zeros for unused parameters at the end of its backward, and
    again at the end of the whole backward, since they still had no gradient. A rank on which the unit's backward did
    not run would have sent them once: a hang."""
    model = TwoEither()
    for unit in (model.first, model.second):
        fully_shard(unit)
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    with events.record() as log:
        model(torch.ones(2, 4, requires_grad=True), rank).sum().backward()
    assert sorted(event.unit for event in log if event.kind == "reduce_scatter") == ["first", "second"]
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_forward_after_a_failed_backward_passed_for_a_recomputation(rank: int, world_size: int) -> None:
    """A unit whose backward had raised was still "in backward"; the next forward took itself for the recomputation of a
    checkpoint, hooked nothing, and its gradients were never reduced. Now it says what to do."""
    model = fully_shard(nn.Linear(4, 4))

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("from the user's hook")

    hidden = model(torch.ones(2, 4, requires_grad=True))
    hidden.register_hook(fail)
    with pytest.raises(KeyError):
        hidden.sum().backward()
    with pytest.raises(OrderError, match="reset_iter_state"):
        model(torch.ones(2, 4))
    model.reset_iter_state()
    model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 2.0))


@on_ranks(2)
def test_padding_of_an_uneven_direct_gradient_was_uninitialised(rank: int, world_size: int) -> None:
    """The all-reduce hook sees the flat gradients, padding included. On the direct lane nothing ever wrote the padding,
    so a hook that took a norm got garbage."""
    model = nn.Linear(1000, 301, bias=False)  # large enough for the direct lane, rows 151 and 150
    fully_shard(model)
    seen: list[torch.Tensor] = []
    model.set_all_reduce_hook(lambda flat: seen.append(flat.clone()))
    for _ in range(3):
        model(torch.randn(2, 1000)).sum().backward()
    for flat in seen:
        assert flat.numel() == 151 * 1000
        local = model.weight.grad.to_local().numel()
        assert flat[local:].abs().sum() == 0


class SharesMemory(nn.Module):
    """The gradient of `shift` is a view of the gradient that flows on to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift.view(-1) + x


@on_ranks(2)
def test_scaling_a_gradient_changed_another_one(rank: int, world_size: int) -> None:
    """fp16 gradients are divided before they are summed. That was done in place, but what autograd leaves in `.grad`
    may share its memory with the gradient that is still on its way to the input: the input's came out divided too."""
    model = SharesMemory().half()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    x = torch.ones(64, dtype=torch.float16, requires_grad=True)
    weight = torch.arange(64).half()
    (model(x * 1) * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    assert torch.equal(model.shift.grad.full_tensor().view(-1), weight)


@on_ranks(2)
def test_backward_that_failed_above_the_root_went_unnoticed(rank: int, world_size: int) -> None:
    """The root's own backward was over when something before it raised. The next forward was accepted, but nothing
    ended the backward after it, and the failed one's gradients came out of it."""
    model = fully_shard(nn.Linear(4, 4))

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            raise KeyError("before the root")

    with pytest.raises(KeyError):
        model(Fail.apply(100 * torch.ones(2, 4, requires_grad=True))).sum().backward()
    with pytest.raises(OrderError, match="reset_iter_state"):
        model(torch.ones(2, 4))
    model.reset_iter_state()
    model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 2.0))


@on_ranks(2)
def test_user_hooks_ran_with_gradients_enabled(rank: int, world_size: int) -> None:
    """Autograd runs post-accumulate-grad hooks without recording; so must we, or an optimizer in backward fails."""
    model = fully_shard(nn.Linear(4, 4))

    def step(param: torch.Tensor) -> None:
        param.add_(param.grad, alpha=-0.1)
        param.grad = None

    before = model.weight.full_tensor().clone()
    model.weight.register_post_accumulate_grad_hook(step)
    model(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(model.weight.full_tensor(), before - 0.2)


@on_ranks(2)
def test_list_of_modules_lost_its_prefetch(rank: int, world_size: int) -> None:
    """Each module of a list was recorded by itself, so the unit that ran before the second one was the unit itself."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], reshard_after_forward=True)
    fully_shard([model[1], model[2]], reshard_after_forward=True)
    fully_shard(model)
    for _ in range(2):
        with events.record() as log:
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    order = [f"{e.kind} {e.unit}" for e in log if e.kind in ("unshard", "post_backward")]
    assert (
        order[2:]
        == ["unshard 1, 2", "unshard 0", "post_backward 1, 2", "post_backward 0", "post_backward "][: len(order) - 2]
    )


@on_ranks(2)
def test_call_that_raised_left_sharded_parameters(rank: int, world_size: int) -> None:
    """fully_shard replaced the parameters and then found that the class cannot be swapped."""

    class Picky(nn.Linear):
        def __init_subclass__(cls, *, needed: int) -> None:
            super().__init_subclass__()

    layer = Picky(4, 4)
    weight = layer.weight
    with pytest.raises(TypeError):
        fully_shard(layer)
    assert layer.weight is weight
    assert type(layer) is Picky
    assert fully_shard.state(layer) is None


@on_ranks(2)
def test_parameter_got_another_mesh_object(rank: int, world_size: int) -> None:
    """`nn.Parameter(dtensor)` detaches, and DTensor's dispatch took the spec from its cache: the mesh was equal
    to the caller's, but that of an earlier model, with process groups of its own."""
    kept = []
    for _ in range(3):
        mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        assert model.weight.device_mesh is mesh
        model(torch.ones(2, 4)).sum().backward()
        assert model.weight.grad.device_mesh is mesh
        kept.append(mesh)
