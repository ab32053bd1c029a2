"""Where optional features plug in. Layer: runtime, ground.

The core calls the functions on these lists at fixed points of a step, in the order in which they were added, and knows
none of them. A feature registers itself when its module is imported (`unit_made`, `root_made`), and adds hooks to the
roots (`Hooks`) that use it. A plain unit makes no call for them (`tests/system/test_ratchets.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from fsdp2.errors import UnsupportedError

# Arguments of `fully_shard` that features implement. The function checks a value other than False and returns the entry
# for `UnitSettings.features`. That of ``reshard_after_forward`` gets an int and the `MeshRoles`, and returns a setting.
options: dict[str, Callable[[Any], Any]] = {}
# Called by `fully_shard`: with each module to be managed, to ask whether it needs a unit of its own; with the drafts of
# all units, before anything is changed; with `ignored_params`; with each parameter that was sharded, and its whole
# values; and with each unit that was made (also by `copy.deepcopy`).
needs_own_unit: list[Callable[[nn.Module], bool]] = []
units_drafted: list[Callable[[Sequence[Any]], None]] = []
params_ignored: list[Callable[[Iterable[Any]], None]] = []
param_sharded: list[Callable[[Any, Any], None]] = []
unit_made: list[Callable[[Any], None]] = []
# Called with the units of a future root, root first: names are final, changes of parameters are not adopted yet.
units_named: list[Callable[[Sequence[Any]], None]] = []
# Called with the `Step` of a new root, before its first forward: names are final, and no parameter is on the meta
# device. Units get the step afterwards, so an error here leaves no root.
root_made: list[Callable[[Any], None]] = []
# Called before `_apply` of a sharded module, with its arguments. The returned function is called afterwards.
before_apply: list[Callable[[Any, Callable[[Any], Any], bool], Callable[[], None]]] = []
# Called after `zero_grad` of a sharded module, with the module.
after_zero_grad: list[Callable[[Any], None]] = []
# Setters of `FSDPModule` that features implement, by name; called with the module and the arguments.
setters: dict[str, Callable[..., Any]] = {}
# "begin" and "end": `autograd.on_backward_begin` and `on_backward_end` under transforms of `torch.func`.
levels: dict[str, Callable[..., Any]] = {}
# Called with the parameters of a group while nothing else refers to their shards. May move the shards; returns whether
# it did.
shards_made: list[Callable[[Sequence[Any]], bool]] = []
# Called with the base tensor of a shard: whether a feature allocated it for this shard and its padding only.
has_padding: list[Callable[[Any], bool]] = []
# Called before `shards_made`, with the list of parameters and the `Channel`. May sort the list, equally on all ranks.
orders: list[Callable[[list[Any], Any], None]] = []
# Called when a gather is planned, with lists of destinations and sources of one dtype: returns fewer copies that do the
# same.
copies: list[Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]] = []
# "copy_back": called with a parameter that was changed in place while unsharded; copies the change into its shard.
in_place: dict[str, Callable[[Any], None]] = {}
# Where the unsharded values of a `Bucket` come from. `sources` make a `Shards` of their own kind for a group, or return
# None. `around_sources` return the source that they get, or a wrapper. `keeps`, by `Bucket.keep`, return a source that
# keeps values at reshard. `keep_values` get the source of a group that reshards after a forward without gradients, and
# return one that keeps its values until the next.
sources: list[Callable[[Any], Any]] = []
around_sources: list[Callable[[Any, Any], Any]] = []
keeps: dict[Any, Callable[[Any], Any]] = {}
keep_values: list[Callable[[Any], Any]] = []
# By the `all_gather_dtype` of `MixedPrecisionPolicy`: called with a parameter and its `MeshRoles`; returns whether the
# parameter is sent in that dtype.
gather_dtypes: dict[Any, Callable[[Any, Any], bool]] = {}
# Called with an FQN and a local tensor: the object whose hooks change its all-gather, or None.
gather_hooks: list[Callable[[str, Any], Any]] = []
# "unused": called with the parameters of a group, their gradients, and which missing gradients to fill with zeros.
# "register_hook": called with a sharded parameter that has such hooks, its reduced gradient and the gradient's spec;
# returns the local tensor that the hooks make of it.
gradients: dict[str, Callable[..., Any]] = {}
# By the `reduce_scatter_dtype` of `MixedPrecisionPolicy`: wraps the backend's `Comm` in another one.
scatter_dtypes: dict[Any, Callable[[Any], Any]] = {}


def implementation(table: Mapping[Any, Any], key: Any, name: str) -> Any:
    """The entry of one of these tables for `key`. Raises `UnsupportedError` if the feature was removed."""
    if key not in table:
        raise UnsupportedError(f"{name}: the module of fsdp2.extras that implements it was removed")
    return table[key]


class Hooks:
    """The hooks of one root. They must refer to it weakly, so that a model is freed when its last user drops it."""

    def __init__(self) -> None:
        # The root's forward starts, with these args and kwargs.
        self.before_forward: list[Callable[[tuple[Any, ...], dict[str, Any]], None]] = []
        # The forward of this unit starts, and its parameters are available. Not called in a recomputation.
        self.unit_started: list[Callable[[Any], None]] = []
        # A forward of the root, or of a unit called outside of the root's forward, has ended without an error.
        self.after_forward: list[Callable[[], None]] = []
        # A backward begins, or gradients are finalised. `State.settings` of all units and `Step.is_last` are set.
        self.settings_chosen: list[Callable[[], None]] = []
        # Backward reaches this unit, and may compute only some gradients (`inputs=...`).
        self.reached_in_part: list[Callable[[Any], None]] = []
        # Backward is over, and the remaining gradients, perhaps of earlier backwards, are about to be reduced.
        self.before_last_reductions: list[Callable[[], None]] = []
        # All reductions of the last backward of a step have been issued, and are about to be waited for.
        self.before_wait: list[Callable[[], None]] = []
        # Backward is over, and its reductions have been issued; after the last backward of a step they are complete.
        self.after_backward: list[Callable[[], None]] = []
        self.on_reset: list[Callable[[], None]] = []  # `reset_iter_state` was called
