"""torch's own pipeline schedules on stages that fsdp2 shards (Behaviour 4, 105).

Four ranks are a mesh of two pipeline ranks and two data-parallel ones. Each stage is two sharded blocks in a sharded
`nn.Sequential`. What fsdp2's stages compute is compared with torch's FSDP2 on the same schedule; `test_pipeline.py`
compares with one process.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

import fsdp2
from fsdp2 import events, fully_shard
from tests.helpers.meshes import shared_mesh
from tests.helpers.parity_models import TORCH_VERSION, Block, count, local
from tests.helpers.ranks import on_ranks

NUM_MICROBATCHES = 4
# One stage a rank, or two: schedule -> the stages of pipeline rank 0 and of rank 1.
STAGES = {
    "GPipe": ([0], [1]),
    "1F1B": ([0], [1]),
    "Interleaved1F1B": ([0, 2], [1, 3]),
    "LoopedBFS": ([0, 2], [1, 3]),
    "InterleavedZeroBubble": ([0, 2], [1, 3]),
    "ZBVZeroBubble": ([0, 3], [1, 2]),
    "DualPipeV": ([0, 3], [1, 2]),
}
# They compute the gradients of inputs and of weights apart, with the parameters that a stage holds just before: also
# torch's FSDP2 loses gradients here when stages reshard after forward.
SPLIT_BACKWARD = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def pipeline_mesh() -> DeviceMesh:
    return shared_mesh((2, 2, 1), ("pp", "dp", "one"))


def data(step: int, dp_rank: int) -> tuple[Tensor, Tensor]:
    """A whole batch: inputs and targets."""
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    return torch.randn(12, 8, generator=generator), torch.randn(12, 8, generator=generator)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def make_stages(num_stages: int) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(8, 11), Block(8, 11)) for _ in range(num_stages)]


@dataclass
class Training:
    """This rank's part of a pipelined training. `modules`: its stages, by index."""

    modules: dict[int, Any]
    schedule: Any
    optim: torch.optim.Optimizer
    losses: list[Tensor] = field(default_factory=list)

    def step(self, step: int) -> None:
        """A whole step but for the optimizer's."""
        dp_rank = pipeline_mesh().get_local_rank("dp")
        inputs, target = data(step, dp_rank)
        args = (inputs,) if 0 in self.modules else ()
        self.losses = []
        is_last = self.schedule._num_stages - 1 in self.modules
        self.schedule.step(*args, **({"target": target, "losses": self.losses} if is_last else {}))

    def params(self) -> dict[str, Any]:
        return {f"{i}.{name}": p for i, module in self.modules.items() for name, p in module.named_parameters()}


def train(api: ModuleType, name: str, raf: bool = False) -> Training:
    """The stages of this rank, sharded over the data-parallel axis, in a schedule."""
    mesh = pipeline_mesh()
    indices = STAGES[name][mesh.get_local_rank("pp")]
    num_stages = 2 * len(indices)
    whole = make_stages(num_stages)
    modules = {index: whole[index] for index in indices}
    for module in modules.values():
        for each in (*module, module):
            api.fully_shard(each, mesh=mesh["dp"], reshard_after_forward=raf)
    group = mesh.get_group("pp")
    stages = [PipelineStage(m, i, num_stages, torch.device("cpu"), group=group) for i, m in modules.items()]
    kind = getattr(schedules, f"Schedule{name}")
    is_multi = issubclass(kind, schedules.PipelineScheduleMulti)
    schedule = kind(stages if is_multi else stages[0], NUM_MICROBATCHES, loss_fn=loss_fn)
    params = [param for module in modules.values() for param in module.parameters()]
    return Training(modules, schedule, torch.optim.Adam(params, lr=1e-2))


def race(name: str, raf: bool) -> None:
    """Two steps of each training, compared bit by bit."""
    ours, theirs = train(fsdp2, name, raf), train(torch_fsdp, name, raf)
    for step in range(2):
        ours.step(step)
        theirs.step(step)
        assert len(ours.losses) == len(theirs.losses) == (NUM_MICROBATCHES if ours.losses else 0)
        assert all(map(torch.equal, ours.losses, theirs.losses))
        for (key, param), (their_key, their_param) in zip(ours.params().items(), theirs.params().items(), strict=True):
            assert key == their_key
            assert param.grad is not None, f"step {step}: {key} has no gradient"
            assert torch.equal(local(param.grad), local(their_param.grad)), f"step {step}: {key}, against torch"
        for training in (ours, theirs):
            training.optim.step()
            training.optim.zero_grad()


@on_ranks(4)
@pytest.mark.parametrize("raf", [True, False])
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"])
def test_schedules(rank: int, world_size: int, name: str, raf: bool) -> None:
    """Behaviour 105: losses and gradients are torch's, bit by bit."""
    race(name, raf)


@on_ranks(4)
@pytest.mark.parametrize("name", SPLIT_BACKWARD)
def test_schedules_that_split_backward(rank: int, world_size: int, name: str) -> None:
    """Behaviour 105: zero-bubble schedules set gradients by hand, not through backward; all are reduced."""
    if TORCH_VERSION < (2, 13) and name != "InterleavedZeroBubble":
        pytest.skip("a rank of these schedules sends to itself, which gloo refuses, under torch's own FSDP2 too")
    race(name, raf=False)


@on_ranks(2)
@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="a rank sends to itself, which gloo refuses")
def test_split_backward_of_stages_that_reshard(rank: int, world_size: int) -> None:
    """These schedules ask a stage for its parameters when it holds shards, so stages lost gradients, without a word, as
    on torch's FSDP2. Here one rank has both stages of a pipeline, so that all ranks get the error."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    modules = make_stages(2)
    for module in modules:
        for each in (*module, module):
            fully_shard(each, mesh=mesh["dp"], reshard_after_forward=True)
    group = mesh.get_group("pp")
    stages = [PipelineStage(m, i, 2, torch.device("cpu"), group=group) for i, m in enumerate(modules)]
    schedule = schedules.ScheduleInterleavedZeroBubble(stages, NUM_MICROBATCHES, loss_fn=loss_fn)
    inputs, target = data(0, rank)
    with pytest.raises(fsdp2.OrderError, match="reshard_after_forward=False"):
        schedule.step(inputs, target=target)


@on_ranks(4)
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_communication(rank: int, world_size: int, name: str) -> None:
    """Behaviour 97: one all-gather and one reduce-scatter a block and step, however many microbatches; nothing
    stays unsharded."""
    training = train(fsdp2, name)
    for step in range(2):
        with events.record() as log:
            training.step(step)
        if step == 1:  # the first runs each stage once more, to learn the shapes
            blocks = 2 * len(training.modules)
            assert count(log, "all_gather", "reduce_scatter") == {"all_gather": blocks, "reduce_scatter": blocks}
        for param in training.params().values():
            assert isinstance(param, torch.distributed.tensor.DTensor)
            assert isinstance(param.grad, torch.distributed.tensor.DTensor)
        training.optim.zero_grad()


def sharded_pair() -> Sequence[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    return [model, model[0], model[1]]


@on_ranks(2)
def test_what_torch_asks_for(rank: int, world_size: int) -> None:
    """Behaviour 4: torch's own `FSDPModule` and `fully_shard.state` know our modules, and no others."""
    model, inner, plain = sharded_pair()
    assert [isinstance(each, torch_fsdp.FSDPModule) for each in (model, inner, plain)] == [True, True, False]
    states = [torch_fsdp.fully_shard.state(each) for each in (model, inner, plain)]
    assert states[0] is not None
    assert states[1] is not None
    assert states[0] is not states[1]
    assert states[2] is None
    states[0]._root_post_backward_final_callback()  # never ran: nothing to end
    with pytest.raises(AssertionError, match="fully_shard has already been applied"):
        torch_fsdp.fully_shard(inner)


@on_ranks(2)
def test_copied_stage(rank: int, world_size: int) -> None:
    """A copy of a stage ends its own backward, not that of the original."""
    modules = sharded_pair()
    copied: Any = copy.deepcopy(modules[0])
    copied.set_requires_gradient_sync(False)
    copied(torch.randn(2, 4)).sum().backward()
    copied.set_requires_gradient_sync(True)
    for model in (modules[0], copied):
        torch_fsdp.fully_shard.state(model)._root_post_backward_final_callback()
    assert [param.grad is None for param in modules[0].parameters()] == [True] * 4
    assert [param.grad is None for param in copied.parameters()] == [False] * 4
