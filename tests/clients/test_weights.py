"""`fsdp2.weights` of a model with adapters of PEFT: what `merge_and_unload` makes in one process, bit for bit."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import fsdp2
from fsdp2 import UnsupportedError, fully_shard
from fsdp2.transfer import Wanted
from tests.helpers.ranks import on_ranks

SIZES = {"vocab_size": 32, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}


def adapted(model: nn.Module, config: LoraConfig) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return get_peft_model(model, config)


def llama(*, dtype: torch.dtype = torch.float32, adapters: int = 1, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, intermediate_size=20)).to(dtype)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj", "embed_tokens"], **options)
    made = adapted(model, config)
    for number in range(1, adapters):
        made.add_adapter(f"other{number}", LoraConfig(r=2, target_modules=["q_proj"]))
    made.base_model.set_adapter([*made.peft_config])
    return spoiled(made)


def mixtral() -> nn.Module:
    """Stacked experts, of which adapters change the parameters themselves."""
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 1, "num_local_experts": 3, "intermediate_size": 8}
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj"], target_parameters=names)
    return spoiled(adapted(MixtralForCausalLM(MixtralConfig(**SIZES, **sizes)), config))


def spoiled(model: nn.Module) -> nn.Module:
    """Adapters that change something."""
    for param in model.parameters():
        if param.requires_grad:
            nn.init.normal_(param)
    return model


def shard(model: nn.Module) -> nn.Module:
    for layer in model.get_base_model().model.layers:  # type: ignore[operator]
        fully_shard(layer)
    return fully_shard(model)


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (each.to_local() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in model.named_parameters()
    }


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "two adapters": {"adapters": 2},
    "modules to save": {"modules_to_save": ["lm_head"]},
}


@on_ranks(2, 3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_as_merged_in_one_process(rank: int, world_size: int, case: str, wire: torch.dtype | None) -> None:
    merged = llama(**CASES[case]).merge_and_unload().state_dict()  # type: ignore[operator]
    expected = {name: tensor.to(wire or tensor.dtype) for name, tensor in merged.items()}
    model = shard(llama(**CASES[case]))
    before = bits(model)
    plan = fsdp2.weights(model, dtype=wire)
    assert {each.name for each in plan.metadata()} == {*expected}
    for _ in range(2):
        for name, tensor in plan:
            assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    wanted = Wanted("model.layers.1.mlp.down_proj.weight", 0, (5, 2), (6, 17))
    for part in plan.send_boxes([wanted]):
        start = [a + b for a, b in zip(wanted.start, part.start, strict=True)]
        box = tuple(slice(a, a + n) for a, n in zip(start, part.tensor.shape, strict=True))
        assert torch.equal(part.tensor, expected[wanted.name][box])
    known = plan.snapshot()
    after = bits(model)
    assert before.keys() == after.keys() and all(torch.equal(each, after[name]) for name, each in before.items())
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.mul_(2)
    changed = {change.name for change in plan.changes(known)}
    assert "model.layers.1.mlp.down_proj.weight" in changed and "model.norm.weight" not in changed


@on_ranks(2)
def test_stacked_experts_under_published_names(rank: int, world_size: int, tmp_path: Path) -> None:
    if rank == 0:
        mixtral().merge_and_unload().save_pretrained(tmp_path)  # type: ignore[operator]
    dist.barrier()
    expected = load_file(tmp_path / "model.safetensors")
    found = {name: tensor.clone() for name, tensor in fsdp2.weights(shard(mixtral()), "transformers")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_an_adapter_that_is_more_than_a_product() -> None:
    with pytest.raises(UnsupportedError, match=r"'default' of '.*embed_tokens'.*does more than add the product"):
        fsdp2.weights(llama(use_dora=True))
