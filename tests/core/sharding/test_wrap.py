"""`auto_shard` and its policies: which modules become units, and what the report says. Plans are made without
processes, from meta models."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn

from fsdp2 import ArgumentError, MisuseError, MixedPrecisionPolicy, fully_shard
from fsdp2.wrap import Policy, WrapReport, auto_shard, by_class, by_predicate, by_size, transformer_blocks
from tests.helpers.models import Transformer, error_of, tokens
from tests.helpers.parity_models import Block, Stack, TiedLm, batch, local
from tests.helpers.ranks import on_ranks
from tests.helpers.wrapped_models import Attention, Llama, Many, Stage, Translator, encoder


def plan(build: Callable[[], nn.Module], policy: Policy, **options: Any) -> WrapReport:
    """The dry run on a meta model."""
    with torch.device("meta"):
        model = build()
    return auto_shard(model, policy, dry_run=True, **options)


def fqns(build: Callable[[], nn.Module], policy: Policy, **options: Any) -> list[str]:
    """The names of the units, without the root."""
    report = plan(build, policy, **options)
    assert report.units[-1].fqn == ""
    return [unit.fqn for unit in report.units[:-1]]


# --- the report -------------------------------------------------------------------------------------------------------


def test_report() -> None:
    """Issue: policies "tell what they did and why": units in order with sizes, runs in one row, what cannot be one."""
    policy = by_predicate(lambda fqn, module: "layers" in fqn and fqn.count(".") < 2)
    model = Llama()
    report = auto_shard(model, policy, dry_run=True)
    assert type(model) is Llama and report == plan(Llama, policy)
    assert_expected_inline(
        str(report),
        """\
4 units by by_predicate(<lambda>)
  unit                   class             parameters  why
  layers.0 ... layers.2  3 x DecoderLayer  784 each    <lambda> chose it
  (root)                 Llama             184         the root: all that no other unit holds
  not a unit: layers: has no forward, so nothing would gather its parameters""",
    )
    assert sum(unit.numel for unit in report.units) == sum(param.numel() for param in Llama().parameters())


# --- policies ---------------------------------------------------------------------------------------------------------


def test_by_class() -> None:
    """FSDP1's transformer_auto_wrap_policy: classes, derived ones, and names of either."""

    class Special(Block):
        pass

    def build() -> nn.Module:
        return Many(a=Block(4, 5), b=Special(4, 5), c=nn.Linear(4, 4))

    for policy in (by_class(Block), by_class("Block"), by_class(Special, Block)):
        assert fqns(build, policy) == ["a", "b"]
    assert fqns(build, by_class("Special")) == ["b"]
    assert fqns(build, by_class(Block, nn.Linear)) == ["a.up", "a.down", "a", "b.up", "b.down", "b", "c"]
    assert plan(build, by_class(Special)).units[0].reason == "its class is Special"


def test_by_size() -> None:
    """FSDP1's size_based_auto_wrap_policy: what no unit below holds yet must reach the size."""

    def build() -> nn.Module:
        blocks = nn.ModuleList(Many(a=nn.Linear(4, 4, bias=False), b=nn.Linear(9, 9)) for _ in range(2))
        return Many(blocks=blocks, tail=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), out=nn.Linear(2, 2))

    assert fqns(build, by_size(90)) == ["blocks.0.b", "blocks.1.b"]
    assert fqns(build, by_size(16)) == [
        *("blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.1.b"),
        *("tail.0", "tail.1"),
    ]
    report = plan(build, by_size(40))
    assert [unit.fqn for unit in report.units] == ["blocks.0.b", "blocks.1.b", "tail", ""]
    assert report.units[-1].numel == 2 * 16 + 6
    assert "has no forward" in plan(build, by_size(32)).refused["blocks"]
    assert fqns(build, by_size(91)) == ["blocks.0", "blocks.1"]


def test_by_predicate() -> None:
    """FSDP1's lambda_auto_wrap_policy, and the options that CustomPolicy takes from a dict."""
    report = plan(Stack, by_predicate(lambda fqn, module: fqn.endswith("1") or isinstance(module, nn.LayerNorm)))
    chosen = ["blocks.0.norm", "blocks.1.norm", "blocks.1", "blocks.2.norm"]
    assert [unit.fqn for unit in report.units[:-1]] == chosen

    def keep_last(fqn: str, module: nn.Module) -> bool | dict[str, Any]:
        return {"reshard_after_forward": fqn != "blocks.2"} if isinstance(module, Block) else False

    report = plan(Stack, by_predicate(keep_last))
    assert [unit.options.get("reshard_after_forward") for unit in report.units] == [True, True, False, None]
    assert "keep_last chose it, reshard_after_forward=False" in str(report)
    of_root = {"": {"reshard_after_forward": False}, "inp": {}}
    report = plan(Stack, by_predicate(lambda fqn, module: of_root.get(fqn, False)))
    assert [(unit.fqn, unit.options) for unit in report.units] == [("inp", {}), ("", {"reshard_after_forward": False})]


def test_transformer_blocks() -> None:
    """In lists, dicts and sequences; several stacks; a model of torch's own. A block's experts stay with the block; the
    stages of a hierarchical model are blocks, sequences of leaves are not."""
    for experts in (0, 8):
        assert fqns(partial(Llama, num_experts=experts), transformer_blocks()) == ["layers.0", "layers.1", "layers.2"]
    stages = partial(Many, stages=nn.ModuleList([Stage(2), Stage(3)]))
    assert fqns(stages, transformer_blocks()) == ["stages.0", "stages.1"]
    assert fqns(Stack, transformer_blocks()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert fqns(lambda: nn.Sequential(nn.Linear(4, 4), Block(4, 4), Block(4, 4)), transformer_blocks()) == ["1", "2"]
    assert fqns(encoder, transformer_blocks()) == ["layers.0", "layers.1"]
    stacks = {"encoder": 2, "decoder": 3}
    wanted = [f"transformer.{name}.layers.{index}" for name, depth in stacks.items() for index in range(depth)]
    assert fqns(Translator, transformer_blocks()) == wanted
    message = error_of(ArgumentError, lambda: plan(lambda: nn.Sequential(*[nn.Linear(4, 4)] * 3), transformer_blocks()))
    assert "transformer_blocks() chooses no module below the root" in message
    assert "1 x Linear (up to 20 elements)" in message


def test_transformer_blocks_of_hugging_face() -> None:
    """Models of Hugging Face name their blocks; nested models (a vision tower) too."""

    class Tower(nn.Module):
        _no_split_modules = ("Attention",)

        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(8, 4, 2)

    class Model(Llama):
        _no_split_modules = ("FeedForward", "NotThere")

        def __init__(self) -> None:
            super().__init__(1)
            self.tower = Tower()

    report = plan(Model, transformer_blocks())
    assert [unit.fqn for unit in report.units[:-1]] == [
        "layers.0.attention",
        "layers.0.experts.0",
        "tower.attention",
    ]
    assert report.units[1].reason == "FeedForward is in _no_split_modules"


# --- what holds for every policy --------------------------------------------------------------------------------------


def test_shared_modules_and_weights_count_once() -> None:
    """Issue: never twice. A module under two names is one unit; a weight belongs to the first unit that has it."""

    def build() -> nn.Module:
        block = Block(4, 5)
        return Many(wrapped=Many(inner=block), blocks=nn.ModuleList([block, block, Block(4, 5)]), tied=TiedLm())

    report = plan(build, by_class(Block, Many, nn.Embedding, "Linear"))
    assert [unit.fqn for unit in report.units].count("wrapped.inner") == 1
    assert not any(unit.fqn in ("blocks.0", "blocks.1") for unit in report.units)
    assert "blocks.0" not in report.refused
    assert report.refused["tied.head"] == report.refused["wrapped"] == "no parameters that no other unit holds"
    assert sum(unit.numel for unit in report.units) == sum(param.numel() for param in build().parameters())


def test_what_cannot_be_a_unit() -> None:
    """Issue: never a module without forward; and not MultiheadAttention's out_proj, whose weight it reads itself."""
    report = plan(Translator, by_predicate(lambda fqn, module: True))
    chosen = {unit.fqn for unit in report.units}
    assert not any(fqn.endswith(("out_proj", "layers")) for fqn in chosen)
    attention = "transformer.encoder.layers.0.self_attn"
    assert {attention, "head"} <= chosen and "transformer" not in chosen
    assert report.refused[f"{attention}.out_proj"] == "MultiheadAttention reads it without calling it"
    assert report.refused["transformer.encoder.layers"].startswith("has no forward")


def test_mistakes() -> None:
    """Issue: a class that matches nothing, or a policy that would wrap nothing, names the classes there are."""
    message = error_of(ArgumentError, lambda: plan(Stack, by_class(Block, "LlamaDecoderLayer")))
    assert message.startswith("by_class: the model has no module of class LlamaDecoderLayer. It has 3 x Block (")
    for policy in (by_size(), by_predicate(lambda fqn, module: False), by_class(Stack), by_class(nn.ModuleList)):
        message = error_of(ArgumentError, lambda policy=policy: plan(Stack, policy))
        assert f"{policy.name} chooses no module below the root" in message and "The model has 3 x Block (" in message
    assert "has no forward" in message
    for make in (by_class, lambda: by_class({Block}), lambda: by_size(0)):  # type: ignore[arg-type]
        error_of(ArgumentError, make)
    assert "by_predicate(function)" in error_of(ArgumentError, lambda: plan(Stack, lambda module: True))  # type: ignore[arg-type]
    assert "cannot be the root" in error_of(
        ArgumentError, lambda: plan(lambda: nn.ModuleList([Block(4, 4), Block(4, 4)]), transformer_blocks())
    )


# --- sharding ---------------------------------------------------------------------------------------------------------


BUILDS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "llama": (Llama, ["layers"]),
    "experts": (lambda: Llama(2, num_experts=3), ["layers"]),
    "tied": (lambda: Transformer(tied=True), ["blocks"]),
    "translator": (Translator, ["transformer.encoder.layers", "transformer.decoder.layers"]),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", BUILDS)
def test_training_is_that_of_sharding_by_hand(rank: int, world_size: int, kind: str) -> None:
    """Issue: units found by themselves train as those chosen by hand, bit by bit; options reach every unit."""
    build, stacks = BUILDS[kind]
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    auto = build()
    hand = copy.deepcopy(auto)
    auto_shard(auto, transformer_blocks(), **options)
    for stack in stacks:
        for element in hand.get_submodule(stack).children():
            fully_shard(element, **options)
    fully_shard(hand, **options)
    for step in range(2):
        losses = [model(tokens(step, rank)).float().square().mean() for model in (auto, hand)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    for (name, mine), (_, theirs) in zip(auto.named_parameters(), hand.named_parameters(), strict=True):
        assert torch.equal(local(mine.grad), local(theirs.grad)), name


@on_ranks(2)
def test_one_report_and_log_on_all_ranks(rank: int, world_size: int) -> None:
    """Issue: the same on all ranks, whatever the order of a set; logged at INFO on the logger "fsdp2"."""
    with TestCase().assertLogs("fsdp2", "INFO") as found:
        report = auto_shard(Translator(), by_class(*{nn.Linear, nn.Embedding, nn.MultiheadAttention}))
    assert [record.getMessage() for record in found.records] == [str(report)]
    reports: list[Any] = [None] * world_size
    dist.all_gather_object(reports, report.units)
    assert reports[0] == reports[1]


@on_ranks(2)
def test_sharded_modules_are_left_alone(rank: int, world_size: int) -> None:
    """Issue: not modules that are sharded already, nor what is below them; a sharded model is a MisuseError."""
    model: Any = Stack()
    mine = fully_shard(model.blocks[1])
    unit = fully_shard.state(mine)  # type: ignore[attr-defined]
    report = auto_shard(model, by_class(Block, nn.Linear))
    assert not any(entry.fqn.startswith("blocks.1") for entry in report.units)
    assert fully_shard.state(mine) is unit  # type: ignore[attr-defined]
    assert report.units[-1].numel == 0  # all its layers are units
    model(batch(0, rank)).sum().backward()
    assert "sharded already" in error_of(MisuseError, lambda: auto_shard(model, by_class(Block)))
