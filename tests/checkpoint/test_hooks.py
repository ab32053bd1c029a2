"""What runs on loading: hooks of modules, as with torch. (Those of optimizers are refused: test_refused.py.)"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import checkpoint
from tests.helpers.ranks import on_ranks


class Scaled(nn.Module):
    """Derives a buffer from its weight once it is loaded, in the way that `how` names."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.bias = nn.Parameter(torch.zeros(4))
        self.register_buffer("scale", torch.zeros(()), persistent=False)
        self.how = how
        if how == "post-hook":
            self.register_load_state_dict_post_hook(lambda module, keys: self.derive(module.weight))
        if how == "pre-hook":
            self.register_load_state_dict_pre_hook(self.before)

    def derive(self, weight: Any) -> None:
        self.scale.copy_(weight.detach().full_tensor().sum())

    def before(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.derive(state[prefix + "weight"])
        state.setdefault(prefix + "bias", torch.ones_like(self.bias.detach()))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        super()._load_from_state_dict(state, prefix, *others)
        if self.how == "method":
            self.derive(self.weight)


def sharded(how: str) -> Any:
    model = nn.Sequential(Scaled(how), nn.BatchNorm1d(4))
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    return model


@on_ranks(2)
@pytest.mark.parametrize("how", ["post-hook", "pre-hook", "method"])
def test_what_a_module_derives_when_it_is_loaded(rank: int, world_size: int, how: str, tmp_path: Path) -> None:
    """It derived from the random weights, silently. Loading by torch gives the same."""
    model, one, other = sharded(how), sharded(how), sharded(how)
    checkpoint.save(tmp_path / "a", model=model)
    checkpoint.load(tmp_path / "a", model=one)
    other.load_state_dict(model.state_dict())
    assert one[0].scale.ne(0) and torch.equal(one[0].scale, other[0].scale)
    for name, value in other.state_dict().items():
        here = one.state_dict()[name]
        assert torch.equal(*(each.full_tensor() if hasattr(each, "full_tensor") else each for each in (value, here)))


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adafactor", "ASGD"])
def test_a_fresh_optimizer_of_a_model_in_another_dtype(kind: str, tmp_path: Path) -> None:
    """An fp32 run goes on in bf16: moments in the parameters' dtype as after torch's loader, counters as they are."""
    options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    models = [nn.Linear(3, 4), *(nn.Linear(3, 4).bfloat16() for _ in range(2))]
    saved, here, by_torch = (getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options) for model in models)
    models[0](torch.ones(2, 3)).sum().backward()
    saved.step()
    checkpoint.save(tmp_path / "a", model=models[0], optimizer=saved)
    checkpoint.load(tmp_path / "a", model=models[1], optimizer=here, cast=True)
    models[2].load_state_dict(models[0].state_dict())
    by_torch.load_state_dict(saved.state_dict())
    for one, other in zip(models[1].parameters(), models[2].parameters(), strict=True):
        assert here.state[one].keys() == by_torch.state[other].keys()
        for key, value in here.state[one].items():
            expected = by_torch.state[other][key] if value.ndim else saved.state[next(models[0].parameters())][key]
            assert value.dtype == expected.dtype, key
            assert value.ndim == 0 or torch.equal(value, expected), key
    for model, optimizer in ((models[1], here), (models[2], by_torch)):
        model(torch.ones(2, 3).bfloat16()).sum().backward()
        optimizer.step()
    for one, other in zip(models[1].parameters(), models[2].parameters(), strict=True):
        assert one.dtype == torch.bfloat16 and torch.allclose(one, other, rtol=0.02, atol=0.01)
