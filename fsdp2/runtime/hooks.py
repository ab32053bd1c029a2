"""Where features that a plain user does not use plug in. Layer: runtime, ground.

The core calls the functions on these lists at fixed points of a step, in the order in which they were added, and knows
none of them. A feature adds itself when its module is imported (`unit_made`, `root_made`), and to the lists of one root
(`Hooks`) where it has something to do there. They cost a plain unit no call (`tests/system/test_ratchets.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from fsdp2.errors import UnsupportedError

# Arguments of `fully_shard` that features understand: the function that checks a value that is not False, and returns
# what `UnitSettings.features` has under this name; for ``reshard_after_forward``, from an int and the `MeshRoles`, what
# it means.
options: dict[str, Callable[[Any], Any]] = {}
# Called by `fully_shard`: with each module that its units would manage, which may need a unit of its own; with the
# drafts of all units that it will make, before anything is changed; with `ignored_params`; with each parameter that it
# has sharded and its whole values; and, as by `copy.deepcopy`, with each unit that it has made.
needs_own_unit: list[Callable[[nn.Module], bool]] = []
units_drafted: list[Callable[[Sequence[Any]], None]] = []
params_ignored: list[Callable[[Iterable[Any]], None]] = []
param_sharded: list[Callable[[Any, Any], None]] = []
unit_made: list[Callable[[Any], None]] = []
# Called with the units of a module that will be a root, root first: they have names, but changes are not adopted yet.
units_named: list[Callable[[Sequence[Any]], None]] = []
# Called when a unit becomes a root, with its `Step`, before its first forward: names are final, no parameter is on the
# meta device. Units get the step afterwards: after an error there is no root.
root_made: list[Callable[[Any], None]] = []
# Called before `_apply` of a sharded module, with its arguments. What a hook returns is called afterwards.
before_apply: list[Callable[[Any, Callable[[Any], Any], bool], Callable[[], None]]] = []
# Called after `zero_grad` of a sharded module, with the module.
after_zero_grad: list[Callable[[Any], None]] = []
# Setters of `FSDPModule` that are implemented outside of the core, by name; called with the module and the arguments.
setters: dict[str, Callable[..., Any]] = {}
# Under transforms of `torch.func`, by "begin" and "end": what `autograd.on_backward_begin` and `on_backward_end` do.
levels: dict[str, Callable[..., Any]] = {}
# Called with the parameters of a group whose shards nothing else refers to yet, which it may put elsewhere: returns
# whether it did.
shards_made: list[Callable[[Sequence[Any]], bool]] = []
# Called with the base of a shard: whether a feature has made it for this shard and its padding alone.
has_padding: list[Callable[[Any], bool]] = []
# Called before `shards_made`, with the list of parameters and the `Channel`: may sort it, on all ranks alike.
orders: list[Callable[[list[Any], Any], None]] = []
# Called when a gather is planned, with its copies of shards, all of one dtype, as two lists: fewer that do the same.
copies: list[Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]] = []
# "copy_back": called with a parameter that was changed in place while it was unsharded; copies that into its shard.
in_place: dict[str, Callable[[Any], None]] = {}
# Where the unsharded values of a `Bucket` come from. A function of `sources` may return a `Shards` of its own kind
# for a group, or None; one of `around_sources` what it is given, or something around it; one of `keeps` what keeps
# values at reshard, by `Bucket.keep`; one of `keep_values`, called with the source of a group that reshards after a
# forward without gradients, what keeps values until the next.
sources: list[Callable[[Any], Any]] = []
around_sources: list[Callable[[Any, Any], Any]] = []
keeps: dict[Any, Callable[[Any], Any]] = {}
keep_values: list[Callable[[Any], Any]] = []
# By the `all_gather_dtype` of `MixedPrecisionPolicy`: called with a parameter and its `MeshRoles`, returns whether it
# travels so.
gather_dtypes: dict[Any, Callable[[Any, Any], bool]] = {}
# Called with an FQN and a local tensor: the object whose hooks change its all-gather, or None.
gather_hooks: list[Callable[[str, Any], Any]] = []
# What few gradients need. "unused": called with the parameters of a group, their gradients, and which of those that are
# missing to fill with zeros. "register_hook": with a sharded parameter that has such hooks, its reduced gradient, and
# the spec of that; returns what they make of it, a local tensor.
gradients: dict[str, Callable[..., Any]] = {}
# By the `reduce_scatter_dtype` of `MixedPrecisionPolicy`: puts another `Comm` around that of the backend.
scatter_dtypes: dict[Any, Callable[[Any], Any]] = {}


def implementation(table: Mapping[Any, Any], key: Any, name: str) -> Any:
    """What a feature has added to one of these tables for `key`. Raises `UnsupportedError` if it was removed."""
    if key not in table:
        raise UnsupportedError(f"{name}: the module of fsdp2.extras that implements it was removed")
    return table[key]


class Hooks:
    """The hooks of one root. They refer to it weakly: a model is freed when its last user drops it."""

    def __init__(self) -> None:
        # The root's forward starts, with these positional and keyword inputs.
        self.before_forward: list[Callable[[tuple[Any, ...], dict[str, Any]], None]] = []
        # The forward of this unit starts, and its parameters are there; within its own backward not called.
        self.unit_started: list[Callable[[Any], None]] = []
        # A forward of the root, or of a unit outside of the root's, has ended without an error.
        self.after_forward: list[Callable[[], None]] = []
        # A backward begins, or gradients are finalised. `State.settings` of all units and `Step.is_last` are chosen.
        self.settings_chosen: list[Callable[[], None]] = []
        # Backward reaches this unit, and may compute the gradients of some inputs only.
        self.reached_in_part: list[Callable[[Any], None]] = []
        # Backward is over, and the gradients that are left will be reduced; or those of earlier backwards will be.
        self.before_last_reductions: list[Callable[[], None]] = []
        # All reductions of the last backward of a step have been issued, and will be waited for.
        self.before_wait: list[Callable[[], None]] = []
        # Backward is over, and its reductions have been issued; in the last backward of a step they are done.
        self.after_backward: list[Callable[[], None]] = []
        self.on_reset: list[Callable[[], None]] = []  # `reset_iter_state` was called
