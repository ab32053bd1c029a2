"""torchao, unmodified, on torch's FSDP2 and on ours: low-precision training tensors, which change their own all-gather
(`fsdp_pre_all_gather`), and optimizers with 8-bit and 4-bit states on DTensor shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.prototype.quantized_training import (
    bitnet_training,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
)
from torchao.quantization import quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

from tests.clients.clients import Run, library_of, run_both

DIM, DEPTH, BATCH = 128, 2, 32
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class AdaptedLinear(nn.Module):
    """QLoRA: a frozen weight in NF4 and a trained update of rank 4."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(to_nf4(plain.weight.detach(), 64, 4), requires_grad=False)
        self.a = nn.Parameter(torch.randn(4, plain.in_features) * 0.02)
        self.b = nn.Parameter(torch.zeros(plain.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return linear_nf4(x, self.weight) + x @ self.a.T @ self.b.T


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(DEPTH)))


def shard(model: nn.Sequential, **options: Any) -> None:
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)


def batch() -> Tensor:
    return torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))


def local_values(model: nn.Module) -> dict[str, Any]:
    """The trained shards of this rank, as plain numbers."""
    values = {}
    for name, param in model.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        values[name] = local.dequantize() if hasattr(local, "dequantize") and type(local) is not Tensor else local
        values[name] = values[name].detach() + 0
    return values


def steps(model: Any, optim: Any, num: int = 3, after: Any = None, accumulate: int = 1) -> list[float]:
    x, losses = batch(), []
    for _ in range(num):
        for micro in range(accumulate):
            model.set_requires_gradient_sync(micro + 1 == accumulate)
            loss = model(x * (1 + micro)).float().square().mean()
            loss.backward()
        if accumulate > 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optim.step()
        optim.zero_grad()
        if after is not None:
            after(model)
        losses.append(loss.item())
    return losses


# --- tensors that change their own all-gather -------------------------------------------------------------------------

CONFIGS = {
    "int8 mixed precision": int8_mixed_precision_training,
    "int8 weights": int8_weight_only_quantized_training,
    "bitnet": bitnet_training,
}


def train_quantised(kind: str, mixed: bool) -> Run:
    dist.init_process_group("gloo")
    model = build()
    quantize_(model, CONFIGS[kind](), filter_fn=lambda module, name: isinstance(module, nn.Linear))
    shard(model, mp_policy=BF16 if mixed else MixedPrecisionPolicy(param_dtype=torch.float32))
    torch.manual_seed(dist.get_rank())  # int8 weights round at random
    losses = steps(model, torch.optim.SGD(model.parameters(), lr=0.05))
    kinds = {type(param.to_local()).__name__ for param in model.parameters()}
    return Run(losses, library_of(model), values=local_values(model), notes={"kinds": kinds})


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_quantised_training(kind: str, mixed: bool) -> None:
    both = run_both(train_quantised, 2, kind=kind, mixed=mixed)
    both.assert_equal()
    assert both.ours[0].notes == both.torch[0].notes
    assert len(both.ours[0].notes["kinds"]) == 2  # plain norms and biases, quantised weights


def train_float8(gathers_float8: bool, precomputes: bool) -> Run:
    """float8 with matmuls emulated in fp32, as any device can: casts, scales and all-gathers are the real ones."""
    dist.init_process_group("gloo")
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers_float8, emulate=True)
    model = convert_to_float8_training(build(), config=config)
    shard(model)
    after = precompute_float8_dynamic_scale_for_fsdp if precomputes else None
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = steps(model, optim, 20, after=after, accumulate=2)  # clipped
    return Run(losses, library_of(model), values=local_values(model))


@pytest.mark.parametrize(("gathers_float8", "precomputes"), [(False, False), (True, False), (True, True)])
def test_float8(gathers_float8: bool, precomputes: bool) -> None:
    both = run_both(train_float8, 2, gathers_float8=gathers_float8, precomputes=precomputes)
    both.assert_equal()
    assert both.ours[0].losses[-1] < both.ours[0].losses[0]


def train_qlora() -> Run:
    dist.init_process_group("gloo")
    model = build()
    for block in model:
        block.up, block.down = AdaptedLinear(block.up), AdaptedLinear(block.down)
        block.norm.requires_grad_(False)
    shard(model)
    losses = steps(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    trained = {name: param.full_tensor() for name, param in model.named_parameters() if param.requires_grad}
    kinds = {type(param.to_local()).__name__ for param in model.parameters()}
    return Run(losses, library_of(model), values=trained, notes={"kinds": kinds})


def test_qlora_on_nf4() -> None:
    both = run_both(train_qlora, 2)
    both.assert_equal()
    assert "NF4Tensor" in both.ours[0].notes["kinds"]
    assert both.ours[0].losses[-1] < both.ours[0].losses[0]


# --- optimizers with small states -------------------------------------------------------------------------------------

OPTIMIZERS = {"8 bits": AdamW8bit, "4 bits": AdamW4bit, "float8": AdamWFp8}


def values_of(model: nn.Module) -> list[Tensor]:
    return [param.to_local().clone() for param in model.parameters()]


def put_back(model: nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(model.parameters(), values, strict=True):
            param.to_local().copy_(value)


def train_small_states(kind: str, folder: str) -> Run:
    """Step, save the states with torch.distributed.checkpoint, step on; then the same steps with an optimizer that
    loads them. The optimizers compile their step, which takes minutes on a CPU; here it runs as it is written."""
    dist.init_process_group("gloo")
    torch.compiler.set_stance("force_eager")
    model = build()
    shard(model)
    optim = OPTIMIZERS[kind](model.parameters(), lr=1e-2)
    losses = steps(model, optim)
    kinds = {type(state["exp_avg"].to_local()).__name__ for state in optim.state.values()}
    dcp.save({"optim": optim.state_dict()}, checkpoint_id=folder)
    before = values_of(model)
    further = steps(model, optim, 2)
    resumed = OPTIMIZERS[kind](model.parameters(), lr=1e-2)
    steps(model, resumed, 1)  # makes states to load into
    state = {"optim": resumed.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    resumed.load_state_dict(state["optim"])
    put_back(model, before)
    assert steps(model, resumed, 2) == further
    return Run([*losses, *further], library_of(model), values=local_values(model), notes={"states": kinds})


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_with_small_states(tmp_path: Path, kind: str) -> None:
    both = run_both(train_small_states, 2, kind=kind, folder=str(tmp_path))
    both.assert_equal()
    assert len(both.ours[0].notes["states"]) == 2, "large shards are quantised, small ones are not"
