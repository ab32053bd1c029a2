"""Hugging Face Accelerate: its FSDP2 plugin and its `ParallelismConfig`, unmodified, on torch's FSDP2 and on ours."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets  # noqa: F401 - Accelerate does so at its first data loader: once here, not again in every rank
import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ParallelismConfig, set_seed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.clients import ROOT, TIMEOUT_S, Run, library_of, run_both, run_script
from tests.clients.training import LAYERS, LENGTH, VOCAB, llama, take_cpus_for_accelerators, whole_state

LAYERWISE = {"auto_wrap_policy": "transformer_based_wrap"}
Build = Callable[[], nn.Module]


def tied_llama() -> nn.Module:
    return llama(tie_word_embeddings=True)


def other_llama() -> nn.Module:
    return llama(initializer_range=1.0)


def loader() -> DataLoader:
    ids = torch.randint(VOCAB, (256, LENGTH), generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(ids), batch_size=2)


def units(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def batches(data: Any, num: int) -> Iterator[Tensor]:
    for (ids,), _ in zip(data, range(num), strict=False):
        yield ids


def prepared(
    build: Build, *, accumulate: int = 1, precision: str = "no", parallel: dict[str, int] | None = None, **plugin: Any
) -> tuple[Accelerator, nn.Module, Any, Any]:
    take_cpus_for_accelerators()
    set_seed(3)
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulate,
        mixed_precision=precision,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **plugin),
        parallelism_config=ParallelismConfig(**parallel) if parallel else None,
    )
    model = build()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator, *accelerator.prepare(model, optim, loader())


def steps(
    accelerator: Accelerator, model: nn.Module, optim: Any, data: Iterator[Tensor]
) -> tuple[list[Any], list[Any]]:
    """The loop from Accelerate's documentation: losses of the microbatches, gradient norms of the steps."""
    losses, norms = [], []
    for ids in data:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optim.step()
            optim.zero_grad()
        losses.append(loss.item())
    return losses, norms


def train(build: Build = llama, num: int = 4, **options: Any) -> Run:
    accelerator, model, optim, data = prepared(build, **options)
    losses, norms = steps(accelerator, model, optim, batches(data, num))
    notes = {"units": units(model)}
    return Run(losses, library_of(model), values={"norms": norms, "parameters": whole_state(model)}, notes=notes)


@pytest.mark.parametrize("ram_efficient", [False, True])
@pytest.mark.parametrize("build", [llama, tied_llama])
def test_the_transformer_policy(build: Build, ram_efficient: bool) -> None:
    """`cpu_ram_efficient_loading`: only rank 0 has values; the others are sharded on the meta device and filled by
    broadcasts and `load_state_dict(assign=True)`."""
    both = run_both(train, 2, build=build, cpu_ram_efficient_loading=ram_efficient, **LAYERWISE)
    both.assert_equal()
    assert both.ours[0].notes == both.torch[0].notes
    assert [f"model.layers.{index}" in both.ours[0].notes["units"] for index in range(LAYERS)] == [True] * LAYERS


def test_activation_checkpointing() -> None:
    both = run_both(train, 2, activation_checkpointing=True, **LAYERWISE)
    both.assert_equal()
    assert "model.layers.0" in both.ours[0].notes["units"]


def test_gradient_accumulation() -> None:
    """20 clipped steps of three microbatches; only the last one communicates gradients."""
    both = run_both(train, 2, num=60, accumulate=3, **LAYERWISE)
    both.assert_equal()
    assert len(both.ours[0].values["norms"]) == 20
    assert both.ours[0].events["reduce_scatter"] == 20 * (LAYERS + 2)  # embedding; norm and head


def test_mixed_precision() -> None:
    """bf16 by the plugin's policy, under Accelerate's own autocast."""
    run_both(train, 2, precision="bf16", **LAYERWISE).assert_equal()


@pytest.mark.parametrize(("replicate", "shard"), [(1, 4), (2, 2)])
def test_parallelism_config(replicate: int, shard: int) -> None:
    parallel = {"dp_replicate_size": replicate, "dp_shard_size": shard}
    both = run_both(train, 4, parallel=parallel, **LAYERWISE)
    # Four ranks: gloo's ring and our rank order add in different orders.
    both.assert_equal(rtol=1e-5, atol=1e-6)


def train_context_parallel() -> Run:
    """Parameters are sharded over the ranks of both axes, data over the first only."""
    take_cpus_for_accelerators()
    set_seed(3)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **LAYERWISE),
        parallelism_config=ParallelismConfig(dp_shard_size=2, cp_size=2),
    )
    model = llama()
    model, optim, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader())
    losses, norms = steps(accelerator, model, optim, batches(data, 40))
    notes = {"meshes": {param.device_mesh.size() for param in model.parameters()}}
    return Run(losses, library_of(model), values={"norms": norms, "parameters": whole_state(model)}, notes=notes)


def test_parallelism_config_with_context_parallelism() -> None:
    both = run_both(train_context_parallel, 4)
    assert all(run.notes["meshes"] == {4} and len(run.values["norms"]) == 20 for run in both.ours + both.torch)
    # Ranks that differ in the second axis have the same data.
    assert both.ours[0].losses == both.ours[1].losses != both.ours[2].losses == both.ours[3].losses
    both.assert_equal(rtol=1e-4, atol=1e-5)


# --- accelerate launch ------------------------------------------------------------------------------------------------

LAUNCH = """--use_fsdp --fsdp_version 2 --num_processes 2 --num_machines 1 --main_process_port 0 --mixed_precision no
    --dynamo_backend no --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap Block"""
PROGRAM = Path(__file__).with_name("accelerate_program.py")


def launch(out: Path, *words: str) -> list[dict[str, Any]]:
    """What each rank of the program wrote. It is started as its users do; `words` go before its name."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH.split(), *words, PROGRAM, out]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HOME": str(out.parent)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert job.returncode == 0, job.stderr
    return [torch.load(f"{out}.{rank}") for rank in range(2)]


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two processes need two GPUs, or none")
def test_accelerate_launch(tmp_path: Path) -> None:
    """`accelerate launch -m fsdp2.compat program.py`: the plugin is the one of the command line."""
    torchs, ours = launch(tmp_path / "torch"), launch(tmp_path / "fsdp2", "-m", "fsdp2.compat")
    for their_rank, our_rank in zip(torchs, ours, strict=True):
        for which, result in (("torch.distributed.fsdp", their_rank), ("fsdp2.module", our_rank)):
            units = [name for name, homes in result.pop("homes").items() if which in homes]
            assert units == ["", "0", "1", "2"], which
        torch.testing.assert_close(our_rank, their_rank, rtol=0, atol=0)
    assert len(ours[0]["losses"]) == 4 and ours[0]["losses"] != ours[1]["losses"]


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_and_go_on(folder: str, kind: str) -> Run:
    """Train, save, train on."""
    accelerator, model, optim, data = prepared(llama, state_dict_type=kind, **LAYERWISE)
    steps(accelerator, model, optim, batches(data, 2))
    accelerator.save_state(folder)
    losses, norms = steps(accelerator, model, optim, batches(data, 3))
    return Run(losses, library_of(model), values={"norms": norms, "parameters": whole_state(model)})


def resume(folder: str, kind: str) -> Run:
    """Another process, other values: load, and train the same steps."""
    accelerator, model, optim, data = prepared(other_llama, state_dict_type=kind, **LAYERWISE)
    accelerator.load_state(folder)
    losses, norms = steps(accelerator, model, optim, batches(data, 3))
    return Run(losses, library_of(model), values={"norms": norms, "parameters": whole_state(model)})


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_save_and_load(tmp_path: Path, kind: str) -> None:
    """Either library resumes from its own checkpoint and from the other's."""
    for library in ("torch", "fsdp2"):
        folder = str(tmp_path / library)
        before = run_script(save_and_go_on, 2, library, folder=folder, kind=kind)
        after = run_both(resume, 2, folder=folder, kind=kind)
        after.assert_equal()
        assert after.ours[0].losses == before[0].losses
        assert after.ours[0].values["norms"] == before[0].values["norms"]
