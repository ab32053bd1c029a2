"""All-gather extensions: tensors that say themselves what is gathered and what becomes of it (tests/behaviour.md,
section R).

`FSDP_API=torch` runs this file on torch's own FSDP2, which shows that what is expected here is what users know.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close

import fsdp2
from fsdp2 import FSDPError, ZeroPolicy, fully_shard
from tests.helpers.extensions import Gathered, GatheredTwice, InPieces, Wrapped, aten, keep_version, layers_in_pieces
from tests.helpers.models import reference_grads, run_step
from tests.helpers.parity_models import assert_gradients, batch, local, mesh_2d
from tests.helpers.ranks import on_ranks

ON_TORCH = os.environ.get("FSDP_API") == "torch"
api: Any = torch.distributed.fsdp if ON_TORCH else fsdp2


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


class Quantised(torch.Tensor):
    """(rows, columns) int8 numbers and a scale a row. Everything computes with their product."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers = numbers
        self.scale = scale

    def __repr__(self, **_: Any) -> str:
        return f"Quantised({self.numbers}, {self.scale})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return Quantised(args[0].numbers, args[0].scale)
        if func is aten.as_strided.default:
            rows = args[1][0]
            return Quantised(args[0].numbers[:rows], args[0].scale[:rows])
        args, kwargs = torch.utils._pytree.tree_map_only(Quantised, lambda q: q.numbers * q.scale, (args, kwargs or {}))
        return func(*args, **kwargs)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 numbers and (rows, 1) scales."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
    return (weight / scale).round().to(torch.int8), scale


class QuantisedWhenGathered(Wrapped):
    """Gathers int8 and scales, computes with a subclass of its own, which holds both."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[Gathered, Any]:
        return quantise(self.padded(mesh, outer_size)), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: Gathered, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, Gathered] | None:
        numbers, scale = all_gather_outputs
        if out is None:
            return Quantised(numbers, scale), all_gather_outputs
        assert isinstance(out, Quantised)
        assert out.numbers.data_ptr() == numbers.data_ptr() and out.scale.data_ptr() == scale.data_ptr()
        return None


class FakeQuantised(nn.Linear):
    """What `QuantisedWhenGathered` computes, with a plain weight."""

    def forward(self, x: Tensor) -> Tensor:
        numbers, scale = quantise(self.weight.detach())
        weight = self.weight + (numbers * scale - self.weight.detach())
        return nn.functional.linear(x, weight, self.bias)


def linears(dim: int, kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    return nn.Sequential(*[kind(dim, dim) for _ in range(3)])


def extended(plain: nn.Module, kind: type[Wrapped], **options: Any) -> tuple[Any, dict[str, list[Any]]]:
    """A sharded copy in which every weight is a `kind`, and what unit 0's has seen. Biases are plain."""
    model: Any = copy.deepcopy(plain)
    seen: list[dict[str, list[Any]]] = [{} for _ in model]
    for layer, log in zip(model, seen, strict=True):
        layer.weight = nn.Parameter(kind(layer.weight.detach().clone(), log))
        api.fully_shard(layer, **options)
    api.fully_shard(model, **options)
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
        assert_close(inner(param).detach(), rows_of(plain_param.detach(), rank, world_size))


def inner(param: Tensor) -> Tensor:
    """The local tensor, out of its wrapper."""
    tensor = local(param)
    return tensor.plain if isinstance(tensor, Wrapped) else tensor


def rows_of(value: Tensor, rank: int, world_size: int) -> Tensor:
    """This rank's chunk, empty past the last one."""
    chunks = value.chunk(world_size)
    return chunks[rank] if rank < len(chunks) else value[:0]


# --- training ---------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("dim", [8, 5], ids=["even", "uneven"])
@pytest.mark.parametrize("raf", [True, False])
def test_training(rank: int, world_size: int, dim: int, raf: bool) -> None:
    """Behaviour 150-153: two tensors of two dtypes make the parameter, also where a rank's shard is padded or empty."""
    plain = linears(dim)
    model, _ = extended(plain, InPieces, reshard_after_forward=raf)
    race(model, plain, rank, world_size, dim)
    assert all(type(local(param)) is (InPieces if param.ndim == 2 else Tensor) for param in model.parameters())


@on_ranks(2, 4)
@pytest.mark.parametrize("dim", [5, 8], ids=["uneven", "even"])
@pytest.mark.parametrize("raf", [True, False])
def test_training_with_an_unsharded_subclass(rank: int, world_size: int, dim: int, raf: bool) -> None:
    """Behaviour 150, 152: what is computed with is a subclass of two tensors, in the gathered memory.

    Its scales have one column. torch 2.13 takes that for missing padding where rows are uneven; the rows count."""
    if ON_TORCH and dim == 5:
        pytest.skip("AssertionError in torch 2.13")
    plain = linears(dim, FakeQuantised)
    model, _ = extended(nn.Sequential(*map(copy_of, plain)), QuantisedWhenGathered, reshard_after_forward=raf)
    race(model, plain, rank, world_size, dim)


@on_ranks(2)
def test_outputs_with_storages_of_their_own(rank: int, world_size: int) -> None:
    """Behaviour 150: torch's TwoTensor refuses two tensors at different offsets, as those of one buffer are."""
    model, _ = extended(linears(8), GatheredTwice)
    model[0].unshard()
    assert torch.equal(2 * model[0].weight.a, model[0].weight.b)


def copy_of(layer: nn.Linear) -> nn.Linear:
    """An `nn.Linear` with the same values."""
    made = nn.Linear(layer.in_features, layer.out_features)
    made.load_state_dict(layer.state_dict())
    return made


@on_ranks(2, 4)
def test_training_in_place_of_the_gathered_buffer(rank: int, world_size: int) -> None:
    """Behaviour 150: the outputs are the same memory each time, so a parameter may live in them (torchao relies on
    it)."""
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = linears(8)
    model, _ = extended(plain, InPlace, mp_policy=policy)
    reference = without_extension(plain, mp_policy=policy)
    for step in range(3):
        for each in (model, reference):
            each.zero_grad()
            run_step(each, rank, step, 8)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(local(one.grad), local(other.grad))


def without_extension(plain: nn.Module, **options: Any) -> Any:
    """A sharded copy with plain weights."""
    model: Any = copy.deepcopy(plain)
    for layer in model:
        api.fully_shard(layer, **options)
    return api.fully_shard(model, **options)


@on_ranks(2, 4)
def test_mixed_precision(rank: int, world_size: int) -> None:
    """Behaviour 150, 152, 153: `param_dtype` reaches the function, which makes a bf16 parameter; the rest is as
    ever."""
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = linears(8)
    model, seen = extended(plain, InPieces, mp_policy=policy, reshard_after_forward=True)
    reference = without_extension(plain, mp_policy=policy)
    for each in (model, reference):
        each(batch(0, rank, 8)).sum().backward()
    assert {call[2] for call in seen["post"]} == {torch.bfloat16}
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(local(one.grad), local(other.grad))


# --- what the functions are given -------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_arguments(rank: int, world_size: int) -> None:
    """Behaviour 149, 150: mesh, global size and stride, owner and policy; outputs of S times the input's rows, the
    metadata, the dtype; `out` is None once, then always one object. The metadata travels with its all-gather."""
    policy = api.MixedPrecisionPolicy(output_dtype=torch.float32)
    model, seen = extended(linears(8), InPieces, mp_policy=policy, reshard_after_forward=True)
    for step in range(2):
        run_step(model, rank, step, 8)
    num_calls = {name: len(calls) for name, calls in seen.items()}
    assert num_calls == {"pre": 4, "post": 4}, "once an all-gather: the functions may keep statistics"
    for mesh, size, stride, module, given in seen["pre"]:
        assert isinstance(mesh, DeviceMesh) and mesh.ndim == 1 and mesh.size() == world_size
        assert (tuple(size), tuple(stride)) == ((8, 8), (8, 1))
        assert isinstance(size, torch.Size)
        assert module is model[0]
        assert given == policy
    outs = [out for _, _, _, out in seen["post"]]
    model[0].unshard()  # no freed tensor below: pytest would print it, and crash
    assert outs[0] is None
    assert outs[1] is model[0].weight, "the parameter itself"
    assert all(out is outs[1] for out in outs[2:])
    for shapes, metadata, dtype, _ in seen["post"]:
        assert shapes == [(8, 8), (8, 8)] and metadata == {"rows": 8} and dtype == torch.float32


@on_ranks(4)
def test_mesh_with_hsdp(rank: int, world_size: int) -> None:
    """Behaviour 149: the function gets the shard axis alone."""
    mesh = mesh_2d(2, 2)
    plain = linears(8)
    model, seen = extended(plain, InPieces, mesh=mesh)
    run_step(model, rank, dim=8)
    assert_gradients(model, reference_grads(plain, world_size, dim=8))
    given = seen["pre"][0][0]
    assert given.ndim == 1 and given.mesh_dim_names == ("shard",)
    assert given == mesh["shard"] and given.get_group() is mesh.get_group("shard")


@on_ranks(2)
def test_memory(rank: int, world_size: int) -> None:
    """Behaviour 152: what the function said to free is freed on reshard and there again when it is called next."""
    model, seen = extended(linears(8), InPieces, reshard_after_forward=True)
    run_step(model, rank, dim=8)
    out = seen["post"][-1][3]
    assert out.untyped_storage().nbytes() == 0
    model[0].unshard()
    assert out.untyped_storage().nbytes() == 8 * 8 * 4
    model[0].reshard()
    assert out.untyped_storage().nbytes() == 0


class Legacy(Wrapped):
    """The older form, which is given the mesh alone."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[Gathered, Any]:
        self.note("pre", mesh)
        return (self.plain,), None

    fsdp_post_all_gather = InPlace.fsdp_post_all_gather


@on_ranks(2, 4)
def test_legacy_form(rank: int, world_size: int) -> None:
    """Behaviour 149: a function of the mesh alone is still called."""
    plain = linears(8)
    model, seen = extended(plain, Legacy)
    race(model, plain, rank, world_size, 8)
    assert all(mesh.size() == world_size for mesh in seen["pre"])


@on_ranks(2, 4)
def test_functions_on_the_instance(rank: int, world_size: int) -> None:
    """Behaviour 148: set on the local tensor itself, of no special class; other parameters go their usual way."""
    plain = linears(8)
    model = without_extension(plain)
    calls: list[str] = []

    def patch(tensor: Any) -> None:
        def pre(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> tuple[Gathered, Any]:
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
        model.zero_grad()
        run_step(model, rank, step, 8)
        assert_gradients(model, reference_grads(plain, world_size, step, 8))
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


def gathered_bytes(model: Any, seen: dict[str, list[Any]]) -> list[int]:
    """The sizes of the last gathered storages while unit 0 is unsharded."""
    model[0].unshard()
    sizes = [tensor.untyped_storage().nbytes() for tensor in seen["outputs"][-1]]
    model[0].reshard()
    return sizes


@on_ranks(2, 4)
@pytest.mark.skipif(ON_TORCH, reason="since torch 2.15")
@pytest.mark.parametrize("raf", [True, False])
def test_release_of_the_outputs(rank: int, world_size: int, raf: bool) -> None:
    """Behaviour 154: the gathered tensors take no memory while the unit computes; training goes on as ever."""
    plain = linears(8)
    model, seen = extended(plain, Releases, reshard_after_forward=raf)
    assert gathered_bytes(model, seen) == [0, 0]
    race(model, plain, rank, world_size, 8)
    assert gathered_bytes(model, seen) == [0, 0]


@on_ranks(4)
@pytest.mark.skipif(ON_TORCH, reason="since torch 2.15")
@pytest.mark.parametrize("case", ["not_a_bool", "no_extension", "int_raf"])
def test_release_of_the_outputs_mistakes(rank: int, world_size: int, case: str) -> None:
    """Behaviour 154: a real bool, of a full extension, and no second all-gather of plain shards."""
    name = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
    base, value = {"not_a_bool": (InPieces, 1), "no_extension": (Wrapped, True), "int_raf": (InPieces, True)}[case]
    kind = type("Wrong", (base,), {name: lambda self: value})
    layer: Any = nn.Linear(4, 4)
    layer.weight = nn.Parameter(kind(layer.weight.detach(), {}))

    def shard_and_run() -> None:
        api.fully_shard(layer, reshard_after_forward=2 if case == "int_raf" else True)
        layer(batch(0, rank, 4))

    with pytest.raises(NotImplementedError if case == "int_raf" else AssertionError):
        shard_and_run()


# --- mistakes ---------------------------------------------------------------------------------------------------------


def pre_only(self: Any, mesh: DeviceMesh) -> Any:
    raise AssertionError("never called")


HALVES: dict[str, Callable[..., Any]] = {
    "fsdp_pre_all_gather": pre_only,
    "fsdp_post_all_gather": InPlace.fsdp_post_all_gather,
}


@on_ranks(2)
@pytest.mark.parametrize("name", HALVES)
def test_half_an_extension(rank: int, world_size: int, name: str) -> None:
    """Behaviour 148: one function without the other is refused by `fully_shard`, and names the missing one."""
    kind = type("Half", (Wrapped,), {name: HALVES[name]})
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(kind(layer.weight.detach(), {}))
    with pytest.raises(AssertionError, match=r"fsdp_pre_all_gather.*fsdp_post_all_gather|fsdp_post.*fsdp_pre"):
        api.fully_shard(layer)


@on_ranks(2)
def test_signature(rank: int, world_size: int) -> None:
    """Behaviour 149: a function of two arguments is neither form."""

    class Odd(InPlace):
        def fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size) -> Any:  # type: ignore[override]
            raise RuntimeError("never called")

    layer: Any = nn.Linear(4, 4)
    layer.weight = nn.Parameter(Odd(layer.weight.detach(), {}))

    def shard_and_run() -> None:
        api.fully_shard(layer)
        layer(batch(0, rank, 4))

    with pytest.raises(AssertionError, match="fsdp_pre_all_gather"):
        shard_and_run()


class Unpadded(InPieces):
    """Gathers its rows as they are."""

    def padded(self, mesh: DeviceMesh, outer_size: torch.Size) -> Tensor:
        return self.plain


@on_ranks(2)
def test_unpadded_input(rank: int, world_size: int) -> None:
    """Behaviour 151: with 5 rows over two ranks, rank 1 must return 3, too; it says what it got and what it expects."""
    layer: Any = nn.Linear(4, 5, bias=False)
    layer.weight = nn.Parameter(Unpadded(layer.weight.detach(), {}))
    api.fully_shard(layer)
    if rank == 1:
        with pytest.raises(AssertionError) as info:
            layer.unshard()
        assert "3, 4" in str(info.value) and "2, 4" in str(info.value)


@on_ranks(2)
def test_an_extension_without_a_shard_axis(rank: int, world_size: int) -> None:
    """ZeRO stage 0 with a weight that has hooks, which nothing would call: refused."""
    with pytest.raises(FSDPError, match="hooks"):
        layers_in_pieces(zero=ZeroPolicy(stage=0))


class TimesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(InPieces(weight.t().contiguous().t(), {}))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value @ self.weight


@on_ranks(2)
def test_a_wrapper_that_is_not_contiguous(rank: int, world_size: int) -> None:
    """A transposed weight of a subclass (fp8 stores those) is cut along the wrong dim; square ones without an error.
    torch's FSDP2 refuses."""
    with pytest.raises(FSDPError):
        fully_shard(TimesWeight())
