"""Text from a trained model, one byte at a time. Imported by `train_lm.py`."""

from __future__ import annotations

import torch
from torch import nn

TEMPERATURE = 0.8  # below 1: likely bytes become likelier still


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, length: int, seq_len: int, device: torch.device, seed: int) -> bytes:
    """Continue `prompt` by `length` bytes. Collective: each forward gathers the weights, so all ranks must call it.

    All ranks draw alike from the same seed and return the same text. There is no cache of keys and values: each byte
    costs one forward over the last `seq_len`.
    """
    model.eval()
    generator = torch.Generator(device="cpu").manual_seed(seed)
    text = torch.tensor([list(prompt)], device=device)
    for _ in range(length):
        logits = model(text[:, -seq_len:])[0, -1].float().cpu()
        probabilities = torch.softmax(logits / TEMPERATURE, dim=-1)
        drawn = torch.multinomial(probabilities, num_samples=1, generator=generator)
        text = torch.cat((text, drawn.to(device)[None]), dim=1)
    return bytes(text[0].tolist())
