"""Hugging Face PEFT, unmodified, on torch's FSDP2 and on ours: LoRA on a frozen base, sharded by hand or Accelerate."""

from pathlib import Path
from typing import Any

import datasets  # noqa: F401 - Accelerate does so at its first data loader: once here, not again in every rank
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from tests.clients.clients import Run, library_of, run_both, run_script
from tests.clients.training import llama, train, whole


def base_model() -> nn.Module:
    return llama(tie_word_embeddings=True)


def lora(**options: Any) -> LoraConfig:
    targets = ["q_proj", "v_proj", "down_proj"]
    return LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **options)


def shard(model: nn.Module, **options: Any) -> None:
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def adapter(model: nn.Module) -> dict[str, Tensor]:
    """The adapter by PEFT's own names, whole. Collective."""
    state = get_peft_model_state_dict(model, state_dict=model.state_dict())
    return {name: whole(value) for name, value in state.items()}


def frozen(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.full_tensor() for name, param in model.named_parameters() if not param.requires_grad}


def adapt(folder: str, dora: bool = False, base_dtype: torch.dtype = torch.float32) -> Run:
    """LoRA in fp32 on a frozen base: fp32 and bf16 beside each other in a unit are two dtypes, of which one trains."""
    dist.init_process_group("gloo")
    model = get_peft_model(base_model().to(base_dtype), lora(use_dora=dora), autocast_adapter_dtype=True)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, **({"mp_policy": mixed} if base_dtype != torch.float32 else {}))
    before = frozen(model)
    losses = train(model).losses
    after = frozen(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    values = adapter(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    return Run(losses, library_of(model), values={"adapter": values})


@pytest.mark.parametrize("kind", ["lora", "dora", "bf16 base"])
def test_lora_on_a_frozen_base(tmp_path: Path, kind: str) -> None:
    options = {"dora": kind == "dora", "base_dtype": torch.bfloat16 if kind == "bf16 base" else torch.float32}
    both = run_both(adapt, 2, folder=str(tmp_path), **options)
    both.assert_equal()
    ours = both.ours[0]
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert stored.keys() == ours.values["adapter"].keys()
    assert all(torch.equal(value, ours.values["adapter"][name]) for name, value in stored.items())


def go_on(folder: str, loads: str) -> Run:
    """Continue from a saved adapter, which is read before sharding, or into the sharded model."""
    dist.init_process_group("gloo")
    if loads == "before":
        model = PeftModel.from_pretrained(base_model(), folder, is_trainable=True)
        shard(model)
    else:
        model = get_peft_model(base_model(), lora())
        shard(model)
        state = get_peft_model_state_dict(model, state_dict=model.state_dict())
        stored = load_file(Path(folder, "adapter_model.safetensors"))
        pieces = {name: distribute_tensor(stored[name], old.device_mesh, old.placements) for name, old in state.items()}
        set_peft_model_state_dict(model, pieces)
    start = adapter(model)
    run = train(model)
    return Run(run.losses, run.library, values={"start": start, "adapter": adapter(model)})


@pytest.mark.parametrize("loads", ["before", "into"])
def test_an_adapter_goes_on(tmp_path: Path, loads: str) -> None:
    first = run_script(adapt, 2, "fsdp2", folder=str(tmp_path))
    both = run_both(go_on, 2, folder=str(tmp_path), loads=loads)
    both.assert_equal()
    saved = first[0].values["adapter"]
    assert all(torch.equal(value, saved[name]) for name, value in both.ours[0].values["start"].items())


def adapt_sharded() -> Run:
    """The adapter comes after `fully_shard`: its parameters are plain, and each rank has its own gradients for them."""
    dist.init_process_group("gloo")
    model = base_model().requires_grad_(False)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    torch.manual_seed(9)
    model = get_peft_model(model, lora())
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters() if param.requires_grad}
    run = train(model)
    return Run(run.losses, run.library, values={"shapes": shapes, "adapter": adapter(model)})


def test_an_adapter_on_a_sharded_model() -> None:
    """PEFT decides by the names of a weight's mesh whether its shape is the layer's: ours must have none too."""
    both = run_both(adapt_sharded, 2)
    both.assert_equal()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert both.ours[0].values["shapes"][name] == (4, 32)
