"""axolotl's replacement for what Accelerate does to a model under FSDP2, and its tiled MLP, which runs backwards within
backward and keeps the unit unsharded meanwhile; without its trainer. The MLP is a unit of its own: the tiled MLP
reshards its unit in backward, and in a larger unit attention would need its weights after that, with either library."""

from typing import Any

import pytest
from accelerate import Accelerator, FullyShardedDataParallelPlugin

from tests.clients.clients import Run, run_both
from tests.clients.training import adamw, llama, take_cpus_for_accelerators, train, without


def script(tiles: int, efficient: bool) -> Run:
    without("evaluate", "deepspeed", "deepspeed.runtime", "deepspeed.runtime.sequence_parallel")
    without("deepspeed.runtime.sequence_parallel.ulysses_sp")
    from axolotl.monkeypatch.accelerate.fsdp2 import patch_accelerate_fsdp2
    from axolotl.monkeypatch.tiled_mlp.patch import patch_tiled_mlp

    take_cpus_for_accelerators()
    patch_accelerate_fsdp2()
    if tiles:
        patch_tiled_mlp("llama", cfg_num_shards=tiles)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer", *["LlamaMLP"] * bool(tiles)],
        cpu_ram_efficient_loading=efficient,
    )
    accelerator: Any = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    return train(model, optimizer=optimizer, clip=accelerator.clip_grad_norm_)


@pytest.mark.parametrize(("tiles", "efficient"), [(0, True), (2, False)])
def test_trains_as_on_torch(tiles: int, efficient: bool) -> None:
    run_both(script, 2, tiles=tiles, efficient=efficient).assert_equal()
