"""`fsdp2.local_optimizer`: between steps the torch optimizer over DTensors, to the last bit; in steps it is not."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2.errors import ArgumentError
from fsdp2.optim import LocalOptimizer, local_optimizer, offload_optimizer
from tests.helpers.matrix_optimizers import train
from tests.helpers.optimizers import CASES, Optim, assert_same, params_in
from tests.helpers.parity_models import Stack, batch, full, local, shard_blocks
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import mesh_of

Make = Callable[[Any], Optim]


def params_of(seed: int = 0) -> list[nn.Parameter]:
    """Even, uneven and empty shards (of 2 and of 4 ranks), a replicated 0-dim parameter, a plain one."""
    mesh = mesh_of((torch.distributed.get_world_size(),), ("shard",))
    generator = torch.Generator().manual_seed(seed)
    wholes = [torch.randn(shape, generator=generator) for shape in ((8, 3), (5, 2), (1, 4), (3,), (), (4,))]
    params = [nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])) for whole in wholes[:4]]
    return [*params, nn.Parameter(distribute_tensor(wholes[4], mesh, [Replicate()])), nn.Parameter(wholes[5])]


def set_grads(params: list[nn.Parameter], step: int) -> None:
    """In the first step the second parameter has no gradient, so its state begins later; in the third the third."""
    for index, (param, grad) in enumerate(zip(params, params_of(step + 1), strict=False)):
        param.grad = None if (step, index) in ((0, 1), (2, 2)) else grad.detach()


def groups_of(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """torch's fused and foreach optimizers cannot take DTensors and plain tensors in one group."""
    return [{"params": params[:5]}, {"params": params[5:], "weight_decay": 0.2}]


def step_once(optimizer: Optim, step: int = 0) -> None:
    set_grads(params_in(optimizer), step)
    optimizer.step()


@contextmanager
def no_dtensor_operations() -> Iterator[None]:
    """Within this nothing computes with DTensors."""

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert not any(issubclass(kind, DTensor) for kind in types), f"{func} on DTensors"
            return func(*args, **(kwargs or {}))

    with Refuse():
        yield


@on_ranks(2)
@pytest.mark.parametrize("case", ["adamw_fused", "sgd_momentum"])
def test_no_dtensor_operations_in_a_step(rank: int, world_size: int, case: str) -> None:
    """The point of it all."""
    kind, options = CASES[case]
    optimizer = local_optimizer(kind, groups_of(params_of()), **options)
    step_once(optimizer)
    set_grads(params_in(optimizer), 1)
    with no_dtensor_operations():
        optimizer.step()
    through_dtensors = kind(groups_of(params_of()), **options)
    step_once(through_dtensors)
    set_grads(params_in(through_dtensors), 1)
    with pytest.raises(AssertionError, match="on DTensors"), no_dtensor_operations():
        through_dtensors.step()


def stack(rank: int, make: Make, steps: int) -> tuple[Any, Optim]:
    """A sharded model with uneven and empty shards, trained some steps."""
    torch.manual_seed(0)
    model = shard_blocks(fsdp2, Stack(dim=3, hidden=5, depth=1))
    optimizer = make(model)
    for step in range(steps):
        model(batch(step, rank, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def torch_adamw(model: nn.Module) -> Optim:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def local_adamw(model: nn.Module) -> Optim:
    return local_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)


@on_ranks(2, 4)
@pytest.mark.parametrize(("saves", "loads"), [(torch_adamw, local_adamw), (local_adamw, torch_adamw)])
def test_distributed_checkpoint(rank: int, world_size: int, tmp_path: Path, saves: Make, loads: Make) -> None:
    """The issue: the state dict is DTensors keyed by FQN; what one kind saved the other loads, bit for bit."""
    model, optimizer = stack(rank, saves, 3)
    states = get_optimizer_state_dict(model, optimizer)
    assert set(states["state"]) == {name for name, _ in model.named_parameters()}
    assert isinstance(states["state"]["blocks.0.up.weight"]["exp_avg"], DTensor)
    dcp.save({"optimizer": states}, checkpoint_id=tmp_path)
    other_model, other = stack(rank, loads, 0)  # no state yet: torch makes it by a step, with lr 0
    loaded = get_optimizer_state_dict(other_model, other)
    dcp.load({"optimizer": loaded}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other_model, other, loaded)
    for param, other_param in zip(model.parameters(), other_model.parameters(), strict=True):
        local(other_param.detach()).copy_(local(param.detach()))
    assert_same(other, optimizer)


@on_ranks(2)
def test_torch_machinery(rank: int, world_size: int) -> None:
    """Schedulers, hooks, closures, added groups, names: as with the torch optimizer; hooks see DTensors."""
    seen: list[str] = []
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # the first one of a class makes its `step` run hooks

    def run(make: Callable[..., Optim]) -> Optim:
        params = params_of()
        optimizer = make(torch.optim.AdamW, [(str(index), param) for index, param in enumerate(params[:4])], lr=1e-2)
        optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append("pre"))
        optimizer.register_step_post_hook(
            lambda optimizer, *_: seen.append(type(optimizer.param_groups[0]["params"][0].data).__name__)
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        set_grads(params, 1)
        optimizer.step()
        scheduler.step()
        optimizer.add_param_group({"params": [("4", params[4]), ("5", params[5])], "lr": 0.1})

        def closure() -> float:
            seen.append(f"closure {torch.is_grad_enabled()}")
            assert isinstance(optimizer.param_groups[0]["params"][0], DTensor)
            set_grads(params, 2)
            return 1.5

        assert optimizer.step(closure) == 1.5
        return optimizer

    ours = run(local_optimizer)
    seen_by_ours, seen = seen, []
    theirs = run(lambda kind, params, **options: kind(params, **options))
    assert seen_by_ours == seen == ["pre", "DTensor", "pre", "closure True", "DTensor"]
    assert isinstance(ours, LocalOptimizer) and isinstance(ours, torch.optim.AdamW)
    assert_same(ours, theirs)
    assert ours.param_groups[0]["lr"] == 0.5e-2


@on_ranks(2)
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(rank: int, world_size: int, fused: bool) -> None:
    """Behaviour 172: an inf on one rank makes all ranks skip the step; fused optimizers get the scale themselves."""
    params, scaler = params_of()[:4], torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = local_optimizer(torch.optim.AdamW, params, fused=fused)
    scaler.scale(torch.ones(()))
    for poisoned in (True, False):
        set_grads(params, 1)
        if poisoned and rank == 1:
            local(params[0].grad).fill_(float("inf"))
        before = [local(param.detach()).clone() for param in params]
        scaler.step(optimizer)
        scaler.update()
        changed = [not torch.equal(a, local(b.detach())) for a, b in zip(before, params, strict=True)]
        assert any(changed) != poisoned
        assert scaler.get_scale() == 2.0


@on_ranks(2)
def test_other_gradients(rank: int, world_size: int) -> None:
    """A gradient with other placements is redistributed, as DTensor's dispatch would; a plain one is an error."""
    results = []
    for make in (torch.optim.SGD, lambda params, lr: local_optimizer(torch.optim.SGD, params, lr=lr)):
        params = params_of()[:1]
        optimizer = make(params, lr=0.1)
        whole = torch.arange(24.0).view(8, 3)
        params[0].grad = distribute_tensor(whole, params[0].device_mesh, [Replicate()])
        for _ in range(2):  # with the same gradient
            optimizer.step()
        results.append(full(params[0].detach()))
    assert torch.equal(*results)
    params[0].grad = whole
    with pytest.raises(ArgumentError, match=r"shape \(8, 3\) has a gradient that is a plain Tensor"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is params[0]


@pytest.mark.parametrize(
    "kind", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam, Optim]
)
def test_only_elementwise_optimizers(kind: type[Optim]) -> None:
    """A Muon on shards would be wrong without any error, and so might any optimizer that we do not know."""
    with pytest.raises(ArgumentError, match=f"{kind.__name__} is not known.*elementwise=True"):
        local_optimizer(kind, [nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ArgumentError, match="differentiable"):  # local tensors are outside of autograd
        local_optimizer(torch.optim.SGD, [nn.Parameter(torch.ones(2))], differentiable=True)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["fused", "offloaded"])
def test_the_state_of_one_process(rank: int, world_size: int, kind: str) -> None:
    """`load_state_dict` takes whole tensors for sharded parameters. Each rank stepped with the rows of rank 0."""
    make = local_optimizer if kind == "fused" else offload_optimizer
    policy = {} if kind == "fused" else {"offload_policy": fsdp2.Offload()}
    plain = Stack(dim=3, hidden=5, depth=1)
    alone = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    train(alone, range(1, 2))
    model = shard_blocks(fsdp2, copy.deepcopy(plain), **policy)
    optimizer = make(torch.optim.AdamW, model.parameters(), lr=1e-2, fused=True)
    optimizer.load_state_dict(copy.deepcopy(alone.state_dict()))
    for each in (alone, optimizer):
        train(each, range(2, 4))
    for param, own in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(own), param, rtol=0, atol=1e-6)
