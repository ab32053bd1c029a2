"""`fsdp2.weights`: what is published equals `full_tensor().to(dtype)` bit for bit, however the model is sharded."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import ArgumentError, CPUOffloadPolicy, MixedPrecisionPolicy, OrderError, ZeroPolicy, events, fully_shard
from fsdp2.transfer import Wanted
from tests.helpers.ranks import on_ranks


class Norm(nn.Module):
    """As BatchNorm, in any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("running_mean", torch.zeros(6))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_mean += x.detach().mean(0).float()
            self.num_batches_tracked += 1
        return x * self.weight


class Model(nn.Module):
    """Uneven rows, a tied weight, a frozen one, a scalar, an integer, and statistics that change."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 6)
        self.norm = Norm()
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first.bias.requires_grad_(False)
        self.register_buffer("skipped", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(self.embed(x)).relu()) * self.scale
        return self.head(self.norm(hidden))


def made(kind: str, world_size: int) -> Any:
    torch.manual_seed(0)
    model = Model()
    halves = (2, world_size // 2)
    options: dict[str, Any] = {}
    shard = fully_shard
    if kind == "hsdp":
        options["mesh"] = init_device_mesh("cpu", halves, mesh_dim_names=("replicate", "shard"))
    elif kind == "tensor parallel":
        mesh = init_device_mesh("cpu", halves, mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        options["mesh"] = mesh["dp"]
    elif kind == "other dim":
        options["shard_placement_fn"] = lambda param: Shard(param.ndim - 1) if param.ndim else None
    elif kind == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    elif kind == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    elif kind.startswith("stage"):
        options["zero"] = ZeroPolicy(int(kind[-1]))
    elif kind == "torch":
        shard = torch_fsdp.fully_shard  # type: ignore[assignment]
        del model.scale  # torch cannot shard a scalar
        model.scale = 1.0  # type: ignore[assignment]
    if kind != "plain":
        for each in (model.first, model.second):
            shard(each, **options)
        shard(model, **options)
    return model


def wanted(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """What each parameter alone gives."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole
    found.pop("head.weight")  # tied
    return found


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


KINDS = ["fsdp", "hsdp", "tensor parallel", "other dim", "mixed", "offloaded", "stage0", "stage3", "torch", "plain"]


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_tensors(rank: int, world_size: int, kind: str, dtype: torch.dtype | None) -> None:
    """In several passes, with steps in between, in buckets of all sizes: one collective each."""
    model = made(kind, world_size)
    plan = fsdp2.weights(model, dtype=dtype)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for bucket_bytes, lookahead in ((1, 0), (300, 2), (1 << 20, 1)):
        model(torch.arange(6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = wanted(model, dtype)
        with events.record() as log:
            buckets = 0
            names = []
            for bucket in plan.full(bucket_bytes, lookahead):
                buckets += 1
                for name, tensor in bucket:
                    assert same(tensor, expected[name]), name
                    names.append(name)
        assert names == [each.name for each in plan.metadata()] == [*expected]
        collectives = [event for event in log if event.kind == "weights"]
        assert len(collectives) <= buckets
        assert bool(collectives) == (kind not in ("plain", "stage0") and (kind, world_size) != ("hsdp", 2))
    found = {name: tensor.clone() for name, tensor in plan}
    assert all(same(found[name], expected[name]) for name in expected)
    assert plan.version == 4
    sums: list[Any] = [None] * world_size
    dist.all_gather_object(sums, plan.checksum)
    assert len({*sums}) == 1 and sums[0]
    model(torch.arange(6)).sum().backward()  # the model is as it was


@on_ranks(4, 2)
@pytest.mark.parametrize("kind", ["fsdp", "tensor parallel", "plain"])
def test_to_the_first_rank(rank: int, world_size: int, kind: str) -> None:
    model = made(kind, world_size)
    expected = wanted(model, None)
    for bucket in fsdp2.weights(model).full(200, to="first"):
        found = dict(bucket)
        assert bool(found) == (rank == 0)
        assert all(same(tensor, expected[name]) for name, tensor in found.items())


@on_ranks(2)
def test_names_dtypes_and_what_is_left_out(rank: int, world_size: int) -> None:
    model = made("fsdp", world_size)
    kept = {"first.weight": "layers.0.weight", "second.bias": None}
    plan = fsdp2.weights(
        model, kept, lambda name, _: None if "norm" in name else torch.float16, only=lambda name: name != "scale"
    )
    shapes = {each.name: (each.dtype, each.shape) for each in plan.metadata()}
    assert shapes["layers.0.weight"] == (torch.float16, (10, 6))
    assert shapes["norm.weight"][0] == torch.float32
    assert shapes["norm.num_batches_tracked"] == (torch.int64, ())
    assert not {"second.bias", "scale", "skipped", "head.weight"} & shapes.keys()
    assert not any("running" in each.name for each in fsdp2.weights(model, buffers=False).metadata())
    with pytest.raises(ArgumentError, match="both be 'x'"):
        fsdp2.weights(model, lambda name: "x")
    plan = fsdp2.weights(model)
    model.first.weight = nn.Parameter(torch.ones(2))  # of another shape, and not sharded
    with pytest.raises(OrderError, match=r"'first\.weight' is now sharded as"):
        list(plan)


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "tensor parallel", "other dim"])
def test_boxes_and_parts(rank: int, world_size: int, kind: str) -> None:
    """Boxes cover each tensor once by their primaries, and parts fill the slices that consumers want."""
    model = made(kind, world_size)
    with events.record() as log:
        plan = fsdp2.weights(model, dtype=torch.bfloat16)
        for each in plan.metadata():
            counted = torch.zeros(each.shape, dtype=torch.int32)
            for other in range(world_size):
                for place in [place for place in plan.boxes(other) if place.name == each.name and place.is_primary]:
                    index = [slice(s, s + n) for s, n in zip(place.start, place.local_shape, strict=True)]
                    counted[tuple(index)] += 1
            assert (counted == 1).all(), each.name
        assert all(tuple(plan.local(place.name).shape) == place.local_shape for place in plan.boxes())
        slices = [
            Wanted("first.weight", 0, (3, 1), (5, 4)),
            Wanted("first.weight", 1, (0, 0), (10, 6)),
            Wanted("norm.running_mean", 1, (2,), (3,)),
            Wanted("second.bias", 0, (5,), (1,)),
        ]
        mine = [(part.wanted, part.start, part.tensor.float()) for part in plan.send_boxes(slices)]
    assert not log
    expected, sent = wanted(model, torch.bfloat16), [None] * world_size
    dist.all_gather_object(sent, mine)
    for index, each in enumerate(slices):
        filled = torch.full(each.shape, torch.nan)
        for other, start, tensor in (part for parts in sent for part in parts):  # type: ignore[union-attr]
            if other == index:
                place_ = tuple(slice(s, s + n) for s, n in zip(start, tensor.shape, strict=True))
                assert filled[place_].isnan().all()
                filled[place_] = tensor
        box = tuple(slice(s, s + n) for s, n in zip(each.start, each.shape, strict=True))
        assert torch.equal(filled, expected[each.name][box].float())
    with pytest.raises(ArgumentError, match="is not within"):
        list(plan.send_boxes([Wanted("second.bias", 0, (5,), (2,))]))


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "tensor parallel", "other dim", "offloaded", "plain"])
def test_changes(rank: int, world_size: int, kind: str) -> None:
    """The old values with the changes applied are the new ones, bit for bit, also where few elements change."""
    model = made(kind, world_size)
    plan = fsdp2.weights(model, dtype=torch.bfloat16)
    held = {name: tensor.clone() for name, tensor in plan}
    known = plan.snapshot()
    assert [*plan.changes(known)] == []
    for step in range(3):
        for number, param in enumerate(model.parameters()):
            local = param.to_local() if isinstance(param, DTensor) else param
            if step < 2 and local.numel() and number % 2 == step:
                with torch.no_grad():
                    local.view(-1)[:: step + 2] += 1
        for name, indices, values, shape in plan.changes(known):
            assert indices.dtype == torch.int32 and (indices.diff() > 0).all()
            assert tuple(held[name].shape) == shape
            held[name].view(-1)[indices.long()] = values
        expected = wanted(model, torch.bfloat16)
        if kind != "plain":
            assert all(same(held[name], expected[name]) for name in expected)
    with pytest.raises(ArgumentError, match="another plan"):
        list(plan.changes(fsdp2.weights(model, only=lambda name: name == "scale").snapshot()))


@on_ranks(2, 4)
@pytest.mark.parametrize("lookahead", [1, 3])
@pytest.mark.parametrize("to", ["all", "first"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_leaves(rank: int, world_size: int, lookahead: int, to: Any, who: int) -> None:
    """Its consumer raises: no rank waits for ever, the others learn who it was, and the next pass works."""
    model = made("fsdp", world_size)
    plan = fsdp2.weights(model)
    for leaves_at in (0, 2):
        left: list[str] = []
        try:
            for index, _ in enumerate(plan.full(1, lookahead, to)):
                if rank == who and index == leaves_at:
                    raise ValueError("the consumer is gone")
        except (ValueError, OrderError) as error:
            left.append(str(error))
        if rank == who:
            assert left == ["the consumer is gone"]
        elif to == "all" or rank == 0:
            assert f"rank {who} has left pass" in left[0]
        else:
            assert not left
    expected = wanted(model, None)
    assert all(same(tensor, expected[name]) for name, tensor in plan)
