"""A program on some ranks: train a llama, publish it to a vLLM in a process of its own before and after, and save it.

    torchrun --nproc_per_node=2 tests/engines/publishing.py FOLDER

FOLDER/first has the model that vLLM starts with; FOLDER/trained receives the checkpoint of the trained one. Prints one
line of JSON: logarithms of probabilities that vLLM gives, at the start, after the weights were published, and of a new
vLLM that loads FOLDER/trained.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

import fsdp2
from fsdp2 import checkpoint, fully_shard

PROMPT = [5, 9, 17, 40]


def serve(pipe: Connection, folder: str) -> None:
    """vLLM's process: answer with what it predicts; take weights, one tensor after the other, until None."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind"
    )
    vllm: Any = import_module("vllm")
    model = vllm.LLM(folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=64)
    pipe.send(predicted(vllm, model))
    while pipe.recv() == "weights":
        model.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(pipe.recv, None)})
        pipe.send(predicted(vllm, model))


def predicted(vllm: Any, model: Any) -> list[dict[int, float]]:
    """The most likely tokens at each place of the prompt, and of four more, and their logarithms of probability."""
    what = vllm.SamplingParams(max_tokens=4, temperature=0, logprobs=5, prompt_logprobs=5, detokenize=False)
    (answer,) = model.generate([{"prompt_token_ids": PROMPT}], what, use_tqdm=False)
    places = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
    return [{token: found.logprob for token, found in place.items()} for place in places]


def start(folder: Path) -> tuple[Connection, Any]:
    """A vLLM with the model in `folder`, and the first that it predicts."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    context.Process(target=serve, args=(other, str(folder)), daemon=True).start()
    return pipe, pipe.recv()


def publish(source: Any, pipe: Connection | None) -> Any:
    """Collective. Rank 0 has the pipe."""
    if pipe is not None:
        pipe.send("weights")
    for pair in source:
        if pipe is not None:
            pipe.send(pair)
    if pipe is not None:
        pipe.send(None)
        return pipe.recv()


def train(model: LlamaForCausalLM) -> Iterator[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for _ in range(10):
        ids = (torch.randint(model.config.vocab_size, (2, 1)) + torch.arange(16)) % model.config.vocab_size
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    model = LlamaForCausalLM.from_pretrained(folder / "first", dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    pipe, before = start(folder / "first") if is_first else (None, None)
    source = import_module("engines").vllm_source(fsdp2.weights(model, dtype=torch.bfloat16))
    unchanged = publish(source, pipe)
    losses = [*train(model)]
    after = publish(source, pipe)
    checkpoint.save(folder / "trained", model=model, consolidated=True)
    if is_first:
        model.config.save_pretrained(folder / "trained")
        _, loaded = start(folder / "trained")
        found = {"before": before, "unchanged": unchanged, "after": after, "loaded": loaded, "losses": losses}
        print("found:", json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    main()
