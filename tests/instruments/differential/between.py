"""What programs do between steps: evaluation, averages of weights, edits, hooks on parameters, losses outside of
forward, gradients asked for by name, and modules that are sharded late.

A program has one or two themes, so that an error in one does not hide what the others would find.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.instruments.differential.program import Action, Model

if TYPE_CHECKING:
    from tests.instruments.differential.generate import Generator

__all__ = ["BLOCKS", "Between", "themes"]

THEMES = {
    "average": 4,
    "edit": 4,
    "kept": 4,
    "outside": 3,
    "gradient hook": 3,
    "accumulated hook": 3,
    "inputs": 3,
    "late": 3,
    "optimizer": 2,
    "stepped": 3,
    "data": 2,
    "within": 1,
}
ALONE = {"stepped", "within", "late", "data", "inputs"}  # with the others much ends in an error
NEED_SHARDS = ("average", "gradient hook", "accumulated hook", "optimizer")
BLOCKS = {"kept": ("Kept",), "within": ("Masked", "MaxNorm"), "outside": ("Lin", "TiedPair"), "late": ("Lin", "Mlp")}
WEIGHTS = {"Lin": "lin.weight", "TiedPair": "first.weight"}
EDITS = ("p.mul_(1.5)", "p.add_(0.25)", "p.copy_(torch.full_like(p, 0.2))", "p.data.mul_(-1.0)")


def themes(rng: random.Random) -> tuple[str, ...]:
    """The themes of a program."""
    chosen = rng.choices(list(THEMES), list(THEMES.values()), k=2)
    return tuple(chosen[:1]) if ALONE & {*chosen} or rng.random() < 0.5 else tuple(dict.fromkeys(chosen))


class Between:
    """Writes the actions of a program of these themes."""

    def __init__(self, make: Generator, chosen: tuple[str, ...]) -> None:
        self.make, self.rng, self.themes = make, make.rng, chosen
        self.averages: str = ""
        self.has_run = False

    def before(self) -> tuple[Action, ...]:
        """Hooks that parameters have before fully_shard."""
        hooks = [theme for theme in self.themes if "hook" in theme and self.make.chance(0.6)]
        return tuple(self._hook(theme) for theme in hooks)

    def write(self) -> None:
        make = self.make
        if "stepped" in self.themes:
            make.add("step_in_backward", "step_in_backward(optimizer)")
        if make.chance(0.1):
            name = self.rng.choice(("set_reshard_after_forward", "set_reshard_after_backward"))
            make.set_all(name, self.rng.choice(make.models), make.chance(0.2))
        for _ in range(self.rng.randint(2, 3)):
            self._pause(0.5)
            self._step()
        self._pause(1.0)
        self._forward_and_backward()
        make.add("step", "optimizer.step()")

    def _pause(self, evaluates: float) -> None:
        """Between two steps."""
        if self.make.chance(evaluates):
            self._evaluate()
        if self.make.chance(0.7):
            self._act()
            if self.make.chance(0.3):
                self._evaluate()

    def _step(self) -> None:
        make = self.make
        count = 2 if make.chance(0.6 if "stepped" in self.themes else 0.25) and "inputs" not in self.themes else 1
        for index in range(count):
            if count > 1:
                make.set_all("set_requires_gradient_sync", make.models[0], index == count - 1)
            self._forward_and_backward()
        if make.chance(0.5):
            self._evaluate()
        clips = "stepped" not in self.themes and not make.has_tp
        if clips and make.chance(0.5):
            how = self.rng.choice(("torch.nn.utils.clip_grad_norm_", "clip_grad_norm_", "clip_grad_norm_"))
            make.add("clip", f"norm = whole({how}({self.rng.choice(make.models).name}.parameters(), 0.05))")
        make.add("step", "optimizer.step()")
        if make.chance(0.4):
            self._evaluate()
        zeroed = "; ".join(f"{model.name}.zero_grad()" for model in make.models)
        make.add("zero_grad", zeroed if make.chance(0.6) else "optimizer.zero_grad()")

    def _evaluate(self) -> None:
        context = self.rng.choice(("torch.no_grad()", "torch.no_grad()", "torch.inference_mode()"))
        slot = self.make.slot()
        call = self.make.call(self.make.x())
        if self.averages == "averaged" and self.make.chance(0.4):
            call = f"averaged({self.make.x()}, {self.make.route(self.make.models[0])})"
        code = f"with {context}: seen = loss_of({call}); loss[{slot}] = seen.clone()"
        self.make.add(f"forward in {context}", code, makes=slot)
        self.has_run = True

    def _act(self) -> None:
        theme = self.rng.choice(self.themes)
        if theme in NEED_SHARDS and self.make.chance(0.5):
            self.make.reshard()
        if theme == "average":
            self._average()
        elif theme == "edit":
            self._edit()
        elif "hook" in theme:
            self.make.actions.append(self._hook(theme))
        elif theme == "optimizer":
            params = ", ".join(f"*{model.name}.parameters()" for model in self.make.models)
            self.make.add("optimizer", f"optimizer = torch.optim.SGD([{params}], lr=0.05, momentum=0.5)")
        elif theme == "data":
            self._data()
        elif theme == "late" and self.has_run:
            self._late()

    # --- themes -------------------------------------------------------------------------------------------------------

    def _average(self) -> None:
        """AveragedModel, or a list of tensors."""
        make, model = self.make, self.make.models[0].name
        start = {
            "averaged": f"averaged = torch.optim.swa_utils.AveragedModel({model})",
            "average": f"average = [p.detach().clone() for p in {model}.parameters()]",
        }
        update = {
            "averaged": f"averaged.update_parameters({model})",
            "average": f"[a.lerp_(p.detach(), 0.5) for a, p in zip(average, {model}.parameters())]",
        }
        tensors = {"averaged": "averaged.parameters()", "average": "average"}
        if not self.averages:
            self.averages = self.rng.choice(list(start))
            make.add("average", start[self.averages])
            return
        make.add("average", update[self.averages])
        slot = make.slot()
        total = f"sum(whole(a.detach()).double().square().sum() for a in {tensors[self.averages]})"
        make.add("look", f"loss[{slot}] = {total}", makes=slot)
        if make.chance(0.2):
            pairs = f"zip({model}.parameters(), {tensors[self.averages]})"
            make.add("edit", f"with torch.no_grad(): [p.copy_(a) for p, a in {pairs}]")

    def _edit(self) -> None:
        make = self.make
        is_held = make.chance(0.4)
        edit = self.rng.choice(EDITS[:-1] if is_held else EDITS)
        unit = self.rng.choice(make.sharded)
        path = unit if is_held else self.rng.choice((self.rng.choice(make.models).name, self.rng.choice(make.paths)))
        if is_held:
            make.add("unshard", f"{unit}.unshard()")
        make.add("edit", f"with torch.no_grad(): [{edit} for p in {path}.parameters()]")
        if is_held and make.chance(0.6):
            make.add("reshard", f"{unit}.reshard()")

    def _data(self) -> None:
        path = self.rng.choice((self.rng.choice(self.make.models).name, self.rng.choice(self.make.paths)))
        vector = f"ps = [*{path}.parameters()]; v = torch.nn.utils.parameters_to_vector(ps)"
        code = self.rng.choice(
            (
                f"for p in {path}.parameters(): p.data = p.data * 1.5",
                f"{vector}; torch.nn.utils.vector_to_parameters(v * 1.5, ps)",
            )
        )
        self.make.add("data", code)

    def _hook(self, kind: str) -> Action:
        path = self.rng.choice((self.rng.choice(self.make.models).name, self.rng.choice(self.make.paths)))
        scale = self.rng.choice((0.5, 2.0))
        call = {
            "gradient hook": f"p.register_hook(lambda grad: grad * {scale})",
            "accumulated hook": f"p.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_({scale}), None)[1])",
        }[kind]
        return Action(kind, f"[{call} for p in {path}.parameters() if p.requires_grad]", on=path, value=scale)

    def _late(self) -> None:
        units = [(path, node.unit) for model in self.make.models for path, node in model.nodes()]
        paths = [path for path, is_unit in units if not is_unit and path not in self.make.sharded]
        if paths:
            path = self.rng.choice(paths)
            self.make.add("late", f"fully_shard({path}{', mesh=mesh' if self.make.has_mesh else ''})", on=path)

    # --- forward and backward -----------------------------------------------------------------------------------------

    def _forward_and_backward(self) -> None:
        make = self.make
        self.has_run = True
        make.slots.clear()
        if "kept" in self.themes and make.chance(0.7) and (path := self._path_of("Kept")):
            self._kept(path)
        elif "outside" in self.themes and make.chance(0.7):
            self._outside()
        else:
            make.forward()
            if make.chance(0.3):
                self._evaluate()
            if "inputs" in self.themes and make.slots:
                self._inputs()
            else:
                make.backward()
        make.slots.clear()

    def _path_of(self, *kinds: str) -> str:
        paths = [path for model in self.make.models for path, node in model.nodes() if node.kind in kinds]
        return self.rng.choice(paths) if paths else ""

    def _run(self, model: Model, loss: str) -> int:
        """A forward through all blocks of a model; `loss` is what follows."""
        slot = self.make.slot()
        route = ", ".join(map(str, range(len(model.blocks))))
        self.make.add("forward", f"out = {model.name}({self.make.x()}, ({route},)); loss[{slot}] = {loss}", makes=slot)
        return slot

    def _backward(self, slots: tuple[int, ...], options: str = "") -> None:
        code = " + ".join(f"loss[{slot}]" for slot in slots)
        self.make.add("backward", f"({code}).backward({options})", needs=slots)

    def _kept(self, path: str) -> None:
        """A loss reads what a module kept: alone, with the output's loss or before it.

        Not after it, and with it where a unit around the module reshards after forward: see the row of `KEPT`.
        """
        model = next(each for each in self.make.models if path.startswith(each.name))
        around = any(path.startswith(f"{unit}.") for unit in self.make.sharded if unit != model.name)
        around |= "reshard_after_forward" in (model.options or "")
        around |= any(action.kind == "set_reshard_after_forward" for action in self.make.actions)
        way = "with" if around else self.rng.choice(("alone", "with", "before"))
        if way == "alone":
            self._backward((self._run(model, f"loss_of({path}.kept)"),))
            return
        whole, kept = self._run(model, "loss_of(out)"), self.make.slot()
        self.make.add("kept", f"loss[{kept}] = loss_of({path}.kept)", makes=kept, needs=(whole,))
        if way == "with":
            self._backward((whole, kept))
        else:
            self._backward((kept,), "retain_graph=True")
            self._backward((whole,))

    def _outside(self) -> None:
        """A loss of the output and a weight that the user unsharded."""
        make, model = self.make, self.rng.choice(self.make.models)
        weights = [
            (path, f"{path}.{WEIGHTS[node.kind]}")
            for path, node in model.nodes()
            if path in make.sharded and node.kind in WEIGHTS
        ]
        if model.options is not None:
            weights.append((model.name, f"{model.name}.head.weight"))
        if not weights:
            make.forward()
            make.backward()
            return
        unit, weight = self.rng.choice(weights)
        slot = self._run(model, "loss_of(out)")
        make.add("unshard", f"{unit}.unshard()")
        code = f"(lambda h: h @ {weight}.t().to(h.dtype))"
        code = f"checkpoint({code}, out, use_reentrant=False)" if make.chance(0.3) else f"{code}(out)"
        loss = make.slot()
        make.add("outside", f"loss[{loss}] = loss_of({code})", makes=loss, needs=(slot,))
        self._backward((loss,))

    def _inputs(self) -> None:
        """Gradients of some parameters, by name."""
        slot = self.rng.choice(sorted(self.make.slots))
        path = self.rng.choice((self.make.models[0].name, self.rng.choice(self.make.paths)))
        params = f"[p for p in {path}.parameters() if p.requires_grad]"
        if self.make.chance(0.5):
            code = f"loss[{slot}].backward(inputs={params})"
        else:
            code = f"ps = {params}; gs = torch.autograd.grad(loss[{slot}], ps, allow_unused=True); "
            code += "[setattr(p, 'grad', g if p.grad is None else p.grad + g) "
            code += "for p, g in zip(ps, gs) if g is not None]"
        self.make.add("backward", code, needs=(slot,))
