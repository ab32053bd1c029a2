"""Optimizers of torch that go over parameters one by one, and whether two of them are in the same state, bit by bit."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.helpers.parity_models import local

Optim = torch.optim.Optimizer
CASES: dict[str, tuple[type[Optim], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"amsgrad": True}),
    "adamw_foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw_fused": (torch.optim.AdamW, {"fused": True}),
    "adam_lr_tensor": (torch.optim.Adam, {"lr": torch.tensor(1e-2), "fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd_foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "adagrad_foreach": (torch.optim.Adagrad, {"foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "rmsprop_foreach": (torch.optim.RMSprop, {"foreach": True}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
}

NOT_ON_DTENSORS = {"rprop"}  # torch has no rule for one of its operations


def params_in(optimizer: Optim) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def assert_same_tensors(ours: Any, theirs: Any) -> None:
    """Bit by bit, and the same kind of tensor with the same layout."""
    assert type(ours) is type(theirs)
    if isinstance(ours, DTensor):
        assert (ours.device_mesh, ours.placements, ours.shape, ours.stride(), ours.dtype) == (
            (theirs.device_mesh, theirs.placements, theirs.shape, theirs.stride(), theirs.dtype)
        )
        ours, theirs = local(ours.detach()), local(theirs.detach())
    if isinstance(ours, Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    else:
        assert ours == theirs


def assert_same(ours: Optim, theirs: Optim) -> None:
    """Parameters and state dicts of two optimizers."""
    a, b = ours.state_dict(), theirs.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for index in a["state"]:
        assert a["state"][index].keys() == b["state"][index].keys()
        for key, value in a["state"][index].items():
            assert_same_tensors(value, b["state"][index][key])
    for param, other in zip(params_in(ours), params_in(theirs), strict=True):
        assert_same_tensors(param, other)
