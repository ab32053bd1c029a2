"""Those parts of torch that ask about FSDP2 modules, while `fsdp2.compat` is installed, as composable `replicate` does;
and private objects of torch's that torchtitan, axolotl and others use.

One job of two ranks makes all checks: each runs first on torch's FSDP2, then, installed, on fsdp2, and the two must
agree. It is a process of its own because `install` must come before any client's imports.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp  # the client's view: its attributes are whoever's is installed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module

from tests.helpers.scripts import run_script
from tests.helpers.source_tree import ROOT

TIMEOUT_SECONDS = 170
CHECKS: dict[str, Callable[[int], Any]] = {}


def check(body: Callable[[int], Any]) -> Callable[[int], Any]:
    """A check gets the rank, and returns what must be the same on both."""
    CHECKS[body.__name__] = body
    return body


@cache
def whole_mesh() -> DeviceMesh:
    """Made once: DTensor takes an equal mesh that it has seen before for this one."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def blocks(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(count)])


def sharded(**options: Any) -> Any:
    model = blocks()
    for block in model:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)


def step(model: nn.Module, rank: int, seed: int = 0) -> list[float]:
    """The loss and the sum of each whole gradient."""
    torch.manual_seed(10 * seed + rank)
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    grads = [param.grad for param in model.parameters()]
    sums = [
        (grad.full_tensor() if isinstance(grad, DTensor) else grad).sum().item() for grad in grads if grad is not None
    ]
    return [loss.item(), *sums]


# --- the checks, in the client's words --------------------------------------------------------------------------------


@check
def replicate_leaves_sharded_modules_alone(rank: int) -> Any:
    """It finds "fully_shard" in the registry of `contract`, and averages the gradients of other modules only."""
    from torch.distributed._composable.replicate import replicate

    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(sharded())
    model = blocks()
    fsdp.fully_shard(model[1])
    replicate(model)
    return [step(model, rank), type(model[1].up.weight).__name__]


@check
def experts_with_a_mesh_of_their_own(rank: int) -> Any:
    """torchtitan's expert parallelism: `FSDPMeshInfo` and `ShardPlacementResult` from torch's private modules."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    everyone, own = _get_mesh_info(mesh["shard"]), _get_mesh_info(mesh)
    assert isinstance(everyone, FSDPMeshInfo) and isinstance(own, FSDPMeshInfo)
    model = blocks()
    experts = set(model[0].parameters())

    def place(param: nn.Parameter) -> Any:
        if param in experts:
            return ShardPlacementResult(placement=Shard(param.ndim - 1), mesh_info=own)
        return ShardPlacementResult(placement=Shard(0), mesh_info=everyone)

    fsdp.fully_shard(model, mesh=mesh["shard"], shard_placement_fn=place)
    return [str(param.placements) for param in model.parameters()], step(model, rank)


@check
def experts_on_a_part_of_the_whole_mesh(rank: int) -> Any:
    """The same where all parameters are DTensors on the whole mesh, and names say which axes are data parallel."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

    mesh = whole_mesh()
    dims = fsdp.DataParallelMeshDims(shard="shard")
    model = distribute_module(blocks(), mesh)
    info = _get_mesh_info(mesh, dims)
    fsdp.fully_shard(
        model, mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=lambda param: ShardPlacementResult(Shard(0), info)
    )
    return [[str(param.placements), str(param.device_mesh)] for param in model.parameters()]


@check
def states_that_trainers_look_for(rank: int) -> Any:
    """NeMo Automodel reads the compute dtype, axolotl keeps a unit unsharded over inner backwards, verl changes when it
    reshards after forward. They find units in torch's registry of module states."""
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    model = sharded(mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    found = [name for name, module in model.named_modules() if module in _module_state_mapping]
    states = [_get_module_fsdp_state(module) for module in (model, *model)]
    assert states == [module._get_fsdp_state() for module in (model, *model)]
    assert _get_module_fsdp_state(model[0].up) is None
    first, second, third = [state._fsdp_param_group for state in states[1:]]
    info = second.mesh_info
    forms = lambda: [type(block.up.weight).__name__ for block in model]  # noqa: E731
    second.post_forward_mesh_info = _get_post_forward_mesh_info(False, info)
    third.post_forward_mesh_info = _get_post_forward_mesh_info(True, info)
    with torch.no_grad():
        model(torch.ones(4, 8))
    after_forward = forms()
    before, first.reshard_after_backward = first.reshard_after_backward, False
    numbers = [step(model, rank), forms()]
    first.reshard_after_backward = before
    numbers += [step(model, rank), forms()]
    numbers += [states[0]._fsdp_param_group is None, before, str(states[1]._mp_policy.param_dtype), found]
    return numbers, after_forward, [info.shard_mesh_size, info.shard_mesh_dim, info.mesh.size()]


# --- the job ----------------------------------------------------------------------------------------------------------


def run_check(body: Callable[[int], Any], rank: int) -> Any:
    try:
        return body(rank)
    except Exception:
        return traceback.format_exc()


def main(out: str) -> None:
    import fsdp2.compat

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results: dict[str, list[Any]] = {name: [] for name in CHECKS}
    for install in (False, True, False):
        (fsdp2.compat.install if install else fsdp2.compat.uninstall)()
        for name, body in CHECKS.items():
            assert fsdp.FSDPModule.__module__ == ("fsdp2.module" if install else "torch.distributed.fsdp")
            results[name].append(run_check(body, rank))
            dist.barrier()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, results)
    if rank == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("clients") / "results.json"
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    module = "tests.compat.test_clients"
    done = run_script("-m", module, out, ranks=2, cwd=ROOT, environment=variables, timeout_s=TIMEOUT_SECONDS)
    assert done.status == 0, done.errors
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", CHECKS)
def test_same_on_both(results: Any, name: str) -> None:
    """Before, while and after `install`: the same, and no traceback."""
    for rank in (0, 1):
        on_torch, on_ours, afterwards = results[rank][name]
        if isinstance(on_torch, str) and "ImportError" in on_torch:
            pytest.skip(f"this torch has not got what the client uses: {on_torch.splitlines()[-1]}")
        assert not isinstance(on_ours, str) or "Traceback" not in on_ours, on_ours
        assert on_ours == on_torch
        assert afterwards == on_torch


if __name__ == "__main__":
    main(sys.argv[1])
