"""Programs from seeds. A seed and a number of ranks give the same program on every machine."""

import random
from dataclasses import replace

from tests.instruments.differential import choices
from tests.instruments.differential.between import BLOCKS, Between, themes
from tests.instruments.differential.program import Action, Model, Node, Program

__all__ = ["generate"]


def generate(seed: int, world_size: int, kind: str = "") -> Program:
    """The program of a seed. kind: "between", of what programs do between steps; "options", with what torch lacks."""
    rng = random.Random(f"{seed} on {world_size} {kind}".strip())
    generator = Generator(rng, world_size)
    return generator.program(seed, themes(rng) if kind == "between" else (), kind == "options")


def _pick(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


class Generator:
    def __init__(self, rng: random.Random, world_size: int) -> None:
        self.rng, self.world_size = rng, world_size
        self.leaves, self.frameworks, self.setters = dict(choices.LEAVES), choices.FRAMEWORKS, choices.SETTERS
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
        self.mixed = self.forces_sum = self.has_tp = self.has_mesh = False
        self.zero, self.rest, self.policy = "", "[]", ""
        self.reshards = 0.35  # how many units say whether they do

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def program(self, seed: int, chosen: tuple[str, ...], beyond: bool) -> Program:
        mesh, axes = self._draw_beyond() if beyond else self._mesh()
        self.has_mesh = len(axes) > 1
        self.has_tp = "tp" in axes
        self.shard_size = mesh[axes.index("shard")]
        if not beyond and not self.has_tp and not self.chance(0.93):
            self.zero = f"zero=ZeroPolicy(stage={self.rng.randint(0, 3)})"
        if chosen:
            self.reshards, self.zero = 0.12, self.zero if self.chance(0.5) else ""
        self.mixed = not self.zero and self.chance(0.2)
        self.forces_sum = self.chance(0.6)
        if self.mixed:
            for kind in choices.TORCH_REJECTS:  # one process, in one dtype, would be the only reference
                self.leaves.pop(kind, None)
        for kind in (kind for theme in chosen for kind in BLOCKS.get(theme, ())):
            self.leaves[kind] = 14
        if self.frameworks and not chosen and self.chance(0.5):
            for _ in range(self.rng.choice((1, 1, 2))):
                self.leaves[_pick(self.rng, self.frameworks)] = 14
        self.policy = self.rng.choice(choices.POLICIES[:2]) if self.mixed and self.chance(0.85) else ""
        names = ["model"] if self.chance(0.88) else ["model", "other"]
        self.models = tuple(self._model(name) for name in names)
        kinds = {node.kind for model in self.models for _, node in model.nodes()}
        self.can_transform = not kinds & choices.UNTRANSFORMED and not self.has_tp
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
        steps = choices.OPTIMIZERS[:2] if beyond else choices.OPTIMIZERS
        optimizer = "optimizer = " + self.rng.choice(steps).replace("{}", params)
        optimizer += "; scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)"
        optimizer += '; scaler = torch.amp.GradScaler("cpu", init_scale=4.0)'
        before: tuple[Action, ...] = ()
        if chosen:
            between = Between(self, chosen)
            before = between.before()
            between.write()
        else:
            self._write_actions()
        return Program(seed, self.world_size, mesh, axes, self.models, optimizer, tuple(self.actions), before)

    def _mesh(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        if self.world_size == 1 or self.chance(0.5):
            return (self.world_size,), ("shard",)
        if self.chance(0.12) and self.world_size % 2 == 0:
            return (self.world_size // 2, 2), ("shard", "tp")
        replicas = self.rng.choice([n for n in (1, 2, 4) if self.world_size % n == 0])
        return (replicas, self.world_size // replicas), ("replicate", "shard")

    def _draw_beyond(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Options that torch lacks, and a mesh for them. Some round numbers: what hangs on signs, and frameworks, are
        left to the other programs."""
        stages = [each for each in choices.STAGES if self.world_size == 4 or "secondary" not in each]
        stage, travels = self.rng.choice(stages), self.rng.choice(choices.TRAVELS)
        if "replicas" in stage and "int8" in travels:
            travels = ""  # refused
        self.zero = ", ".join(filter(None, (stage, travels))) or "zero=ZeroPolicy(stage=2)"
        self.frameworks = {}
        self.leaves.pop("Embed", None)
        self.setters = {
            name: weight for name, weight in choices.SETTERS.items() if "custom" not in name
        } | choices.BEYOND_TORCH
        if "replicas" in stage or (self.chance(0.3) and "secondary" not in stage):
            return (2, self.world_size // 2), ("replicate", "shard")
        return (self.world_size,), ("shard",)

    # --- models -------------------------------------------------------------------------------------------------------

    def _model(self, name: str) -> Model:
        blocks = tuple(self._node(2, 0.7) for _ in range(self.rng.randint(1, 4)))
        alone = [i for i, block in enumerate(blocks) if not block.unit and not any(n.unit for _, n in block.nodes(""))]
        together = tuple(alone[:2]) if len(alone) >= 2 and self.chance(0.6) else ()
        if self.chance(0.07):  # each block is a root
            self.policy = choices.POLICIES[2] if self.policy else ""  # what the net has itself is float32
            blocks = tuple(replace(block, unit=True, options=self._options()) for block in blocks)
            return Model(name, blocks, (), None)
        return Model(name, blocks, together, self._options())

    def _node(self, depth: int, unit: float) -> Node:
        is_unit = self.chance(unit)
        options = self._options() if is_unit else ""
        if depth == 0 or self.chance(0.65):
            kind = _pick(self.rng, self.leaves)
            return Node(kind, self._arguments(kind), (), is_unit, options)
        kind = _pick(self.rng, choices.AROUND)
        args = f"reentrant={self.chance(0.4)}" if kind == "Checkpointed" else ""
        inner = tuple(self._node(depth - 1, 0.5) for _ in range(self.rng.choice((1, 1, 2))))
        return Node(kind, args, inner, is_unit, options)

    def _arguments(self, kind: str) -> str:
        if kind in ("Mlp", "Scale", "Embed", "HalfFrozen", "MaxNorm"):
            return str(self.rng.choice((2, 4, 8) if self.has_tp and kind == "Mlp" else (2, 3, 4, 5, 7, 8)))
        if kind == "Tiled":
            return self.rng.choice(("1", "2", "3", "1, by_rank=True"))
        if kind == "Kept":
            return self.rng.choice(('"shift"', '"lin"'))
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
        if self.chance(self.reshards):
            values = ["True", "False"] + (["2"] if self.shard_size == 4 else [])
            options.append(f"reshard_after_forward={self.rng.choice(values)}")
        if self.policy or (self.mixed and self.chance(0.8)):
            options.append(self.policy or self.rng.choice(choices.POLICIES))
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
            self.forward()
            self.backward()
            self._complete()
            self.add("step", "optimizer.step()")

    def _step(self) -> None:
        """A training step with something unusual around it."""
        for _ in range(self.rng.randint(0, 2)):
            self._setter()
        self.forward()
        if self.chance(0.3):
            self._odd()
        self.backward()
        self._finish()

    def _accumulate(self) -> None:
        """Microbatches, with what may hold for each of them."""
        ways = self.rng.sample(("sync", "all_reduce", "last", "factor", "reshard", "none"), 2)
        count = self.rng.randint(2, 3)
        target = self.models[0]
        for index in range(count):
            last = index == count - 1
            if "sync" in ways:
                self.set_all("set_requires_gradient_sync", target, last)
            if "all_reduce" in ways:
                self.set_all("set_requires_all_reduce", target, last)
            if "last" in ways:
                self.set_all("set_is_last_backward", target, last)
            if "reshard" in ways:
                self.set_all("set_reshard_after_backward", target, last)
            if "factor" in ways:
                factor = self.rng.choice((2.0, 4.0, 8.0))
                for path in self._single():
                    self._factor("set_gradient_divide_factor", path, factor)
            self.forward()
            if self.chance(0.2):
                self._odd()
            self.backward()
        self._finish()

    def _anything(self) -> None:
        for _ in range(self.rng.randint(3, 9)):
            way = self.rng.random()
            if way < 0.3:
                self._setter()
            elif way < 0.5:
                self._odd()
            elif way < 0.75:
                self.forward()
            elif way < 0.93:
                self.backward()
            else:
                self._finish()

    def _complete(self) -> None:
        """The last backward, where gradients have not been handed over yet."""
        if not any(action.kind == "set_is_last_backward" and not action.value for action in self.actions):
            return
        for model in self.models:
            self.set_all("set_is_last_backward", model, True)
            call = f"{model.name}({self.x()}, {self.route(model)})"
            self.add("forward", f"loss[{self.next_slot}] = loss_of({call})", makes=self.next_slot)
            self.add("backward", f"loss[{self.next_slot}].backward()", needs=(self.next_slot,))
            self.next_slot += 1

    def _finish(self) -> None:
        if self.chance(0.8):
            self.slots.clear()  # a step between forward and backward is rare
        self._complete()
        if self.chance(0.4):  # so that no unit computes with older parameters than the others, after the step
            self.reshard()
        if self.chance(0.3):
            which = self.rng.choice(self.models).name
            norms = ("2.0", "1.0", 'float("inf")')
            norm = self.rng.choice(norms if self.shard_size <= 2 else norms[:2])  # torch: not where a rank has no rows
            if not self.has_tp:  # torch cannot clip over two meshes
                how = self.rng.choice(("torch.nn.utils.clip_grad_norm_", "clip_grad_norm_"))
                self.add("clip", f"norm = whole({how}({which}.parameters(), 0.05, {norm}))")
        if self.chance(0.9):
            self.add("step", "optimizer.step()")
            if self.chance(0.3):
                self._around_the_step()
        if self.chance(0.85):
            self.add("zero_grad", f"optimizer.zero_grad(set_to_none={self.chance(0.7)})")

    def reshard(self) -> None:
        every = [unit.modules[0] for model in self.models for unit in model.units()]
        self.add("reshard", "; ".join(f"{each}.reshard()" for each in every))

    def _around_the_step(self) -> None:
        way = self.rng.choice(("schedule", "optimizer state dict", "add_param_group", "group", "scale"))
        if way == "schedule":
            self.add(way, "scheduler.step()")
        elif way == "optimizer state dict":
            self.add(way, "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))")
        elif way == "add_param_group" and self.rest != "[]":
            self.add(way, f'optimizer.add_param_group({{"params": {self.rest}, "lr": 0.03}})')
            self.rest = "[]"
        elif way == "group":
            self.add(way, 'optimizer.param_groups[0]["lr"] *= 0.5')
        elif way == "scale" and not self.slots:
            self.add("zero_grad", "optimizer.zero_grad()")
            self.forward()
            scaled = tuple(self.slots)
            for slot in scaled:
                self.add("backward", f"scaler.scale(loss[{slot}]).backward()", needs=(slot,))
            self.slots.clear()
            self._complete()
            if scaled:
                code = "scaler.unscale_(optimizer); scaler.step(optimizer); scaler.update()"
                self.add("scaler", code, needs=scaled)

    def add(self, kind: str, code: str, **more: object) -> None:
        self.actions.append(Action(kind, code, **more))  # type: ignore[arg-type]

    # --- forward and backward -----------------------------------------------------------------------------------------

    def route(self, model: Model) -> str:
        blocks = list(range(len(model.blocks)))
        if self.chance(0.3):
            blocks = self.rng.choices(blocks, k=self.rng.randint(1, len(blocks) + 1))
        return f"({', '.join(map(str, blocks))},)"

    def call(self, x: str = "{x}") -> str:
        if len(self.models) == 2 and self.chance(0.7):
            call = f"other(model({x}, {self.route(self.models[0])}), {self.route(self.models[1])})"
        elif self.chance(0.12):
            # Only sharded ones: the parameters of others are those of a unit around them, which has not unsharded them.
            paths = [path for path in self.sharded if path.count(".") == 1 and path.partition(".")[0] in self.have_run]
            call = f"{self.rng.choice(paths)}({x})" if paths else self.whole_call(x)
        else:
            call = self.whole_call(x)
        return call

    def whole_call(self, x: str) -> str:
        model = self.rng.choice(self.models)
        return f"{model.name}({x}, {self.route(model)})"

    def slot(self) -> int:
        self.next_slot += 1
        return self.next_slot - 1

    def x(self) -> str:
        self.next_batch += 1
        return f"x({self.next_batch})"

    def forward(self) -> None:
        slot = self.next_slot
        way = self.rng.random()
        self.have_run.update(each.name for each in self.models if any(f"{each.name}(" in a.code for a in self.actions))
        if way < 0.1:
            context = self.rng.choice(("torch.no_grad()", "torch.inference_mode()"))
            code = f"with {context}: seen = loss_of({self.call().format(x=self.x())}); loss[{slot}] = seen.clone()"
            self.add("forward in " + context, code, makes=slot)
            self.next_slot += 1
            return
        self.next_slot += 1
        self.slots[slot] = True
        kind, code = "forward", f"loss[{slot}] = loss_of({self.call().format(x=self.x())})"
        if way < 0.16:
            kind = "forward in autocast"
            code = f'with torch.autocast("cpu", torch.bfloat16): {code}'
        elif way < 0.21:
            kind = "two forwards in a loss"
            first, second = (self.call().format(x=self.x()) for _ in range(2))
            code = f"loss[{slot}] = loss_of({first}) + loss_of({second})"
        elif way < 0.25 and not self.is_reentrant:
            kind = "gradient of the input"
            call = self.call().format(x="given")
            code = f"given = {self.x()}.requires_grad_(); loss[{slot}] = loss_of({call})"
            code += f"; slope = torch.autograd.grad(loss[{slot}], given, retain_graph=True, allow_unused=True)[0]"
        elif way < 0.36 and (self.can_transform or self.chance(0.05)):
            kind, code = self._transform(slot)
        self.add(kind, code, makes=slot)

    def _transform(self, slot: int) -> tuple[str, str]:
        which = self.rng.choice(("jvp", "vjp", "grad", "jacrev", "vmap"))
        f = f"lambda t: {self.call().format(x='t')}"
        x = self.x()
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

    def backward(self) -> None:
        if not self.slots:
            self.forward()
        if not self.slots:
            return
        chosen = self.rng.sample(sorted(self.slots), min(len(self.slots), self.rng.choice((1, 1, 1, 2))))
        code = " + ".join(f"loss[{slot}]" for slot in chosen)
        code = f"({code})" if len(chosen) > 1 else code
        retain = self.chance(0.12)
        self.add("backward", f"{code}.backward({'retain_graph=True' if retain else ''})", needs=tuple(chosen))
        if not retain:
            for slot in chosen:
                del self.slots[slot]

    # --- setters ------------------------------------------------------------------------------------------------------

    def _set(self, name: str, on: str, value: bool | float, recurse: bool | None = None) -> None:
        more = "" if recurse is None else f", recurse={recurse}"
        recursive = recurse is not False and name in choices.RECURSIVE
        self.add(name, f"{on}.{name}({value}{more})", on=on, value=value, recurse=recursive)

    def set_all(self, name: str, model: Model, value: bool | int) -> None:
        """The whole model's setting, by each of its roots."""
        code = "; ".join(f"{root}.{name}({value})" for root in model.roots())
        self.add(name, code, on=model.name, value=value, recurse=True)

    def _factor(self, name: str, on: str, factor: float) -> None:
        """With gloo torch needs the sum apart for that; without it drops out."""
        if self.forces_sum:
            self._set("set_force_sum_reduction_for_comms", on, True)
        self._set(name, on, factor)

    def _setter(self) -> None:
        single = self._single()
        model = self.models[0]
        on = self.rng.choice(model.roots()) if self.chance(0.5) else self.rng.choice(single)
        name = _pick(self.rng, self.setters)
        if name == "set_is_last_backward" and model.options is None:
            self.set_all(name, model, self.chance(0.5))
            return
        recurse = False if name in choices.RECURSIVE and self.chance(0.25) else None
        if "factor" in name:
            self._factor(name, on, self.rng.choice((1.0, 2.0, 4.0, 8.0, 3.0)))
        elif name == "set_reduce_scatter_max_input_buffers":
            self._set(name, on, self.rng.choice((1, 2, 3)), recurse)
        elif name == "set_unshard_in_backward":  # False for those alone whose backward does not read them
            on = self.rng.choice(self.lookups or single)
            self._set(name, on, not self.lookups)
        elif name.startswith("set_custom"):
            self.add(name, f"{on}.{name}({'Gathers' if 'gather' in name else 'Scatters'}())", on=on)
        elif name.startswith("set_modules_to"):
            root = next(root for model in self.models for root in model.roots() if on.startswith(root))
            near = [path for path in single if path.startswith(root)]
            chosen = self.rng.sample(near, min(len(near), self.rng.choice((0, 1, 1, 2))))
            self.add(name, f"{on}.{name}([{', '.join(chosen)}])", on=on)
        elif name == "set_all_reduce_hook":
            self.add(name, f"{on}.{name}(lambda grad: grad.mul_(0.5))", on=on)
        else:
            self._set(name, on, self.chance(0.5), recurse)

    def _single(self) -> list[str]:
        """One module of each unit."""
        return [unit.modules[0] for model in self.models for unit in model.units()]

    # --- other things -------------------------------------------------------------------------------------------------

    def _odd(self) -> None:
        way = _pick(self.rng, choices.ODD)
        if way in ("state_dict", "hand", "forget", "to"):
            self._complete()
        on = self.rng.choice(self.sharded)
        model = self.rng.choice(self.models).name
        path = self.rng.choice(self.paths)
        if way == "unshard":
            self.add(way, f"{on}.unshard()")
        elif way == "reshard":
            self.add(way, f"{on}.reshard()")
        elif way == "wait":
            self.add("unshard", f"handles[0] = {on}.unshard(async_op=True)")
            if self.chance(0.7):
                self.forward()
            self.add(way, "handles[0].wait()")
        elif way == "state_dict":
            self.add(way, f"saved[0] = {{k: v.clone() for k, v in {model}.state_dict().items()}}")
            if self.chance(0.7):
                self._step()
                self.add("load_state_dict", f"{model}.load_state_dict(saved[0])")
        elif way == "freeze":
            self.add(way, f"{path}.requires_grad_({self.chance(0.4)})")
        elif way == "train":
            self.add(way, f"{path}.train({self.chance(0.5)})")
        elif way == "deepcopy":
            self._deepcopy(self.rng.choice(self.models))
        elif way == "fail":
            self._fail(path)
        elif way == "hand":
            self.add(way, f"for p in {path}.parameters(): p.grad = torch.full_like(p, 0.25)")
        elif way == "forget":
            self.add(way, f"for p in {path}.parameters(): p.grad = None")
        elif way == "to":
            self.slots.clear()  # a backward through what was converted is an error
            kind = self.rng.choice(("float64", "bfloat16"))
            self.add(way, f"{model}.to(torch.{kind}).to(torch.float32)")
        elif way == "hook":
            self.add(way, f"{path}.register_forward_hook(lambda module, args, out: out * 1.5)")

    def _deepcopy(self, model: Model) -> None:
        """A copy computes, goes backward, and leaves its original alone."""
        if any(node.kind == "Recursive" for _, node in model.nodes()):
            return  # its copy would call the original
        # As deepcopy does; torch, which refuses it, must not go on with older unsharded parameters.
        self.add("reshard", "; ".join(f"{unit.modules[0]}.reshard()" for unit in model.units()))
        slot, self.next_slot = self.next_slot, self.next_slot + 1
        code = f"copied = copy.deepcopy({model.name}); part = loss_of(copied({self.x()}, {self.route(model)}))"
        self.add("deepcopy", f"{code}; part.backward(); loss[{slot}] = part.detach()", makes=slot)

    def _fail(self, path: str) -> None:
        self.add("fail", f'{path}.fails = "{self.rng.choice(("forward", "backward"))}"')
        self.forward()
        self.backward()
        for model in self.models:
            self.add("reset_iter_state", "; ".join(f"{root}.reset_iter_state()" for root in model.roots()))
        self.add("fail", f'{path}.fails = ""')  # the block may not have run
        self.slots.clear()
        self.add("zero_grad", "; ".join(f"{model.name}.zero_grad()" for model in self.models))
