"""A model and a training whose memory on streams is watched."""

import torch
from torch import nn

__all__ = ["make_model", "train"]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 64)) for _ in range(5)])


def train(model: nn.Module, rank: int, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        model.set_requires_gradient_sync(step != 0)
        model(x).square().mean().backward()
        if step:
            optimizer.step()
            optimizer.zero_grad()
    return [param.full_tensor() for param in model.parameters()]
