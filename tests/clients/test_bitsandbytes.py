"""bitsandbytes' 4- and 8-bit layers as a frozen base, under LoRA adapters of PEFT. 4-bit weights are sharded as they
are packed, and the layers keep what unpacks them; 8-bit weights keep that themselves, so with FSDP2 they stay whole."""

import bitsandbytes as bnb
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.clients.clients import Run, run_both
from tests.clients.training import llama, train


def packed(linear: nn.Linear, bits: int) -> nn.Module:
    sizes = {"input_features": linear.in_features, "output_features": linear.out_features, "bias": False}
    if bits == 8:
        layer = bnb.nn.Linear8bitLt(**sizes, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    else:
        layer = bnb.nn.Linear4bit(**sizes, compute_dtype=torch.bfloat16, quant_type="nf4", quant_storage=torch.bfloat16)
        layer.weight = bnb.nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type="nf4", quant_storage=torch.bfloat16, module=layer
        )
    return layer.to("cpu")


def script(bits: int) -> Run:
    dist.init_process_group("gloo")
    model = llama().to(torch.bfloat16)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, packed(getattr(layer.mlp, name), bits))
    torch.manual_seed(7)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["up_proj", "down_proj"], init_lora_weights=False))
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    options["ignored_params"] = {param for param in model.parameters() if isinstance(param, bnb.nn.Int8Params)}
    for layer in model.model.model.layers:
        fully_shard(layer, **options)
    return train(fully_shard(model, **options))


@pytest.mark.parametrize("bits", [4, 8])
def test_trains_as_on_torch(bits: int) -> None:
    run_both(script, 2, bits=bits).assert_equal()
