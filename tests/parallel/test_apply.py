"""What `parallelize` does to a model, beyond the losses of `test_parity.py`, and what it refuses."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.testing import assert_close

from fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    ZeroPolicy,
    auto_shard,
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
    quiet,
    race,
    tensor_plan,
)
from tests.helpers.parity_models import count, full
from tests.helpers.ranks import on_ranks


def step(model: nn.Module, config: ParallelConfig) -> Tensor:
    """Forward and backward of this rank's part of one batch; the loss."""
    with quiet():
        loss = loss_of(model, *part_of(build_meshes(config, "cpu"), global_batch(0)))
        loss.backward()
    return loss.detach()


# --- blocks -----------------------------------------------------------------------------------------------------------


def units(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


ATTENTIONS = [f"blocks.{i}.attention" for i in range(3)]
TOLD: dict[str, tuple[Any, list[str]]] = {
    "found": (None, ["", "blocks.0", "blocks.1", "blocks.2"]),
    "empty": ([], ["", "blocks.0", "blocks.1", "blocks.2"]),
    "class": (DecoderBlock, ["", "blocks.0", "blocks.1", "blocks.2"]),
    "class name": ("DecoderBlock", ["", "blocks.0", "blocks.1", "blocks.2"]),
    "pattern": ("blocks.[01]", ["", "blocks.0", "blocks.1"]),
    "list of blocks": ("blocks", ["", "blocks.0", "blocks.1", "blocks.2"]),
    "several": (["blocks.0", nn.Embedding, "head"], ["", "embed", "blocks.0", "head"]),
    "nested": (["blocks.*", "blocks.0.attention"], ["", "blocks.0", "blocks.0.attention", "blocks.1", "blocks.2"]),
    "policy in a list": ([by_class("Attention"), "blocks.1"], ["", *ATTENTIONS[:1], "blocks.1", *ATTENTIONS[1:]]),
    "policy": (
        by_class(DecoderBlock, "Attention"),
        ["", *(f"blocks.{i}{a}" for i in range(3) for a in ("", ".attention"))],
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("how", TOLD)
def test_blocks_become_units(rank: int, world_size: int, how: str) -> None:
    blocks, expected = TOLD[how]
    assert units(race(ParallelConfig(), blocks=blocks, steps=1)) == expected


@on_ranks(2)
def test_modules_themselves_and_names_in_the_config(rank: int, world_size: int) -> None:
    model = Lm()
    assert units(parallelize(model, ParallelConfig(), blocks=[model.blocks[2]])) == ["", "blocks.2"]
    assert units(parallelize(Lm(), ParallelConfig(blocks=("blocks.1", "Embedding")))) == ["", "embed", "blocks.1"]
    both = parallelize(Lm(), ParallelConfig(blocks=("blocks.1",)), blocks="blocks.0")
    assert units(both) == ["", "blocks.0"]


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


@on_ranks(2)
@pytest.mark.parametrize("call", ["parallelize", "auto_shard", "fully_shard"])
def test_ignored_parameters_that_can_be_read_once(rank: int, world_size: int, call: str) -> None:
    """From an iterator the first unit took them all, and the root sharded them after all."""
    model: Any = Lm()
    ignored = model.embed.parameters()
    if call == "parallelize":
        parallelize(model, ParallelConfig(), ignored_params=ignored)
    elif call == "auto_shard":
        auto_shard(model, by_class(DecoderBlock), ignored_params=ignored)
    else:
        fully_shard(model, ignored_params=ignored)
    assert not isinstance(model.embed.weight, DTensor)
    assert isinstance(model.head.weight, DTensor)


BAD_BLOCKS: dict[str, tuple[Any, str]] = {
    "name": (
        "block.*",
        "parallelize: the model has no module 'block.*'. At its top it has embed, blocks, norm, head; its classes are "
        "3 x DecoderBlock",
    ),
    "deeper": ("blocks.*.mlp", "parallelize: the model has no module 'blocks.*.mlp'"),
    "class": (nn.LSTM, "by_class: the model has no module of class LSTM. It has 3 x DecoderBlock"),
    "class name": ("DecoderBlok", "parallelize: the model has no module 'DecoderBlok'"),
    "module": (nn.Linear(1, 1), "parallelize: the model has no module this Linear. At its top"),
    "one of several": (["blocks.*", "none"], "parallelize: the model has no module 'none'"),
    "number": (3, "parallelize: the model has no module 3. At its top"),
    "policy": (by_size(1e9), "auto_shard: by_size(1,000,000,000) chooses no module below the root"),
}


@on_ranks(2)
@pytest.mark.parametrize("how", BAD_BLOCKS)
def test_blocks_that_match_nothing(rank: int, world_size: int, how: str) -> None:
    blocks, message = BAD_BLOCKS[how]
    model = Lm()
    assert error_of(ArgumentError, lambda: parallelize(model, ParallelConfig(), blocks=blocks)).startswith(message)
    assert not units(model)


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
def test_a_recomputed_block_draws_the_same_dropout(rank: int, world_size: int) -> None:
    class Dropping(DecoderBlock):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(x, 0.5))

    gradients = []
    for how in ("none", "full"):
        torch.manual_seed(0)
        model = Lm()
        model.blocks = nn.ModuleList(Dropping() for _ in range(2))
        config = ParallelConfig(activation_checkpointing=how)
        parallelize(model, config)
        torch.manual_seed(1 + rank)
        step(model, config)
        gradients.append([param.grad.to_local() for param in model.parameters()])
    assert_close(*gradients, rtol=0, atol=0)


@on_ranks(2)
def test_treated_blocks_are_what_they_were(rank: int, world_size: int) -> None:
    """Names of parameters and classes, copies, and memory."""
    config = ParallelConfig(activation_checkpointing="full", compile="eager")
    model: Any = Lm()
    names = [name for name, _ in model.named_parameters()]
    parallelize(model, config)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(isinstance(block, DecoderBlock) for block in model.blocks)
    with compiling():
        twin = copy.deepcopy(model)
        losses = [step(each, config) for each in (model, twin)]
        assert losses[0] == losses[1]
    gone = weakref.ref(model.blocks[0])
    del model
    gc.collect()  # autograd and dynamo leave cycles of their own
    assert gone() is None


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


def test_compile_uses_inductor_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without running it: that takes a compiler."""
    from fsdp2.parallel.blocks import recompute_and_compile

    asked: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda fn, backend: asked.append(backend) or fn)
    recompute_and_compile([Lm()], 0, True)
    assert asked == ["inductor"]


# --- what the config and the options say to fully_shard ---------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision(rank: int, world_size: int, precision: str, dtype: torch.dtype) -> None:
    config = ParallelConfig(mixed_precision=precision)
    model = parallelize(Lm(), config)
    with events.record() as log:
        step(model, config)
    assert {event.dtype for event in log if event.kind == "all_gather"} == {dtype}
    assert {event.dtype for event in log if event.kind == "reduce_scatter"} == {torch.float32}
    assert {param.dtype for param in model.parameters()} == {torch.float32}


@on_ranks(2)
def test_options_replace_the_config(rank: int, world_size: int) -> None:
    config = ParallelConfig(mixed_precision="bf16", reshard_after_forward=False)
    model = parallelize(Lm(), config, mp_policy=MixedPrecisionPolicy(), reshard_after_forward=True)
    with events.record() as log:
        step(model, config)
    assert {event.dtype for event in log if event.kind == "all_gather"} == {torch.float32}
    assert count(log, "all_gather") == {"all_gather": 2 * 4}  # the root too


@on_ranks(2)
@pytest.mark.parametrize(("reshard", "gathers"), [(None, 7), (False, 4), (True, 8)])
def test_reshard_after_forward(rank: int, world_size: int, reshard: Any, gathers: int) -> None:
    config = ParallelConfig(reshard_after_forward=reshard)
    model = parallelize(Lm(), config)
    with events.record() as log:
        step(model, config)
    assert count(log, "all_gather") == {"all_gather": gathers}


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


@on_ranks(4)
def test_layers_are_split_and_sharded(rank: int, world_size: int) -> None:
    model = parallelize(Lm(), config_of({"shard": 2, "tensor": 2}), tp_plan=tensor_plan())
    block: Any = model.blocks[0]
    assert block.up.weight.device_mesh.mesh_dim_names == ("dp_shard", "tp")
    assert block.down.weight.placements == (Shard(0), Shard(1))
    assert block.down.bias.placements == (Shard(0), Replicate())
    assert block.norm.weight.device_mesh.mesh_dim_names == ("dp_shard",)


@on_ranks(2)
@pytest.mark.parametrize("degrees", [{"shard": 2}, {"replicate": 2}, {"tensor": 2}])
def test_tied_weights(rank: int, world_size: int, degrees: dict[str, int]) -> None:
    """torch's `parallelize_module` unties them: each name gets a DTensor of its own."""
    plan = {**tensor_plan(), "embed": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    model: Any = race(config_of(degrees), lambda: Lm(tied=True), tp_plan=plan)
    assert model.head.weight is model.embed.weight


@on_ranks(2)
def test_tied_weights_that_are_split_differently(rank: int, world_size: int) -> None:
    plan = {**tensor_plan(), "head": ColwiseParallel(output_layouts=Replicate())}
    message = error_of(ArgumentError, lambda: parallelize(Lm(tied=True), config_of({"tensor": 2}), tp_plan=plan))
    assert message.startswith(
        "tp_plan: 'embed.weight' and 'head.weight' are one weight, but it was split as a plain tensor there and as "
        "(Shard(dim=0),) here; give both modules styles that split it in the same way"
    )


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


PLANS: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (None, ArgumentError, "parallelize: tensor = 2 needs a plan, and NoPlan has none; pass tp_plan="),
    "empty": ({}, ArgumentError, "parallelize: tensor = 2 needs a plan"),
    "no such name": (
        {"layers.*.2": "colwise"},
        ArgumentError,
        "tp_plan: no module of this NoPlan is named 'layers.*.2'",
    ),
    "no such style": (
        {"layers.*.0": "packed_colwise"},
        UnsupportedError,
        "tp_plan: 'layers.*.0' wants the style 'packed_colwise', which is not one of colwise, rowwise",
    ),
    "no style": ({"layers.*.0": 3}, UnsupportedError, "tp_plan: 'layers.*.0' wants the style 3, which is not one of"),
    "unfit module": (
        {"layers.*.1": "colwise"},
        ArgumentError,
        "tp_plan: 'layers.0.1' is a LayerNorm; ColwiseParallel splits Linear and Embedding",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("how", PLANS)
def test_plans_that_do_not_fit(rank: int, world_size: int, how: str) -> None:
    plan, kind, message = PLANS[how]
    model = NoPlan()
    assert error_of(kind, lambda: parallelize(model, config_of({"tensor": 2}), tp_plan=plan)).startswith(message)
    assert not any(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(2)
def test_a_model_that_is_tensor_parallel_already(rank: int, world_size: int) -> None:
    config = config_of({"tensor": 2})
    mesh = build_meshes(config, "cpu").tensor
    model = torch.distributed.tensor.parallel.parallelize_module(Lm(), mesh, tensor_plan())
    message = error_of(MisuseError, lambda: parallelize(model, config, tp_plan=tensor_plan()))
    assert message.startswith("tp_plan: 'blocks.0.attention.query' has DTensors for parameters already")


# --- refusals ---------------------------------------------------------------------------------------------------------


def meshes_of_other_degrees(model: nn.Module) -> Any:
    return parallelize(model, config_of({"shard": 2}), meshes=build_meshes(config_of({"replicate": 2}), "cpu"))


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "degrees": (
        lambda model: parallelize(model, config_of({"shard": 3})),
        ArgumentError,
        "2 ranks, but 3 (shard). Change a degree, or start 3 ranks.",
    ),
    "meshes": (
        meshes_of_other_degrees,
        ArgumentError,
        "parallelize: the meshes have other degrees, {'pipeline': 1, 'replicate': 2",
    ),
    "mesh": (
        lambda model: parallelize(model, ParallelConfig(), mesh=None),
        ArgumentError,
        "parallelize: makes the mesh from the config's degrees; leave mesh out",
    ),
    "tier": (
        lambda model: parallelize(model, ParallelConfig(tensor=2, offload="files"), tp_plan=tensor_plan()),
        ArgumentError,
        'Offload: params="files" needs a folder: tier="/a/fast/disk"',
    ),
    "zero": (
        lambda model: parallelize(model, config_of({"replicate": 2}), zero=ZeroPolicy(stage=2)),
        ArgumentError,
        "parallelize: shard = 1 shards nothing, which is stage 0 of ZeRO",
    ),
    "reshard": (
        lambda model: parallelize(model, config_of({"replicate": 2}, reshard_after_forward=True)),
        ArgumentError,
        "parallelize: shard = 1 shards nothing, which is stage 0 of ZeRO",
    ),
    "no module": (
        lambda model: parallelize([model], ParallelConfig()),
        ArgumentError,
        "parallelize: expected an nn.Module",
    ),
    "no such option": (
        lambda model: parallelize(model, ParallelConfig(activation_checkpointing="full"), mp=None),
        TypeError,
        "got an unexpected keyword argument 'mp'",
    ),
    "no forward": (
        lambda model: parallelize(model.blocks, ParallelConfig()),
        ArgumentError,
        "auto_shard: a ModuleList has no forward, so it cannot be the root; pass the model",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("what", REFUSED)
def test_refusals_leave_the_model_alone(rank: int, world_size: int, what: str) -> None:
    call, kind, message = REFUSED[what]
    model = Lm()
    assert error_of(kind, lambda: call(model)).startswith(message)
    assert not units(model) and type(model.blocks[0]) is DecoderBlock
    assert model(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, VOCAB)


@on_ranks(2)
def test_twice(rank: int, world_size: int) -> None:
    model = parallelize(Lm(), ParallelConfig())
    assert "is sharded already" in error_of(MisuseError, lambda: parallelize(model, ParallelConfig()))
    other = Lm()
    fully_shard(other.blocks[0])
    assert "is sharded already" in error_of(MisuseError, lambda: parallelize(other, ParallelConfig()))
