"""trl, unmodified: its own programs `trl/scripts/sft.py` and `dpo.py` as the wheel has them, so its `SFTTrainer` and
`DPOTrainer` (with a sharded reference model), on Accelerate's FSDP2 plugin. 20 steps of two micro-batches, clipped."""

import gc
import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast

from tests.clients.clients import Run, library_of, run_in_folders
from tests.clients.training import llama, take_cpus_for_accelerators

WORDS = [f"w{index}" for index in range(60)]
SPECIAL = ["<unk>", "<eos>", "<pad>"]
STEPS = 20


def make_model(folder: Path) -> None:
    """A model with its tokenizer, as a hub would have it."""
    llama(eos_token_id=1, pad_token_id=2).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def make_data(folder: Path, columns: list[str]) -> None:
    """Random sentences of various lengths."""
    random.seed(7)
    rows = [{name: " ".join(random.choices(WORDS, k=random.randint(4, 9))) for name in columns} for _ in range(128)]
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def program(name: str, source: str, folder: str, options: dict[str, Any]) -> Run:
    """`python trl/scripts/NAME.py --...` in this process."""
    options = options | take_cpus_for_accelerators()
    datasets.config.HF_DATASETS_CACHE = Path(source, "cache")
    plugin = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
    every = {
        "model_name_or_path": f"{source}/model",
        "dataset_name": f"{source}/data",
        "output_dir": folder,
        "fsdp": "full_shard",
        "fsdp_config": plugin,
        "max_steps": STEPS,
        "save_steps": STEPS,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "bf16": False,
        "dtype": "float32",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    path = str(Path(trl.__file__).parent / "scripts" / f"{name}.py")
    sys.argv = [path, *(word for key, value in (every | options).items() for word in (f"--{key}", text(value)))]
    gc.disable()  # the program ends without handing its models over; they are still there
    runpy.run_path(path, run_name="__main__")
    models = [each for each in gc.get_objects() if isinstance(each, nn.Module)]
    history = json.loads(Path(folder, f"checkpoint-{STEPS}", "trainer_state.json").read_text())["log_history"]
    logs = [entry for entry in history if "loss" in entry]
    numbers = [{key: value for key, value in entry.items() if "token" not in key} for entry in logs]
    return Run([entry["loss"] for entry in logs], library_of(*models), values={"logs": numbers})


CASES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "sft": ("sft", ["text"], {"gradient_checkpointing": True}),
    "sft-completion": ("sft", ["prompt", "completion"], {}),
    "sft-lora": ("sft", ["text"], {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}),
    "dpo": ("dpo", ["prompt", "chosen", "rejected"], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_trl(tmp_path: Path, case: str) -> None:
    name, columns, options = CASES[case]
    options = {"gradient_checkpointing": False} | options
    make_model(tmp_path / "model")
    make_data(tmp_path / "data", columns)
    both = run_in_folders(program, 2, tmp_path, name=name, source=str(tmp_path), options=options)
    both.assert_equal()
    assert len(both.ours[0].losses) == STEPS
    assert all(entry["grad_norm"] > 0.0 for entry in both.ours[0].values["logs"])
    file = "adapter_model.safetensors" if "use_peft" in options else "model.safetensors"
    theirs, ours = (load_file(tmp_path / library / file) for library in ("torch", "fsdp2"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in ours)
