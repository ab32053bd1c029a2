"""The whole batch in one process, without sharding: the reference that says who is right.

Lines that compute run once for each rank's rows; what the ranks' gradients come to is kept in an account of its own,
by the documented meaning of the setters: a gradient waits unreduced, waits for the all-reduce, or has arrived.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.instruments.differential.models import Boom
from tests.instruments.differential.models_between import Kept
from tests.instruments.differential.program import Action, Program

__all__ = ["OneProcess"]

HOOKS = ("gradient hook", "accumulated hook")
WRITE_GRADIENTS = {"Tiled", "GradByHand"}  # their backward gives weights gradients, whatever it was asked for


class _Unit:
    """What one process has to know of a unit's settings."""

    def __init__(self, modules: list[nn.Module], root: str) -> None:
        self.modules = modules
        self.root = root
        self.sync = True
        self.all_reduce = True
        self.factor: float | None = None
        self.unused = False
        self.params: list[nn.Parameter] = []


class OneProcess:
    """The unsharded side of a run: `namespaces[rank]` is where the lines of that rank's rows run."""

    def __init__(self, program: Program, ranks: int, make: Callable[[int], dict[str, Any]]) -> None:
        self.program, self.ranks = program, ranks
        self.rng = torch.get_rng_state()
        first = make(0)
        self.namespaces = [first]
        for rank in range(1, ranks):
            own = {name: make(rank)[name] for name in ("x", "loss", "rank", "saved")}
            self.namespaces.append({**first, **own})
        # None: the account does not know, until gradients are zeroed.
        self.waiting: dict[nn.Parameter, Tensor] = {}
        self.partial: dict[nn.Parameter, Tensor] = {}
        self.unsure = False
        self.only_partials = False  # a unit's partial gradients were reduced in this action, and it got no new ones
        self.failed = False  # a backward failed, and gradients have not been zeroed since
        # A hook changes gradients in a way that one process does not know.
        self.lost = "Hooked" in program.kinds() or (
            "reentrant=True" in program.source()  # a backward for each checkpoint, and hooks in each
            and any(each.kind == "accumulated hook" for each in (*program.before, *program.actions))
        )
        self.late: set[str] = set()  # roots whose gradients the last backward will hand over
        # Of each rank: they differ, as batch statistics do.
        self.buffers: list[dict[tuple[nn.Module, str], Tensor]] = []
        self._is_last: dict[str, bool] = {}
        self._units: list[_Unit] = []
        self._made_by: dict[int, str] = {}  # the line that made the loss of a slot
        stages = re.findall(r"stage=(\d)", program.options())
        self._stage = int(stages[0]) if stages else None
        self._steps = False  # in backward
        self._hooks: dict[nn.Parameter, list[Action]] = {}

    def sharded(self) -> None:
        """The models are there: who owns which parameter."""
        owned: set[nn.Parameter] = set()
        for unit in self.program.units():
            modules = [eval(expression, self.namespaces[0]) for expression in unit.modules]
            roots = [root for model in self.program.models for root in model.roots()]
            new = _Unit(modules, next(root for root in roots if unit.modules[0].startswith(root)))
            for module in modules:
                new.params += [p for p in module.parameters() if p not in owned]
                owned.update(new.params)
            self._units.append(new)
        for hook in self.program.before:
            self._hook(hook)
        self._keep(0)
        self.buffers = [
            {key: b if b is None else b.clone() for key, b in self.buffers[0].items()} for _ in self.namespaces
        ]
        self._install(0)

    def execute(self, action: Action) -> Exception | None:
        torch.set_rng_state(self.rng)
        self.only_partials = False
        if self._goes_backward_within(action):
            self.unsure = True
            self.lost |= self._steps  # it may also step
        try:
            if action.kind.startswith("set_"):
                self._set(action)
            elif action.kind == "backward":
                self._backward(action)
            elif action.kind == "reset_iter_state":
                self.waiting.clear()
                self.partial.clear()
                self.unsure = True
            elif action.makes is not None:
                self._made_by[action.makes] = action.code
                self._each_rank(action.code)
                if "autograd.grad" in action.code and self.program.kinds() & WRITE_GRADIENTS:
                    self._hand_over(self._roots_in(action.code))
            elif action.kind in ("state_dict", "load_state_dict", "to", "average"):
                self._each_rank(action.code)
            elif action.kind in HOOKS:
                self._hook(action)
            elif action.kind not in ("unshard", "reshard", "wait"):
                exec(action.code, self.namespaces[0])
                self._steps |= action.kind == "step_in_backward"
                if action.kind == "zero_grad":
                    self.unsure = self.failed = False
        except Exception as error:
            if action.kind == "backward" or isinstance(error, Boom):
                self.unsure = self.failed = True
            return error
        finally:
            self.rng = torch.get_rng_state()
        return None

    def _goes_backward_within(self, action: Action) -> bool:
        """Whether a forward runs backwards of its own, which may reduce what waits, by the factor that holds then, or
        zeros for unused parameters."""
        waits = self.waiting or self.partial
        factors = any("divide_factor" in each.kind for each in self.program.actions)
        if not (waits and (factors or self._hooks or self._steps)) and not any(unit.unused for unit in self._units):
            return False
        words = ("autograd.grad", "torch.func", "part.backward")
        return any(word in action.code for word in words) or "Transforms" in self.program.kinds()

    def knows_gradients(self) -> bool:
        return not self.unsure and not self.waiting and not self.partial

    def _modules(self) -> list[nn.Module]:
        return [m for model in self.program.models for m in self.namespaces[0][model.name].modules()]

    def _keep(self, rank: int) -> None:
        kept = {(m, name): b for m in self._modules() for name, b in m.named_buffers(recurse=False)}
        kept.update({(m, "kept"): m.kept for m in self._modules() if isinstance(m, Kept)})
        if rank < len(self.buffers):
            self.buffers[rank] = kept
        else:
            self.buffers.append(kept)

    def _install(self, rank: int) -> None:
        for (module, name), buffer in self.buffers[rank].items():
            setattr(module, name, buffer)

    def _ranks(self) -> Iterator[dict[str, Any]]:
        """The namespace of each rank, with its buffers, the same random state, and the same blocks told to fail."""
        rng = torch.get_rng_state()
        fails = [(m, m.__dict__["fails"]) for m in self._modules() if m.__dict__.get("fails")]
        for rank, namespace in enumerate(self.namespaces):
            torch.set_rng_state(rng)
            self._install(rank)
            for module, value in fails:
                module.fails = value
            yield namespace
            self._keep(rank)
        self._install(0)

    def _each_rank(self, code: str) -> None:
        errors = []
        for namespace in self._ranks():
            try:
                exec(code, namespace)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _backward(self, action: Action) -> None:
        params = [p for unit in self._units for p in unit.params]
        arrived = {p: p.grad for p in params}
        totals: dict[nn.Parameter, Tensor] = {}
        errors = []
        for namespace in self._ranks():
            for p in params:
                p.grad = None
            try:
                exec(action.code, namespace)
            except Exception as error:
                errors.append(error)
            for p in params:
                if p.grad is not None:
                    totals[p] = totals[p] + p.grad if p in totals else p.grad
        for p in params:
            p.grad = arrived[p]
        if errors:
            raise errors[0]
        roots = {unit.root for unit in self._units if any(p in totals for p in unit.params)}
        passed = {root for slot in action.needs for root in self._roots_in(self._made_by[slot])}
        held = [unit.root for unit in self._units if any(p in self.waiting or p in self.partial for p in unit.params)]
        if any(root in passed - roots for root in held):
            self.unsure = True  # a backward that brings a root no gradient may still have reduced what waited there
        self._hand_over(roots)
        for p, total in totals.items():
            self.waiting[p] = self.waiting[p] + total if p in self.waiting else total
        for unit in self._units:
            if unit.root in roots and unit.sync and (self._stage in (None, 2, 3) or self._ends_step(unit.root)):
                self._reduce(unit)
        if self._steps:
            exec("optimizer.step(); optimizer.zero_grad()", self.namespaces[0])

    def _hook(self, action: Action) -> None:
        """Hooks see what the optimizer will see, so they run here after a reduction, not in each rank's backward."""
        for p in eval(action.on, self.namespaces[0]).parameters():
            if p.requires_grad:
                self._hooks.setdefault(p, []).append(action)

    def _roots_in(self, code: str) -> set[str]:
        """The roots of the models that a line calls."""
        called = set(re.findall(r"\b(model|other)\b", code))
        return {unit.root for unit in self._units if unit.root.partition(".")[0] in called}

    def _ends_step(self, root: str) -> bool:
        return self._is_last.get(root.partition(".")[0], True)

    def _hand_over(self, roots: set[str]) -> None:
        """A backward has given these roots gradients."""
        for root in roots:
            (self.late.discard if self._ends_step(root) else self.late.add)(root)

    def _reduce(self, unit: _Unit) -> None:
        if not any(p in self.waiting for p in unit.params):
            self.only_partials |= unit.all_reduce and any(p in self.partial for p in unit.params)
        for p in unit.params:
            if unit.unused and p.requires_grad and p not in self.waiting:
                self.waiting[p] = torch.zeros_like(p)
            if p in self.waiting:
                reduced = self.waiting.pop(p) / (unit.factor or self.ranks)
                self.partial[p] = self.partial[p] + reduced if p in self.partial else reduced
            all_reduces = unit.all_reduce and (self._stage is None or self._ends_step(unit.root))
            if p in self.partial and (all_reduces or not self._is_replicated(p)):
                reduced = self.partial.pop(p)
                scales = {kind: math.prod(h.value for h in self._hooks.get(p, ()) if h.kind == kind) for kind in HOOKS}
                reduced *= scales["gradient hook"]
                p.grad = (reduced if p.grad is None else p.grad + reduced) * scales["accumulated hook"]

    def _is_replicated(self, p: nn.Parameter) -> bool:
        """0-dim parameters are on every mesh, and all at stage 0 of ZeRO."""
        return p.dim() == 0 or "replicate" in self.program.axes or "stage=0" in self.program.options()

    def _set(self, action: Action) -> None:
        if action.kind == "set_is_last_backward":
            self._is_last[action.on.partition(".")[0]] = action.value
        module = eval(action.on, self.namespaces[0])
        below = set(module.modules()) if action.recurse else {module}
        for unit in self._units:
            if not below.intersection(unit.modules):
                continue
            if action.kind == "set_requires_gradient_sync":
                unit.sync = unit.all_reduce = action.value
            elif action.kind == "set_requires_all_reduce":
                unit.all_reduce = action.value
            elif action.kind in ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"):
                unit.factor = action.value
            elif action.kind == "set_reduce_scatter_unused_params":
                unit.unused = action.value
            elif action.kind == "set_all_reduce_hook":
                self.lost = True
