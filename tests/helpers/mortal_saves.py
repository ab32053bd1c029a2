"""What ranks save that die or fail meanwhile (see `mortal_ranks.py`), and whether a checkpoint holds it."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import checkpoint

RANKS = 2
TIMEOUT_S = 0.6  # of the ranks for each other; a case in which a rank died takes as long


def tensors(step: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Uneven shards, a replicated tensor, and a 0-dim one; all values say the step."""
    rows = torch.arange(15.0).reshape(5, 3) + 1000 * step
    chunks = rows.chunk(RANKS)
    local = chunks[mesh.get_local_rank()].clone()
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=rows.shape, stride=rows.stride())
    return {"rows": sharded, "all": torch.full((7,), step), "step": torch.tensor(step)}


def save(root: str, step: int, rank: int, mesh: DeviceMesh, values: int | None = None, **options: Any) -> None:
    """Save the values of a step, which may be another one than that of the name."""
    values = step if values is None else values
    extra = {"data": {"position": values, "rank": rank, "seed": torch.tensor([values, rank])}, "name": f"run {values}"}
    options.setdefault("timeout_s", TIMEOUT_S)
    state = tensors(values, mesh)
    checkpoint.save(root, model=state, optimizer={"moment": state["rows"]}, extra=extra, step=step, **options)


def first(rank: int, root: str) -> None:
    """A body of `run_cases`: save step 1, with time to spare."""
    save(root, 1, rank, init_device_mesh("cpu", (RANKS,)), timeout_s=30)


def check(folder: str, values: int, rank: int, mesh: DeviceMesh) -> None:
    """The checkpoint holds what `save` was given for the step `values`, bit by bit, on every rank."""
    into = tensors(0, mesh)
    moment = {"moment": tensors(0, mesh)["rows"]}
    loaded = checkpoint.load(folder, model=into, optimizer=moment, timeout_s=30)
    wanted = tensors(values, mesh)
    for name in into:
        assert torch.equal(plain(into[name]), plain(wanted[name])), name
    assert torch.equal(plain(moment["moment"]), plain(wanted["rows"]))
    data = loaded.extra["data"]
    assert (data["position"], data["rank"], data["seed"].tolist()) == (values, rank, [values, rank])
    assert loaded.extra["name"] == f"run {values}"


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
