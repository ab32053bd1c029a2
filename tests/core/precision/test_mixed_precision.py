"""Mixed precision: which dtype is gathered, computed in, reduced and kept (Behaviour 113-121)."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import MixedPrecisionPolicy, events, fully_shard
from tests.helpers.models import linears
from tests.helpers.parity_models import (
    batch,
    count,
    full,
)
from tests.helpers.ranks import on_ranks

BF16, FP32 = torch.bfloat16, torch.float32


def wire_dtypes(log: list[events.Event], kind: str) -> list[torch.dtype | None]:
    return [event.dtype for event in log if event.kind == kind]


class Notes(nn.Module):
    """A linear layer that notes the dtypes it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((x.dtype, self.linear.weight.dtype))
        return self.linear(x)


@on_ranks(2)
@pytest.mark.parametrize("param_dtype", [None, BF16])
@pytest.mark.parametrize("reduce_dtype", [None, BF16])
def test_dtypes(rank: int, world_size: int, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> None:
    """Behaviour 113-115: gather and compute in param_dtype, reduce in reduce_dtype, keep the original dtype."""
    model: Any = fully_shard(Notes(), mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype))
    compute, reduced = param_dtype or FP32, reduce_dtype or FP32
    optim = torch.optim.AdamW(model.parameters())
    with events.record() as log:
        loss = model(batch(0, rank, 4)).sum()
        loss.backward()
    assert loss.dtype == compute
    assert model.seen == [(compute, compute)]
    assert wire_dtypes(log, "all_gather") == [compute]
    assert wire_dtypes(log, "reduce_scatter") == [reduced]
    optim.step()
    for param in model.parameters():
        assert param.dtype == param.grad.dtype == param.to_local().dtype == FP32
        assert {value.dtype for value in optim.state[param].values()} == {FP32}


@dataclass
class Inputs:
    a: Tensor
    rest: Any


class Dtypes(nn.Module):
    """Takes anything, notes the dtypes of the tensors in it; has a sharded layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: Any = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.seen = (x.dtype, args, kwargs)
        return self.linear(x.to(self.linear.weight.dtype))


@on_ranks(2)
@pytest.mark.parametrize("cast", [True, False])
def test_inputs(rank: int, world_size: int, cast: bool) -> None:
    """Behaviour 116: every floating tensor in args and kwargs, nested, fp64 too; ints stay. Off: all stay."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=cast)
    model: Any = fully_shard(Dtypes(), mp_policy=policy)
    double, ints = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)
    model(torch.ones(1, 2), [double, ints], Inputs(double, {"deep": (ints, double)}), key={"x": double}, text="t")
    dtype, (in_list, inputs), kwargs = model.seen
    floating = BF16 if cast else torch.float64
    assert dtype == (BF16 if cast else FP32)
    assert [t.dtype for t in in_list] == [floating, torch.int64]
    assert [t.dtype for t in (inputs.a, *inputs.rest["deep"])] == [floating, torch.int64, floating]
    assert kwargs["key"]["x"].dtype == floating
    assert kwargs["text"] == "t"
    assert double.dtype == torch.float64


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return {"list": [y, torch.arange(3)], "data": Inputs(y.double(), None)}


@on_ranks(2)
@pytest.mark.parametrize("param_dtype", [None, BF16])
def test_outputs(rank: int, world_size: int, param_dtype: torch.dtype | None) -> None:
    """Behaviour 117: output_dtype reaches every floating tensor in the output; containers stay."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=FP32, output_dtype=torch.float16)
    model: Any = fully_shard(Outputs(), mp_policy=policy)
    out = model(batch(0, rank, 4))
    assert [t.dtype for t in out["list"]] == [torch.float16, torch.int64]
    assert (type(out["data"]), out["data"].a.dtype) == (Inputs, torch.float16)
    (out["list"][0].sum() + out["data"].a.sum()).backward()
    assert model.linear.weight.grad.dtype == FP32


class Recomputed(nn.Module):
    """Checkpoints its inner layer, `twice`, or with a tanh whose backward recomputes before the layer's begins."""

    def __init__(self, use_reentrant: bool, twice: bool) -> None:
        super().__init__()
        self.inner = Notes()
        self.outer = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant
        self.twice = twice
        self.after: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            y = self.inner(x)
            self.after.append(y.dtype)
            return self.inner(y) if self.twice else y.tanh()

        return checkpoint(run, self.outer(x), use_reentrant=self.use_reentrant)


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize("twice", [False, True], ids=["with_tanh", "twice"])
def test_recompute_casts_again(rank: int, world_size: int, use_reentrant: bool, twice: bool) -> None:
    """Behaviour 118: the recompute of a checkpoint casts inputs and outputs as the forward did."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32)
    model: Any = Recomputed(use_reentrant, twice)
    fully_shard(model.inner, mp_policy=policy)
    fully_shard(model)
    model(batch(0, rank, 4)).sum().backward()
    assert model.inner.seen == [(BF16, BF16)] * (4 if twice else 2)
    assert model.after == [FP32] * 2


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.batch_norm = nn.BatchNorm1d(4)
        self.layer_norm = nn.LayerNorm(4)
        self.steps = nn.Parameter(torch.arange(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.steps.dtype == torch.int64
        return self.layer_norm(self.batch_norm(self.linear(x))) * self.steps[3]


@on_ranks(2)
def test_buffers_and_integers_are_not_cast(rank: int, world_size: int) -> None:
    """Behaviour 16, 119: integer parameters and buffers keep their dtype; norms work, BatchNorm with its own policy."""
    model: Any = Norms()
    fully_shard(model.batch_norm, mp_policy=MixedPrecisionPolicy(output_dtype=BF16))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))
    for _ in range(2):
        out = model(batch(0, rank, 4))
        out.sum().backward()
    assert out.dtype == BF16
    assert model.batch_norm.running_mean.dtype == FP32
    assert model.batch_norm.num_batches_tracked.item() == 2
    model.reshard()
    assert torch.equal(model.steps.full_tensor(), torch.arange(6))
    assert model.linear.weight.grad is not None


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([1.0, 2.0, 4.0]))
        self.second = nn.Parameter(torch.tensor([8.0, 16.0, 32.0]).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.first).sum() + (x * self.second.float()).square().sum()


@on_ranks(2)
def test_frozen_parameter_of_another_dtype(rank: int, world_size: int) -> None:
    """Behaviour 120, 121: a frozen fp8 next to a trainable fp32 parameter, in one all-gather without a common dtype."""
    model: Any = TwoDtypes()
    plain = copy.deepcopy(model)
    fully_shard(model, reshard_after_forward=True)
    for _ in range(2):
        model.zero_grad()
        with events.record() as log:
            loss = model(torch.ones(3))
            loss.backward()
        assert_close(loss, plain(torch.ones(3)))
        gathers = [e for e in log if e.kind == "all_gather"]
        assert [e.dtype for e in gathers] == [None] * 2
        # Padded to two elements a rank, 2 ranks x (2 x 4 bytes + 2 x 1 byte), and perhaps to a round address.
        assert all(20 <= e.nbytes <= 32 for e in gathers)
        assert torch.equal(model.first.grad.full_tensor(), torch.ones(3))
    assert isinstance(model.second, DTensor)
    assert model.second.to_local().dtype == torch.float8_e4m3fn


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x[0] + self.weight * x[1]).sum()


@on_ranks(2, 4)
@pytest.mark.parametrize("reduce_dtype", [FP32, None])
def test_gradients_of_several_uses_are_added_in_the_reduce_dtype(
    rank: int, world_size: int, reduce_dtype: torch.dtype | None
) -> None:
    """In one backward: 1 + 2**-9 needs more bits than bf16 has. torch's FSDP2 rounds the sum to bf16 first."""
    x, expected = torch.tensor([1.0, 2**-9]), 1 + 2**-9
    gradients = []
    for api in (torch.distributed.fsdp, fsdp2):
        model = api.fully_shard(UsedTwice(), mp_policy=api.MixedPrecisionPolicy(BF16, reduce_dtype))
        model(x).backward()
        gradients.append(model.weight.grad.full_tensor())
    assert torch.equal(gradients[0], torch.ones(4))
    assert torch.equal(gradients[1], torch.full((4,), expected))


# --- a compute dtype for each parameter -------------------------------------------------------------------------------


class Normed(nn.Module):
    """A norm, which is to stay in fp32, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.to(self.norm.weight.dtype)).to(self.linear.weight.dtype))


@on_ranks(2, 4)
@pytest.mark.parametrize("keep", [torch.float32, None, torch.bfloat16])
def test_param_dtype_override(rank: int, world_size: int, keep: torch.dtype | None) -> None:
    """Behaviour 122: called once for each managed parameter; the original dtype keeps it from being cast."""
    model: Any = Normed()
    norms, everything = set(model.norm.parameters()), list(model.parameters())
    model.ignored, model.below = nn.Linear(1, 1, bias=False), fully_shard(nn.Linear(1, 1))
    model.again = model.linear.weight
    asked: list[Tensor] = []

    def override(param: nn.Parameter) -> torch.dtype | None:
        asked.append(param)
        return keep if param in norms else None

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, param_dtype_override_fn=override)
    fully_shard(model, mp_policy=policy, ignored_params={model.ignored.weight})
    assert len(asked) == len(everything) and {id(param) for param in asked} == {id(param) for param in everything}
    seen: list[torch.dtype] = []
    used = nn.ModuleList([model.norm, model.linear])
    model.norm.register_forward_hook(lambda *_: seen.extend(param.dtype for param in used.parameters()))
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with events.record() as log:
        loss = model(batch(0, rank, 4)).sum()
    loss.backward()
    kept = keep or torch.bfloat16
    assert seen == [torch.bfloat16, kept, kept, torch.bfloat16, torch.bfloat16], "inputs are cast all the same"
    assert count(log, "all_gather") == {"all_gather": 1}
    assert {param.grad.dtype for param in used.parameters()} == {torch.float32}
    assert_close(full(model.linear.bias.grad), torch.full((4,), 3.0))
    assert len(asked) == len(everything)


@on_ranks(2)
@pytest.mark.parametrize("value", [torch.float16, torch.int32, "float32", 1])
def test_param_dtype_override_values(rank: int, world_size: int, value: Any) -> None:
    """Behaviour 122: param_dtype, the original dtype, or None; the error names parameter and value."""
    policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda param: value)
    with pytest.raises(ValueError, match=r"0\.weight") as info:
        fully_shard(linears(1), mp_policy=policy)
    assert str(value) in str(info.value)
