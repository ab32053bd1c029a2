"""The private names of torch that the core uses, and public ones whose name depends on the version. Ground layer.

Each entry says why no public API is enough. The other modules of this folder serve one package each, and `shared`
serves several. A torch upgrade touches only this folder. Checked on the CPU, with all tests on torch 2.11.0, 2.13.0 and
2.15.0, and with a third of them on 2.14.1.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad, profiler
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """A spec made once from the global shape and stride, which `DTensor.from_local` would compute in each call."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), dtype))


# Splits a dim that another axis has split into `split_factor` pieces; no public placement does.
strided_shard: Callable[..., Placement] = _StridedShard


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes and process groups of several submeshes of one mesh, in this order. (Slicing the root mesh
    by names does not find flattened axes.)"""
    with real_tensors():
        return DeviceMesh._concatenate(list(meshes))


@contextmanager
def real_tensors() -> Iterator[None]:
    """Create real CPU tensors, as a mesh needs them, even while the caller builds a model on the meta device or with
    fake tensors."""
    with fake_tensor.unset_fake_temporarily(), torch.device("cpu"):
        yield


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D mesh of the same ranks; torch creates its process group once and later finds it by name."""
    if mesh.ndim == 1:
        return mesh
    with real_tensors():
        return mesh._flatten()


def same_root_mesh(*meshes: DeviceMesh) -> bool:
    """Whether two meshes are parts of the same mesh, or of equal meshes: a DTensor's mesh may come from a cache."""
    with real_tensors():
        return torch.equal(*(mesh._get_root_mesh().mesh.flatten() for mesh in meshes))


# A DTensor that requires no gradient, without the dispatch, checks and graph of `DTensor.from_local`. Only `__new__` is
# called: `__init__` does nothing, and its wrapper for Dynamo costs as much as all the rest.
plain_dtensor: Callable[[torch.Tensor, DTensorSpec], DTensor] = partial(DTensor.__new__, DTensor, requires_grad=False)


def make_dtensor(
    local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False, kind: type[DTensor] = DTensor
) -> DTensor:
    """`plain_dtensor` with `requires_grad` and a subclass."""
    tensor: DTensor = DTensor.__new__(kind, local, spec, requires_grad=requires_grad)
    return tensor


def make_parameter(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> nn.Parameter:
    """A DTensor that `_is_param` marks as an `nn.Parameter`. The constructor of `nn.Parameter` would detach it, which
    takes the spec from a cache, whose mesh may have other process groups. It would also call `requires_grad_`, which
    raises under transforms of `torch.func`."""
    param: Any = make_dtensor(local, spec, requires_grad)
    param._is_param = True
    return param  # type: ignore[no-any-return]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """`DTensor._local_tensor` is the local tensor itself; `to_local()` creates an autograd view of it."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


# For `map` over all parameters, without a Python frame for each.
grad_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = vars(torch._C.TensorBase)["grad"].__set__
hooks_of: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")
backward_hooks_of: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
local_of: Callable[[torch.Tensor | None], torch.Tensor] = attrgetter("_local_tensor")
spec_of: Callable[[torch.Tensor | None], DTensorSpec] = attrgetter("_spec")
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")  # what it is a view of
version: Callable[[torch.Tensor], int] = attrgetter("_version")  # how often autograd saw it change in place
# Identifies a tensor's storage. ``tensor.data = ...`` changes it, but not a DTensor's local tensor.
storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
# Where a module's parameters live; `setattr` costs ten times as much.
parameter_slots: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
# Makes a tensor a parameter of the user's own class without calling its constructor, which may do anything.
subclassed_parameter: Callable[[type, torch.Tensor, bool], nn.Parameter] = torch.Tensor._make_subclass


def set_local_tensor(tensor: torch.Tensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Replace the local tensor and the spec of a DTensor that must stay the same object."""
    assert isinstance(tensor, DTensor)
    tensor._local_tensor = local
    tensor._spec = spec


# Runs a function at the end of the running backward pass (only callable from within one).
queue_backward_callback: Callable[[Callable[[], None]], None]
queue_backward_callback = torch.autograd.Variable._execution_engine.queue_callback
# The number of the backward pass that this thread runs, or -1. A nested backward has its own number.
running_backward: Callable[[], int] = torch._C._current_graph_task_id
# The number of the next node that this thread will add to the autograd graph (they ascend); the number of a node;
# whether the running backward will run a node.
next_node_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
number_of_node: Callable[[Any], int] = methodcaller("_sequence_nr")
will_run_node: Callable[[Any], bool] = torch._C._will_engine_execute_node


def backward_is_running() -> bool:
    """Whether this thread runs a backward pass."""
    return running_backward() != -1


# The level of forward-mode AD; negative if it is off.
forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")
# Whether a transform of `torch.func` is active.
transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
# Runs a block as if no transform of `torch.func` were active: a tensor created under one cannot be used later.
outside_transforms: Callable[[], AbstractContextManager[object]] = torch._C._DisableFuncTorch
# Whether a profiler is recording in this process: `record_function` costs microseconds even if none is.
profiler_is_on: Callable[[], bool] = partial(getattr, profiler, "_is_profiler_enabled")


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Its `apply` for calls without active transforms. `Function.apply` checks for transforms in each call, which takes
    a third of its time."""
    base: Any = super(torch.autograd.Function, function)
    return base.apply  # type: ignore[no-any-return]


def post_accumulate_grad_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """The `register_post_accumulate_grad_hook` hooks, in the order in which they run. We call those of sharded
    parameters ourselves, since we set their gradients; on unsharded parameters our own hook must be the last."""
    return list((hooks_of(tensor) or {}).values())


def move_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Move the hooks of `old` to `new`, in the same dicts, so that their handles still remove them."""
    new._backward_hooks = old._backward_hooks
    if hooks := hooks_of(old):
        new._post_accumulate_grad_hooks = hooks


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's composable `replicate` was applied: its `contract` decorator stores names in an attribute with a
    random suffix."""
    notes = [value for key, value in module.__dict__.items() if key.startswith("__composable_api_state_key")]
    return any(isinstance(note, dict) and "replicate" in note for note in notes)


# Many copies (and casts) in one call, with one kernel on an accelerator; the lists must not be empty.
copy_lists: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_


def foreach_copy(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """`copy_lists`, also for empty lists."""
    if destinations:
        copy_lists(list(destinations), list(sources))


def foreach_add(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """`torch._foreach_add_`."""
    if tensors:
        torch._foreach_add_(list(tensors), list(others))


def foreach_divided(tensors: Sequence[torch.Tensor], divisor: float) -> list[torch.Tensor]:
    """`torch._foreach_div`."""
    return list(torch._foreach_div(list(tensors), divisor)) if tensors else []


# Chunks tensors along a dim, pads them with zeros, and puts chunk r of each into row r of `out`.
chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat


GATHER_OPTIONS = distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
GATHER_OPTIONS.asyncOp = True


def scatter_options(op: Any) -> Any:
    """The options of an asynchronous reduce-scatter."""
    options: Any = dist.ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = True
    return options


_NAMES_BEFORE_2_13 = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


def collective_of(group: dist.ProcessGroup, name: str) -> Callable[..., dist.Work]:
    """The group's own method of this name; call it with outputs, sources and options. The checks in
    `torch.distributed`'s functions cost half as much as the call itself."""
    method: Callable[..., dist.Work] = getattr(group, name, None) or getattr(group, _NAMES_BEFORE_2_13[name])
    return method
