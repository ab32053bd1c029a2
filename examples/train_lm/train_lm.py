"""Train a byte-level language model with fsdp2: the complete job, from the command line to a sample of its text.

    cd examples/train_lm
    torchrun --nproc_per_node=2 train_lm.py                                   # two CPU processes, about two minutes
    torchrun --nproc_per_node=8 train_lm.py --bf16                            # eight GPUs
    torchrun --nproc_per_node=8 train_lm.py --hsdp 2                          # two replicas, each sharded over four
    torchrun --nproc_per_node=4 train_lm.py --config configs/fsdp_tp.toml     # all of it from a file
    torchrun --nproc_per_node=4 train_lm.py --parallel tensor=2 compile=true  # or by keys
    torchrun --nproc_per_node=2 train_lm.py --resume                          # go on from the newest checkpoint
    torchrun --nproc_per_node=2 --max-restarts=3 train_lm.py --auto-resume    # go on by itself after a crash
    python train_lm.py                                                        # one process

The default text is the source code of Python's standard library; `--data PATH...` takes other files or folders. The
folder `--out` (runs/train_lm) receives metrics.jsonl, loss.png and checkpoints/. `--help` lists all options.

Ctrl-C (SIGINT), SIGTERM or SIGUSR1 ends the job after the current step with a checkpoint and exit status 0; with
`--auto-resume` 75, which has a launcher start it again. (torchrun, itself interrupted too, adds its own SignalException
report and exits with 1.) launch/ has recipes for more than one machine. A mistake in the options, the data or the
checkpoint is one message from rank 0 and exit status 2 from every rank.

Reading order: this file, building.py (the sharding), model.py, data.py, checkpoint.py. The rest serves them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import NoReturn

import checkpoint
import torch
import torch.nn.functional as F
from building import build_model, build_optimizer, learning_rate, local_part
from data import Batch, BatchPlan, Corpus, load_corpus
from options import Options, parse_options
from planning import explain
from reporting import Report, measure
from run_folder import find_checkpoint, prepare_folder
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
from sampling import generate
from summary import describe, differences, fingerprint
from torch import Tensor, nn

from fsdp2 import FSDPModule
from fsdp2.optim import clip_grad_norm_
from fsdp2.parallel import build_meshes

PROMPT = b"def "


def main() -> NoReturn:
    stop = StopRequest()
    world = start_world()
    try:
        options = on_every_rank(lambda: parse_options(sys.argv[1:], world.size))
        device = on_every_rank(lambda: choose_device(options.device, world))
        corpus = on_every_rank(lambda: load_corpus(options.data, options.seq_len))
        saved = on_every_rank(lambda: find_checkpoint(options, asdict(options.model())))
        on_rank_zero(lambda: prepare_folder(options.out, saved))
    except UsageError as error:
        leave(world, error)
    if device.type == "cpu" and world.size > 1:
        torch.set_num_threads(1)  # the ranks share the cores
    try:
        steps_done = Job(options, world, device, corpus, saved).run(stop)
    except BaseException:
        crash()
    leave(world, again=options.auto_resume and steps_done < options.steps)


class Job:
    """One training run, as this rank sees it. All ranks call all methods alike."""

    def __init__(
        self, options: Options, world: World, device: torch.device, corpus: Corpus, saved: checkpoint.Saved | None
    ) -> None:
        self.options, self.world, self.device, self.corpus = options, world, device, corpus
        self.meshes = build_meshes(options.parallel, device.type)
        self.model = build_model(options, self.meshes, device)
        self.optimizer = build_optimizer(options, self.model)
        if saved is not None:
            checkpoint.load(saved, self.model, self.optimizer)
        self.first_step = saved.step if saved is not None else 0
        self.plan = BatchPlan(
            options.seq_len,
            options.batch_size,
            options.grad_accum,
            self.meshes.data_rank,  # ranks that share a sequence or a layer read the same batch
            self.meshes.data_ranks,
            options.seed,
        )
        self.report = Report(options.out, self.first_step, options.steps, active=world.leads)
        self.saver = checkpoint.Saver(options.out, saved, self.report, options.keep, world.leads)
        self.report.settings(describe(options, corpus, self.plan, self.model, self.meshes.root))
        if options.plan:
            self.report.note(on_rank_zero(lambda: explain(options, world.size, device)))
        self.fingerprint = fingerprint(options, corpus, self.plan)
        if saved is not None:
            self.report.note(f"going on from {saved.path}")
            changed = differences(saved.run, self.fingerprint)
            if changed:
                self.report.note(f"note: the result will differ from that of an uninterrupted run: {changed}")

    def run(self, stop: StopRequest) -> int:
        """Train to the end or to a stop request; leave a checkpoint, the loss curve and, at the end, a sample.

        Returns the number of steps done since the very start of the run.
        """
        options, report = self.options, self.report
        with report:
            if self.first_step == 0:
                self.validate(0)
            step = self.train(stop)
            if step == options.steps > self.first_step:
                self.validate(step)
            self.save(step)
            self.saver.finish()
        report.end(step, options.steps, self.saver.newest)
        wanted = options.sample_bytes if step == options.steps else 0
        if wanted and self.meshes.context is None:  # a text that grows has no equal parts
            report.sample(generate(self.model, PROMPT, wanted, options.seq_len, self.device, options.seed))
        return step

    def train(self, stop: StopRequest) -> int:
        """The loop; returns the number of steps done since the very start of the run."""
        options = self.options
        losses: list[Tensor] = []
        since = time.perf_counter()
        for step in range(self.first_step + 1, options.steps + 1):
            if stop.agreed():
                return step - 1
            lr = learning_rate(step, options)
            loss, norm = self.train_step(self.plan.train(self.corpus.train, step, self.device), lr)
            losses.append(loss)
            self.report.advance(step)
            last = step == options.steps
            if step % options.log_every == 0 or last:
                self.report.train(step, measure(losses, norm, lr, self.plan.tokens_per_step, since, self.device))
                losses, since = [], time.perf_counter()
            paused = time.perf_counter()
            if options.eval_every and step % options.eval_every == 0 and not last:
                self.validate(step)
            if options.save_every and step % options.save_every == 0 and not last:
                self.save(step)
            since += time.perf_counter() - paused  # tokens per second count training alone
        return options.steps

    def train_step(self, microbatches: Iterable[Batch], lr: float) -> tuple[Tensor, Tensor]:
        """One optimizer step; returns this rank's mean loss and the norm of the whole gradient, both left on device."""
        assert isinstance(self.model, FSDPModule)  # fully_shard has made it one
        self.model.train()
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(microbatches, start=1):
            # Up to the last microbatch, gradients add up unsharded on each rank without communication.
            self.model.set_requires_gradient_sync(number == self.options.grad_accum)
            loss = self.loss(batch) / self.options.grad_accum
            loss.backward()
            total += loss.detach()
        # torch's own takes the parameters of one mesh; tensor parallelism makes a second one.
        clip = nn.utils.clip_grad_norm_ if self.meshes.tensor is None else clip_grad_norm_
        norm = clip(self.model.parameters(), self.options.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm

    def loss(self, batch: Batch) -> Tensor:
        """The mean over this rank's tokens; all ranks have equally many."""
        inputs, targets, positions = local_part(batch, self.meshes)
        return F.cross_entropy(self.model(inputs, positions).flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def validate(self, step: int) -> None:
        self.model.eval()
        batches = self.plan.valid(self.corpus.valid, self.options.eval_batches, self.device)
        losses = torch.stack([self.loss(batch) for batch in batches])
        self.report.valid(step, mean_over_ranks(losses.mean()))

    def save(self, step: int) -> None:
        about = {"step": step, "model": asdict(self.options.model()), "run": self.fingerprint}
        self.saver.save(self.model, self.optimizer, about)


if __name__ == "__main__":
    main()
