"""The fine-tuning example as a user starts it, judged by what transformers makes of the folder that it leaves."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.helpers.examples import EXAMPLES, TEXT, metrics, run, torchrun
from tests.helpers.scripts import Finished

pytestmark = pytest.mark.exhaustive
transformers = pytest.importorskip("transformers")

SHORT = [*TEXT, "--device", "cpu", "--steps", "20", "--seq-len", "32", "--batch-size", "4"]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """LoRA on the tiny model, on two ranks, merged; with the example's own check of the logits. The run's folder."""
    out = tmp_path_factory.mktemp("merged") / "out"
    job = torchrun("train_lm/finetune.py", *SHORT, "--out", out, "--check")
    assert job.status == 0, job.errors
    return out, job


def losses(out: Path) -> tuple[float, float]:
    """Of the validation, before and after."""
    found = metrics(out, "valid_loss")
    assert list(found) == [0, 20]
    return found[0], found[20]


def validation_loss(model: Any, folder: Path, rows: int) -> float:
    """What the example prints, in one process and by transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    files = sorted((path.name, path.read_bytes()) for path in Path(TEXT[1]).rglob("*.py"))
    text = b"".join(content[len(content) - len(content) // 20 :] for _, content in files)
    tokens = np.array(tokenizer(text.decode("utf-8", "replace"), verbose=False)["input_ids"])
    starts = np.linspace(0, len(tokens) - 33, num=rows, dtype=np.int64)
    batch = torch.from_numpy(np.stack([tokens[start : start + 33] for start in starts]))
    with torch.no_grad():
        return float(F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten()))


def test_transformers_loads_the_result(merged: tuple[Path, Finished]) -> None:
    """Configuration, weights and tokenizer; the loss is the one that the sharded model had."""
    out, job = merged
    before, after = losses(out)
    assert after < before - 0.2
    model, report = transformers.AutoModelForCausalLM.from_pretrained(out / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert validation_loss(model.eval(), out / "model", rows=16) == pytest.approx(after, abs=2e-4)
    assert re.search(r"logits of .* differ by \d\.\de-0[5-9]", job.output.replace("\n", ""))


def test_only_the_adapted_layers_have_changed(merged: tuple[Path, Finished]) -> None:
    out, job = merged
    base, tuned = (load_file(out / folder / "model.safetensors") for folder in ("base", "model"))
    assert base.keys() == tuned.keys()
    changed = {name for name in base if not torch.equal(base[name], tuned[name])}
    assert changed == {f"model.layers.{n}.self_attn.{p}_proj.weight" for n in (0, 1) for p in "qv"}
    assert "training 3,584 of" in job.output  # 2 layers x rank 8 x (64 + 64 + 64 + 32)


def test_the_adapter_alone(merged: tuple[Path, Finished], tmp_path: Path) -> None:
    """One rank instead of two, the matrices in peft's format: put together by hand they give the merged model."""
    out, base = tmp_path / "out", merged[0] / "base"
    options = [*SHORT, "--batch-size", "8", "--model", base, "--save", "adapter", "--out", out]
    job = run("train_lm/finetune.py", *options, ranks=None)
    assert job.status == 0, job.errors
    assert losses(out) == pytest.approx(losses(merged[0]), abs=2e-3)
    config = json.loads((out / "model" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["r"] == 8
    adapter = load_file(out / "model" / "adapter_model.safetensors")
    assert len(adapter) == 8
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    for name, weight in model.named_parameters():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in adapter:
            delta = adapter[f"{prefix}.lora_B.weight"] @ adapter[f"{prefix}.lora_A.weight"]
            weight.data += config["lora_alpha"] / config["r"] * delta
    assert validation_loss(model.eval(), base, rows=16) == pytest.approx(losses(out)[1], abs=2e-4)


def test_chosen_parameters_of_a_tied_model(merged: tuple[Path, Finished], tmp_path: Path) -> None:
    """`--train` with patterns, in bfloat16, on a model whose head is its embedding."""
    base = tmp_path / "base"
    shutil.copytree(merged[0] / "base", base)
    config = transformers.AutoConfig.from_pretrained(base)
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
    options = ["--model", base, "--train", "model.layers.1.mlp.*", "model.norm.*", "--bf16", "--lr", "3e-2", "--check"]
    out = tmp_path / "out"
    job = run("train_lm/finetune.py", *SHORT, *map(str, options), "--out", out)
    assert job.status == 0, job.errors
    before, tuned = load_file(base / "model.safetensors"), load_file(out / "model" / "model.safetensors")
    assert before.keys() == tuned.keys() and "lm_head.weight" not in tuned
    changed = {name for name in before if not torch.equal(before[name], tuned[name])}
    assert changed == {"model.norm.weight", *(f"model.layers.1.mlp.{n}_proj.weight" for n in ("gate", "up", "down"))}
    assert losses(out)[1] < losses(out)[0]


def test_the_checkpoint_has_what_is_trained_alone(merged: tuple[Path, Finished]) -> None:
    saved = [load_file(path) for path in merged[0].glob("checkpoints/step-00000020/model-rank-*.safetensors")]
    assert sum(tensor.numel() for shards in saved for tensor in shards.values()) == 3584


def test_a_resumed_run_ends_in_the_same_weights(merged: tuple[Path, Finished], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("train_lm/finetune.py", *SHORT, "--out", out, "--steps", "10").status == 0
    (out / "model" / "model.safetensors").unlink()  # the result of 10 steps is replaced
    job = run("train_lm/finetune.py", *SHORT, "--out", out, "--resume")
    assert job.status == 0, job.errors
    assert "going on from" in job.output and "note:" not in job.output
    whole, resumed = (load_file(folder / "model" / "model.safetensors") for folder in (merged[0], out))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole.keys() | resumed.keys())
    assert metrics(out, "loss") == metrics(merged[0], "loss")


def test_the_command_line_counts(merged: tuple[Path, Finished], tmp_path: Path) -> None:
    """A lower learning rate on resume was noted, and the checkpoint's was used."""
    job = run("train_lm/finetune.py", *SHORT, "--out", tmp_path, "--resume", merged[0], "--lr", "0", "--steps", "30")
    assert job.status == 0, job.errors
    assert "lr was 0.01 and is 0.0" in job.output
    before, after = (
        [load_file(path) for path in sorted((out / "checkpoints" / step).glob("model-rank-*.safetensors"))]
        for out, step in ((merged[0], "step-00000020"), (tmp_path, "step-00000030"))
    )
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def test_the_result_is_no_model_to_begin_with(tmp_path: Path) -> None:
    """It moved away with the run before, and then could not be read."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    job = run("train_lm/finetune.py", *SHORT, "--out", tmp_path, "--model", tmp_path / "model", ranks=None)
    assert job.status == 2 and "is where the result goes" in job.errors
    assert (tmp_path / "model" / "config.json").exists()


def test_a_frozen_base_that_stays_gathered(merged: tuple[Path, Finished], tmp_path: Path) -> None:
    """Where the frozen weights stay changes no bit of the result."""
    job = run("train_lm/finetune.py", *SHORT, "--out", tmp_path, "--keep-frozen", "host")
    assert job.status == 0, job.errors
    expected, actual = (load_file(folder / "model" / "model.safetensors") for folder in (merged[0], tmp_path))
    assert all(torch.equal(expected[name], actual[name]) for name in expected.keys() | actual.keys())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora-targets", "query"], "--lora-targets query names no linear layer of this model; it has ['down_proj'"),
        (["--train", "head.*"], "--train head.* matches no parameter; they are called model.embed_tokens.weight"),
        (["--train", "lm_head.*", "--save", "adapter"], "--save adapter needs LoRA matrices"),
        (["--model", str(EXAMPLES)], "has no config.json"),
    ],
    ids=["targets", "patterns", "adapter of nothing", "no model"],
)
def test_bad_input_is_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    job = run("train_lm/finetune.py", *SHORT, "--out", tmp_path / "out", *arguments, ranks=None)
    assert job.status == 2
    assert [line for line in job.errors.splitlines() if line.startswith("error: ") and message in line], job.errors
    assert "Traceback" not in job.errors
