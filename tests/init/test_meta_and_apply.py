"""Building on the meta device, moving, converting and replacing parameters (tests/behaviour.md, section D)."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2 import MixedPrecisionPolicy, events, fully_shard
from tests.helpers.models import (
    check_step,
    error_of,
    is_sharded,
    linears,
    mlp,
    reference_grads,
    run_step,
    sharded_copy,
)
from tests.helpers.parity_models import assert_gradients, batch, full, local, mesh_2d, shard_like
from tests.helpers.ranks import on_ranks


def fill_from(model: nn.Module, plain: nn.Module) -> None:
    """Give the local shards of `model` the values of `plain`, as a checkpoint would."""
    with torch.no_grad():
        for param, value in zip(model.parameters(), plain.parameters(), strict=True):
            wanted = shard_like(value, param)
            assert wanted is not None
            local(param).copy_(wanted)


def padded_nbytes(param: DTensor) -> int:
    """Bytes of one padded shard of a parameter that is sharded on its first dim."""
    size = param.device_mesh.size(-1)
    return -(-param.shape[0] // size) * size * param[0:1].numel() * param.element_size() // size


@on_ranks(2, 4)
@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("hsdp", [False, True])
def test_meta_flow(rank: int, world_size: int, policy: MixedPrecisionPolicy | None, hsdp: bool) -> None:
    """Behaviour 31: meta -> fully_shard -> to_empty -> initialise -> train; with 3 and 1 rows over the ranks."""
    plain = mlp(4, 3, 1)
    with torch.device("meta"):
        model = mlp(4, 3, 1)
    options: dict[str, Any] = {"mp_policy": policy} if policy else {}
    mesh = mesh_2d(world_size // 2, 2) if hsdp else None
    fully_shard(model[0], mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    assert all(isinstance(param, DTensor) and param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    fill_from(model, plain)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if policy is None else {"rtol": 0.1, "atol": 0.03}
    for step in range(2):
        model.zero_grad()
        run_step(model, rank, step, 4)
        assert_gradients(model, reference_grads(plain, world_size, step, 4), **tolerance)


@on_ranks(2)
@pytest.mark.parametrize("how", ["forward", "unshard"])
def test_meta_parameters_left(rank: int, world_size: int, how: str) -> None:
    """Behaviour 32: an error that lists exactly the parameters still on meta, and says what to do."""
    with torch.device("meta"):
        model = fully_shard(mlp(4, 4, 4))
    model[0].to_empty(device="cpu")
    call = model.unshard if how == "unshard" else lambda: model(batch(0, rank, 4))
    text = error_of(RuntimeError, call)
    assert "unit '(root)': parameters are still on the meta device: ['2.weight', '2.bias']" in text
    assert "materialize(model)" in text
    model[2].to_empty(device="cpu")
    call()


@on_ranks(4)
@pytest.mark.parametrize("first_step", [False, True], ids=["before_first_forward", "after"])
def test_apply_keeps_dtensors(rank: int, world_size: int, first_step: bool) -> None:
    """Behaviour 33, 35: `.cpu()`, `.to(device)` and `.to_empty` reshard, keep DTensors, and pad again."""
    plain = mlp(5, 3, 5)
    model = sharded_copy(plain, lambda m: fully_shard(m, reshard_after_forward=False))
    if first_step:
        model(batch(0, rank, 5))
    for move in (lambda: model.cpu(), lambda: model.to("cpu"), lambda: model.to_empty(device="cpu")):
        move()
        assert is_sharded(model)
        for param, old in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(param, nn.Parameter) and param.shape == old.shape and param.placements == (Shard(0),)
    fill_from(model, plain)
    check_step(model, plain, rank, world_size, dim=5)
    for param in model.parameters():
        assert local(param).untyped_storage().nbytes() == padded_nbytes(param)


@on_ranks(2, 4)
def test_dtype_changes(rank: int, world_size: int) -> None:
    """Behaviour 33, 35, 36: parameters, specs, what forward sees and gradients follow, at any time between steps."""
    plain = mlp(5, 3, 5)
    model = sharded_copy(plain, fully_shard).double()
    plain = plain.double()
    for param, old in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.dtype == local(param).dtype == torch.float64
        assert param._spec.tensor_meta.dtype == torch.float64
        assert local(param).untyped_storage().nbytes() == padded_nbytes(param)
        assert torch.equal(full(param), old)
    for step, dtype in enumerate((torch.float64, torch.float32, torch.float64)):
        model.to(dtype)
        plain.to(dtype)
        with events.record() as log:
            check_step(model, plain, rank, world_size, step, dim=5)
        assert {event.dtype for event in log if event.numel} == {dtype}
        for param in model.parameters():
            assert param.grad.dtype == local(param.grad).dtype == param.grad._spec.tensor_meta.dtype == dtype


@on_ranks(2)
def test_reduce_dtype_outlives_a_cast(rank: int, world_size: int) -> None:
    """Behaviour 36, 115: a bf16 model cast to fp32 still reduces in the bf16 of its policy."""
    model = linears(1).bfloat16()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    model.float()
    with events.record() as log:
        run_step(model, rank)
    dtypes = {event.kind: event.dtype for event in log if event.numel}
    assert dtypes == {"all_gather": torch.float32, "reduce_scatter": torch.bfloat16}
    assert model[0].weight.grad.dtype == torch.float32


@on_ranks(2)
@pytest.mark.parametrize("convert", [False, True])
def test_grad_dtype_of_a_parameter(rank: int, world_size: int, convert: bool) -> None:
    """Behaviour 36: gradients come in the `grad_dtype` set on a sharded parameter, also if that is converted later."""
    dtype = torch.float16 if convert else torch.bfloat16
    model = linears(2).bfloat16()
    shard = (fully_shard(model[0]), fully_shard(model))
    for param in model[0].parameters():
        param.grad_dtype = torch.float32
    if convert:
        model.half()
    for _ in range(2):
        model(batch(0, rank, 4, dtype)).sum().backward()
    assert [param.grad.dtype for param in shard[0].parameters()] == [torch.float32] * 2
    assert [local(param.grad).dtype for param in model[1].parameters()] == [dtype] * 2


@on_ranks(2)
@pytest.mark.parametrize("how", ["new", "computed"])
def test_replacing_parameters_before_the_first_forward(rank: int, world_size: int, how: str) -> None:
    """Behaviour 34: a new DTensor parameter, or one computed from others, is the one that is trained."""
    plain = linears(2)
    model = sharded_copy(plain, lambda m: (fully_shard(m[0]), fully_shard(m)))
    if how == "new":
        value = torch.arange(16.0).view(4, 4) / 16
        replacement = distribute_tensor(value, model[0].weight.device_mesh, [Shard(0)], src_data_rank=None)
    else:
        value = plain[0].weight.detach() * 2 + plain[1].weight.detach()
        replacement = model[0].weight.detach() * 2 + model[1].weight.detach()
    with torch.no_grad():
        plain[0].weight.copy_(value)
    model[0].weight = nn.Parameter(replacement)
    replaced = model[0].weight
    check_step(model, plain, rank, world_size)
    assert model[0].weight is replaced and replaced.grad is not None


@on_ranks(2)
def test_replacing_a_parameter_by_a_plain_one(rank: int, world_size: int) -> None:
    """Behaviour 34: a parameter that is no DTensor cannot be gathered; the error names it."""
    model = fully_shard(linears(2))
    model[1].weight = nn.Parameter(torch.zeros(4, 4))
    text = error_of(ValueError, lambda: model(batch(0, rank, 4)))
    assert "1.weight: expected the module to hold an nn.Parameter that is a DTensor of shape (4, 4)" in text
    assert "Distribute full tensors first" in text


@on_ranks(2)
@pytest.mark.parametrize("how", ["move", "convert"])
def test_moves_keep_pending_gradients(rank: int, world_size: int, how: str) -> None:
    """Behaviour 36: unsynced gradients survive a move, or an export in float64, between microbatches."""
    plain = linears(2)
    model = sharded_copy(plain, lambda m: (fully_shard(m[0]), fully_shard(m)))
    model.set_requires_gradient_sync(False)
    run_step(model, rank, 0)
    if how == "move":
        model.cpu()
    else:
        model.to(torch.float64).to(torch.float32)
    model.set_requires_gradient_sync(True)
    run_step(model, rank, 1)
    first, second = (reference_grads(plain, world_size, step) for step in (0, 1))
    assert_gradients(model, {name: first[name] + second[name] for name in first})
