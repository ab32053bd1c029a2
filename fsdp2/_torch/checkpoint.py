"""Private names of torch for `fsdp2.checkpoint`. Ground layer."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

# Names of torch's functions and classes in files of `torch.save` (those that rebuild a tensor) and in metadata of DCP.
# They are part of the format, and only compared with: nothing by these names is imported or called.
PICKLED_TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
PICKLED_DCP_FILE = "torch.distributed.checkpoint.filesystem._StorageInfo"
PICKLED_DCP_METADATA = (
    PICKLED_DCP_FILE,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",  # by older versions, as the next one
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.serialization._get_layout",
)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of which this one is a part."""
    root: DeviceMesh = mesh._get_root_mesh()
    return root


def loading_code(module: nn.Module) -> list[Any]:
    """What `load_state_dict` runs for a module besides nn.Module's own code: hooks, and methods that its class
    overrides. No public API lists the hooks (`_load_state_dict_pre_hooks`, `_load_state_dict_post_hooks`)."""
    cls, base = type(module), nn.Module
    methods = [(cls.load_state_dict, base.load_state_dict), (cls._load_from_state_dict, base._load_from_state_dict)]
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    return [*hooks, *(own for own, inherited in methods if own is not inherited)]


def state_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The hooks of `state_dict` and `load_state_dict`, which `Optimizer` keeps in private attributes. Wrappers that do
    not call its constructor lack these."""
    kinds = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return [hook for kind in kinds for hook in getattr(optimizer, f"_optimizer_{kind}_hooks", {}).values()]
