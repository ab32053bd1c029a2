"""Programs from seeds. A seed and a number of ranks give the same program on every machine."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.differential.program import Action, Model, Node, Program

__all__ = ["generate"]

LEAVES = {
    "Lin": 8,
    "Mlp": 8,
    "Norm": 2,
    "Scale": 3,
    "Embed": 2,
    "TiedPair": 2,
    "Drop": 2,
    "Batch": 2,
    "Unused": 2,
    "HalfFrozen": 2,
    "Frozen": 2,
    "HalfDouble": 1,
    "TwoDtypes": 1,
    "Scalar": 1,
}
FRAMEWORKS = {"GradByHand": 4, "Tiled": 4, "Hooked": 2, "Transforms": 3, "Awkward": 2, "Recursive": 2}
# No transform of torch.func goes through these: they have autograd functions, hooks, buffers or random numbers.
UNTRANSFORMED = {"Drop", "GradByHand", "Tiled", "Checkpointed", "Hooked", "Scale", "Batch", "Recursive"}
TORCH_REJECTS = ("Scalar", "TwoDtypes")
AROUND = {"Seq": 4, "Residual": 4, "Repeat": 2, "Checkpointed": 5, "Detached": 1, "Teacher": 1, "Views": 2}
POLICIES = (
    "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)",
    "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)",
    "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)",
    "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)",
    "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)",
)
OPTIMIZERS = (
    "torch.optim.SGD({}, lr=0.05)",
    "torch.optim.SGD({}, lr=0.05, momentum=0.9)",
    "torch.optim.AdamW({}, lr=0.01, eps=1e-2)",
    "local_optimizer(torch.optim.SGD, {}, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)",
    "local_optimizer(torch.optim.AdamW, {}, lr=0.01, eps=1e-2)",
    "local_optimizer(torch.optim.Adam, {}, lr=0.01, eps=1e-2, amsgrad=True)",
    "local_optimizer(torch.optim.RMSprop, {}, lr=0.01, eps=1e-2, centered=True)",
    "local_optimizer(torch.optim.Adagrad, {}, lr=0.01, eps=1e-2)",
    "local_optimizer(torch.optim.NAdam, {}, lr=0.01, eps=1e-2)",
)


def generate(seed: int, world_size: int, without: tuple[str, ...] = ()) -> Program:
    """The program of a seed; `without` blocks of some kinds."""
    return _Generator(random.Random(f"{seed} on {world_size}"), world_size, without).program(seed)


def _pick(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


class _Generator:
    def __init__(self, rng: random.Random, world_size: int, without: tuple[str, ...]) -> None:
        self.rng, self.world_size = rng, world_size
        self.leaves = {kind: weight for kind, weight in LEAVES.items() if kind not in without}
        self.frameworks = {kind: weight for kind, weight in FRAMEWORKS.items() if kind not in without}
        self.actions: list[Action] = []
        self.slots: dict[int, bool] = {}  # losses that have not gone backward; whether under autocast, say
        self.next_slot = 0
        self.next_batch = 0
        self.shard_size = world_size
        self.models: tuple[Model, ...] = ()
        self.sharded: list[str] = []
        self.have_run: set[str] = set()
        self.lookups: list[str] = []
        self.paths: list[str] = []
        self.can_transform = self.has_doubles = self.is_reentrant = False
        self.mixed = self.forces_sum = self.has_tp = False
        self.zero, self.rest, self.policy = "", "[]", ""

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def program(self, seed: int) -> Program:
        mesh, axes = self._mesh()
        self.has_tp = "tp" in axes
        self.shard_size = mesh[axes.index("shard")]
        self.zero = "" if self.has_tp or self.chance(0.93) else f"zero=ZeroPolicy(stage={self.rng.randint(0, 3)})"
        self.mixed = not self.zero and self.chance(0.2)
        self.forces_sum = self.chance(0.6)
        if self.mixed:
            for kind in TORCH_REJECTS:  # one process, in one dtype, would be the only reference
                self.leaves.pop(kind, None)
        if self.frameworks and self.chance(0.5):
            for _ in range(self.rng.choice((1, 1, 2))):
                self.leaves[_pick(self.rng, self.frameworks)] = 14
        self.policy = self.rng.choice(POLICIES[:2]) if self.mixed and self.chance(0.85) else ""
        names = ["model"] if self.chance(0.88) else ["model", "other"]
        self.models = tuple(self._model(name) for name in names)
        kinds = {node.kind for model in self.models for _, node in model.nodes()}
        self.can_transform = not kinds & UNTRANSFORMED and not self.has_tp
        self.lookups = [
            path for model in self.models for path, node in model.nodes() if node.unit and node.kind == "Embed"
        ]
        self.is_reentrant = any("reentrant=True" in model.source() for model in self.models)
        self.has_doubles = bool(kinds & {"HalfDouble", "TwoDtypes"})
        self.sharded = [path for model in self.models for unit in model.units() for path in unit.modules]
        self.paths = [path for model in self.models for path, _ in model.nodes()]
        params = "model.parameters()" if len(names) == 1 else "[*model.parameters(), *other.parameters()]"
        self.rest = "[]"
        if len(names) == 1 and self.chance(0.35):
            every = "[*model.parameters()]"
            self.rest = f"{every}[3:]"
            params = f'[{{"params": {every}[:2]}}, {{"params": {every}[2:3], "lr": 0.02}}]'
            if self.chance(0.6):
                params, self.rest = f'{params[:-1]}, {{"params": {self.rest}, "weight_decay": 0.2}}]', "[]"
        optimizer = "optimizer = " + self.rng.choice(OPTIMIZERS).replace("{}", params)
        optimizer += "; scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)"
        optimizer += '; scaler = torch.amp.GradScaler("cpu", init_scale=4.0)'
        self._write_actions()
        return Program(seed, self.world_size, mesh, axes, self.models, optimizer, tuple(self.actions))

    def _mesh(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        if self.world_size == 1 or self.chance(0.5):
            return (self.world_size,), ("shard",)
        if self.chance(0.12) and self.world_size % 2 == 0:
            return (self.world_size // 2, 2), ("shard", "tp")
        replicas = self.rng.choice([n for n in (1, 2, 4) if self.world_size % n == 0])
        return (replicas, self.world_size // replicas), ("replicate", "shard")

    # --- models -------------------------------------------------------------------------------------------------------

    def _model(self, name: str) -> Model:
        blocks = tuple(self._node(2, 0.7) for _ in range(self.rng.randint(1, 4)))
        alone = [i for i, block in enumerate(blocks) if not block.unit and not any(n.unit for _, n in block.nodes(""))]
        together = tuple(alone[:2]) if len(alone) >= 2 and self.chance(0.6) else ()
        if self.chance(0.07):  # each block is a root
            self.policy = POLICIES[2] if self.policy else ""  # what the net has itself is float32
            blocks = tuple(replace(block, unit=True, options=self._options()) for block in blocks)
            return Model(name, blocks, (), None)
        return Model(name, blocks, together, self._options())

    def _node(self, depth: int, unit: float) -> Node:
        is_unit = self.chance(unit)
        options = self._options() if is_unit else ""
        if depth == 0 or self.chance(0.65):
            kind = _pick(self.rng, self.leaves)
            return Node(kind, self._arguments(kind), (), is_unit, options)
        kind = _pick(self.rng, AROUND)
        args = f"reentrant={self.chance(0.4)}" if kind == "Checkpointed" else ""
        inner = tuple(self._node(depth - 1, 0.5) for _ in range(self.rng.choice((1, 1, 2))))
        return Node(kind, args, inner, is_unit, options)

    def _arguments(self, kind: str) -> str:
        if kind in ("Mlp", "Scale", "Embed", "HalfFrozen"):
            return str(self.rng.choice((2, 4, 8) if self.has_tp and kind == "Mlp" else (2, 3, 4, 5, 7, 8)))
        if kind == "Tiled":
            return self.rng.choice(("1", "2", "3", "1, by_rank=True"))
        if kind == "Hooked":
            return self.rng.choice(('"accumulated"', '"gradient"'))
        if kind == "GradByHand":
            return self.rng.choice(("", "hidden=True"))
        if kind == "Transforms":
            return self.rng.choice(('"jvp"', '"vjp"', '"grad"', '"vmap"'))
        return ""

    def _options(self) -> str:
        options = []
        if self.zero:
            return self.zero
        if self.chance(0.35):
            choices = ["True", "False"] + (["2"] if self.shard_size == 4 else [])
            options.append(f"reshard_after_forward={self.rng.choice(choices)}")
        if self.policy or (self.mixed and self.chance(0.8)):
            options.append(self.policy or self.rng.choice(POLICIES))
        if not self.has_tp and self.chance(0.06):
            last = f"Shard(p.ndim - 1) if p.shape[-1] % {self.shard_size} == 0 else Shard(0)"
            options.append(f"shard_placement_fn=lambda p: {last}")
        return ", ".join(options)

    # --- actions ------------------------------------------------------------------------------------------------------

    def _write_actions(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            style = self.rng.choice(("step", "step", "accumulate", "anything", "anything"))
            getattr(self, f"_{style}")()
        if self.chance(0.7):
            self._forward()
            self._backward()
            self._complete()
            self._add("step", "optimizer.step()")

    def _step(self) -> None:
        """A training step with something unusual around it."""
        for _ in range(self.rng.randint(0, 2)):
            self._setter()
        self._forward()
        if self.chance(0.3):
            self._odd()
        self._backward()
        self._finish()

    def _accumulate(self) -> None:
        """Microbatches, with what may hold for each of them."""
        ways = self.rng.sample(("sync", "all_reduce", "last", "factor", "reshard", "none"), 2)
        count = self.rng.randint(2, 3)
        target = self.models[0]
        for index in range(count):
            last = index == count - 1
            if "sync" in ways:
                self._set_all("set_requires_gradient_sync", target, last)
            if "all_reduce" in ways:
                self._set_all("set_requires_all_reduce", target, last)
            if "last" in ways:
                self._set_all("set_is_last_backward", target, last)
            if "reshard" in ways:
                self._set_all("set_reshard_after_backward", target, last)
            if "factor" in ways:
                factor = self.rng.choice((2.0, 4.0, 8.0))
                for path in self._single():
                    self._factor("set_gradient_divide_factor", path, factor)
            self._forward()
            if self.chance(0.2):
                self._odd()
            self._backward()
        self._finish()

    def _anything(self) -> None:
        for _ in range(self.rng.randint(3, 9)):
            way = self.rng.random()
            if way < 0.3:
                self._setter()
            elif way < 0.5:
                self._odd()
            elif way < 0.75:
                self._forward()
            elif way < 0.93:
                self._backward()
            else:
                self._finish()

    def _complete(self) -> None:
        """The last backward, where gradients have not been handed over yet."""
        if not any(action.kind == "set_is_last_backward" and not action.value for action in self.actions):
            return
        for model in self.models:
            self._set_all("set_is_last_backward", model, True)
            call = f"{model.name}({self._x()}, {self._route(model)})"
            self._add("forward", f"loss[{self.next_slot}] = loss_of({call})", makes=self.next_slot)
            self._add("backward", f"loss[{self.next_slot}].backward()", needs=(self.next_slot,))
            self.next_slot += 1

    def _finish(self) -> None:
        if self.chance(0.8):
            self.slots.clear()  # a step between forward and backward is rare
        self._complete()
        if self.chance(0.4):  # so that no unit computes with older parameters than the others, after the step
            every = [unit.modules[0] for model in self.models for unit in model.units()]
            self._add("reshard", "; ".join(f"{each}.reshard()" for each in every))
        if self.chance(0.3):
            which = self.rng.choice(self.models).name
            norms = ("2.0", "1.0", 'float("inf")')
            norm = self.rng.choice(norms if self.shard_size <= 2 else norms[:2])  # torch: not where a rank has no rows
            if not self.has_tp:  # torch cannot clip over two meshes
                how = self.rng.choice(("torch.nn.utils.clip_grad_norm_", "clip_grad_norm_"))
                self._add("clip", f"norm = whole({how}({which}.parameters(), 0.05, {norm}))")
        if self.chance(0.9):
            self._add("step", "optimizer.step()")
            if self.chance(0.3):
                self._around_the_step()
        if self.chance(0.85):
            self._add("zero_grad", f"optimizer.zero_grad(set_to_none={self.chance(0.7)})")

    def _around_the_step(self) -> None:
        way = self.rng.choice(("schedule", "optimizer state dict", "add_param_group", "group", "scale"))
        if way == "schedule":
            self._add(way, "scheduler.step()")
        elif way == "optimizer state dict":
            self._add(way, "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))")
        elif way == "add_param_group" and self.rest != "[]":
            self._add(way, f'optimizer.add_param_group({{"params": {self.rest}, "lr": 0.03}})')
            self.rest = "[]"
        elif way == "group":
            self._add(way, 'optimizer.param_groups[0]["lr"] *= 0.5')
        elif way == "scale" and not self.slots:
            self._add("zero_grad", "optimizer.zero_grad()")
            self._forward()
            scaled = tuple(self.slots)
            for slot in scaled:
                self._add("backward", f"scaler.scale(loss[{slot}]).backward()", needs=(slot,))
            self.slots.clear()
            self._complete()
            if scaled:
                code = "scaler.unscale_(optimizer); scaler.step(optimizer); scaler.update()"
                self._add("scaler", code, needs=scaled)

    def _add(self, kind: str, code: str, **more: object) -> None:
        self.actions.append(Action(kind, code, **more))  # type: ignore[arg-type]

    # --- forward and backward -----------------------------------------------------------------------------------------

    def _route(self, model: Model) -> str:
        blocks = list(range(len(model.blocks)))
        if self.chance(0.3):
            blocks = self.rng.choices(blocks, k=self.rng.randint(1, len(blocks) + 1))
        return f"({', '.join(map(str, blocks))},)"

    def _call(self, x: str = "{x}") -> str:
        if len(self.models) == 2 and self.chance(0.7):
            call = f"other(model({x}, {self._route(self.models[0])}), {self._route(self.models[1])})"
        elif self.chance(0.12):
            # Only sharded ones: the parameters of others are those of a unit around them, which has not unsharded them.
            paths = [path for path in self.sharded if path.count(".") == 1 and path.partition(".")[0] in self.have_run]
            call = f"{self.rng.choice(paths)}({x})" if paths else self._whole_call(x)
        else:
            call = self._whole_call(x)
        return call

    def _whole_call(self, x: str) -> str:
        model = self.rng.choice(self.models)
        return f"{model.name}({x}, {self._route(model)})"

    def _x(self) -> str:
        self.next_batch += 1
        return f"x({self.next_batch})"

    def _forward(self) -> None:
        slot = self.next_slot
        way = self.rng.random()
        self.have_run.update(each.name for each in self.models if any(f"{each.name}(" in a.code for a in self.actions))
        if way < 0.1:
            context = self.rng.choice(("torch.no_grad()", "torch.inference_mode()"))
            code = f"with {context}: seen = loss_of({self._call().format(x=self._x())}); loss[{slot}] = seen.clone()"
            self._add("forward in " + context, code, makes=slot)
            self.next_slot += 1
            return
        self.next_slot += 1
        self.slots[slot] = True
        kind, code = "forward", f"loss[{slot}] = loss_of({self._call().format(x=self._x())})"
        if way < 0.16:
            kind = "forward in autocast"
            code = f'with torch.autocast("cpu", torch.bfloat16): {code}'
        elif way < 0.21:
            kind = "two forwards in a loss"
            first, second = (self._call().format(x=self._x()) for _ in range(2))
            code = f"loss[{slot}] = loss_of({first}) + loss_of({second})"
        elif way < 0.25 and not self.is_reentrant:
            kind = "gradient of the input"
            call = self._call().format(x="given")
            code = f"given = {self._x()}.requires_grad_(); loss[{slot}] = loss_of({call})"
            code += f"; slope = torch.autograd.grad(loss[{slot}], given, retain_graph=True, allow_unused=True)[0]"
        elif way < 0.36 and (self.can_transform or self.chance(0.05)):
            kind, code = self._transform(slot)
        self._add(kind, code, makes=slot)

    def _transform(self, slot: int) -> tuple[str, str]:
        which = self.rng.choice(("jvp", "vjp", "grad", "jacrev", "vmap"))
        f = f"lambda t: {self._call().format(x='t')}"
        x = self._x()
        code = {
            "jvp": f"value, tangent = torch.func.jvp({f}, ({x},), (torch.ones_like({x}),)); "
            f"loss[{slot}] = loss_of(value) + loss_of(tangent)",
            "vjp": f"value, pull = torch.func.vjp({f}, {x}); "
            f"loss[{slot}] = loss_of(value) + loss_of(pull(torch.ones_like(value))[0])",
            "grad": f"f = {f}; loss[{slot}] = loss_of(torch.func.grad(lambda t: loss_of(f(t)))({x}))",
            "jacrev": f"loss[{slot}] = loss_of(torch.func.jacrev({f})({x}[:2]))",
            "vmap": f"loss[{slot}] = loss_of(torch.func.vmap({f})({x}.unflatten(0, (2, -1))))",
        }[which]
        return f"torch.func.{which}", code

    def _backward(self) -> None:
        if not self.slots:
            self._forward()
        if not self.slots:
            return
        chosen = self.rng.sample(sorted(self.slots), min(len(self.slots), self.rng.choice((1, 1, 1, 2))))
        code = " + ".join(f"loss[{slot}]" for slot in chosen)
        code = f"({code})" if len(chosen) > 1 else code
        retain = self.chance(0.12)
        self._add("backward", f"{code}.backward({'retain_graph=True' if retain else ''})", needs=tuple(chosen))
        if not retain:
            for slot in chosen:
                del self.slots[slot]

    # --- setters ------------------------------------------------------------------------------------------------------

    def _set(self, name: str, on: str, value: bool | float, recurse: bool | None = None) -> None:
        more = "" if recurse is None else f", recurse={recurse}"
        recursive = recurse is not False and name in RECURSIVE
        self._add(name, f"{on}.{name}({value}{more})", on=on, value=value, recurse=recursive)

    def _set_all(self, name: str, model: Model, value: bool | int) -> None:
        """The whole model's setting, by each of its roots."""
        code = "; ".join(f"{root}.{name}({value})" for root in model.roots())
        self._add(name, code, on=model.name, value=value, recurse=True)

    def _factor(self, name: str, on: str, factor: float) -> None:
        """With gloo torch needs the sum apart for that; without it drops out."""
        if self.forces_sum:
            self._set("set_force_sum_reduction_for_comms", on, True)
        self._set(name, on, factor)

    def _setter(self) -> None:
        single = self._single()
        model = self.models[0]
        on = self.rng.choice(model.roots()) if self.chance(0.5) else self.rng.choice(single)
        name = _pick(self.rng, SETTERS)
        if name == "set_is_last_backward" and model.options is None:
            self._set_all(name, model, self.chance(0.5))
            return
        recurse = False if name in RECURSIVE and self.chance(0.25) else None
        if "factor" in name:
            self._factor(name, on, self.rng.choice((1.0, 2.0, 4.0, 8.0, 3.0)))
        elif name == "set_reduce_scatter_max_input_buffers":
            self._set(name, on, self.rng.choice((1, 2, 3)), recurse)
        elif name == "set_unshard_in_backward":  # False for those alone whose backward does not read them
            on = self.rng.choice(self.lookups or single)
            self._set(name, on, not self.lookups)
        elif name.startswith("set_custom"):
            self._add(name, f"{on}.{name}({'Gathers' if 'gather' in name else 'Scatters'}())", on=on)
        elif "prefetch" in name:
            root = next(root for model in self.models for root in model.roots() if on.startswith(root))
            near = [path for path in single if path.startswith(root)]
            chosen = self.rng.sample(near, min(len(near), self.rng.choice((0, 1, 1, 2))))
            self._add(name, f"{on}.{name}([{', '.join(chosen)}])", on=on)
        elif name == "set_all_reduce_hook":
            self._add(name, f"{on}.{name}(lambda grad: grad.mul_(0.5))", on=on)
        else:
            self._set(name, on, self.chance(0.5), recurse)

    def _single(self) -> list[str]:
        """One module of each unit."""
        return [unit.modules[0] for model in self.models for unit in model.units()]

    # --- other things -------------------------------------------------------------------------------------------------

    def _odd(self) -> None:
        way = _pick(self.rng, ODD)
        if way in ("state_dict", "hand", "forget", "to"):
            self._complete()
        on = self.rng.choice(self.sharded)
        model = self.rng.choice(self.models).name
        path = self.rng.choice(self.paths)
        if way == "unshard":
            self._add(way, f"{on}.unshard()")
        elif way == "reshard":
            self._add(way, f"{on}.reshard()")
        elif way == "wait":
            self._add("unshard", f"handles[0] = {on}.unshard(async_op=True)")
            if self.chance(0.7):
                self._forward()
            self._add(way, "handles[0].wait()")
        elif way == "state_dict":
            self._add(way, f"saved[0] = {{k: v.clone() for k, v in {model}.state_dict().items()}}")
            if self.chance(0.7):
                self._step()
                self._add("load_state_dict", f"{model}.load_state_dict(saved[0])")
        elif way == "freeze":
            self._add(way, f"{path}.requires_grad_({self.chance(0.4)})")
        elif way == "train":
            self._add(way, f"{path}.train({self.chance(0.5)})")
        elif way == "deepcopy":
            self._deepcopy(self.rng.choice(self.models))
        elif way == "fail":
            self._fail(path)
        elif way == "hand":
            self._add(way, f"for p in {path}.parameters(): p.grad = torch.full_like(p, 0.25)")
        elif way == "forget":
            self._add(way, f"for p in {path}.parameters(): p.grad = None")
        elif way == "to":
            if self.has_doubles:
                self.slots.clear()  # not there and back: what is float64 becomes float32
            kind = self.rng.choice(("float64", "bfloat16"))
            self._add(way, f"{model}.to(torch.{kind}).to(torch.float32)")
        elif way == "hook":
            self._add(way, f"{path}.register_forward_hook(lambda module, args, out: out * 1.5)")

    def _deepcopy(self, model: Model) -> None:
        """A copy computes, goes backward, and leaves its original alone."""
        if any(node.kind == "Recursive" for _, node in model.nodes()):
            return  # its copy would call the original
        # As deepcopy does; torch, which refuses it, must not go on with older unsharded parameters.
        self._add("reshard", "; ".join(f"{unit.modules[0]}.reshard()" for unit in model.units()))
        slot, self.next_slot = self.next_slot, self.next_slot + 1
        code = f"copied = copy.deepcopy({model.name}); part = loss_of(copied({self._x()}, {self._route(model)}))"
        self._add("deepcopy", f"{code}; part.backward(); loss[{slot}] = part.detach()", makes=slot)

    def _fail(self, path: str) -> None:
        self._add("fail", f'{path}.fails = "{self.rng.choice(("forward", "backward"))}"')
        self._forward()
        self._backward()
        for model in self.models:
            self._add("reset_iter_state", "; ".join(f"{root}.reset_iter_state()" for root in model.roots()))
        self._add("fail", f'{path}.fails = ""')  # the block may not have run
        self.slots.clear()
        self._add("zero_grad", "; ".join(f"{model.name}.zero_grad()" for model in self.models))


RECURSIVE = {
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
}
SETTERS = {
    "set_requires_gradient_sync": 6,
    "set_requires_all_reduce": 4,
    "set_is_last_backward": 3,
    "set_reshard_after_forward": 3,
    "set_reshard_after_backward": 3,
    "set_unshard_in_backward": 1,
    "set_gradient_divide_factor": 3,
    "set_reduce_scatter_divide_factor": 1,
    "set_reduce_scatter_unused_params": 2,
    "set_reduce_scatter_max_input_buffers": 1,
    "set_all_reduce_hook": 1,
    "set_modules_to_forward_prefetch": 3,
    "set_modules_to_backward_prefetch": 3,
    "set_custom_all_gather": 1,
    "set_custom_reduce_scatter": 1,
}
ODD = {
    "unshard": 3,
    "reshard": 3,
    "wait": 2,
    "state_dict": 2,
    "freeze": 3,
    "train": 2,
    "fail": 3,
    "hand": 1,
    "forget": 1,
    "to": 1,
    "hook": 1,
    "deepcopy": 2,
}
