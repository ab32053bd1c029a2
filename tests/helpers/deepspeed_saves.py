"""DeepSpeed's folders, as its version 0.19 lays them out, and what is to come out of them."""

from __future__ import annotations

from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import checkpoint


class Net(nn.Module):
    """Two param groups, a buffer, a frozen and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3, bias=False)
        self.head = nn.Linear(7, 3, bias=False)
        self.head.weight = self.second.weight
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))


GROUPS = [["first.weight", "second.weight", "scale"], ["first.bias"]]
KINDS = ("fp32", "exp_avg", "exp_avg_sq")


def values() -> dict[str, dict[str, Tensor]]:
    """Kind -> parameter -> what is to come out."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: param.shape for name, param in Net().named_parameters() if param.requires_grad}
    return {kind: {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for kind in KINDS}


def param_groups(step: Any = None) -> list[dict[str, Any]]:
    options = [{"lr": 0.02, "weight_decay": 0.1}, {"lr": 0.01, "weight_decay": 0.0}]
    common = {"betas": (0.9, 0.99), "eps": 1e-8, **({} if step is None else {"step": step})}
    return [{**common, **own, "params": [index]} for index, own in enumerate(options)]


def model_states(zero3: bool, rank: int, world: int, frozen: Tensor) -> dict[str, Any]:
    whole = {name: Net().state_dict()[name] for name in Net().state_dict()}
    module = {name: torch.empty(0) if zero3 and value.is_floating_point() else value for name, value in whole.items()}
    module["mask"] = torch.tensor([True, False])
    part = ceil(frozen.numel() / world)
    padded = torch.cat([frozen.flatten(), torch.zeros(part * world - frozen.numel())])
    return {
        "module": module,
        "buffer_names": ["mask"],
        "param_shapes": [{name: whole[name].shape for name in group} for group in GROUPS],
        "frozen_param_shapes": {"frozen": frozen.shape},
        "frozen_param_fragments": {"frozen": padded[rank * part :][:part].clone() if zero3 else frozen},
        "shared_params": {"head.weight": "second.weight"},
        "global_steps": 7,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }


def flat(stage: int, tensors: dict[str, Tensor], group: list[str], rank: int, world: int) -> Tensor:
    """A rank's part of a group: of every parameter, or of all of them end to end."""

    def part(value: Tensor, align: int) -> Tensor:
        size = ceil(value.numel() / (align * world)) * align
        padded = torch.cat([value, torch.full((size * world - value.numel(),), 99.0)])
        return padded[rank * size :][:size]

    if stage == 3:
        return torch.cat([part(tensors[name].flatten(), 1) for name in group]).clone()
    return part(torch.cat([tensors[name].flatten() for name in group]), 2).clone()


def write_ranks(folder: Path, stage: int, world: int, scaler: type, step: Any, bf16: bool = False) -> Tensor:
    """Files as DeepSpeed's `save_checkpoint` writes them."""
    frozen, all_values = torch.arange(9.0).view(3, 3), values()
    inner = folder / "global_step7"
    inner.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    for rank in range(world):
        flats = {kind: [flat(stage, all_values[kind], group, rank, world) for group in GROUPS] for kind in KINDS}
        in_group = not isinstance(step, Tensor)
        state = {
            index: {"exp_avg": flats["exp_avg"][index], "exp_avg_sq": flats["exp_avg_sq"][index]}
            | ({} if in_group else {"step": step})
            for index in range(len(GROUPS))
        }
        optimizer = {"state": state, "param_groups": param_groups(step if in_group else None)}
        weights = [nn.Parameter(one) for one in flats["fp32"]]
        own: dict[str, Any] = {"loss_scaler": scaler(), "partition_count": world}
        if stage == 3:
            own |= {"fp32_flat_groups": weights, "optimizer_state_dict": optimizer}
        else:
            if rank == world - 1:  # the weights are without the padding that the moments have
                used = [sum(prod(all_values["fp32"][name].shape) for name in group) for group in GROUPS]
                weights = [
                    nn.Parameter(weight[: count - rank * weight.numel()])
                    for weight, count in zip(weights, used, strict=True)
                ]
            own |= {"single_partition_of_fp32_groups": weights, "base_optimizer_state": optimizer}
            own["partition_count"] = [world, world]
        prefix = "bf16_" if bf16 else ""
        torch.save({"optimizer_state_dict": own}, inner / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            torch.save(model_states(stage == 3, rank, world, frozen), inner / f"{name}mp_rank_00_model_states.pt")
    return frozen


def write_universal(folder: Path, zero3: bool) -> Tensor:
    """Files as DeepSpeed's `ds_to_universal` writes them: of ZeRO-3 flat, else in a dict."""
    frozen = torch.arange(9.0).view(3, 3)
    inner = folder / "global_step7_universal"
    for kind, tensors in values().items():
        for name, value in tensors.items():
            (inner / "zero" / name).mkdir(parents=True, exist_ok=True)
            torch.save(
                value.flatten() if zero3 else {"cat_dim": 0, "param": value}, inner / "zero" / name / f"{kind}.pt"
            )
            if not zero3:
                torch.save(torch.tensor(7.0), inner / "zero" / name / "step.pt")
    state = {index: {"step": torch.tensor(7.0)} for index in range(len(GROUPS))}
    common = {"param_groups": param_groups(), "optimizer_state_dict": {"state": state}}
    torch.save(common, inner / "zero" / "optimizer_state.pt")
    for rank in range(2 if zero3 else 1):
        name = f"zero_pp_rank_{rank}_" if zero3 else ""
        torch.save(model_states(zero3, rank, 2, frozen), inner / f"{name}mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text("global_step7_universal")
    return frozen


def loads(rank: int, world_size: int, folder: Path, frozen: Tensor, sharded: bool) -> None:
    model = Net()
    if sharded:
        fsdp2.fully_shard(model)
    decayed = [model.first.weight, model.second.weight, model.scale]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": [model.first.bias]}], lr=1.0)
    loaded = checkpoint.load(folder, model=model, optimizer=optimizer)
    assert (loaded.step, loaded.missing, loaded.unexpected) == (7, [], [])
    expected = values()

    def whole(value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    for name, param in model.named_parameters():
        if name == "frozen":
            assert torch.equal(whole(param), frozen)
            continue
        assert torch.equal(whole(param), expected["fp32"][name]), name
        state = optimizer.state[param]
        assert all(torch.equal(whole(state[kind]), expected[kind][name]) for kind in KINDS[1:]), name
        assert isinstance(state["step"], Tensor) and state["step"] == 7
    assert model.mask.tolist() == [True, False]
    found = [{key: group[key] for key in ("lr", "weight_decay", "betas")} for group in optimizer.param_groups]
    assert found == [{key: group[key] for key in ("lr", "weight_decay", "betas")} for group in param_groups()]
