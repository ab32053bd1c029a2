"""A real vLLM, on the CPU, predicts with published weights what it predicts with a checkpoint of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.scripts import run_script

pytest.importorskip("vllm", reason="needs vLLM for the CPU: run `make test-engines`")


@pytest.mark.timeout(600)
def test_published_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=128, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "first")
    job = run_script(Path(__file__).with_name("publishing.py"), tmp_path, ranks=2, timeout_s=500)
    assert job.status == 0, job.errors
    found = json.loads(next(line for line in job.output.splitlines() if line.startswith("found:"))[6:])
    assert found["losses"][-1] < found["losses"][0]
    assert found["unchanged"] == found["before"] != found["after"]
    assert found["after"] == found["loaded"]
