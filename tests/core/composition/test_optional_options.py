"""Optional units with other options: prefetching, mixed precision, ZeRO, compiled blocks, optimizers in backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fsdp2
from fsdp2 import MixedPrecisionPolicy, OptionalPolicy, events, fully_shard
from tests.helpers.optional_models import (
    POLICIES,
    TURNS,
    VisionLanguage,
    assert_equal_gradients,
    forward_and_backward,
    gradients,
    inputs,
    micro_batches,
    pair,
    who_has_images,
)
from tests.helpers.parity_models import local, shard_like
from tests.helpers.ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("by", ["default", "prediction", "lists"])
def test_prefetching_around_a_tower_that_one_rank_runs(rank: int, world_size: int, by: str) -> None:
    """The order of the other units' gathers and reductions is the same on both ranks, with prefetch lists, with the
    automatic prefetch, and with the tower between two blocks of text."""

    class Between(VisionLanguage):
        def forward(self, text: Tensor, images: Tensor | None = None) -> Tensor:
            x = self.blocks[0](self.embed(text))
            if images is not None:
                x = x + self.projector(self.vision(images))
            return self.blocks[1](x).square().mean()

    plain, model = pair(POLICIES["runs_if"], Between, reshard_after_forward=True)
    if by == "prediction":
        model.set_auto_forward_prefetch()
    elif by == "lists":
        model.blocks[0].set_modules_to_forward_prefetch([model.vision])
        model.vision.set_modules_to_forward_prefetch([model.blocks[1]])
        model.vision.set_modules_to_backward_prefetch([model.blocks[0]])
        model.blocks[1].set_modules_to_backward_prefetch([model.vision])
    orders = []
    for step, with_images in enumerate([[0], [0], [0], [], [1]]):
        for each in (plain, model):
            each.zero_grad()
        run = forward_and_backward(step, with_images)
        gradients(plain, world_size, run)
        with events.record() as log:
            run(model, rank)
        assert_equal_gradients(plain, model)
        sent = [each for each in log if each.kind in ("all_gather", "reduce_scatter", "all_reduce", "agreement")]
        orders.append([(each.kind, each.unit, each.numel) for each in sent])
    everywhere: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everywhere, orders)
    assert everywhere[0] == everywhere[1]


@on_ranks(2)
def test_mixed_precision_reduces_in_the_reduce_dtype(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    torch.manual_seed(0)
    plain = VisionLanguage()
    model: Any = copy.deepcopy(plain)
    fully_shard(model.vision, optional=POLICIES["runs_if"], mp_policy=policy)
    fully_shard(model)
    run = forward_and_backward(0, [1])
    gradients(plain, world_size, run)
    with events.record() as log:
        run(model, rank)
    sent = {each.dtype for each in log if each.kind == "reduce_scatter" and each.unit == "vision"}
    assert sent == {torch.float32}
    for name, param in model.named_parameters():
        wanted = shard_like(plain.get_parameter(name).grad, param)
        assert (param.grad is None) == (wanted is None)
        if wanted is not None:
            assert_close(local(param.grad), wanted, rtol=0.1, atol=0.02)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_of_zero(rank: int, world_size: int, stage: int) -> None:
    zero = fsdp2.ZeroPolicy(stage=stage)
    torch.manual_seed(0)
    plain = VisionLanguage()
    model: Any = copy.deepcopy(plain)
    fully_shard(model.vision, optional=POLICIES["runs_if"], zero=zero)
    fully_shard(model, zero=zero)
    for with_images in ([[0], []], [[], []], [[], [1]]):
        for each in (plain, model):
            each.zero_grad()
        run = micro_batches(with_images, TURNS["not last"])
        gradients(plain, world_size, run)
        run(model, rank)
        assert_equal_gradients(plain, model, exact=False)


@on_ranks(2)
def test_gradients_that_are_finalised_by_hand(rank: int, world_size: int) -> None:
    plain, model = pair(POLICIES["runs_if"])
    model.set_manual_backward_finalization(True)

    def run(model: Any, rank: int) -> None:
        for step, with_images in ((0, [1]), (1, [])):
            model(*inputs(step, rank, with_images)).backward()
        if model is not plain:
            model.finalize_backward()

    gradients(plain, world_size, run)
    run(model, rank)
    assert_equal_gradients(plain, model, exact=False)


def llava() -> nn.Module:
    """LLaVA with a vision tower of CLIP and a language model of Llama, two layers each. The tower's last layer is
    unused: LLaVA takes the outputs of the one before."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=16)
    text = transformers.LlamaConfig(**sizes, vocab_size=32, num_key_value_heads=1, pad_token_id=0)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=31)
    return transformers.LlavaForConditionalGeneration(config)  # type: ignore[no-any-return]


def words(step: int, rank: int, with_images: Sequence[int]) -> dict[str, Tensor]:
    """Two sentences; each begins with the four tokens of an image where the rank has images."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(1, 30, (2, 8), generator=generator)
    if rank not in with_images:
        return {"input_ids": tokens, "labels": tokens}
    tokens[:, :4] = 31
    return {"input_ids": tokens, "labels": tokens, "pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}


@pytest.mark.exhaustive
@on_ranks(2, timeout_s=240)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_vision_language_model_of_transformers(rank: int, world_size: int, checkpoints: bool) -> None:
    torch.manual_seed(0)
    plain: Any = llava()
    plain.train()
    model: Any = copy.deepcopy(plain)
    has_pixels = OptionalPolicy(runs_if=lambda *args, pixel_values=None, **kwargs: pixel_values is not None)
    fully_shard([model.model.vision_tower, model.model.multi_modal_projector], optional=has_pixels)
    for layer in model.model.language_model.layers:
        fully_shard(layer)
    fully_shard(model)
    if checkpoints:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it has another name in transformers 6
            for each in (plain, model):
                each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for step, with_images in enumerate(who_has_images(world_size)):
        for each in (plain, model):
            each.zero_grad()

        def run(model: Any, rank: int, step: int = step, with_images: Sequence[int] = with_images) -> None:
            model(**words(step, rank, with_images)).loss.backward()

        gradients(plain, world_size, run)
        with events.record() as log:
            run(model, rank)
        assert_equal_gradients(plain, model)
        sent = {each.kind for each in log if "vision_tower" in each.unit} & {"all_gather", "reduce_scatter"}
        assert sent == ({"all_gather", "reduce_scatter"} if with_images else set())
    assert model.model.vision_tower.post_layernorm.weight.grad is None


@on_ranks(2)
def test_an_optimizer_that_steps_in_backward(rank: int, world_size: int) -> None:
    """Optional units and their hosts are stepped at its end, and only where some rank has gradients."""
    plain, model = pair(POLICIES["runs_if"])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    fsdp2.step_in_backward(optimizers[1])
    for step, with_images in enumerate(([0], [], [1])):
        run = forward_and_backward(step, with_images)
        gradients(plain, world_size, run)
        run(model, rank)
        optimizers[0].step()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert_close(local(other), shard_like(one, other), rtol=1e-5, atol=1e-6)
