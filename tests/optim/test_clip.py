"""`fsdp2.clip_grad_norm_`: every element counts once on any meshes, with one all-reduce where one group will do."""

from collections.abc import Sequence
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing import assert_close

import fsdp2
from fsdp2.errors import ArgumentError
from fsdp2.optim import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from tests.helpers.parity_models import full, mesh_2d
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import mesh_of

NORMS = [2, 1, inf, 3, 0.5, -inf]
SHAPES = [(8, 3), (5, 2), (1, 4), (3,)]  # 4 ranks: even; uneven with one empty; only one rank has rows; one empty


def values(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=dtype)


def parameter(whole: Tensor, mesh: DeviceMesh | None = None, placements: Sequence[Placement] = ()) -> nn.Parameter:
    """A parameter whose gradient is `whole`, distributed."""
    grad = whole.clone() if mesh is None else distribute_tensor(whole.clone(), mesh, placements)
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    return param


def plain_clip(wholes: Sequence[Tensor], max_norm: float, norm_type: float) -> tuple[Tensor, list[Tensor]]:
    """What torch does in one process: the norm, and the clipped gradients."""
    params = [parameter(whole) for whole in wholes]
    norm = nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    return norm, [param.grad for param in params]


def check(params: Sequence[nn.Parameter], wholes: Sequence[Tensor], norm_type: float, num_all_reduces: int) -> None:
    """Clip to half and to twice of what torch's norm is in one process, and compare with that."""
    for part in (0.5, 2.0):
        limit = part * float(plain_clip(wholes, 1.0, norm_type)[0])
        expected, grads = plain_clip(wholes, limit, norm_type)
        for param, whole in zip(params, wholes, strict=True):
            param.grad = parameter(whole, *layout_of(param)).grad
        with CommDebugMode() as seen:
            norm = clip_grad_norm_(params, limit, norm_type)
        assert seen.get_total_counts() == num_all_reduces
        assert type(norm) is Tensor and norm.shape == ()
        assert_close(norm, expected)
        for param, grad in zip(params, grads, strict=True):
            assert_close(full(param.grad), grad)
        gathered = [torch.zeros_like(norm) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, norm)
        assert all(torch.equal(other, norm) for other in gathered)


def layout_of(param: Tensor) -> tuple[Any, ...]:
    return (param.device_mesh, param.placements) if isinstance(param, DTensor) else ()


@on_ranks(4)
def test_layouts(rank: int, world_size: int) -> None:
    """Behaviour 171: every element counts once, whatever the meshes; one all-reduce where one group has all ranks."""
    line, square, tp = mesh_of((4,), ("shard",)), mesh_of((2, 2), ("ep", "fsdp")), mesh_of((2, 2), ("dp", "tp"))
    all_tp = mesh_of((1, 4), ("dp", "tp"))
    cases: dict[str, tuple[int, list[Any]]] = {
        "uneven and empty shards, of which torch cannot take the inf-norm": (
            1,
            [(shape, line, [Shard(0)]) for shape in SHAPES],
        ),
        "replicas": (1, [(shape, mesh_2d(2, 2), [Replicate(), Shard(0)]) for shape in SHAPES]),
        "several meshes over the same ranks, which torch refuses": (
            1,
            [
                ((8, 3), line, [Shard(0)]),
                ((5, 2), square, [Replicate(), Shard(0)]),
                ((4, 6), square, [Shard(0), Shard(1)]),
                ((3, 5), square, [Shard(1), Replicate()]),
                ((), line, [Replicate()]),
                ((7,),),
            ],
        ),
        "submeshes: nothing says that ranks of the other axis hold the same": (
            2,
            [((5, 2), tp["dp"], [Shard(0)]), ((4, 3), tp["tp"], [Shard(1)]), ((3,), tp["dp"], [Replicate()]), ((7,),)],
        ),
        "all ranks are tensor parallel: what is not split was counted on each of them": (
            1,
            [
                ((4, 6), all_tp, [Replicate(), Shard(0)]),
                ((4, 6), all_tp["dp"], [Shard(0)]),
                ((4, 6), all_tp["tp"], [Shard(1)]),
                ((4, 6),),
            ],
        ),
    }
    for num_all_reduces, layouts in cases.values():
        wholes = [values(shape, seed) for seed, (shape, *_) in enumerate(layouts)]
        params = [parameter(whole, *layout) for whole, (_, *layout) in zip(wholes, layouts, strict=True)]
        for norm_type in NORMS:
            check(params, wholes, norm_type, num_all_reduces)


@on_ranks(4)
@pytest.mark.parametrize("norm_type", NORMS)
def test_tensor_parallel(rank: int, world_size: int, norm_type: float) -> None:
    """Behaviour 171: (dp, tp) meshes as `fully_shard` makes them, with `_StridedShard`; replicated ones count once."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    row, column = rank // 2, rank % 2
    wholes = [values((8, 3), 0), values((4, 6), 1), values((4,), 2)]
    locals_ = [  # cut by tp first, then by dp
        wholes[0].chunk(2)[column].chunk(2)[row],
        wholes[1].chunk(2, 1)[column].chunk(2)[row],
        wholes[2].chunk(2)[row],
    ]
    layouts = [(_StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(1)), (Shard(0), Replicate())]
    params = []
    for whole, local, layout in zip(wholes, locals_, layouts, strict=True):
        grad = DTensor.from_local(local.contiguous(), mesh, layout, shape=whole.shape, stride=whole.stride())
        params.append(nn.Parameter(torch.zeros_like(grad)))
        params[-1].grad = grad
    expected, grads = plain_clip(wholes, 0.1, norm_type)
    with CommDebugMode() as seen:
        norm = clip_grad_norm_(params, 0.1, norm_type)
    assert seen.get_total_counts() == 1
    assert_close(norm, expected)
    assert_close([full(param.grad) for param in params], grads)


@on_ranks(4)
def test_ranks_apart(rank: int, world_size: int) -> None:
    """Pipeline stages: each pair of ranks has other parameters on a mesh of its own, and only the first pair clips."""
    mesh = mesh_of((2, 2), ("pp", "dp"))["dp"]
    wholes = [values((5, 2), 0), values((4,), 1)]
    for norm_type in NORMS if rank < 2 else ():
        params = [parameter(wholes[0], mesh, [Shard(0)]), parameter(wholes[1], mesh, [Replicate()])]
        expected, grads = plain_clip(wholes, 0.1, norm_type)
        assert_close(clip_grad_norm_(params, 0.1, norm_type), expected)
        assert_close([full(param.grad) for param in params], grads)


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [2, inf, -inf])
def test_gradients_missing_on_one_rank(rank: int, world_size: int, norm_type: float) -> None:
    """A rank without any gradient takes part in the all-reduce: no hang, and the others' norm."""
    mesh = mesh_of((2,), ("shard",))
    param = parameter(values((4, 2), 0), mesh, [Shard(0)])
    if rank == 1:
        param.grad = None
    norm = clip_grad_norm_([param, nn.Parameter(torch.ones(3))], 1.0, norm_type)
    assert_close(norm, torch.linalg.vector_norm(values((4, 2), 0)[:2], norm_type))


@on_ranks(2)
@pytest.mark.parametrize("poison", [nan, inf, -inf])
@pytest.mark.parametrize("norm_type", [2, inf, -inf])
@pytest.mark.parametrize("poisoned_rank", [0, 1])
def test_not_finite(rank: int, world_size: int, norm_type: float, poison: float, poisoned_rank: int) -> None:
    """NaN and infinities reach the norm on all ranks (gloo's MAX may lose NaN), or raise on all, before any scaling."""
    mesh = mesh_of((2,), ("shard",))
    whole = values((4, 2), 0)
    whole[2 * poisoned_rank] = poison
    params = [parameter(values((2,), 1), mesh, [Shard(0)]), parameter(whole, mesh, [Shard(0)])]
    expected = torch.linalg.vector_norm(torch.cat([values((2,), 1), whole.flatten()]), norm_type)
    assert_close(get_total_norm([param.grad for param in params], norm_type), expected, equal_nan=True)
    if expected.isfinite():
        return
    before = [param.grad.to_local().clone() for param in params]
    with pytest.raises(RuntimeError, match=r"number \[1\] hold" if rank == poisoned_rank else r"number \[\] hold"):
        clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
    assert_close([param.grad.to_local() for param in params], before, equal_nan=True, rtol=0, atol=0)
    clip_grad_norm_(params, 1.0, norm_type)


@on_ranks(2)
def test_dtypes(rank: int, world_size: int) -> None:
    """bf16 is summed in fp32: better than torch, whose norm has 8 bits; fp64 anywhere makes the norm fp64."""
    mesh = mesh_of((2,), ("shard",))
    half = values((64, 8), 0, torch.bfloat16)
    norm = get_total_norm([parameter(half, mesh, [Shard(0)]).grad])
    assert norm.dtype == torch.float32
    assert_close(norm, half.float().norm())
    mixed = [half, values((3, 5), 1, torch.float64)]
    params = [parameter(whole, mesh, [Shard(0)]) for whole in mixed]
    norm = clip_grad_norm_(params, 0.5)
    assert norm.dtype == torch.float64
    assert_close(norm, torch.cat([whole.double().flatten() for whole in mixed]).norm())
    assert_close(full(params[0].grad), (half * (0.5 / norm)).to(torch.bfloat16))
    assert_close(full(params[1].grad), mixed[1] * (0.5 / norm))


@on_ranks(2)
def test_partial_gradients(rank: int, world_size: int) -> None:
    """The norm of a sum is not that of its terms: they are added up for the norm, and scaled as they are."""
    mesh = mesh_of((2,), ("shard",))
    grad = DTensor.from_local(values((4,), rank), mesh, [Partial()])
    total = values((4,), 0) + values((4,), 1)
    param = nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, [Replicate()]))
    assert_close(get_total_norm(grad), total.norm())
    param.grad = grad
    clip_grad_norm_(param, 0.5)
    assert_close(full(param.grad), total * 0.5 / total.norm())


@on_ranks(2)
def test_in_two_halves(rank: int, world_size: int) -> None:
    """A norm over more than these parameters (say of all pipeline stages) can be handed in."""
    mesh = mesh_of((2,), ("shard",))
    params = [parameter(values((4, 2), 0), mesh, [Shard(0)]), nn.Parameter(torch.ones(2))]
    norm = get_total_norm([params[0].grad])
    with CommDebugMode() as seen:
        clip_grads_with_norm_(params, 0.5, 2 * norm)
    assert not seen.get_total_counts()
    assert_close(full(params[0].grad), values((4, 2), 0) * 0.25 / norm)


@on_ranks(2)
def test_plain_model_without_communication(rank: int, world_size: int) -> None:
    """Plain tensors alone: what torch does, whatever the other ranks do. No parameters: zero."""
    if rank == 0:
        params = [parameter(values((4, 2), 0)), parameter(values((3,), 1))]
        expected, grads = plain_clip([values((4, 2), 0), values((3,), 1)], 0.1, 2)
        assert_close(clip_grad_norm_((param for param in params), 0.1), expected)
        assert_close([param.grad for param in params], grads)
        assert clip_grad_norm_([], 0.1) == 0


@pytest.mark.parametrize("norm_type", [0, -1, nan])
def test_unknown_norms(norm_type: float) -> None:
    """torch counts tensors for 0 and divides by zero below."""
    with pytest.raises(ArgumentError, match="norm_type"):
        clip_grad_norm_(parameter(torch.ones(2)), 1.0, norm_type)


@on_ranks(2)
def test_a_clipped_model_can_be_moved(rank: int, world_size: int) -> None:
    """torch swaps the parameters, which no weak reference may hold: `to` raised after a clip."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    fsdp2.fully_shard(model)
    model(torch.ones(2, 6)).sum().backward()
    fsdp2.clip_grad_norm_(model.parameters(), 0.05)
    model.to(torch.float64)
    assert all(param.dtype == torch.float64 for param in model.parameters())
