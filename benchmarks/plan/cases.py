"""What is planned and then run: small models of plain nn and of transformers, each with a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from benchmarks.common import GPT
from fsdp2 import Offload, ZeroPolicy, offload_optimizer
from fsdp2.parallel import ParallelConfig
from fsdp2.plan import Workload

VOCAB, LENGTH = 128, 32


@dataclass(frozen=True)
class Case:
    """One workload on `ranks` ranks.

    Attributes:
        options: of `parallelize`.
    """

    workload: Workload
    config: ParallelConfig = field(default_factory=ParallelConfig)
    ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)


def tokens(size: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(size * LENGTH).remainder(VOCAB).view(size, LENGTH)
    return {"input_ids": ids, "labels": ids}


def lm_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1).float(), batch["labels"].flatten())


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def gpt(dim: int = 128, tied: bool = False, frozen: bool = False) -> nn.Module:
    model = GPT(VOCAB, LENGTH, dim, 4, 3)
    if tied:
        model.head.weight = model.tokens.weight
    if frozen:
        for name, param in model.named_parameters():
            param.requires_grad_("norm" in name)
    return model


def of_gpt(build: Callable[[], nn.Module] = gpt, **options: Any) -> Workload:
    return Workload(build, tokens, lm_loss, batch_size=4, **options)


class Convolutions(nn.Module):
    """A small network for images, with batch norm and a layer that is a unit by itself."""

    def __init__(self) -> None:
        super().__init__()
        channels = [3, 32, 64, 128]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in pairwise(channels)
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Mlp(nn.Module):
    """Two layers that tensor parallelism can split."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Mlps(nn.Module):
    """Several of them, of a width that no number of ranks divides."""

    def __init__(self, dim: int = 96, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(dim) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def of_mlps(dim: int = 96, depth: int = 3) -> Workload:
    return Workload(lambda: Mlps(dim, depth), lambda size: torch.ones(size, dim), square, batch_size=8)


class Experts(nn.Module):
    """A mixture of experts without a loop over tokens: each token goes through all, weighted by the router."""

    def __init__(self, dim: int, num: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num, bias=False)
        self.up = nn.Parameter(torch.randn(num, dim, 2 * dim) * 0.02)
        self.down = nn.Parameter(torch.randn(num, 2 * dim, dim) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        hidden = F.silu(torch.einsum("bd,ndh->nbh", x, self.up))
        return x + torch.einsum("nbh,nhd,bn->bd", hidden, self.down, weights)


class Mixture(nn.Module):
    """Several of them."""

    def __init__(self, dim: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(dim, 4) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def transformers_model(name: str, **changes: Any) -> Callable[[], nn.Module]:
    """A causal language model of transformers, made small."""

    def build() -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": VOCAB,
            **changes,
        }
        config = AutoConfig.for_model(name, **sizes)
        config.use_cache = False
        return AutoModelForCausalLM.from_config(config)

    return build


SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **SMALL))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    config.use_cache = False
    return T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **SMALL))


def images(size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.ones(size, 3, 32, 32), "labels": torch.zeros(size, dtype=torch.long)}


TENSOR_PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
FOUR_HEADS = {"num_key_value_heads": 2}
WIDER = {"hidden_size": 128, "intermediate_size": 352}


def in_background(params: Any) -> torch.optim.Optimizer:
    return offload_optimizer(torch.optim.AdamW, params)


def offloaded(**what: bool) -> Case:
    """Steps of units in the background, for which the caller waits: otherwise what is in memory at once is chance."""
    return Case(of_gpt(optimizer=in_background), options={"offload_policy": Offload(overlap=False, **what)})


CASES: dict[str, Case] = {
    "gpt": Case(of_gpt()),
    "gpt, large lanes": Case(of_gpt(lambda: gpt(dim=512))),
    "gpt, bf16": Case(of_gpt(), ParallelConfig(mixed_precision="bf16")),
    "gpt, checkpointed": Case(of_gpt(), ParallelConfig(activation_checkpointing="full")),
    "gpt, every second block": Case(of_gpt(), ParallelConfig(activation_checkpointing="selective")),
    "gpt, kept after forward": Case(of_gpt(), ParallelConfig(reshard_after_forward=False)),
    "gpt, tied": Case(of_gpt(lambda: gpt(tied=True))),
    "gpt, frozen": Case(of_gpt(lambda: gpt(frozen=True))),
    "gpt, frozen, gathered once": Case(
        of_gpt(lambda: gpt(frozen=True)), options={"zero": ZeroPolicy(keep_frozen="host")}
    ),
    "gpt, 3 microbatches": Case(of_gpt(microbatches=3)),
    "gpt, SGD": Case(of_gpt(optimizer=lambda params: torch.optim.SGD(params, 0.1, momentum=0.9))),
    "gpt, replicated": Case(of_gpt(), ParallelConfig(replicate=2, shard=1)),
    "gpt, offloaded": Case(of_gpt(), ParallelConfig(cpu_offload=True)),
    "gpt, states offloaded": offloaded(),
    "gpt, gradients offloaded": offloaded(grads=True),
    "gpt, all offloaded": offloaded(grads=True, params=True),
    "convolutions": Case(
        Workload(
            Convolutions,
            lambda size: torch.ones(size, 3, 32, 32),
            square,
            batch_size=4,
        ),
        ParallelConfig(blocks=("blocks.*",)),
    ),
    "experts": Case(Workload(Mixture, lambda size: torch.ones(size, 64), square, batch_size=64)),
    "mlps, large lanes": Case(of_mlps(256, 2)),
    "mlps, uneven": Case(of_mlps(99)),
    "mlps, bf16": Case(of_mlps(99), ParallelConfig(mixed_precision="bf16")),
    "mlps, tensor": Case(of_mlps(), ParallelConfig(tensor=2), options={"tp_plan": TENSOR_PLAN}),
    "llama": Case(Workload(transformers_model("llama", **WIDER, **FOUR_HEADS), tokens, batch_size=2)),
    "gpt2": Case(Workload(transformers_model("gpt2", n_embd=64, n_layer=3, n_head=4), tokens, batch_size=4)),
    "qwen2, bf16, checkpointed": Case(
        Workload(transformers_model("qwen2", **FOUR_HEADS), tokens, batch_size=4),
        ParallelConfig(mixed_precision="bf16", activation_checkpointing="full"),
    ),
    "mixtral": Case(
        Workload(
            transformers_model("mixtral", num_local_experts=4, experts_implementation="batched_mm", **FOUR_HEADS),
            tokens,
            batch_size=4,
        )
    ),
    "bert": Case(Workload(bert, tokens, batch_size=4)),
    "t5, tied": Case(Workload(t5, tokens, batch_size=4), ParallelConfig(blocks=("T5Block",))),
    "vit": Case(Workload(vit, images, batch_size=4)),
    "gpt, HSDP": Case(of_gpt(), ParallelConfig(replicate=2), ranks=4),
    "gpt, resharded to 2": Case(of_gpt(), ParallelConfig(reshard_after_forward=2), ranks=4),
    "mlps, sharded and tensor": Case(of_mlps(), ParallelConfig(tensor=2), 4, {"tp_plan": TENSOR_PLAN}),
}
