"""What the fuzzer found between steps, each as the smallest program: fsdp2 does what one process does, or refuses.

A program is a model and its lines, and how it ends: "" where the last line runs as in one process.
"""

import pytest

from tests.helpers.parity_models import TORCH_VERSION
from tests.instruments.differential.program import Action, Model, Node, Program
from tests.instruments.differential.runner import run

PARAMS = "[p for p in model.parameters() if p.requires_grad]"
NAMED = "gradients asked for by name"


def net(block: str = "Lin", args: str = "", unit: bool = True) -> Model:
    return Model("model", (Node(block, args, (), unit),))


def forward(slot: int, loss: str = "loss_of(out)", route: str = "(0,)") -> Action:
    return Action("forward", f"out = model(x({slot}), {route}); loss[{slot}] = {loss}", makes=slot)


def evaluation(slot: int, model: str = "model") -> Action:
    code = f"with torch.no_grad(): loss[{slot}] = loss_of({model}(x({slot}), (0,))).clone()"
    return Action("forward in torch.no_grad()", code, makes=slot)


def backward(slot: int, code: str = "loss[{}].backward()") -> Action:
    return Action("backward", code.format(slot), needs=(slot,))


def sync(value: bool) -> Action:
    return Action("set_requires_gradient_sync", f"model.set_requires_gradient_sync({value})", "model", value, True)


def look(slot: int, tensors: str) -> Action:
    total = f"sum(whole(a.detach()).double().square().sum() for a in {tensors})"
    return Action("look", f"loss[{slot}] = {total}", makes=slot)


def hook(kind: str) -> Action:
    call = {
        "gradient hook": "p.register_hook(lambda grad: grad * 0.5)",
        "accumulated hook": "p.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])",
    }[kind]
    return Action(kind, f"[{call} for p in model.parameters()]", on="model", value=0.5)


TRAIN = (forward(8), backward(8))
STEP = Action("step", "optimizer.step()")
ZERO = Action("zero_grad", "model.zero_grad()")
UNSHARD, RESHARD = Action("unshard", "model.unshard()"), Action("reshard", "model.reshard()")
EDIT = Action("edit", "with torch.no_grad(): [p.mul_(1.5) for p in model.parameters()]")
CLIP = Action("clip", "norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))")
MEAN = Action("average", "mean = [p.detach().clone() for p in model.parameters()]")
MOVE = Action("average", "[a.lerp_(p.detach(), 0.5) for a, p in zip(mean, model.parameters())]")
AVERAGE = Action("average", "averaged = torch.optim.swa_utils.AveragedModel(model)")
UPDATE = Action("average", "averaged.update_parameters(model)")
MAKE = Action("optimizer", "optimizer = torch.optim.SGD(model.parameters(), lr=0.05)")
LATE = Action("late", "fully_shard(model.blocks[0])", on="model.blocks[0]")
GRADS = f"gs = torch.autograd.grad(loss[{{}}], {PARAMS}, allow_unused=True)"
STEPPED = Action("step_in_backward", "step_in_backward(optimizer)")
DATA = Action("data", "for p in model.parameters(): p.data = p.data * 1.5")

PROGRAMS: dict[str, tuple[Model, tuple[Action, ...], str]] = {
    "evaluate, then clip": (net(), (*TRAIN, evaluation(1), CLIP), ""),
    "evaluate, then zero": (net(), (*TRAIN, evaluation(1), ZERO, *TRAIN), ""),
    "evaluate, then average": (net(), (MEAN, evaluation(0), MOVE, look(1, "mean")), ""),
    "evaluate the average": (
        net(),
        (
            AVERAGE,
            evaluation(0, "averaged"),
            *TRAIN,
            STEP,
            evaluation(1),
            UPDATE,
            look(2, "averaged.state_dict().values()"),
        ),
        "",
    ),
    "evaluate, then edit": (net(), (evaluation(0), EDIT, *TRAIN), ""),
    "evaluate, then make an optimizer": (net(), (evaluation(0), MAKE, *TRAIN, STEP), ""),
    "evaluate, then shard a layer": (net(unit=False), (evaluation(0), LATE, *TRAIN), "refused: late"),
    "edit what unshard gathered": (net(), (UNSHARD, EDIT, RESHARD), ""),
    "edit, and train before the reshard": (net(), (UNSHARD, EDIT, *TRAIN), ""),
    "edit in forward": (net("Masked"), TRAIN, "refused: a write to an unsharded weight"),
    "edit in an embedding": (net("MaxNorm", "5"), TRAIN, "refused: a write to an unsharded weight"),
    "a kept tensor alone": (net("Kept", '"shift"'), (forward(0, "loss_of(model.blocks[0].kept)"), backward(0)), ""),
    "hook": (net(), (hook("gradient hook"), *TRAIN), ""),
    "backward by name": (net(), (forward(0), backward(0, f"loss[{{}}].backward(inputs={PARAMS})"), STEP), NAMED),
    "gradients by name": (net(), (forward(0), backward(0, GRADS), STEP), NAMED),
    "assigned data": (net(), (DATA, *TRAIN), "warned"),
    "a unit used twice, stepped in backward": (
        net(),
        (STEPPED, sync(False), *TRAIN, sync(True), forward(1, route="(0, 0)"), backward(1)),
        "",
    ),
}


def run_lines(model: Model, actions: tuple[Action, ...], ends: str, before: tuple[Action, ...] = ()) -> None:
    optimizer = "optimizer = torch.optim.SGD(model.parameters(), lr=0.05)"
    result = run(Program(0, 2, (2,), ("shard",), (model,), optimizer, actions, before))
    assert result.kind == "same", result.text
    assert ends in result.ended and bool(ends) == bool(result.ended), result.ended


@pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="torch's own FSDP2 lacks what some lines call")
@pytest.mark.parametrize("name", PROGRAMS)
def test_between_steps(name: str) -> None:
    """Each of these trained nothing, trained something else or blamed what was right, most without a word."""
    run_lines(*PROGRAMS[name])


@pytest.mark.parametrize("kind", ["gradient hook", "accumulated hook"])
def test_hooks_from_before_fully_shard(kind: str) -> None:
    """They never ran."""
    run_lines(net(), TRAIN, "", (hook(kind),))
