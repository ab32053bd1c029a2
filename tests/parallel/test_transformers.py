"""`parallelize` on models of transformers: blocks by `_no_split_modules`, tensor parallelism by the model's plan."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2.errors import ArgumentError
from fsdp2.parallel import parallelize
from tests.helpers.models import error_of
from tests.helpers.parallel_models import VOCAB, config_of, name_of, race
from tests.helpers.ranks import on_ranks

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


class Logits(nn.Module):
    """A causal model that takes tokens and gives logits, as the race wants it."""

    def __init__(self, kind: str, **more: Any) -> None:
        super().__init__()
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
        self.model = getattr(transformers, f"{kind}ForCausalLM")(config)

    @property
    def tp_plan(self) -> dict[str, str]:
        return {f"model.{name}": style for name, style in self.model.tp_plan.items()}

    @property
    def config(self) -> Any:
        return self.model.config

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


def llama() -> nn.Module:
    return Logits("Llama")


def llama_tied() -> nn.Module:
    return Logits("Llama", tie_word_embeddings=True)


def qwen3() -> nn.Module:
    """Norms of single heads, whose gradients are sums over the tensor axis."""
    model = Logits("Qwen3")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("_norm.weight"):
                param.uniform_(0.5, 1.5)
    return model


BUILDS = {"llama": llama, "llama_tied": llama_tied, "qwen3": qwen3}


@on_ranks(2)
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("degrees", [{"shard": 2}, {"tensor": 2}], ids=name_of)
def test_two_ranks(rank: int, world_size: int, build: str, degrees: dict[str, int]) -> None:
    model: Any = race(config_of(degrees, activation_checkpointing="full"), BUILDS[build], steps=2, tp_plan=None)
    tied = model.model.lm_head.weight is model.model.model.embed_tokens.weight
    assert tied == (build == "llama_tied")


@on_ranks(2)
def test_the_very_model(rank: int, world_size: int) -> None:
    """Without a wrapper around it: its own `tp_plan`, its blocks, its loss."""
    config = config_of({"tensor": 2})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    tokens = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    expected = model(tokens, labels=tokens).loss
    parallelize(model, config)
    assert model(tokens, labels=tokens).loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.exhaustive
@on_ranks(4)
def test_heads_that_do_not_divide(rank: int, world_size: int) -> None:
    message = error_of(ArgumentError, lambda: parallelize(llama(), config_of({"tensor": 4})))
    assert message == "parallelize: tensor = 4 does not divide num_key_value_heads = 2 of this Logits"
