"""Lightning, unmodified: `ModelParallelStrategy` of Fabric and of the Trainer, which leaves `fully_shard` to a function
of the program. The model is Lightning's demo, a Transformer with dropout. 20 steps of two micro-batches, clipped."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.demos import LightningTransformer, Transformer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.clients import Run, library_of, run_in_folders, run_script
from tests.clients.training import LENGTH, VOCAB, whole_state

STEPS, HALF, ACCUMULATE, MAX_NORM = 20, 10, 2, 0.5


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The `parallelize_fn` of Lightning's documentation, without tensor parallelism."""
    transformer = model.transformer
    for layer in [*transformer.encoder.layers, *transformer.decoder.layers]:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def loader(batch_size: int = 2) -> DataLoader:
    ids = torch.randint(VOCAB, (512, LENGTH + 1), generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=batch_size)


def norm_of(model: nn.Module) -> float:
    """Of the gradients."""
    norms = [torch.linalg.vector_norm(p.grad) for p in model.parameters()]
    return sum(norm.full_tensor().item() ** 2 for norm in norms) ** 0.5


# --- Fabric -----------------------------------------------------------------------------------------------------------


def with_fabric(folder: str, empty: bool = False, whole_file: bool = False, resume: str | None = None) -> Run:
    """The loop of Fabric's documentation: `no_backward_sync`, `clip_gradients`, `save` and `load`."""
    strategy = FabricStrategy(shard, 2, 1, save_distributed_checkpoint=not whole_file)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(3)
    with fabric.init_module(empty_init=empty):
        model = Transformer(vocab_size=VOCAB)
    model = fabric.setup(model)
    optim = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = iter(fabric.setup_dataloaders(loader()))
    state = {"model": model, "optimizer": optim, "step": 0}
    if resume:
        fabric.load(resume, state)
        for _ in range(state["step"] * ACCUMULATE):
            next(data)
    losses, norms = [], []
    for step in range(state["step"], STEPS):
        torch.manual_seed(1000 * step + fabric.global_rank)  # dropout as it would be had the run not stopped
        for micro in range(ACCUMULATE):
            with fabric.no_backward_sync(model, enabled=micro < ACCUMULATE - 1):
                inputs, targets = next(data)
                loss = nn.functional.nll_loss(model(inputs, targets), targets.flatten())
                fabric.backward(loss / ACCUMULATE)
            losses.append(loss.item())
        norms.append(norm_of(model))
        fabric.clip_gradients(model, optim, max_norm=MAX_NORM)
        optim.step()
        optim.zero_grad()
        if step + 1 == HALF:
            fabric.save(folder, state | {"step": HALF})
    return Run(losses, library_of(model), {"norms": norms, "parameters": whole_state(model)})


@pytest.mark.parametrize(("empty", "whole_file"), [(False, False), (True, True)])
def test_fabric(tmp_path: Path, empty: bool, whole_file: bool) -> None:
    """On the meta device Lightning calls `to_empty` and every `reset_parameters` once `fully_shard` is done. It saves
    a folder of shards, or one file; each library goes on from the other's."""
    options = {"empty": empty, "whole_file": whole_file}
    both = run_in_folders(with_fabric, 2, tmp_path, **options)
    both.assert_equal()
    assert len(both.ours[0].losses) == STEPS * ACCUMULATE and both.ours[0].losses != both.ours[1].losses
    assert both.ours[0].events["reduce_scatter"] == STEPS * 5  # four layers and the root, once a step
    for reader, writer, runs in (("fsdp2", "torch", both.torch), ("torch", "fsdp2", both.ours)):
        paths = {"folder": str(tmp_path / "rest"), "resume": str(tmp_path / writer)}
        resumed = run_script(with_fabric, 2, reader, **paths, **options)
        for after, before in zip(resumed, runs, strict=True):
            assert after.losses == before.losses[HALF * ACCUMULATE :]
            assert after.values["norms"] == before.values["norms"][HALF:]


# --- the Trainer ------------------------------------------------------------------------------------------------------


class Demo(LightningTransformer):
    """The demo as its users write it: `configure_model` shards, `training_step` is Lightning's."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def configure_model(self) -> None:
        if not isinstance(self.model, FSDPModule):
            shard(self.model, self.device_mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(norm_of(self.model))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def prepare_data(self) -> None:
        pass

    def train_dataloader(self) -> DataLoader:
        return loader()


def with_trainer(folder: str, resume: str | None = None) -> Run:
    lightning.seed_everything(3)
    model = Demo()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=MAX_NORM,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            lightning.pytorch.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=HALF, save_top_k=-1)
        ],
    )
    trainer.fit(model, ckpt_path=resume)
    values = {"norms": model.norms, "parameters": whole_state(model.model)}
    return Run(model.losses, library_of(model), values)


def test_the_trainer(tmp_path: Path) -> None:
    both = run_in_folders(with_trainer, 2, tmp_path)
    both.assert_equal()
    for reader, writer in (("fsdp2", "torch"), ("torch", "fsdp2")):
        resume = str(tmp_path / writer / f"step={HALF}.ckpt")
        resumed = run_script(with_trainer, 2, reader, folder=str(tmp_path / "rest"), resume=resume)
        assert len(resumed[0].losses) == (STEPS - HALF) * ACCUMULATE
        assert not resumed[0].still
