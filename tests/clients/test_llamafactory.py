"""LLaMA-Factory's FSDP2 engine, without its trainer: bf16, all weights or a LoRA adapter, and its checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.clients.clients import Run, run_both
from tests.clients.training import adamw, llama, train, weights


def script(folder: str, lora: bool) -> Run:
    from llamafactory.v1.plugins.trainer_plugins.distributed import fsdp2

    model: Any = llama()
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    model = fsdp2.FSDP2Engine({"reshard_after_forward": True}, bf16=True).shard_model(model)
    run = train(model)
    optimizer = adamw(model)
    fsdp2.save_checkpoint(model, optimizer, folder)
    for param in optimizer.param_groups[0]["params"]:
        param.data.zero_()
    fsdp2.load_checkpoint(model, optimizer, folder)
    return Run(run.losses, run.library, run.values | {"loaded": weights(model)})


@pytest.mark.parametrize("lora", [False, True])
def test_trains_as_on_torch(tmp_path: Path, lora: bool) -> None:
    both = run_both(script, 2, folder=str(tmp_path), lora=lora)
    both.assert_equal()
    values = both.ours[0].values
    assert all(torch.equal(values["loaded"][name], weight) for name, weight in values["weights"].items())
