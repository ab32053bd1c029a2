"""What may go into and come out of a sharded module, and how often it may be called (section F)."""

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from fsdp2 import MixedPrecisionPolicy, events, fully_shard
from tests.helpers.models import check_step, is_sharded, units
from tests.helpers.one_process import check, in_units
from tests.helpers.parity_models import batch, count
from tests.helpers.ranks import on_ranks


def backward(model: nn.Module, rank: int) -> None:
    model(batch(0, rank, 4)).square().sum().backward()


@on_ranks(2)
def test_order_against_user_hooks(rank: int, world_size: int) -> None:
    """Behaviour 45: unshard before all user pre-hooks but later prepended ones; reshard in its turn among the hooks."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded: dict[str, bool] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, *_: sharded.update({name: isinstance(module.weight, DTensor)})

    model[0].register_forward_pre_hook(note("pre, registered earlier"))
    model[0].register_forward_hook(note("post, registered earlier"))
    fully_shard(model[0], reshard_after_forward=True)
    fully_shard(model)
    model[0].register_forward_pre_hook(note("pre, registered later"))
    model[0].register_forward_pre_hook(note("pre, prepended later"), prepend=True)
    model[0].register_forward_hook(note("post, registered later"))
    model(batch(0, rank, 4))
    assert sharded == {
        "pre, prepended later": True,
        "pre, registered earlier": False,
        "pre, registered later": False,
        "post, registered earlier": False,
        "post, registered later": True,
    }


@on_ranks(2)
def test_forward_without_hooks(rank: int, world_size: int) -> None:
    """Behaviour 46: `.forward` itself sees sharded parameters, and says so."""
    with pytest.raises(RuntimeError, match="DTensor"):
        fully_shard(nn.Linear(4, 4)).forward(batch(0, rank, 4))


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Out:
    value: Any
    note: str = "kept"
    nothing: None = None


@dataclass(frozen=True)
class FrozenOut:
    value: Any


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "mixed": (lambda t: {"a": [Pair(1.5, FrozenOut(("x", t)))]}, lambda c: c["a"][0].second.value[1]),
    "tensor": (lambda t: t, lambda c: c),
    "list": (lambda t: [t, 3, None], lambda c: c[0]),
    "second_of_two": (lambda t: (t * 2, t), lambda c: c[1]),
    "nested_dataclass": (lambda t: Out(Out({"deep": [t]})), lambda c: c.value.value["deep"][0]),
}


class Boxed(nn.Linear):
    """Unpacks its input, and packs its output."""

    def __init__(self, unpack: Any = None, pack: Any = None) -> None:
        super().__init__(4, 4)
        self.unpack, self.pack = unpack, pack

    def forward(self, box: Any, other: int = 0) -> Any:
        x = super().forward(self.unpack(box) if self.unpack else box)
        return self.pack(torch.tanh(x)) if self.pack else x


class Boxes(nn.Module):
    """Two layers that talk in containers."""

    def __init__(self, kind: str, in_kwargs: bool) -> None:
        super().__init__()
        self.pack, self.unpack = CONTAINERS[kind]
        self.in_kwargs = in_kwargs
        self.first, self.second = Boxed(pack=self.pack), Boxed(unpack=self.unpack)

    def forward(self, x: Tensor) -> Tensor:
        box = self.first(x)
        before = self.unpack(box)
        out = self.second(other=3, box=box) if self.in_kwargs else self.second(box)
        assert type(box) is type(self.pack(x))
        assert self.unpack(box) is before, "the caller's container was changed"
        return out


class Cache:
    """As language models pass it from layer to layer: one object that each of them adds to."""

    __slots__ = ("keys", "owner")

    def __init__(self) -> None:
        self.keys: UserDict[str, Tensor] = UserDict()
        self.owner = self


class Caching(nn.Linear):
    def forward(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        x = super().forward(x)
        cache.keys[f"layer {len(cache.keys)}"] = super().forward(torch.tanh(x))
        return x, cache


class Cached(nn.Sequential):
    def forward(self, x: Tensor) -> Cache:
        cache = Cache()
        for layer in self:
            x, cache = layer(x, cache)
        return cache


@on_ranks(2)
def test_tensors_in_plain_objects(rank: int, world_size: int) -> None:
    """Behaviour 52: a loss reads tensors that a cache holds. Backward met freed weights ("storage of size 0")."""
    plain = Cached(*[Caching(4, 4) for _ in range(3)])
    model = in_units(plain, reshard_after_forward=True)

    def loss(model: nn.Module, rank: int) -> None:
        torch.stack([*model(batch(0, rank, 4)).keys.values()]).square().sum().backward()

    with events.record() as log:
        check(model, plain, rank, world_size, loss)
    assert count(log, "all_gather") == {"all_gather": 6}, "a layer hooked a tensor of another one"


@on_ranks(2)
@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("in_kwargs", [False, True], ids=["args", "kwargs"])
def test_containers(rank: int, world_size: int, kind: str, in_kwargs: bool) -> None:
    """Behaviour 52, 53: pre- and post-backward fire from tensors in any container; the caller's stay as they are."""
    plain = Boxes(kind, in_kwargs)
    model = in_units(plain)
    with events.record() as log:
        check(model, plain, rank, world_size, backward)
    order = [(event.kind, event.unit) for event in log]
    # The second's post-backward hangs on its input, which is in the container: it runs before the first's backward.
    assert order.index(("post_backward", "second")) < order.index(("pre_backward", "first"))


@on_ranks(2)
def test_dataclass_without_anything_to_do(rank: int, world_size: int) -> None:
    """Behaviour 53: with nothing to cast and no gradient to follow, the module gets the caller's own object."""
    seen = []
    model = Boxed(lambda box: seen.append(box) or box.value)
    fully_shard(model)
    box = Out(batch(0, rank, 4))
    model(box).sum().backward()
    assert seen[0] is box


@on_ranks(2)
def test_in_place_on_inputs(rank: int, world_size: int) -> None:
    """Behaviour 54: changing an input that needs a gradient in place is refused by autograd, or works; never wrong."""

    class ScalesItsInput(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    plain = nn.Sequential(nn.Linear(4, 4), ScalesItsInput(4, 4))
    try:
        check(in_units(plain), plain, rank, world_size, backward)
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise


class Heads(nn.Module):
    """Several outputs of which a step may use any; one submodule never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor | None, ...]:
        return self.heads[0](x), self.heads[1](x), self.heads[2](x), None


@on_ranks(2)
@pytest.mark.parametrize("raf", [True, False])
def test_unused_outputs(rank: int, world_size: int, raf: bool) -> None:
    """Behaviour 55: dropped and None outputs and idle submodules do not disturb later iterations; no gradients."""
    plain = Heads()
    model = in_units(plain, reshard_after_forward=raf)
    for used in ([0], [2, 1], [1], [0, 1, 2], [2]):

        def some(m: nn.Module, r: int, used: list[int] = used) -> None:
            sum(m(batch(0, r, 4))[i].sum() for i in used).backward()

        check(model, plain, rank, world_size, some)
        assert [head.weight.grad is not None for head in model.heads] == [i in used for i in range(4)]
        assert is_sharded(model)


class Repeats(nn.Module):
    def __init__(self, chained: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.chained = chained

    def forward(self, x: Tensor) -> Tensor:
        if self.chained:
            return self.layer(torch.tanh(self.layer(torch.tanh(self.layer(x)))))
        return self.layer(x) + self.layer(2 * x) * self.layer(x.square())


@on_ranks(2, 4)
@pytest.mark.parametrize("chained", [True, False], ids=["chained", "side_by_side"])
def test_several_calls_in_one_forward(rank: int, world_size: int, chained: bool) -> None:
    """Behaviour 56: k calls, k all-gathers in forward, one reduce-scatter in backward, the gradient of all calls."""
    plain = Repeats(chained)
    model = in_units(plain)
    with events.record() as log:
        loss = model(batch(0, rank, 4)).square().sum()
    assert count(log, "all_gather") == {"all_gather": 3}
    with events.record() as log:
        loss.backward()
    assert count(log, "reduce_scatter") == {"reduce_scatter": 1}
    assert 1 <= count(log, "all_gather")["all_gather"] <= 3
    check(model, plain, rank, world_size, backward)


@on_ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("raf", "gathers"), [(None, [3, 2, 2]), (True, [3, 3, 3]), (False, [3, 0, 0])])
def test_no_grad(rank: int, world_size: int, raf: bool | None, gathers: list[int], mode: Any) -> None:
    """Behaviour 61: the modules hold shards, unless the user asked otherwise; the root's values are kept."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model = copy.deepcopy(plain)
    for layer in model[:2]:
        fully_shard(layer, reshard_after_forward=raf)
    fully_shard(model, reshard_after_forward=raf)
    x = batch(0, rank, 4)
    for expected in gathers:
        with mode(), events.record() as log:
            assert_close(model(x), plain(x))
        assert count(log, "all_gather") == {"all_gather": expected}
        assert isinstance(model[2].weight, DTensor) == (raf is not False)
        assert isinstance(model[0].weight, DTensor) == (raf is not False)
    check(model, plain, rank, world_size, backward)


@on_ranks(2, 4)
def test_no_unshard_in_backward(rank: int, world_size: int) -> None:
    """Behaviour 62: an embedding needs no weights in backward; its gradient is reduced all the same."""
    plain = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))
    model = in_units(plain)
    model[0].set_unshard_in_backward(False)

    def of_tokens(m: nn.Module, r: int) -> None:
        m((torch.arange(5) + r) % 7).square().sum().backward()

    with events.record() as log:
        check(model, plain, rank, world_size, of_tokens, times=2)
    assert units(log, "all_gather") == ["0", "1", "1"] * 2
    assert sorted(units(log, "reduce_scatter")) == ["0", "0", "1", "1"]


@on_ranks(2)
def test_jvp_through_the_first_forward(rank: int, world_size: int) -> None:
    """Behaviour 65: `torch.func.jvp` through a sharded bf16 model that has not run yet."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model[0], mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    x, tangent = batch(0, rank, 4), batch(1, rank, 4)
    out, out_tangent = torch.func.jvp(model, (x,), (tangent,))
    low = copy.deepcopy(plain).bfloat16()
    expected = torch.func.jvp(low, (x.bfloat16(),), (tangent.bfloat16(),))
    assert_close((out, out_tangent), expected)


# --- outputs that are views, changed in place -------------------------------------------------------------------------


class InPlace(nn.Module):
    """The outputs of two layers are views, both changed in place by their caller."""

    def __init__(self, view: Callable[[Tensor], Tensor], change_base: bool) -> None:
        super().__init__()
        self.first, self.second = Boxed(pack=view), Boxed(pack=view)
        self.change_base = change_base

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y += 1.0
        z = self.second(x + y.sum())
        (z._base if self.change_base else z).mul_(2)
        return z


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced": lambda x: x.clone()[:, 1:],
    "nested": lambda x: x.clone().view(-1, 2, 2)[:, 0],
}


@on_ranks(2)
@pytest.mark.parametrize(("how", "change_base"), [("sliced", False), ("nested", True)])
def test_in_place_change_of_a_view(rank: int, world_size: int, how: str, change_base: bool) -> None:
    """Behaviour 54: in-place changes of outputs are fine, of views as well: same gradients, all units gathered."""
    plain = InPlace(VIEWS[how], change_base)
    model = in_units(plain, reshard_after_forward=True)
    for step in range(2):
        with events.record() as log:
            check_step(model, plain, rank, world_size, step)
        assert sorted(units(log, "all_gather")) == ["first", "first", "second", "second"]


class Biased(nn.Module):
    """Returns an input as it is, or a view of it, as blocks of T5 do with what they add to attention."""

    def __init__(self, returns_view: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.returns_view = returns_view

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x) + bias), bias.view(4) if self.returns_view else bias


class Passing(nn.Module):
    def __init__(self, returns_view: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList([Biased(returns_view) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias * 2
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


@on_ranks(2)
@pytest.mark.parametrize("returns_view", [False, True])
def test_an_input_that_is_returned(rank: int, world_size: int, returns_view: bool) -> None:
    """The hook on its base began the unit's backward again when it was over: all blocks were gathered once more."""
    plain = Passing(returns_view)
    model = in_units(plain)
    with events.record() as log:
        check(model, plain, rank, world_size)
    assert count(log, "all_gather", "post_backward") == {"all_gather": 2 * 3 + 1, "post_backward": 4}
