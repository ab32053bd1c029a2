"""OLMo-core's train module: its own Transformer, sharded by it, micro-batches, clipping, a skip-step optimizer; without
the Trainer around it, which needs a data loader and a folder to save to."""

from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from tests.clients.clients import Run, library_of, run_both
from tests.clients.training import LENGTH, VOCAB, tokens, weights, without


def script(kind: str) -> Run:
    without("cached_path", "cached_path.schemes", "cached_path.schemes.s3", "cached_path.schemes.gs")
    from olmo_core.config import DType
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import SkipStepAdamWConfig
    from olmo_core.train.train_module import TransformerTrainModuleConfig
    from olmo_core.train.train_module.transformer import (
        TransformerDataParallelConfig,
        TransformerDataParallelWrappingStrategy,
    )

    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = TransformerConfig.llama_like(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4).build(init_device="meta")
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=2 * LENGTH,
        max_sequence_length=LENGTH,
        optim=SkipStepAdamWConfig(lr=1e-2, compile=False),
        max_grad_norm=0.5,
        z_loss_multiplier=1e-5,
        dp_config=TransformerDataParallelConfig(
            name=DataParallelType(kind),
            num_replicas=2 if kind == "hsdp" else None,
            param_dtype=DType.bfloat16,
            reduce_dtype=DType.float32,
            wrapping_strategy=TransformerDataParallelWrappingStrategy.fine_grained,
        ),
    ).build(model, device=torch.device("cpu"))
    numbers: dict[str, list[float]] = {}
    trainer = MagicMock()
    trainer.record_metric = lambda name, value, *_, **__: numbers.setdefault(name, []).append(float(value))
    trainer.record_ce_loss = lambda value, **_: numbers.setdefault("loss", []).append(float(value))
    module._attach_trainer(trainer)
    for step in range(20):
        module.train_batch({"input_ids": tokens(step, num=4)})
        module.optim_step()
        module.zero_grads()
    return Run(numbers.pop("loss"), library_of(module.model), numbers | {"weights": weights(module.model)})


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 2), ("hsdp", 4)])
def test_trains_as_on_torch(kind: str, ranks: int) -> None:
    run_both(script, ranks, kind=kind).assert_equal()
