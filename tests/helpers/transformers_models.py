"""Small models of transformers whose names, or layouts, in a Hugging Face checkpoint are not those of their classes."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from fsdp2 import fully_shard

COMMON: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}


def mixtral() -> nn.Module:
    sizes = {"vocab_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 1, "num_local_experts": 11}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**COMMON, **sizes))


def deepseek() -> nn.Module:
    sizes = {
        "vocab_size": 32, "moe_intermediate_size": 6, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "kv_lora_rank": 4, "q_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 4,
    }  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**COMMON, **sizes))


def vit() -> nn.Module:
    config = transformers.ViTConfig(**COMMON, num_hidden_layers=2, image_size=8, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def dinov2() -> nn.Module:
    """One stored tensor is cut for two of the model."""
    sizes = {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4, "use_swiglu_ffn": True}
    return transformers.Dinov2Model(transformers.Dinov2Config(**COMMON, **sizes))


BUILDERS = {"mixtral": mixtral, "deepseek": deepseek, "vit": vit, "dinov2": dinov2}


def sharded(build: Callable[[], nn.Module], device: str, blocks: bool = True) -> nn.Module:
    with torch.device(device):
        model = build()
    for module in [*model.modules()] if blocks else ():
        if isinstance(module, nn.ModuleList) and len(module) == 2:
            for block in module:
                fully_shard(block)
    # The classes of transformers within the outermost one are looked up by their names too.
    if model.base_model is not model:
        fully_shard(model.base_model)
    return fully_shard(model)
