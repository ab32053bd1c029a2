"""What happens while an offloaded step is under way: a signal, two dtypes, an error, other placements."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import fsdp2
from fsdp2 import Offload, checkpoint, offload_optimizer
from tests.helpers.offloaded import Gate, layers, optimizer_for, pending, step_late
from tests.helpers.optimizers import assert_same
from tests.helpers.parity_models import batch
from tests.helpers.ranks import on_ranks


class Interrupted:
    """A future: whoever waits for it first gets a signal."""

    def __init__(self, future: Any):
        self.future, self.has_come = future, False

    def result(self) -> None:
        if not self.has_come:
            self.has_come = True
            raise KeyboardInterrupt
        self.future.result()

    def done(self) -> bool:
        return bool(self.future.done())


@on_ranks(2)
def test_a_wait_is_interrupted(rank: int, world_size: int, tmp_path: Path) -> None:
    """The step goes on. It was forgotten: a checkpoint because of the signal had parameters from the middle of it."""
    results = []
    for policy in (Offload(), None):
        model = layers(policy, depth=2)
        optimizer = optimizer_for(model.parameters(), policy)
        model(batch(0, rank)).square().mean().backward()
        gate = Gate()
        optimizer.step()
        if policy is not None:
            for part in optimizer._known.parts.values():
                part._future = Interrupted(part._future)
                with pytest.raises(KeyboardInterrupt):
                    part.params[0].norm()
            assert len(pending(model)) == 4
        gate.open_soon()
        saved = {name: param.full_tensor() for name, param in model.named_parameters()}
        results.append((saved, optimizer))
    for name, value in results[0][0].items():
        assert torch.equal(value, results[1][0][name])
    assert_same(results[0][1], results[1][1])


@on_ranks(2)
def test_a_unit_with_two_dtypes(rank: int, world_size: int, tmp_path: Path) -> None:
    """Stepped by two inner optimizers. The unit knew of the second only: the others could not be saved after a step."""
    results = []
    for policy in (Offload(), None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())
        options = {"offload_policy": policy} if policy else {}
        fsdp2.fully_shard(model, mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.float32), **options)
        optimizer = optimizer_for(model.parameters(), policy)
        for step in range(2):
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.save(tmp_path / f"{policy is None}-{step}", model=model)
        results.append(optimizer)
    assert_same(*results)


class FailsAtFirst(torch.optim.SGD):
    has_failed = False

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if not self.has_failed:
            self.has_failed = True
            raise ZeroDivisionError("on purpose")
        return super().step(closure)


@on_ranks(2)
def test_gradients_of_a_step_that_failed(rank: int, world_size: int) -> None:
    """The next step takes its own gradients only: a weight without one stays where it is."""
    model = layers(Offload(), depth=2)
    optimizer = offload_optimizer(FailsAtFirst, model[0].parameters(), lr=0.1, elementwise=True)
    before = model[0].weight.full_tensor(), model[0].bias.full_tensor()
    for has_weight in (True, False):
        model(batch(0, rank)).square().mean().backward()
        if not has_weight:
            model[0].weight.grad = None
        optimizer.step()
        if has_weight:
            with pytest.raises(ZeroDivisionError, match="on purpose"):
                model[0].weight.norm()
        optimizer.zero_grad()
    after = model[0].weight.full_tensor(), model[0].bias.full_tensor()
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


@on_ranks(2)
def test_a_plain_dict_is_saved_after_a_step(rank: int, world_size: int, tmp_path: Path) -> None:
    """It has no hooks that wait for the step."""
    model = layers(Offload(), depth=2)
    optimizer = optimizer_for(model.parameters(), Offload())
    model(batch(0, rank)).square().mean().backward()
    step_late(optimizer)
    checkpoint.save(tmp_path / "at", model=dict(model.named_parameters()))
    loaded = {name: torch.empty_like(param) for name, param in model.named_parameters()}
    checkpoint.load(tmp_path / "at", model=loaded)
    for name, param in model.named_parameters():
        assert torch.equal(loaded[name].full_tensor(), param.full_tensor())


@on_ranks(2)
@pytest.mark.parametrize("grads", [False, True])
def test_gradients_with_other_placements(rank: int, world_size: int, grads: bool) -> None:
    """Set by hand, and the same on all ranks. The shard of a shard was stepped."""
    results = []
    for policy in (Offload(grads=grads), None):
        model = layers(policy, depth=2)
        optimizer = optimizer_for(model.parameters(), policy)
        for param in model.parameters():
            whole: Tensor = torch.arange(1.0, 1.0 + param.numel()).view(param.shape)
            param.grad = DTensor.from_local(whole, param.device_mesh, [Replicate()])
        optimizer.step()
        results.append(optimizer)
    assert_same(*results)


@on_ranks(2)
@pytest.mark.parametrize("in_files", [False, True])
def test_a_forward_after_a_step_that_failed(rank: int, world_size: int, in_files: bool, tmp_path: Path) -> None:
    """The first of two dtypes raises. Forward would compute with half a step; state in files is as before."""

    class Fails(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step(closure)
            if self.fails and self.param_groups[0]["params"][0].dtype == torch.float32:
                raise ZeroDivisionError("on purpose")

    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())
    policy = Offload(tier=tmp_path) if in_files else Offload()
    precision = fsdp2.MixedPrecisionPolicy(param_dtype=torch.float32)
    fsdp2.fully_shard(model, mp_policy=precision, offload_policy=policy)
    optimizer = offload_optimizer(Fails, model.parameters(), lr=0.1, momentum=0.9, elementwise=True)
    for Fails.fails in (False, True):
        model(batch(0, rank)).square().mean().backward()
        optimizer.step()
        if not Fails.fails:
            before = optimizer.state[model[0].weight]["momentum_buffer"].full_tensor().clone()
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        model(batch(1, rank))
    if in_files:
        assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"].full_tensor(), before)
