"""Runs a program on torch's FSDP2, on fsdp2 and in one process, in lock-step, on every rank; stops at a difference."""

import copy
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from tests.helpers.meshes import shared_mesh
from tests.instruments.differential import models, models_between
from tests.instruments.differential.compare import (
    Observation,
    Seen,
    compare,
    compare_with_whole,
    forms_differ,
    is_coarse,
    is_sharded,
    left_unreduced,
    zeros_for_none,
)
from tests.instruments.differential.judge import (
    GOES_ON,
    fills_zeros,
    fsdp2_refuses,
    may_refuse,
    needs_shards,
    tolerates_form,
    tolerates_type,
    torch_cannot,
    torch_gives_up,
    torch_is_lost,
    why_left,
)
from tests.instruments.differential.known import EVALUATED, Situation, asks_by_name, is_evaluation
from tests.instruments.differential.one_process import WRITE_GRADIENTS, OneProcess
from tests.instruments.differential.program import Action, Program

__all__ = ["Result", "run_program"]

USE_PARAMETERS = {
    *("clip", "step", "scaler", "zero_grad", "load_state_dict", "edit", "data", "average", "optimizer", "late"),
}


@dataclass
class Result:
    """How a run ended. kind: "same", or what differed: "exception", "loss", "param", "grad", "flag", "rng", "buffer",
    "form"; `hang` and `died` are the runner's."""

    kind: str
    text: str = ""
    at: int = -1  # the action
    ended: str = ""  # why the run ended before the last action, without a difference
    ran: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)  # known differences that were met
    seconds: float = 0.0


def mesh_of(program: Program) -> DeviceMesh:
    return shared_mesh(program.mesh, program.axes)


def run_program(rank: int, world_size: int, text: str, progress: str = "", without_torch: str = "") -> Result:
    """The body that runs on every rank; `without_torch` is a reason to leave torch out."""
    program = Program.from_json(text)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = _Run(program, rank, progress, without_torch).run()
    result.seconds = time.perf_counter() - start
    return result


class _Side:
    """One implementation and the namespace in which its lines run."""

    def __init__(self, name: str, namespace: dict[str, Any]) -> None:
        self.name = name
        self.namespace = namespace
        self.rng = torch.get_rng_state()
        self.warned = False  # of gradients that do not come

    def execute(self, code: str) -> Exception | None:
        torch.set_rng_state(self.rng)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                exec(code, self.namespace)
        except Exception as error:
            return error
        finally:
            self.warned |= any(map(_is_of_silence, caught))
            self.rng = torch.get_rng_state()
        return None


class _Held:
    """Whether parameters are unsharded because the program asked for it, or because a backward is to come.

    A forward that no backward can follow leaves no parameter unsharded that was not so before.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.now = False
        self._keeps = any(word in program.options() for word in ("reshard_after_forward=False", "ZeroPolicy"))

    def loses(self, action: Action, waiting: bool) -> bool:
        """Whether an action of one process is another one with parameters that are unsharded."""
        if not self.now:
            return action.kind == "average" and self._keeps  # those of the average may be
        if action.kind in ("step", "scaler") and "reshard_after_forward=2" in self.program.options():
            return True  # what the module holds then is compared, and the next forward makes it new
        if action.kind == "zero_grad" and "optimizer" not in action.code:
            return waiting or any(model.options is None for model in self.program.models)
        return needs_shards(action)

    def after(self, action: Action, has_unsharded: bool) -> None:
        if action.kind.startswith("set_reshard_after_") or action.kind == "set_is_last_backward":
            self._keeps |= not action.value
        if not has_unsharded:
            self.now = False
        elif is_evaluation(action):
            self.now |= self._keeps
        elif action.makes is not None or action.kind in ("backward", "unshard", "wait"):
            self.now = True


def _is_of_silence(warning: warnings.WarningMessage) -> bool:
    """Of gradients that do not come, or values that do not change."""
    return "Call loss.backward()" in str(warning.message) or ".data was assigned" in str(warning.message)


class _Run:
    def __init__(self, program: Program, rank: int, progress: str, without_torch: str) -> None:
        self.program, self.rank = program, rank
        self.mesh = mesh_of(program)
        tp = self.mesh["tp"].size() if program.has_tp else 1
        self.data_rank, self.data_ranks = rank // tp, program.world_size // tp
        self.progress = os.open(f"{progress}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if progress else -1
        self.without_torch = without_torch
        self.ran: list[str] = []
        self.used: list[str] = []  # known differences that were met
        self.held = _Held(program)
        self.assigned = self.unheard = False  # `.data`; gradients by name, without a warning

    def run(self) -> Result:
        try:
            result = self._run()
            result.used = self.used
            return result
        finally:
            if self.progress >= 0:
                os.close(self.progress)

    def _note(self, at: int, side: str) -> None:
        if self.progress >= 0:
            os.pwrite(self.progress, f"action {at:3d} on {side:11s}".encode(), 0)

    def _run(self) -> Result:
        program = self.program
        torch.manual_seed(program.seed)
        ours = _Side("fsdp2", self._namespace(fsdp2.fully_shard))
        theirs: _Side | None = _Side("torch", self._namespace(torch.distributed.fsdp.fully_shard))
        plain = OneProcess(program, self.data_ranks, lambda rank: self._namespace(lambda module, **_: module, rank))
        errors = {}
        for name, run in (("one process", None), ("torch", theirs), ("fsdp2", ours)):
            self._note(-1, name)
            errors[name] = self._build(plain.namespaces[0] if run is None else run.namespace, run is not None)
        plain.sharded()
        assert errors["one process"] is None, errors
        for side in (ours, theirs, plain):
            assert side is not None
            side.rng = torch.Generator().manual_seed(program.seed).get_state()
        for namespace in plain.namespaces[1:]:
            namespace.update({k: v for k, v in plain.namespaces[0].items() if k not in namespace})
            for model in program.models:
                namespace[model.name] = plain.namespaces[0][model.name]
        if program.before and isinstance(errors["fsdp2"], fsdp2.FSDPError):
            return Result("same", ended=f"fully_shard refuses hooks: {errors['fsdp2']!r}")
        reason = self.without_torch or torch_cannot(program)
        if is_coarse(program) and "Embed" in program.kinds():
            plain.lost = True  # which row is looked up hangs on signs, and these on rounding
        if reason:
            theirs = None
            self.used.append(reason)
        elif type(errors["torch"]) is not type(errors["fsdp2"]):
            text = f"fully_shard: torch {errors['torch']!r}, fsdp2 {errors['fsdp2']!r}"
            return Result("exception", text, ran=self.ran)
        if errors["fsdp2"] is not None:
            return Result("same", ended=f"fully_shard: {errors['fsdp2']!r}")
        return self._actions(ours, theirs, plain)

    def _actions(self, ours: _Side, theirs: _Side | None, plain: OneProcess) -> Result:
        for at, action in enumerate(self.program.actions):
            if not all(slot in ours.namespace["loss"] for slot in action.needs):
                continue
            if ".data.mul_" in action.code and self._has_unsharded(ours):
                continue  # documented as not seen
            waiting = plain.unsure or bool(plain.waiting or plain.partial)
            situation = Situation(waiting, self._has_unsharded(ours) or self._has_unsharded(theirs or ours))
            if self.held.loses(action, waiting):
                plain.lost = True  # the optimizer's parameters are not those that the model has now
            if theirs is not None and action.kind in USE_PARAMETERS:
                apart = forms_differ(self._observe(ours), self._observe(theirs), self.program)
                if self._any(apart):  # only one of them will compute with what the unsharded ones were
                    if not any(is_evaluation(each) for each in self.program.actions[:at]):
                        return self._ended(at, "parameters change while one side has unsharded ones")
                    theirs = None
                    self.used.append(EVALUATED)
            if plain.late and action.kind in ("clip", "step", "scaler", "zero_grad", "hand", "forget"):
                return self._ended(at, "gradients are used while they are held back")
            if plain.unsure and action.kind in ("clip", "step", "scaler"):
                plain.lost = True  # gradients that one process does not have change parameters
            if "autograd.grad" in action.code and self.program.kinds() & WRITE_GRADIENTS:
                plain.lost = True  # these write gradients of weights, of which one process keeps no account here
            errors: list[Exception | None] = [None, None, None]
            self._note(at, "one process")
            errors[2] = plain.execute(action)
            if theirs is not None:
                self._note(at, "torch")
                errors[1] = theirs.execute(action.code)
            self._note(at, "fsdp2")
            errors[0] = ours.execute(action.code)
            self._note(at, "compare")
            self.held.after(action, self._has_unsharded(ours))
            situation = replace(situation, only_partials=plain.only_partials)
            self.ran.append(action.kind)
            known = torch_gives_up(self.program, errors[1], errors[0], errors[2])
            if not known and (errors[0] is None or type(errors[0]) is not type(errors[1])):
                known = torch_is_lost(self.program, action, situation)
            if not known and theirs is not None and action.kind == "backward" and (plain.lost or not plain.waiting):
                left = left_unreduced(self._observe(ours), self._observe(theirs), self.program)
                known = why_left(self.program) if self._any(left) else ""
            if not known and theirs is not None and fills_zeros(self.program):
                some_zero = zeros_for_none(self._observe(ours), self._observe(theirs))
                known = "`set_reduce_scatter_unused_params`, a unit that has never run" if self._any(some_zero) else ""
            if known and theirs is not None:
                self.used.append(known)
                if known in GOES_ON and action.makes is not None and errors[0] is None:
                    theirs.namespace["loss"][action.makes] = ours.namespace["loss"][action.makes]
                    theirs.rng, errors[1] = ours.rng, None
                else:
                    theirs = None
            if refused := fsdp2_refuses(errors[0], errors[1]) or may_refuse(self.program, at, errors[0]):
                self.used.append(refused)
                return self._ended(at, refused)
            self.assigned |= action.kind == "data"
            self.unheard = asks_by_name(action) or (self.unheard and action.kind != "step")
            asked = self.assigned or any(map(asks_by_name, self.program.actions[: at + 1]))
            if asked and self._any(ours.warned):
                return self._ended(at, "warned: gradients asked for by name, or assigned data")
            if self.unheard:
                continue
            if ended := self._cannot_tell(errors, theirs is None, plain):
                return self._ended(at, ended)
            difference = self._compare(at, action, errors, ours, theirs, plain)
            if self._any(difference is not None):
                return difference or Result("elsewhere", ran=self.ran)
            error = errors[0]
            if error is not None and not isinstance(error, models.Boom) and not action.kind.startswith("set_"):
                where = "torch and fsdp2" if theirs is not None else "fsdp2"
                return self._ended(at, f"{action.kind}: {where}: {type(error).__name__}: {error}"[:300])
        return Result("same", ran=self.ran)

    def _ended(self, at: int, why: str) -> Result:
        return Result("same", at=at, ran=self.ran, ended=why)

    def _cannot_tell(self, errors: list[Exception | None], alone: bool, plain: OneProcess) -> str:
        """Why nothing can be said of an action, for which one process is the only reference; empty if something can."""
        error, of_torch, of_plain = errors
        ours, whole, coarse = str(error), str(of_plain), is_coarse(self.program)
        blind = error is not None and (of_plain is None or isinstance(of_plain, models.Boom))
        one_dtype = "one process computes in one dtype"
        if coarse and blind and "support deepcopy" in str(of_torch):
            return one_dtype
        reasons = {
            # What is recomputed without autocast is in other dtypes.
            one_dtype: coarse and (blind or (error is None and "must have the same dtype" in whole)),
            "tensor parallelism has no transforms of torch.func": self.program.has_tp and "setup_context" in ours,
            "backward reads what it was told not to unshard": "storage of size 0" in ours
            and not _unshards(self.program),
            "one process checkpoints what was frozen since": "different number of tensors" in whole,
            "nothing to compare with: one process does not know": plain.lost,
            "one process cannot: a step between forward and backward": "inplace operation" in whole,
            "one process has no root": isinstance(error, fsdp2.OrderError) and "became a root" in ours,
        }
        return next((why for why, holds in reasons.items() if holds), "") if alone else ""

    def _compare(
        self,
        at: int,
        action: Action,
        errors: list[Exception | None],
        ours: _Side,
        theirs: _Side | None,
        plain: OneProcess,
    ) -> Result | None:
        error, of_torch, of_plain = errors
        if theirs is not None:
            if not tolerates_type(self.program, action, error, of_torch):
                text = f"torch: {of_torch!r}\nfsdp2: {error!r}\none process: {of_plain!r}"
                return Result("exception", text[:1500], at, ran=self.ran)
        elif type(error) is not type(of_plain):
            return Result("exception", f"fsdp2: {error!r}\none process: {of_plain!r}"[:1500], at, ran=self.ran)
        if error is not None and theirs is not None and not isinstance(error, models.Boom):
            return None  # the run ends here, where these happened
        seen = self._observe(ours)
        if self.assigned:
            seen.params.clear()  # until a forward says so; what it computes is compared
        found: Seen | None = None
        late = {model.name for model in self.program.models} if plain.failed else plain.late
        if theirs is not None:
            found = compare(seen, self._observe(theirs), self.program, late, tolerates_form(self.program, action))
        against = compare_with_whole(seen, plain, self.data_rank, self.program)
        if found is None and (theirs is not None or against is None):
            return None
        kind, text = found or against  # type: ignore[misc]
        if theirs is not None:
            other = compare_with_whole(self._observe(theirs), plain, self.data_rank, self.program)
            verdict = {
                (True, False): "fsdp2 agrees with one process",
                (False, True): "torch agrees with one process",
                (True, True): "one process agrees with both, or says nothing",
                (False, False): "one process agrees with neither",
            }[against is None, other is None]
            text += f"\n{verdict}"
        return Result(kind, text, at, ran=self.ran)

    def _any(self, value: bool) -> bool:
        flag = torch.tensor(int(value))
        dist.all_reduce(flag)
        return bool(flag)

    # --- building and looking -----------------------------------------------------------------------------------------

    def _namespace(self, fully_shard: Any, rank: int | None = None) -> dict[str, Any]:
        rank = self.data_rank if rank is None else rank
        every = {**vars(models), **vars(models_between)}
        names = {name: value for name, value in every.items() if not name.startswith("_")}
        names.update(
            torch=torch,
            nn=nn,
            copy=copy,
            fully_shard=fully_shard,
            MixedPrecisionPolicy=torch.distributed.fsdp.MixedPrecisionPolicy,
            Shard=Shard,
            parallelize_module=parallelize_module,
            ColwiseParallel=ColwiseParallel,
            RowwiseParallel=RowwiseParallel,
            whole=lambda t: t.full_tensor() if isinstance(t, DTensor) else t,
            mesh=None if len(self.program.axes) == 1 else self._data_mesh(),
            tp=self.mesh["tp"] if self.program.has_tp else None,
            rank=rank,
            x=lambda index: models.batch(index, rank),
            loss={},
            saved={},
            handles={},
            CPUOffloadPolicy=torch.distributed.fsdp.CPUOffloadPolicy,
            Fsdp2Policy=fsdp2.MixedPrecisionPolicy,
            ZeroPolicy=fsdp2.ZeroPolicy,
            local_optimizer=lambda kind, params, **options: kind(params, **options),
            clip_grad_norm_=torch.nn.utils.clip_grad_norm_,
            step_in_backward=lambda optimizer: None,
        )
        if fully_shard is fsdp2.fully_shard:
            own = ("local_optimizer", "clip_grad_norm_", "step_in_backward")
            names.update({name: getattr(fsdp2, name) for name in own})
        return names

    def _data_mesh(self) -> DeviceMesh:
        axes = tuple(axis for axis in self.program.axes if axis != "tp")
        return self.mesh[axes] if len(axes) < len(self.program.axes) else self.mesh

    def _build(self, namespace: dict[str, Any], is_sharded: bool) -> Exception | None:
        torch.manual_seed(self.program.seed)
        try:
            for line in build_lines(self.program, is_sharded):
                exec(line, namespace)
        except Exception as error:
            return error
        return None

    def _has_unsharded(self, side: _Side) -> bool:
        return any(not is_sharded(p, self.program) for p in self._observe(side).params.values())

    def _observe(self, side: _Side) -> Observation:
        params, buffers, flags = {}, {}, {}
        for model in self.program.models:
            module = side.namespace[model.name]
            for name, param in module.named_parameters():
                params[f"{model.name}.{name}"] = param
            for name, buffer in module.named_buffers():
                buffers[f"{model.name}.{name}"] = buffer
            flags[model.name] = module.training
        values = {f"loss[{slot}]": value.detach() for slot, value in side.namespace["loss"].items()}
        if "norm" in side.namespace:
            values["norm"] = side.namespace["norm"]
        return Observation(params, buffers, values, flags, side.rng)


def _unshards(program: Program) -> bool:
    """Whether all units may unshard in backward."""
    return not any(action.kind == "set_unshard_in_backward" and not action.value for action in program.actions)


def build_lines(program: Program, is_sharded: bool = True) -> Iterator[str]:
    """What comes before the actions."""
    for model in program.models:
        yield model.source()
        if is_sharded:
            if program.has_tp:
                yield from _tp_lines(model)
            yield from (each.code for each in program.before if each.on.startswith(model.name))
            for unit in model.units():
                yield unit.source() if len(program.axes) == 1 else unit.source()[:-1] + ", mesh=mesh)"
    yield program.optimizer


def _tp_lines(model: Any) -> Iterator[str]:
    for path, node in model.nodes():
        if node.kind == "Mlp":
            yield f'parallelize_module({path}, tp, {{"up": ColwiseParallel(), "down": RowwiseParallel()}})'
