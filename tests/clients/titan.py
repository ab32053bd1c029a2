"""torchtitan's own trainer on CPUs: what it has no setting for, and small data.

torchtitan 0.3 finds its device by itself and falls back to CUDA, so this names the CPU in its place, before its other
modules copy the name. The attention of its language models is FlexAttention, which cannot train on CPUs: the configs
get torchtitan's `ScaledDotProductAttention`. Everything else is torchtitan's: model, parallelisation, loss, clipping,
optimizer, checkpoints. Import this before anything else of torchtitan.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as device_names
from torch.distributed.fsdp import FSDPModule

import fsdp2

if not torch.cuda.is_available():
    device_names.device_type = "cpu"
    device_names.device_module = SimpleNamespace(
        set_device=torch.cpu.set_device,
        current_device=lambda: 0,
        synchronize=torch.cpu.synchronize,
        get_device_name=lambda _device: "CPU",
        get_device_properties=lambda _device: SimpleNamespace(total_memory=2**30),
        memory_stats=lambda _device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )

if not hasattr(torch.distributed, "set_timeout"):
    # New in torch 2.14. torchtitan shortens all timeouts after the first step, which changes nothing here.
    torch.distributed.set_timeout = lambda _timeout, _group=None: None

from torchtitan import trainer as trainer_module
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

# Rank 0 would sleep two seconds at the end.
trainer_module.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _seconds: None)

__all__ = ["MODELS", "Batches", "FullAC", "Metrics", "NoTokenizer", "small", "train"]


class NoTokenizer(BaseTokenizer):
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_unused: Any):
        super().__init__()

    def encode(self, *_args: Any, **_kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_args: Any, **_kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


class Batches(BaseDataLoader):
    """Random tokens, others for each data-parallel rank and step; each batch is there to be repeated."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_unused: Any):
        self._shape = (local_batch_size, seq_len + 1)
        self._dp_rank = dp_rank
        self._step = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self._dp_rank + self._step % 2)
            tokens = torch.randint(0, 2048, self._shape, generator=generator)
            self._step += 1
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step = state_dict["step"]


class Metrics(MetricsProcessor):
    """Keeps what torchtitan would log."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        log_freq: int = 1

    def __init__(self, config: Config, **options: Any):
        super().__init__(config, **options)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def log(self, step: int, avg_loss: float, max_loss: float, grad_norm: float, **_unused: Any) -> None:
        """The loss is the mean over the tokens of all ranks; the norm is that before clipping."""
        self.losses.append(avg_loss)
        self.norms.append(grad_norm)


MODELS = {"llama3": llama3_debugmodel, "deepseek_v3": deepseek_v3_debugmodel}


def small(model: str, folder: str, *, steps: int, **settings: Any) -> Trainer.Config:
    """One of torchtitan's debug configs with less data, on any device, in fp32.

    `settings` are fields of its `parallelism` or `training`.
    """
    config = MODELS[model]()
    assert config.model_spec is not None
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for _, _, parent, name in list(config.model_spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    config.dump_folder = folder
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = Batches.Config()
    config.metrics = Metrics.Config()
    config.training.steps = steps
    config.training.local_batch_size = 2
    config.training.seq_len = 32
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.validator.enable = False
    config.comm.trace_buf_size = 0
    config.debug.seed = 42
    config.debug.enable_structured_logging = False
    for name, value in settings.items():
        part: Any = next(part for part in (config.parallelism, config.training) if hasattr(part, name))
        setattr(part, name, value)
    return config


def train(config: Trainer.Config) -> Trainer:
    """What `torchtitan.train` does with a config; the trainer, to look at."""
    trainer = config.build()
    if not torch.cuda.is_available():
        for module in (module for model in trainer.model_parts for module in model.modules()):
            # torchtitan divides gradients itself, by `set_gradient_divide_factor(1)`. With that torch's FSDP2 reduces
            # by a product that gloo does not have; ours needs no help.
            if isinstance(module, FSDPModule) and not isinstance(module, fsdp2.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    trainer.train()
    return trainer
