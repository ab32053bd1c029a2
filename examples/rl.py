"""Reinforcement learning in one page: ranks that train, and a process of its own that samples with their weights.

    torchrun --nproc_per_node=2 examples/rl.py           # one process per GPU, or on CPU without one
    python examples/rl.py --steps 20                     # one process, and the sampler

The task: to count. From one token the policy writes eight more, and gets a reward for each that is the one before it
plus one. A step of the loop:

    publish     trainer ranks -- buckets of fsdp2.weights -->  rank 0 -- a pipe -->  sampler
    sample      trainer ranks sleep, so the device is free      <-- tokens --        sampler
    train       each rank on its part of the tokens, by REINFORCE

A real sampler is an engine such as vLLM; engines.py has what they take.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp2
from fsdp2 import fully_shard

VOCAB, LENGTH = 16, 8


def make_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, eos_token_id=None, bos_token_id=None, **sizes))


def sample(pipe: Connection) -> None:
    """The sampler's process: take weights, answer prompts, until the trainer closes the pipe."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = make_model().eval()
    while True:
        try:
            what, content = pipe.recv()
        except EOFError:
            return
        if what == "weights":
            flat = torch.frombuffer(bytearray(pipe.recv_bytes()), dtype=torch.uint8)
            bucket = fsdp2.transfer.Bucket(flat, content)
            model.load_state_dict(dict(bucket), strict=False)
        else:
            mask = torch.ones_like(content)
            pipe.send(model.generate(content, attention_mask=mask, max_new_tokens=LENGTH, do_sample=True, top_k=0))


def publish(plan: fsdp2.transfer.Weights, sampler: Connection | None) -> None:
    """Collective. Rank 0 alone has the sampler, and gets the tensors."""
    for bucket in plan.full(bucket_bytes=1 << 20, to="first"):
        if sampler is not None:
            sampler.send(("weights", bucket.tensors))
            sampler.send_bytes(bucket.flat.cpu().numpy())


def tokens_for(prompts: Tensor, sampler: Connection | None) -> Tensor:
    """What the sampler makes of the prompts, on every rank."""
    found = prompts.new_empty(len(prompts), 1 + LENGTH)
    if sampler is not None:
        sampler.send(("prompts", prompts.cpu()))
        found.copy_(sampler.recv())
    dist.broadcast(found, 0)
    return found


def loss_of(model: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """REINFORCE: each token's log-probability times how much better than the mean it was; and the mean reward."""
    rewards = (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCAB).float()
    logits = model(tokens[:, :-1]).logits.float()
    chosen = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return -((rewards - rewards.mean()) * chosen).mean(), rewards.mean()


def draw(rewards: list[float], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards)
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1), title="examples/rl.py: a policy learns to count")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=128, help="prompts a step, of all ranks")
    parser.add_argument("--figure", help="a file for the reward over the steps; needs matplotlib")
    options = parser.parse_args()
    if "RANK" not in os.environ:  # not started by torchrun: a world of one
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()

    sampler = None
    if rank == 0:
        context = multiprocessing.get_context("spawn")
        sampler, theirs = context.Pipe()
        context.Process(target=sample, args=(theirs,), daemon=True).start()
        theirs.close()

    torch.manual_seed(0)  # the same on each rank: all shard one model, and draw the same prompts
    model = make_model().to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = fsdp2.weights(model, names="transformers")
    rewards = []
    for step in range(1, options.steps + 1):
        publish(plan, sampler)
        with fsdp2.asleep(model, optimizer):
            tokens = tokens_for(torch.randint(VOCAB, (options.batch_size, 1), device=device), sampler)
        loss, reward = loss_of(model, tokens.chunk(world_size)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(reward)
        rewards.append(reward.item() / world_size)
        if rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step:>3}  reward {rewards[-1]:.3f}", flush=True)
    if rank == 0 and options.figure:
        draw(rewards, options.figure)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
