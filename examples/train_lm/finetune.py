"""Fine-tune a model that lies in a Hugging Face folder, and leave a folder that `transformers` loads.

    cd examples/train_lm
    torchrun --nproc_per_node=2 finetune.py                       # LoRA on a tiny model made here
    torchrun --nproc_per_node=8 finetune.py --model models/Llama-3.1-8B --data texts/ --bf16
    torchrun --nproc_per_node=8 finetune.py --model ... --train 'lm_head.*' 'model.layers.31.*'
    torchrun --nproc_per_node=2 finetune.py --save adapter        # only the LoRA matrices, for peft
    torchrun --nproc_per_node=2 finetune.py --resume --steps 100  # go on from the newest checkpoint

`--model` is a folder with config.json, safetensors files and a tokenizer. Each rank reads from the files the rows that
its shards need, and nothing else; nobody ever holds the whole model. `--out` receives such a folder, model/, and what
`train_lm.py` leaves: metrics.jsonl, loss.png, and checkpoints/ (of what is trained). Ctrl-C ends the run with one.

Reading order: `build` (meta device, LoRA, sharding, loading), `Job`, `save`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

import checkpoint as checkpoints
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers  # its names are taken where they are used: each of them takes seconds to import
from data import Batch, BatchPlan, load_corpus
from lora import add_lora, lora_layers
from numpy.typing import NDArray
from reporting import Report, measure
from run_folder import find_checkpoint, prepare_folder, set_aside
from runtime import (
    StopRequest,
    UsageError,
    World,
    choose_device,
    crash,
    leave,
    mean_over_ranks,
    on_every_rank,
    on_rank_zero,
    start_world,
)
from safetensors.torch import save_file
from summary import differences
from tiny_model import make_tiny_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPModule, MixedPrecisionPolicy, ZeroPolicy, auto_shard, checkpoint, transformer_blocks
from fsdp2.init import materialize

COPIED = ("*.json", "*.jinja", "*.model", "*.txt")  # of the model's folder: configuration, tokenizer
NOT_COPIED = ("*.index.json", "checkpoint.json")  # these speak of the weights
RESULT = "model"  # in --out
KEEPS: dict[str, Any] = {"device": True, "host": "host"}  # as ZeroPolicy calls it
LOG_EVERY = 10


@dataclass(frozen=True)
class Options:
    """The parsed command line; the fields are named as the options are."""

    model: Path | None
    data: list[Path]
    out: Path
    resume: Path | None
    auto_resume: bool
    lora: int
    lora_alpha: float
    lora_targets: list[str]
    train: list[str]
    save: str
    steps: int
    save_every: int
    batch_size: int
    seq_len: int
    lr: float
    bf16: bool
    keep_frozen: str
    seed: int
    device: str
    check: bool


def parse_options(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="finetune.py",
        description="Fine-tune a Hugging Face folder, sharded over the ranks of a torchrun job.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    add = parser.add_argument
    add("--model", type=Path, help="folder with config.json, *.safetensors and tokenizer; none: a tiny one is made")
    add("--data", type=Path, nargs="+", default=[Path(asyncio.__file__).parent], help="files or folders of text")
    add("--out", type=Path, default=Path("runs/finetuned"), help="folder for the result, metrics, checkpoints")
    again = parser.add_mutually_exclusive_group().add_argument
    again("--resume", type=Path, nargs="?", const=True, help="go on from PATH's newest checkpoint; no PATH: from --out")
    again("--auto-resume", action="store_true", help="go on from --out's newest checkpoint if it has one, else start")
    add("--lora", type=int, default=8, metavar="RANK", help="rank of the LoRA matrices")
    add("--lora-alpha", type=float, default=16.0, help="their weight, times the rank")
    add("--lora-targets", nargs="+", default=["q_proj", "v_proj"], help="last names of the layers that get them")
    add("--train", nargs="+", default=[], metavar="PATTERN", help="train these parameters themselves, without LoRA")
    add("--save", choices=("merged", "adapter"), default="merged", help="whole model, or the LoRA matrices for peft")
    add("--steps", type=int, default=50, help="optimizer steps in all, those before a resume included")
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0: at the end alone")
    add("--batch-size", type=int, default=8, help="sequences per rank")
    add("--seq-len", type=int, default=128, help="tokens per sequence")
    add("--lr", type=float, default=1e-2, help="learning rate, constant")
    add("--bf16", action="store_true", help="compute in bfloat16; what is trained stays float32")
    add("--keep-frozen", choices=("no", "device", "host"), default="no", help="where gathered frozen weights stay")
    add("--seed", type=int, default=0, help="decides the first LoRA matrices and the batches")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU if there is one")
    add("--check", action="store_true", help="load the result with transformers and compare its logits")
    try:
        values = parser.parse_args(arguments)
        values.resume = values.out if values.resume is True else values.resume
        options = Options(**vars(values))
    except (argparse.ArgumentError, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == 0:  # --help
            raise
        raise UsageError(f"{error} (see --help)") from error
    if options.train and options.save == "adapter":
        raise UsageError("--save adapter needs LoRA matrices, and --train makes none: leave one of the two out")
    return options


def main() -> NoReturn:
    stop = StopRequest()
    world = start_world()
    try:
        options = on_every_rank(lambda: parse_options(sys.argv[1:]))
        device = on_every_rank(lambda: choose_device(options.device, world))
        saved = on_every_rank(lambda: find_checkpoint(options, adapted(options)))
        base = on_rank_zero(lambda: prepare_folders(options, saved))
        say(world, "reading the text (this loads transformers, which takes a while) ...")
        train_tokens, valid_tokens = on_every_rank(lambda: load_tokens(options, base))
        say(world, f"building the model and reading its weights from {base} ...")
        model = on_every_rank(lambda: build(options, base, world, device))
    except UsageError as error:
        leave(world, error)
    try:
        job = Job(options, world, device, model, train_tokens, saved)
        valid = list(job.plan.valid(valid_tokens, 2, device))
        steps_done = job.run(stop, valid)
        if steps_done == options.steps:
            save(options, model, base, world)
            if options.check and options.save == "merged":
                check(options, model, valid[0][0], world)
    except BaseException:
        crash()
    leave(world, again=options.auto_resume and steps_done < options.steps)


def say(world: World, text: str) -> None:
    if world.leads:
        print(text, flush=True)


def adapted(options: Options) -> dict[str, Any]:
    """What decides the names and the meaning of what is trained; a checkpoint of other settings is of no use."""
    return {name: getattr(options, name) for name in ("lora", "lora_alpha", "lora_targets", "train")}


def prepare_folders(options: Options, saved: checkpoints.Saved | None) -> Path:
    """Make room in `--out`; returns the folder of the base model. On rank 0 alone."""
    if options.model is not None and not (options.model / "config.json").is_file():
        raise UsageError(f"--model {options.model} has no config.json: it is no folder in Hugging Face's layout")
    result = (options.out / RESULT).resolve()
    if options.model is not None and result in (options.model.resolve(), *options.model.resolve().parents):
        raise UsageError(f"--model {options.model} is where the result goes: choose another --out")
    prepare_folder(options.out, saved, results=[RESULT])
    if options.model is not None:
        return options.model
    base = options.out / "base"
    print(f"no --model: making a tiny Llama in {base} ...", flush=True)
    make_tiny_model(base)
    return base


def load_tokens(options: Options, base: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Training and validation text, as the tokenizer of the base model sees it."""
    corpus = load_corpus(options.data, options.seq_len)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    sides = [side.tobytes().decode("utf-8", "replace") for side in (corpus.train, corpus.valid)]
    train, valid = (np.array(tokenizer(side, add_special_tokens=False, verbose=False)["input_ids"]) for side in sides)
    for name, tokens in (("training", train), ("validation", valid)):
        if len(tokens) <= options.seq_len:
            raise UsageError(f"the {name} text has {len(tokens)} tokens, and one sequence needs {options.seq_len + 1}")
    return train, valid


def build(options: Options, base: Path, world: World, device: torch.device) -> FSDPModule:
    """The sharded model with the weights of the folder, all but a few of them frozen. Collective."""
    config = transformers.AutoConfig.from_pretrained(base)
    config.use_cache = False
    with torch.device("meta"):  # no memory yet
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if not options.train:
            add_lora(model, options.lora_targets, options.lora, options.lora_alpha)
    freeze(model, options.train or ["*.lora_a", "*.lora_b"])

    policy = MixedPrecisionPolicy()
    if options.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (world.size,), mesh_dim_names=("shard",))
    zero = None if options.keep_frozen == "no" else ZeroPolicy(keep_frozen=KEEPS[options.keep_frozen])
    auto_shard(model, transformer_blocks(), mesh=mesh, mp_policy=policy, zero=zero)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "still on the meta device": `materialize` follows
        loaded = checkpoint.load(base, model=model, strict=False, cast=True)
    missing = [name for name in loaded.missing if ".lora_" not in name]
    if missing or loaded.unexpected:
        raise UsageError(f"{base} does not fit its config.json: missing {missing}, unexpected {loaded.unexpected}")
    materialize(model, init_missing, seed=options.seed)
    return model


def init_missing(model: Any) -> None:
    """Values of what is in no file: the LoRA matrices, and buffers (by transformers' own initialisation)."""
    for _, layer in lora_layers(model):
        layer.reset_lora()
    saved = model.state_dict().keys()
    for prefix, module in model.named_modules():
        if any(f"{prefix}.{name}".lstrip(".") not in saved for name, _ in module.named_buffers(recurse=False)):
            model._init_weights(module)


def freeze(model: nn.Module, trained: Sequence[str]) -> None:
    """Leave only the parameters whose names match a pattern to be trained. Before sharding."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatch(name, pattern) for pattern in trained))
    unused = [pattern for pattern in trained if not any(fnmatch(name, pattern) for name, _ in model.named_parameters())]
    if unused and len(unused) == len(trained):
        some = ", ".join(name for name, _ in list(model.named_parameters())[:3])
        raise UsageError(f"--train {' '.join(unused)} matches no parameter; they are called {some}, ...")


class Job:
    """The training, as this rank sees it. Frozen parameters have no gradient, hence no reduction and no optimizer
    state; nor are they in checkpoints, as the folder of the base model has them."""

    def __init__(
        self,
        options: Options,
        world: World,
        device: torch.device,
        model: FSDPModule,
        tokens: NDArray[Any],
        saved: checkpoints.Saved | None,
    ) -> None:
        self.options, self.world, self.device, self.model, self.tokens = options, world, device, model, tokens
        self.plan = BatchPlan(options.seq_len, options.batch_size, 1, world.rank, world.size, options.seed)
        self.trained = nn.Module()  # a module of what is trained, by its name: checkpoints are of this one
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.trained.register_parameter(name.replace(".", "/"), parameter)
        self.optimizer = torch.optim.AdamW(self.trained.parameters(), lr=options.lr, weight_decay=0.0, fused=True)
        self.first_step = saved.step if saved is not None else 0
        if saved is not None:
            checkpoints.load(saved, self.trained, self.optimizer)
        names = ("batch_size", "seq_len", "lr", "bf16", "seed")
        self.settings = {**{name: getattr(options, name) for name in names}, "world_size": world.size}
        self.report = Report(options.out, self.first_step, options.steps, active=world.leads, unit="token")
        self.saver = checkpoints.Saver(options.out, saved, self.report, keep=0, leads=world.leads)
        trained, total = (sum(p.numel() for p in of.parameters()) for of in (self.trained, model))
        self.report.note(f"training {trained:,} of {total:,} parameters on {world.size} rank(s)")
        if saved is not None:
            changed = differences(saved.run, self.settings)
            self.report.note(f"going on from {saved.path}" + (f"; note: {changed}" if changed else ""))

    def run(self, stop: StopRequest, valid: list[Batch]) -> int:
        """Train to the end or to a stop request; returns the number of steps done since the very start of the run."""
        with self.report:
            if self.first_step == 0:
                self.report.valid(0, validate(self.model, valid))
            step = self.train(stop)
            if step == self.options.steps:
                self.report.valid(step, validate(self.model, valid))
            self.save(step)
            self.saver.finish()
        self.report.end(step, self.options.steps, self.saver.newest)
        return step

    def train(self, stop: StopRequest) -> int:
        options = self.options
        self.model.reshard()  # `validate` left the root's parameters gathered; optimizers want the shards
        self.model.train()
        losses: list[Tensor] = []
        since = time.perf_counter()
        for step in range(self.first_step + 1, options.steps + 1):
            if stop.agreed():
                return step - 1
            for batch in self.plan.train(self.tokens, step, self.device):
                loss = cross_entropy(self.model, batch)
                loss.backward()
                losses.append(loss.detach())
            norm = nn.utils.clip_grad_norm_(self.trained.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.report.advance(step)
            if step % LOG_EVERY == 0 or step == options.steps:
                of_step = measure(losses, norm, options.lr, self.plan.tokens_per_step, since, self.device)
                self.report.train(step, of_step)
                losses, since = [], time.perf_counter()
            if options.save_every and step % options.save_every == 0:
                self.save(step)
        return options.steps

    def save(self, step: int) -> None:
        about = {"step": step, "model": adapted(self.options), "run": self.settings}
        self.saver.save(self.trained, self.optimizer, about)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def validate(model: nn.Module, batches: list[Batch]) -> float:
    model.eval()
    return mean_over_ranks(torch.stack([cross_entropy(model, batch) for batch in batches]).mean())


def save(options: Options, model: FSDPModule, base: Path, world: World) -> None:
    """What was trained, as a folder for others. Collective."""
    result = options.out / RESULT
    if options.save == "adapter":
        save_adapter(options, model, base, world)
    else:
        model.reshard()
        merged = {f"{name}.weight": layer.merged_weight() for name, layer in lora_layers(model)}
        state = {
            name: merged.get(name, parameter.detach())
            for name, parameter in model.named_parameters()
            if not name.endswith((".lora_a", ".lora_b"))
        }
        # All ranks write their rows of whole tensors into model.safetensors; nothing is gathered.
        if world.leads and result.exists():  # of the run before its resume; more than a checkpoint is in it
            set_aside(options.out, [result])
        dist.barrier()
        checkpoint.save(result, model=state, consolidated=True)
    if world.leads:
        for pattern in COPIED:
            for path in base.glob(pattern):
                if not any(fnmatch(path.name, other) for other in NOT_COPIED):
                    shutil.copy(path, result)
    dist.barrier()  # nobody reads the folder before it is complete
    say(world, f"saved {result}")


def save_adapter(options: Options, model: nn.Module, base: Path, world: World) -> None:
    """The LoRA matrices alone, in peft's format. They are small: each is gathered. Collective."""
    tensors: dict[str, Tensor] = {}
    for name, layer in lora_layers(model):
        for ours, theirs in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            matrix = getattr(layer, ours).detach()
            whole = matrix.full_tensor() if isinstance(matrix, DTensor) else matrix
            tensors[f"base_model.model.{name}.{theirs}.weight"] = whole.contiguous().cpu()
    if world.leads:
        (options.out / RESULT).mkdir(exist_ok=True)
        save_file(tensors, options.out / RESULT / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(base.resolve()),
            "r": options.lora,
            "lora_alpha": options.lora_alpha,
            "target_modules": options.lora_targets,
        }
        (options.out / RESULT / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def check(options: Options, model: nn.Module, tokens: Tensor, world: World) -> None:
    """Compare the logits of the saved folder, as transformers loads it, to those of the sharded model. Collective."""
    whole = (
        transformers.AutoModelForCausalLM.from_pretrained(options.out / RESULT, dtype=torch.float32)
        .to(tokens.device)
        .eval()
    )
    ours, theirs = model(input_ids=tokens).logits.float(), whole(input_ids=tokens).logits
    difference = mean_over_ranks((ours - theirs).abs().max())
    say(world, f"checked: logits of {options.out / RESULT} differ by {difference:.1e}")
    allowed = 0.1 if options.bf16 else 1e-4
    if difference > allowed:
        raise RuntimeError(f"{options.out}: logits differ by {difference}, more than {allowed}: {asdict(options)}")


if __name__ == "__main__":
    main()
