"""Training of a model against one process, under each way to reshard: for parameters that torch's FSDP2 refuses."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from tests.helpers.parity_models import Race, batch, mesh_2d

SETTINGS = ["reshard", "keep", "int", "hsdp"]


def options(setting: str, world_size: int) -> dict[str, Any]:
    """Arguments of `fully_shard`. "int" gathers over pairs in backward, "hsdp" has two replicas."""
    if setting == "hsdp":
        return {"mesh": mesh_2d(2, world_size // 2), "reshard_after_forward": True}
    return {"reshard_after_forward": {"reshard": True, "keep": False, "int": 2}[setting]}


def one_step(model: nn.Module, step: int, rank: int) -> Tensor:
    """The `backward` of a `Race` for models of eight input features."""
    loss = model(batch(step, rank)).float().square().mean()
    loss.backward()
    return loss.detach()


def shard_children(api: ModuleType, model: nn.Module, **given: Any) -> Any:
    """Every child that has parameters is a unit, and then the root."""
    for child in model.children():
        if any(True for _ in child.parameters()):
            api.fully_shard(child, **given)
    return api.fully_shard(model, **given)


def train(rank: int, world_size: int, build: Callable[[], nn.Module], shard: Any, **given: Any) -> Any:
    """Four Adam steps, compared to one process at each."""
    race = Race(rank, world_size, build, shard, given.pop("backward", one_step), torch=False, **given)
    return race.run(4)
