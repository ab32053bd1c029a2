"""All-gather extensions: tensors that say what is gathered, and what becomes of it (tests/behaviour.md, section R)."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close

import fsdp2
from fsdp2 import FSDPError, ZeroPolicy, fully_shard
from tests.helpers.extensions import Gathered, GatheredTwice, InPieces, Wrapped, keep_version, layers_in_pieces
from tests.helpers.models import check_step, linears, reference_grads, run_step
from tests.helpers.one_process import in_units
from tests.helpers.parity_models import assert_gradients, local, mesh_2d, shard_like
from tests.helpers.ranks import on_ranks


class InPlace(Wrapped):
    """Computes with the gathered tensor itself, so there is nothing to do but the first time."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[Gathered, Any]:
        return (self.padded(mesh, outer_size).to(mp_policy.param_dtype),), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: Gathered, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, Gathered] | None:
        (gathered,) = all_gather_outputs
        if out is None:
            return gathered, (gathered,)
        assert out.data_ptr() == gathered.data_ptr(), "the buffers of the first call are used again"
        return None


def extended(plain: nn.Module, kind: type[Wrapped], **options: Any) -> tuple[Any, dict[str, list[Any]]]:
    """A sharded copy in which every weight is a `kind`, and what unit 0's has seen. Biases are plain."""
    model: Any = copy.deepcopy(plain)
    seen: list[dict[str, list[Any]]] = [{} for _ in model]
    for layer, log in zip(model, seen, strict=True):
        layer.weight = nn.Parameter(kind(layer.weight.detach().clone(), log))
        fsdp2.fully_shard(layer, **options)
    fsdp2.fully_shard(model, **options)
    return model, seen[0]


def race(model: Any, plain: nn.Module, rank: int, world_size: int, dim: int, steps: int = 3) -> None:
    """Adam (foreach) on the model and on one process, gradients and parameters compared."""
    optims = [torch.optim.Adam(each.parameters(), lr=1e-2, foreach=True) for each in (model, plain)]
    for step in range(steps):
        expected = reference_grads(plain, world_size, step, dim)
        run_step(model, rank, step, dim)
        assert_gradients(model, expected)
        for name, param in plain.named_parameters():
            param.grad = expected[name]
        for optim in optims:
            optim.step()
            optim.zero_grad()
    for param, plain_param in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(inner(param).detach(), shard_like(plain_param.detach(), param))


def inner(param: Tensor) -> Tensor:
    """The local tensor, out of its wrapper."""
    tensor = local(param)
    return tensor.plain if isinstance(tensor, Wrapped) else tensor


# --- training ---------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("dim", [8, 5], ids=["even", "uneven"])
@pytest.mark.parametrize("raf", [True, False])
def test_training(rank: int, world_size: int, dim: int, raf: bool) -> None:
    """Behaviour 150-153: two tensors of two dtypes make the parameter, also where a rank's shard is padded or empty."""
    plain = linears(3, dim)
    model, _ = extended(plain, InPieces, reshard_after_forward=raf)
    race(model, plain, rank, world_size, dim)
    assert all(type(local(param)) is (InPieces if param.ndim == 2 else Tensor) for param in model.parameters())


@on_ranks(2)
def test_outputs_with_storages_of_their_own(rank: int, world_size: int) -> None:
    """Behaviour 150: torch's TwoTensor refuses two tensors at different offsets, as those of one buffer are."""
    model, _ = extended(linears(3, 8), GatheredTwice)
    model[0].unshard()
    assert torch.equal(2 * model[0].weight.a, model[0].weight.b)


@on_ranks(2, 4)
def test_training_in_place_of_the_gathered_buffer(rank: int, world_size: int) -> None:
    """Behaviour 150, 152, 153: the outputs are the same memory each time, so parameters may live in them."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = linears(3, 8)
    model, _ = extended(plain, InPlace, mp_policy=policy)
    reference = in_units(plain, mp_policy=policy)
    for step in range(3):
        for each in (model, reference):
            each.zero_grad()
            run_step(each, rank, step, 8)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(local(one.grad), local(other.grad))


# --- what the functions are given -------------------------------------------------------------------------------------


@on_ranks(4, 2)
def test_arguments(rank: int, world_size: int) -> None:
    """Behaviour 149, 150, 152: once an all-gather, with the shard axis alone; `out` is None once, then one object, of
    which the memory is freed by reshard and there again at the next call."""
    policy = fsdp2.MixedPrecisionPolicy(output_dtype=torch.float32)
    hsdp = mesh_2d(2, 2) if world_size == 4 else None
    model, seen = extended(linears(3, 8), InPieces, mp_policy=policy, mesh=hsdp, reshard_after_forward=True)
    for step in range(2):
        run_step(model, rank, step, 8)
    num_calls = {name: len(calls) for name, calls in seen.items()}
    assert num_calls == {"pre": 4, "post": 4}, "once an all-gather: the functions may keep statistics"
    for mesh, size, stride, module, given in seen["pre"]:
        assert isinstance(mesh, DeviceMesh) and mesh.ndim == 1 and mesh.size() == 2
        assert hsdp is None or (mesh == hsdp["shard"] and mesh.get_group() is hsdp.get_group("shard"))
        assert (tuple(size), tuple(stride)) == ((8, 8), (8, 1))
        assert isinstance(size, torch.Size)
        assert module is model[0]
        assert given == policy
    outs = [out for _, _, _, out in seen["post"]]
    assert outs[-1].untyped_storage().nbytes() == 0
    model[0].unshard()  # no freed tensor below: pytest would print it, and crash
    assert outs[-1].untyped_storage().nbytes() == 8 * 8 * 4
    assert outs[0] is None
    assert outs[1] is model[0].weight, "the parameter itself"
    assert all(out is outs[1] for out in outs[2:])
    for shapes, metadata, dtype, _ in seen["post"]:
        assert shapes == [(8, 8), (8, 8)] and metadata == {"rows": 8} and dtype == torch.float32


@on_ranks(2, 4)
def test_functions_on_the_instance(rank: int, world_size: int) -> None:
    """Behaviour 148, 149: set on the local tensor itself, in the older form, of the mesh alone; other parameters go
    their usual way."""
    plain = linears(3, 8)
    model = in_units(plain)
    calls: list[str] = []

    def patch(tensor: Any) -> None:
        def pre(mesh: DeviceMesh) -> tuple[Gathered, Any]:
            assert mesh.size() == world_size
            calls.append("pre")
            return (tensor.double(),), None

        def post(outputs: Gathered, metadata: Any, param_dtype: torch.dtype, out: Tensor | None = None) -> Any:
            calls.append("post")
            value = outputs[0].to(param_dtype)
            if out is None:
                return value, (value,)
            with torch.no_grad(), keep_version(out):
                out.copy_(value)
            return None

        tensor.fsdp_pre_all_gather, tensor.fsdp_post_all_gather = pre, post

    patch(model[1].weight._local_tensor)
    for step in range(2):
        check_step(model, plain, rank, world_size, step, 8)
    assert calls == ["pre", "post"] * 4


class Releases(InPieces):
    """Does not need the gathered tensors once it has made the parameter of them."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return True

    def fsdp_post_all_gather(
        self, all_gather_outputs: Gathered, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, Gathered] | None:
        self.note("outputs", all_gather_outputs)
        return super().fsdp_post_all_gather(all_gather_outputs, metadata, param_dtype, out=out)


@on_ranks(2, 4)
@pytest.mark.parametrize("raf", [True, False])
def test_release_of_the_outputs(rank: int, world_size: int, raf: bool) -> None:
    """Behaviour 154: the gathered tensors take no memory while the unit computes; training goes on as ever."""
    plain = linears(3, 8)
    model, seen = extended(plain, Releases, reshard_after_forward=raf)
    race(model, plain, rank, world_size, 8)
    model[0].unshard()
    assert [tensor.untyped_storage().nbytes() for tensor in seen["outputs"][-1]] == [0, 0]


# --- mistakes ---------------------------------------------------------------------------------------------------------


def refused(error: type[Exception], kind: type, match: str | None = None, **options: Any) -> None:
    """By `fully_shard`, or by the first forward."""
    layer: Any = nn.Linear(4, 4)
    layer.weight = nn.Parameter(kind(layer.weight.detach(), {}))
    with pytest.raises(error, match=match):
        fsdp2.fully_shard(layer, **options)(torch.ones(1, 4))


@on_ranks(4)
def test_mistakes(rank: int, world_size: int) -> None:
    """Behaviour 148, 149, 154: half an extension, a function of two arguments, an int for a bool, a smaller mesh."""
    first, second = "fsdp_pre_all_gather", "fsdp_post_all_gather"
    release = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
    for name in (first, second):
        half = type("Half", (Wrapped,), {name: getattr(InPlace, name)})
        refused(AssertionError, half, rf"{first}.*{second}|{second}.*{first}")
    refused(AssertionError, type("Odd", (InPlace,), {first: lambda self, mesh, outer_size: None}), first)
    refused(AssertionError, type("Wrong", (InPieces,), {release: lambda self: 1}))
    refused(AssertionError, type("Wrong", (Wrapped,), {release: lambda self: True}))
    refused(NotImplementedError, type("Small", (InPieces,), {release: lambda self: True}), reshard_after_forward=2)


class Unpadded(InPieces):
    """Gathers its rows as they are."""

    def padded(self, mesh: DeviceMesh, outer_size: torch.Size) -> Tensor:
        return self.plain


@on_ranks(2)
def test_unpadded_input(rank: int, world_size: int) -> None:
    """Behaviour 151: with 5 rows over two ranks, rank 1 must return 3, too; it says what it got and what it expects."""
    layer: Any = nn.Linear(4, 5, bias=False)
    layer.weight = nn.Parameter(Unpadded(layer.weight.detach(), {}))
    fsdp2.fully_shard(layer)
    if rank == 1:
        with pytest.raises(AssertionError) as info:
            layer.unshard()
        assert "3, 4" in str(info.value) and "2, 4" in str(info.value)


@on_ranks(2)
def test_an_extension_without_a_shard_axis(rank: int, world_size: int) -> None:
    """ZeRO stage 0 with a weight that has hooks, which nothing would call: refused."""
    with pytest.raises(FSDPError, match="hooks"):
        layers_in_pieces(zero=ZeroPolicy(stage=0))


@on_ranks(2)
def test_a_wrapper_that_is_not_contiguous(rank: int, world_size: int) -> None:
    """A transposed weight of a subclass (fp8 stores those) was cut along the wrong dim."""
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(InPieces(layer.weight.detach().t().contiguous().t(), {}))
    with pytest.raises(FSDPError):
        fully_shard(layer)
