"""`fsdp2.init.materialize`: one call from the meta device to a model that trains, the same on any number of ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2.checkpoint
from fsdp2 import ArgumentError, fully_shard
from fsdp2.init import materialize, seeded
from tests.helpers.ranks import on_ranks


class Positions(nn.Module):
    """A buffer that no state dict has, and how to make it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0).sqrt(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


class Rebuilt(Positions):
    def reset_buffers(self) -> None:
        self.table = torch.arange(6.0, device=self.table.device).sqrt()


class Net(nn.Module):
    """Layers with `reset_parameters`, one whose reset is called otherwise, running statistics, a tied weight."""

    def __init__(self, positions: type[nn.Module] = Rebuilt) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.positions = positions()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.up = nn.Linear(6, 5)
        self.down = nn.Linear(5, 6, bias=False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.positions(self.embed(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x + self.down(torch.relu(self.up(x))))


def on_meta(mesh: DeviceMesh | None = None, positions: type[nn.Module] = Rebuilt) -> Net:
    with torch.device("meta"):
        model = Net(positions)
    return shard(model, mesh)


def shard(model: Net, mesh: DeviceMesh | None) -> Net:
    for part in (model.attention, model.up):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in tensors.items()}


def reference(seed: int) -> dict[str, torch.Tensor]:
    """The same model in one process, without any sharding: the resets in the order in which constructors end."""
    model = Net()
    with seeded(seed), torch.no_grad():
        for part in (model.embed, *model.attention.children(), model.attention, model.norm, model.up, model.down):
            getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))()
        model.head.reset_parameters()
    return whole(model)


def meshes(world_size: int) -> list[DeviceMesh | None]:
    if world_size != 4:
        return [None]
    return [None, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))]


@on_ranks(2, 4)
def test_values_are_those_of_one_process(rank: int, world_size: int) -> None:
    expected = reference(3)
    for mesh in meshes(world_size):
        torch.manual_seed(rank)  # has no say
        model = on_meta(mesh)
        materialize(model, seed=3)
        found = whole(model)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)
        assert model.head.weight is model.embed.weight
        model(torch.randint(7, (2, 3))).sum().backward()
        assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_what_has_no_values_is_named(rank: int, world_size: int) -> None:
    model = on_meta(positions=Positions)
    with pytest.raises(ArgumentError, match=r"positions\.table \(not persistent\).*reset_buffers"):
        materialize(model, seed=0)

    def forgets_one(model: nn.Module) -> None:
        for name, param in model.named_parameters():
            if name != "up.bias":
                nn.init.ones_(param)
        for buffer in model.buffers():
            buffer.zero_()

    with pytest.raises(ArgumentError, match=r"allocated and not initialised: up\.bias\. "):
        materialize(on_meta(), forgets_one)


@on_ranks(4)
def test_replicas_and_buffers_take_the_values_of_the_first(rank: int, world_size: int) -> None:
    def of_this_rank(model: nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.fill_(rank)

    model = on_meta(meshes(4)[1])
    materialize(model, of_this_rank)
    for param in model.parameters():
        assert param.to_local().eq(rank % 2).all()  # ranks 0 and 1 are the first replica
    for buffer in (model.norm.running_mean, model.norm.running_var):
        assert buffer.eq(0).all()


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_too_small_to_tell(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """A rank with no row of a bias, or less than four bytes, cannot tell: those that can raise, and all with them."""

    def small() -> Any:
        with torch.device("meta"):
            return fully_shard(nn.Linear(4, 3 if dtype is torch.bfloat16 and world_size == 2 else 1, dtype=dtype))

    def fill(model: nn.Module, names: tuple[str, ...] = ("weight", "bias")) -> None:
        for name in names:
            model.get_parameter(name).data.fill_(2)

    model = small()
    materialize(model, fill)
    assert all((value == 2).all() for value in whole(model).values())
    with pytest.raises(ArgumentError, match=r"allocated and not initialised: weight\."):
        materialize(small(), lambda model: fill(model, ("bias",)))


class Residual(nn.Module):
    """As torchvision's ResNet: the constructor initialises again what its layers have, and norms with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.embed = nn.Embedding(5, 4, padding_idx=0)
        self.mix = nn.TransformerEncoderLayer(4, 2, 4)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out")
        nn.init.zeros_(self.norm.weight)


@on_ranks(2)
@pytest.mark.parametrize("mode", ["sequential", "blocks"])
def test_what_the_constructor_does_besides(rank: int, world_size: int, mode: Any) -> None:
    """They became the defaults of their layers, silently. What the layers do themselves is no reason to warn."""
    with torch.device("meta"):
        model = Residual()
    fully_shard(model.norm)
    fully_shard(model.mix)  # `conv` stays plain
    with pytest.warns(UserWarning, match=r"materialize: conv \(Conv2d\), norm \(FSDPBatchNorm2d\): the .*init="):
        materialize(model, seed=0, mode=mode)


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
def test_parametrised_modules(rank: int, world_size: int, kind: str) -> None:
    """`reset_parameters` of such a layer writes to a weight that is computed: it killed a rank whose shard is empty."""
    apply: Any = getattr(nn.utils.parametrizations, kind)
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = nn.Sequential(apply(nn.Linear(4, 3)), nn.Linear(3, 2))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    expected = r"'0' \(FSDPParametrizedLinear\) is parametrised \(weight: _\w+Norm\).*init="
    with pytest.raises(ArgumentError, match=expected):
        materialize(model, seed=0)


@on_ranks(2)
def test_what_is_real_stays(rank: int, world_size: int) -> None:
    """A part that has values keeps them: its reset was called all the same."""
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0] = nn.Linear(4, 4)
    nn.init.constant_(model[0].weight, 3)
    for layer in model:
        fully_shard(layer)
    materialize(fully_shard(model), seed=0)
    assert whole(model)["0.weight"].eq(3).all() and not whole(model)["1.weight"].eq(3).any()


@on_ranks(2)
def test_part_of_it_comes_from_a_checkpoint(rank: int, world_size: int, tmp_path: Any) -> None:
    """LoRA on loaded weights: the reset of the layer that holds both would overwrite what was loaded."""

    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.extra = nn.Parameter(torch.empty(2, 4))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            super().reset_parameters()
            for extra in list(self.parameters())[2:]:
                nn.init.ones_(extra)

    if rank == 0:
        save_file(
            {"0.weight": torch.full((4, 4), 3.0), "0.bias": torch.full((4,), 3.0)}, tmp_path / "model.safetensors"
        )
    dist.barrier()

    def loaded() -> Any:
        with torch.device("meta"):
            model = nn.Sequential(Adapted())
        with pytest.warns(UserWarning, match="still on the meta device"):
            fsdp2.checkpoint.load(tmp_path, model=fully_shard(model), strict=False)
        return model

    with pytest.raises(ArgumentError, match=r"overwritten them: 0\.weight, 0\.bias\. .*init="):
        materialize(loaded())
    model = loaded()
    materialize(model, lambda model: model[0].extra.fill_(2), seed=0)
    assert {name: value.unique().item() for name, value in whole(model).items()} == {
        "0.weight": 3,
        "0.bias": 3,
        "0.extra": 2,
    }
