"""`fsdp2.optim.matrix_optimizer`: whole matrices on any number of ranks are stepped as in one process."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2.errors import ArgumentError, MismatchError, MisuseError, UnsupportedError
from fsdp2.optim import MatrixOptimizer, matrix_optimizer, matrix_plan
from tests.helpers.matrix_optimizers import (
    SHAPES,
    Shampoo,
    assert_same,
    layouts,
    muon_pair,
    set_grads,
    sharded,
    train,
    value,
    values_of,
)
from tests.helpers.optimizers import params_in
from tests.helpers.parity_models import full
from tests.helpers.ranks import on_ranks
from tests.helpers.tp_models import mesh_of

KINDS = {"Muon": torch.optim.Muon, "Shampoo": Shampoo}
Optim = torch.optim.Optimizer


def in_one_process(kind: Any, steps: int, missing: Any = ()) -> torch.optim.Optimizer:
    plain: torch.optim.Optimizer = kind([nn.Parameter(each) for each in values_of()], lr=0.1)
    train(plain, range(steps), missing)
    return plain


@on_ranks(3, 1, 2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_as_in_one_process(rank: int, world_size: int, kind: str) -> None:
    """Muon and a user's own optimizer, bit for bit; with empty shards (microsoft/dion issue 74) and uneven rows."""
    missing = {(0, 1), (2, 3), (2, 0)}
    plain = in_one_process(KINDS[kind], 4, missing)
    for layout in layouts(world_size):
        optimizer = matrix_optimizer(KINDS[kind], sharded(values_of(), layout), lr=0.1)
        train(optimizer, range(4), missing)
        assert_same(optimizer, plain)


def steps(optimizer: Optim) -> None:
    train(optimizer, range(2))


def scaled(optimizer: Optim) -> None:
    """A step is left out on every rank, where one element of a gradient, on one rank, is infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scale = scaler.scale(torch.ones(()))
        set_grads(optimizer, step)
        for param in params_in(optimizer):
            param.grad *= scale * (float("inf") if step == 1 and param.shape == SHAPES[2] else 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0


def closure(optimizer: Optim) -> None:
    """It is called once, with gradients enabled, before anything is sent."""
    losses = []

    def loss() -> float:
        assert torch.is_grad_enabled()
        set_grads(optimizer, len(losses))
        losses.append(0.5)
        return losses[-1]

    assert optimizer.step(loss) == optimizer.step(loss) == 0.5 and len(losses) == 2


def frozen(optimizer: Optim) -> None:
    """Frozen parameters do not travel, and their states stay until they are trained again."""
    train(optimizer, range(1))
    for is_frozen in (True, False):
        for param in params_in(optimizer)[:3]:
            param.requires_grad_(not is_frozen)
        missing = [(step, index) for step in range(3) for index in range(3)] if is_frozen else []
        train(optimizer, range(1, 3), missing)


def added_group(optimizer: Optim) -> None:
    train(optimizer, range(1))
    values = [value(index, shape, 5) for index, shape in enumerate(SHAPES[:3])]
    is_ours = isinstance(optimizer, MatrixOptimizer)
    optimizer.add_param_group({"params": sharded(values) if is_ours else [*map(nn.Parameter, values)], "lr": 0.5})
    train(optimizer, range(1, 3))


def changed_from_outside(optimizer: Optim) -> None:
    """What a user or a checkpoint writes into shards and state between steps takes effect in the next one."""
    train(optimizer, range(2))
    params = params_in(optimizer)
    with torch.no_grad():
        params[0].mul_(0.5)
        params[1].data.mul_(0.25)
        optimizer.state[params[2]]["momentum_buffer"].zero_()
    del optimizer.state[params[3]]
    train(optimizer, range(2, 4))


PROGRAMS: list[tuple[Callable[[Optim], None], dict[str, Any]]] = [
    # The adjusted learning rate is that of the whole shape. With the local one it is smaller, and no error says so.
    (steps, {"adjust_lr_fn": "match_rms_adamw"}),
    (steps, {"lr": torch.tensor(0.05)}),
    (steps, {"values": [each.bfloat16() for each in values_of()]}),
    *((each, {}) for each in (scaled, closure, frozen, added_group, changed_from_outside)),
]


@on_ranks(2, 3)
def test_programs(rank: int, world_size: int) -> None:
    """Bit for bit as in one process."""
    for program, options in PROGRAMS:
        plain, optimizer = muon_pair(**options)
        program(plain)
        program(optimizer)
        assert_same(optimizer, plain)


class Net(nn.Module):
    """A fused projection, a stack of experts, and what is not a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.qkv = nn.Linear(6, 10, bias=False)
        self.out = nn.Linear(4, 6)
        self.experts = nn.Parameter(torch.randn(3, 6, 4))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).split((4, 2, 4), dim=-1)
        x = x + self.out(q * k.repeat_interleave(2, -1) + v)
        x = x + torch.einsum("...d,edh,efh->...f", x, self.experts.tanh(), self.experts)
        return self.head(self.norm(x))


def groups_of(net: Any) -> list[dict[str, Any]]:
    return [
        {"params": [net.out.weight], "lr": 0.02},
        {"params": [net.qkv.weight], "split": (4, 2, 4)},
        {"params": [net.experts], "split": 2},
        {
            "params": [net.embedding.weight, net.out.bias, net.norm.weight, net.norm.bias, net.head.weight],
            "kind": torch.optim.AdamW,
            "lr": 0.01,
        },
    ]


def net_on(mesh: str, world_size: int) -> tuple[Net, Net]:
    """The model and its sharded copy."""
    torch.manual_seed(0)
    net = Net()
    model = copy.deepcopy(net)
    options: dict[str, Any] = {}
    if mesh == "hsdp":
        options["mesh"] = mesh_of((2, world_size // 2), ("replicate", "shard"))
    elif mesh == "zero":
        options = {"mesh": mesh_of((2, world_size // 2), ("replicate", "shard"))}
        options["zero"] = fsdp2.ZeroPolicy(shard_replicas=True)
    elif mesh == "tp":
        both = mesh_of((world_size // 2, 2), ("dp", "tp"))
        plan = {"qkv": ColwiseParallel(output_layouts=Replicate()), "out": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(model, both["tp"], plan)
        options["mesh"] = both["dp"]
    elif mesh == "offload":
        options["offload_policy"] = fsdp2.CPUOffloadPolicy(pin_memory=False)
    fsdp2.fully_shard(model.qkv, **options)
    return net, fsdp2.fully_shard(model, **options)


@on_ranks(2, 4)
@pytest.mark.parametrize("mesh", ["fsdp", "hsdp", "tp", "zero", "offload"])
def test_a_model_with_groups(rank: int, world_size: int, mesh: str) -> None:
    """AdamW for the rest; accumulation, clipping and a scheduler: as the same optimizer in one process."""
    net, model = net_on(mesh, world_size)
    optimizer, reference = (matrix_optimizer(torch.optim.Muon, groups_of(each), lr=0.1) for each in (model, net))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (optimizer, reference)]
    for step in range(3):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            tokens = torch.arange(5).add(step + (0 if mesh == "tp" else rank)).remainder(7)
            model(tokens).square().sum().backward()
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        for param, other in zip(model.parameters(), net.parameters(), strict=True):
            other.grad = full(param.grad).clone()
        for each in (optimizer, reference, *schedulers):
            each.step()
        optimizer.zero_grad()
    for (name, param), other in zip(model.named_parameters(), net.parameters(), strict=True):
        assert torch.equal(full(param), other), name


@on_ranks(2, 3)
def test_split(rank: int, world_size: int) -> None:
    """Fused projections and halves of stacked experts are matrices by themselves, as is each one's state."""
    wholes = [value(0, (10, 6), 0), value(1, (3, 6, 4), 0)]

    def parts_of(fused: Tensor, stack: Tensor) -> list[Tensor]:
        return [*fused.split((4, 2, 4)), *(half for expert in stack for half in expert.split(3))]

    plain = torch.optim.Muon([nn.Parameter(part.clone()) for part in parts_of(*wholes)], lr=0.1)
    params = sharded(wholes)
    groups = [{"params": [params[0]], "split": (4, 2, 4)}, {"params": [params[1]], "split": 2}]
    optimizer = matrix_optimizer(torch.optim.Muon, groups, lr=0.1)
    for step in range(2):
        set_grads(optimizer, step)
        for part, grad in zip(params_in(plain), parts_of(*(full(each.grad) for each in params)), strict=True):
            part.grad = grad
        plain.step()
        optimizer.step()
    assert all(map(torch.equal, parts_of(*map(full, params)), params_in(plain)))
    buffers = [full(each) for param in params for each in optimizer.state[param].values()]
    assert all(map(torch.equal, buffers, [plain.state[part]["momentum_buffer"] for part in params_in(plain)]))
    assert [*optimizer.state[params[0]]] == [f"momentum_buffer[{index}]" for index in range(3)]


@on_ranks(3, 2, 4)
def test_buckets(rank: int, world_size: int) -> None:
    """Two collectives for each, which overlap with those of others, and give the same."""
    plain = in_one_process(torch.optim.Muon, 3)
    with patch.object(matrix_plan, "BUCKET_BYTES", 64):
        optimizer = matrix_optimizer(torch.optim.Muon, sharded(values_of()), lr=0.1)
        train(optimizer, range(2))
        set_grads(optimizer, 2)
        with CommDebugMode() as seen:
            optimizer.step()
        assert seen.get_total_counts() == 2 * -(-len(SHAPES) // world_size)
    assert_same(optimizer, plain)


@on_ranks(4)
def test_meshes_that_differ_by_rank(rank: int, world_size: int) -> None:
    """Layers on all ranks, and each pair of ranks with experts of its own: owners among those that hold a matrix."""
    experts = mesh_of((2, 2), ("ep", "fsdp"))["fsdp"]
    own = [value(10 + 2 * (rank // 2) + index, (5, 6), 0) for index in range(2)]
    wholes = [*values_of(), *own]
    plain = torch.optim.Muon([nn.Parameter(each) for each in wholes], lr=0.1)
    params = sharded(values_of())
    params += [nn.Parameter(distribute_tensor(each, experts, [Shard(0)])) for each in own]
    optimizer = matrix_optimizer(torch.optim.Muon, params, lr=0.1)
    for step in range(2):
        set_grads(optimizer, step)
        for param, other in zip(params, plain.param_groups[0]["params"], strict=True):
            other.grad = full(param.grad)
        optimizer.step()
        plain.step()
    for param, other in zip(params, plain.param_groups[0]["params"], strict=True):
        assert torch.equal(full(param), other)


# --- mistakes, and gradients that are missing on some ranks -----------------------------------------------------------


@on_ranks(3, 2, 4)
def test_gradients_missing_on_some_ranks(rank: int, world_size: int) -> None:
    """They count as zeros there, also before the first step; nobody waits for a message that is not sent."""
    plain, optimizer = muon_pair()
    for step in range(3):
        for each in (plain, optimizer):
            set_grads(each, step)
        for index, (param, other) in enumerate(zip(params_in(optimizer), params_in(plain), strict=True)):
            missing = (step + index) % (world_size + 1)  # this rank has none, or all have one
            assert other.grad is not None
            rows = -(-other.shape[0] // world_size)
            other.grad[missing * rows : (missing + 1) * rows] = 0
            if rank == missing:
                param.grad = None
        for each in (plain, optimizer):
            each.step()
    assert_same(optimizer, plain)


@on_ranks(2, 3)
@pytest.mark.parametrize("what", ["shape", "missing", "group"])
def test_ranks_that_differ(rank: int, world_size: int, what: str) -> None:
    """An error on all ranks in the first step. Without it, they would wait for each other, or step the wrong matrix."""
    params = sharded(values_of())
    last = rank == world_size - 1
    if what == "shape":
        params[2] = sharded([value(2, (2, 4) if last else SHAPES[2], 0)])[0]
    elif what == "missing" and last:
        del params[1]
    groups = [{"params": params[:3]}, {"params": params[3:], "split": 1 if what == "group" and last else None}]
    optimizer = matrix_optimizer(torch.optim.Muon, params if what != "group" else groups[:: -1 if last else 1], lr=0.1)
    with pytest.raises(
        MisuseError, match=r"the optimizers of ranks 0 and \d differ: rank 0 has Muon of group"
    ) as error:
        optimizer.step()
    assert "Give all ranks the same parameters" in str(error.value)


@on_ranks(2)
def test_what_is_no_matrix(rank: int, world_size: int) -> None:
    """An error, where others fall back to AdamW without a word (NVIDIA/Megatron-LM issue 5961)."""
    vector = sharded([value(0, (6,), 0)])
    with pytest.raises(ArgumentError, match=r"Muon rejects parameter 0 of group 0.*another kind") as error:
        matrix_optimizer(torch.optim.Muon, vector)
    assert isinstance(error.value.__cause__, ValueError)
    with pytest.raises(ArgumentError, match=r"'norm\.weight': split=2 divides the rows of matrices"):
        matrix_optimizer(torch.optim.Muon, [{"params": [("norm.weight", vector[0])], "split": 2}])
    with pytest.raises(ArgumentError, match="split= is for whole matrices, and AdamW has none"):
        matrix_optimizer(torch.optim.AdamW, [{"params": vector, "split": 2}])
    optimizer = matrix_optimizer(torch.optim.Muon, sharded(values_of()[:1]))
    with pytest.raises(ArgumentError, match="Muon rejects"):
        optimizer.add_param_group({"params": vector})
    assert len(optimizer.param_groups) == 1


@on_ranks(2)
def test_not_within_backward(rank: int, world_size: int) -> None:
    """Units would be stepped with plans of their own, and so by other owners than the one that has the state."""
    model = fsdp2.fully_shard(nn.Linear(6, 5, bias=False))
    with pytest.raises(ArgumentError, match="travel in buckets of many units; step it after backward"):
        fsdp2.step_in_backward(matrix_optimizer(torch.optim.Muon, model.parameters()))


class Measuring(Shampoo):
    """Keeps a sum over all parameters in its group."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["numel"] = group.get("numel", 0) + sum(param.numel() for param in group["params"])


class Counting(Shampoo):
    """Keeps a number, which other ranks could not see change."""

    def _step(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super()._step(param, grad, state, group)
        state["count"] = state.get("count", 0) + 1


@on_ranks(1)
def test_optimizers_that_do_not_step_one_matrix(rank: int, world_size: int) -> None:
    for kind, expected in (
        (Measuring, r"a step of Measuring changes \['numel'\] in its param group"),
        (Counting, r"its optimizer keeps .*'count': <class 'int'>}: expected tensors, a count of steps as a 0-dim one"),
    ):
        optimizer = matrix_optimizer(kind, sharded(values_of()[:1]), lr=0.1)
        with pytest.raises(UnsupportedError, match=expected):
            train(optimizer, range(2))


@on_ranks(2)
def test_states_of_others(rank: int, world_size: int) -> None:
    """Of another optimizer, of other shapes, with another split: errors before a step."""
    optimizer = matrix_optimizer(Shampoo, [{"params": sharded(values_of()[:1]), "split": 2}], lr=0.1)
    train(optimizer, range(1))
    param = params_in(optimizer)[0]
    saved = dict(optimizer.state[param])
    optimizer.state[param] = {key: each for key, each in saved.items() if key != "left[1]"}
    with pytest.raises(MismatchError, match=r"for matrix 1 of 2 .*expected .*'left': \(4, 4\)"):
        optimizer.step()
    optimizer.state[param] = saved
    optimizer.param_groups[0]["split"] = (4, 4)
    with pytest.raises(MismatchError, match=r"param group 0 is of Shampoo with split=2, .* with split=\(4, 4\)"):
        optimizer.step()
