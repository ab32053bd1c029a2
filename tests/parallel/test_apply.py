"""What `parallelize` does to a model, beyond the losses of `test_parity.py`, and what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

from fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    ZeroPolicy,
    by_class,
    by_predicate,
    by_size,
    events,
    fully_shard,
)
from fsdp2.errors import ArgumentError, MisuseError, UnsupportedError
from fsdp2.parallel import ParallelConfig, build_meshes, parallelize
from tests.helpers.models import error_of
from tests.helpers.parallel_models import (
    VOCAB,
    DecoderBlock,
    Lm,
    compiling,
    config_of,
    global_batch,
    loss_of,
    part_of,
    race,
    tensor_plan,
)
from tests.helpers.parity_models import count, full
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import quiet


def step(model: nn.Module, config: ParallelConfig) -> Tensor:
    """Forward and backward of this rank's part of one batch; the loss."""
    with quiet():
        loss = loss_of(model, *part_of(build_meshes(config, "cpu"), global_batch(0)))
        loss.backward()
    return loss.detach()


# --- blocks -----------------------------------------------------------------------------------------------------------


def units(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
ATTENTIONS = [f"blocks.{i}.attention" for i in range(3)]
TOLD: dict[str, tuple[Any, list[str]]] = {
    "found": (None, BLOCKS),
    "empty": ([], BLOCKS),
    "class name": ("DecoderBlock", BLOCKS),
    "pattern": ("blocks.[01]", BLOCKS[:2]),
    "list of blocks": ("blocks", BLOCKS),
    "several": (["blocks.0", nn.Embedding, "head"], ["embed", "blocks.0", "head"]),
    "policy in a list": ([by_class("Attention"), "blocks.1"], [*ATTENTIONS[:1], "blocks.1", *ATTENTIONS[1:]]),
}


@on_ranks(2)
def test_blocks_become_units(rank: int, world_size: int) -> None:
    """Told by an argument or by the config; the argument counts."""
    for how, (blocks, expected) in TOLD.items():
        assert units(parallelize(Lm(), ParallelConfig(), blocks=blocks)) == ["", *expected], how
    model = Lm()
    assert units(parallelize(model, ParallelConfig(), blocks=[model.blocks[2]])) == ["", "blocks.2"]
    config = ParallelConfig(blocks=("blocks.1", "Embedding"))
    assert units(parallelize(Lm(), config)) == ["", "embed", "blocks.1"]
    assert units(parallelize(Lm(), config, blocks="blocks.0")) == ["", "blocks.0"]


@on_ranks(2)
@pytest.mark.parametrize("resharded", [True, False])
def test_a_policy_has_options_for_the_root_too(rank: int, world_size: int, resharded: bool) -> None:
    """`by_predicate` promises it, and `parallelize` dropped them."""

    def chosen(fqn: str, module: nn.Module) -> bool | dict[str, Any]:
        return {"reshard_after_forward": resharded} if not fqn else isinstance(module, DecoderBlock)

    model: Any = parallelize(Lm(), ParallelConfig(), blocks=by_predicate(chosen))
    with torch.no_grad(), quiet():
        model(*part_of(build_meshes(ParallelConfig(), "cpu"), global_batch(0))[:1])
    assert isinstance(model.head.weight, DTensor) is resharded


# --- activation checkpointing and compilation -------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    ("how", "expected"),
    [("none", [1, 1, 1]), ("full", [2, 2, 2]), ("selective", [2, 1, 2]), (3, [2, 1, 1]), (False, [1, 1, 1])],
)
def test_which_blocks_are_recomputed(rank: int, world_size: int, how: Any, expected: list[int]) -> None:
    """How often each block's attention ran in one step; its parameters are gathered once for backward all the same."""
    config = ParallelConfig(activation_checkpointing=how)
    model: Any = parallelize(Lm(), config)
    ran = [0, 0, 0]
    for index, block in enumerate(model.blocks):
        block.attention.register_forward_pre_hook(lambda *_, i=index: ran.__setitem__(i, ran[i] + 1))
    with events.record() as log:
        step(model, config)
    assert ran == expected
    assert count(log, "all_gather", "reduce_scatter") == {"all_gather": 1 + 2 * 3, "reduce_scatter": 1 + 3}


@on_ranks(2)
def test_blocks_are_one_graph(rank: int, world_size: int) -> None:
    """The forward of a block is compiled whole, without the hooks of sharding, and once for all blocks."""
    config = ParallelConfig(compile="aot_eager", activation_checkpointing="full")
    with compiling():
        model = parallelize(Lm(), config)
        for _ in range(2):
            step(model, config)
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]


# --- what the config and the options say to fully_shard ---------------------------------------------------------------


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Keys, options, the dtype of gathers, their number.
SAID: list[tuple[dict[str, Any], dict[str, Any], torch.dtype, int]] = [
    ({"mixed_precision": "fp16"}, {}, FP16, 7),
    ({"mixed_precision": "bf16", "reshard_after_forward": True}, {}, BF16, 8),
    ({"mixed_precision": "bf16", "reshard_after_forward": False}, {"mp_policy": MixedPrecisionPolicy()}, FP32, 4),
    ({"reshard_after_forward": False}, {"reshard_after_forward": True}, FP32, 8),
]


@on_ranks(2)
def test_precision_and_resharding(rank: int, world_size: int) -> None:
    """What the config says, or an option instead."""
    for keys, options, dtype, num_gathers in SAID:
        config = ParallelConfig(**keys)
        model = parallelize(Lm(), config, **options)
        with events.record() as log:
            step(model, config)
        assert {event.dtype for event in log if event.kind == "all_gather"} == {dtype}
        assert count(log, "all_gather") == {"all_gather": num_gathers}
        assert {event.dtype for event in log if event.kind == "reduce_scatter"} == {FP32}
        assert {param.dtype for param in model.parameters()} == {FP32}


@on_ranks(2)
@pytest.mark.parametrize("degrees", [{"shard": 2}, pytest.param({"tensor": 2}, marks=pytest.mark.exhaustive)])
def test_offload_and_zero(rank: int, world_size: int, degrees: dict[str, int], tmp_path: Path) -> None:
    race(config_of(degrees, cpu_offload=True), steps=2)
    race(config_of(degrees, offload="all"), steps=2)
    for offload in ("states", "files"):
        race(config_of(degrees, offload=offload, offload_tier=[str(tmp_path / "a"), str(tmp_path / "b")]), steps=2)
    race(config_of(degrees), steps=2, offload_policy=CPUOffloadPolicy(pin_memory=False), zero=ZeroPolicy(stage=2))


@on_ranks(2)
@pytest.mark.parametrize("degrees", [{"shard": 2}, {"tensor": 2}])
def test_meta_device(rank: int, world_size: int, degrees: dict[str, int]) -> None:
    config = config_of(degrees, activation_checkpointing="full")
    with torch.device("meta"):
        model = parallelize(Lm(), config, tp_plan=tensor_plan())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    whole = Lm()
    with torch.no_grad():
        for (name, param), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert isinstance(param, DTensor), name
            param.copy_(torch.distributed.tensor.distribute_tensor(other, param.device_mesh, param.placements))
    step(model, config)


# --- tensor parallelism -----------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("degrees", [{"shard": 2}, {"replicate": 2}, {"tensor": 2}])
def test_tied_weights(rank: int, world_size: int, degrees: dict[str, int]) -> None:
    """torch's `parallelize_module` unties them: each name gets a DTensor of its own."""
    plan = {**tensor_plan(), "embed": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    model: Any = race(config_of(degrees), lambda: Lm(tied=True), tp_plan=plan)
    assert model.head.weight is model.embed.weight


@on_ranks(2)
def test_frozen_layers_stay_frozen(rank: int, world_size: int) -> None:
    model = Lm()
    model.blocks[0].requires_grad_(False)
    config = config_of({"tensor": 2})
    parallelize(model, config, tp_plan=tensor_plan())
    step(model, config)
    for name, param in model.named_parameters():
        assert param.requires_grad == (param.grad is not None) == (not name.startswith("blocks.0.")), name


@on_ranks(2)
def test_ranks_of_a_tensor_group_get_the_first_ones_values(rank: int, world_size: int) -> None:
    """Of all parameters and buffers: those that the plan leaves plain stayed each rank's own, so that ranks with other
    seeds trained other models together, silently."""

    def seeded(seed: int) -> Any:
        torch.manual_seed(seed)
        model = Lm()
        model.register_buffer("phases", torch.polar(torch.ones(3), torch.rand(3)))
        model.register_buffer("scale", torch.rand(()))
        model.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)
        model.register_buffer("shared", torch.ones(1).expand(3), persistent=False)
        return model

    model = parallelize(seeded(rank), config_of({"tensor": 2}), tp_plan=tensor_plan())
    expected = seeded(0).state_dict()
    for name, value in model.state_dict().items():
        assert_close(full(value) if isinstance(value, DTensor) else value, expected[name], rtol=0, atol=0, msg=name)


class NoPlan(nn.Module):
    """A root that brings a plan along which does not fit it."""

    tp_plan: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def split_already(model: Any) -> Any:
    config = config_of({"tensor": 2})
    model = parallelize_module(Lm(), build_meshes(config, "cpu").tensor, tensor_plan())
    return parallelize(model, config, tp_plan=tensor_plan())


def tied_and_split_differently(model: Any) -> Any:
    plan = {**tensor_plan(), "head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize(Lm(tied=True), config_of({"tensor": 2}), tp_plan=plan)


def blocks(what: Any) -> Callable[[Any], Any]:
    return lambda model: parallelize(model, ParallelConfig(), blocks=what)


PLANS: list[tuple[Any, type[Exception], str]] = [
    (None, ArgumentError, "tensor = 2 needs a plan, and NoPlan has none; pass tp_plan="),
    ({"layers.*.2": "colwise"}, ArgumentError, "tp_plan: no module of this NoPlan is named 'layers.*.2'"),
    ({"layers.*.0": "packed"}, UnsupportedError, "has the style 'packed', which is not one of colwise, row"),
    ({"layers.*.1": "colwise"}, ArgumentError, "'layers.0.1' is a LayerNorm; ColwiseParallel splits Linear"),
]
AUTO = ParallelConfig()
REPLICAS = {"replicate": 2}
REFUSED: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (blocks("block.*"), ArgumentError, "the model has no module 'block.*'. At its top it has embed, blocks, norm, h"),
    (blocks(nn.LSTM), ArgumentError, "by_class: the model has no module of class LSTM. It has 3 x DecoderBlock"),
    (blocks(["blocks.*", "none"]), ArgumentError, "parallelize: the model has no module 'none'"),
    (blocks(3), ArgumentError, "parallelize: the model has no module 3. At its top"),
    (blocks(by_size(1e9)), ArgumentError, "auto_shard: by_size(1,000,000,000) chooses no module below the root"),
    (split_already, MisuseError, "tp_plan: 'blocks.0.attention.query' has DTensors for parameters already"),
    (tied_and_split_differently, ArgumentError, "'embed.weight' and 'head.weight' are one weight, but would be split"),
    (lambda model: parallelize(model, config_of({"shard": 3})), ArgumentError, "2 ranks, but 3 (shard). Change a deg"),
    (
        lambda model: parallelize(model, config_of({"shard": 2}), meshes=build_meshes(config_of(REPLICAS), "cpu")),
        ArgumentError,
        "parallelize: the meshes have the degrees {'pipeline': 1, 'replicate': 2",
    ),
    (lambda model: parallelize(model, AUTO, mesh=None), ArgumentError, "makes the mesh from the config's degrees"),
    (
        lambda model: parallelize(model, ParallelConfig(tensor=2, offload="files"), tp_plan=tensor_plan()),
        ArgumentError,
        'Offload: params="files" needs a folder: tier="/a/fast/disk"',
    ),
    (
        lambda model: parallelize(model, config_of(REPLICAS, reshard_after_forward=True)),
        ArgumentError,
        "parallelize: shard = 1 shards nothing, which is stage 0 of ZeRO",
    ),
    (lambda model: parallelize([model], AUTO), ArgumentError, "parallelize: expected an nn.Module"),
    (lambda model: parallelize(model.blocks, AUTO), ArgumentError, "a ModuleList has no forward, so it cannot be the"),
]


@on_ranks(2)
def test_refusals_leave_the_model_alone(rank: int, world_size: int) -> None:
    for plan, kind, message in PLANS:
        other = NoPlan()
        found = error_of(kind, lambda: parallelize(other, config_of({"tensor": 2}), tp_plan=plan))  # noqa: B023
        assert message in found, found
        assert not any(isinstance(param, DTensor) for param in other.parameters()), message
    for call, kind, message in REFUSED:
        model = Lm()
        found = error_of(kind, lambda: call(model))  # noqa: B023
        assert message in found, found
        assert not units(model) and type(model.blocks[0]) is DecoderBlock, message
    assert model(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, VOCAB)


@on_ranks(2)
def test_twice(rank: int, world_size: int) -> None:
    model = parallelize(Lm(), ParallelConfig())
    assert "is sharded already" in error_of(MisuseError, lambda: parallelize(model, ParallelConfig()))
    other = Lm()
    fully_shard(other.blocks[0])
    assert "is sharded already" in error_of(MisuseError, lambda: parallelize(other, ParallelConfig()))
