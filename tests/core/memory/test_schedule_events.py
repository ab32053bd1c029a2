"""The order of unshard, reshard and reduction over a forward and a backward, as logs to read (tests/behaviour.md,
section F).

Each log lists what really happened on every rank, one event a line; "(root)" is the root unit. `Layers` multiplies by
a parameter of the root first, so every layer's input needs a gradient, unless `root_weight=False`.
Explicit prefetch (tests/behaviour.md, section G) is in `test_prefetch_events.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import fsdp2
from tests.helpers.parity_models import Layers, expect, run_logged, shard_blocks
from tests.helpers.ranks import on_ranks

FORMS = ("unshard", "reshard")


def sharded(num_layers: int = 3, raf: bool | int | None = None, root_weight: bool = True) -> Any:
    return shard_blocks(fsdp2, Layers(num_layers, root_weight=root_weight), reshard_after_forward=raf)


@on_ranks(2)
def test_default(rank: int, world_size: int) -> None:
    """Behaviour 47-49, raf=None: the root stays unsharded; backward fetches one layer ahead and reshards what it
    leaves."""
    for _ in range(2):
        forward, backward = run_logged(sharded(), rank, *FORMS)
        expect(
            rank,
            forward,
            """\
unshard (root)
unshard layers.0
reshard layers.0
unshard layers.1
reshard layers.1
unshard layers.2
reshard layers.2
""",
        )
        expect(
            rank,
            backward,
            """\
unshard layers.2
unshard layers.1
reshard layers.2
unshard layers.0
reshard layers.1
reshard layers.0
reshard (root)
""",
        )


@on_ranks(2)
@pytest.mark.parametrize("raf", [True, 2])
def test_reshard_all(rank: int, world_size: int, raf: bool | int) -> None:
    """Behaviour 47, 48, 50: the root is resharded last; its pre-backward gathers it again and prefetches the last
    layer."""
    forward, backward = run_logged(sharded(raf=raf), rank, *FORMS)
    assert forward.endswith("reshard layers.2\nreshard (root)\n")
    expect(
        rank,
        backward,
        """\
unshard (root)
unshard layers.2
unshard layers.1
reshard layers.2
unshard layers.0
reshard layers.1
reshard layers.0
reshard (root)
""",
    )


@on_ranks(2)
def test_keep_all(rank: int, world_size: int) -> None:
    """Behaviour 47, 48, raf=False: nothing is resharded in forward, nothing unsharded in backward."""
    forward, backward = run_logged(sharded(raf=False), rank, *FORMS)
    expect(
        rank,
        forward,
        """\
unshard (root)
unshard layers.0
unshard layers.1
unshard layers.2
""",
    )
    expect(
        rank,
        backward,
        """\
reshard layers.2
reshard layers.1
reshard layers.0
reshard (root)
""",
    )


@on_ranks(2)
def test_reductions(rank: int, world_size: int) -> None:
    """Behaviour 48: a reduction starts as soon as the unit's last gradient is there, before it is resharded."""
    forward, backward = run_logged(sharded(), rank, "reduce_scatter", *FORMS)
    assert "reduce_scatter" not in forward
    expect(
        rank,
        backward,
        """\
unshard layers.2
unshard layers.1
reduce_scatter layers.2
reshard layers.2
unshard layers.0
reduce_scatter layers.1
reshard layers.1
reduce_scatter layers.0
reshard layers.0
reduce_scatter (root)
reshard (root)
""",
    )


@on_ranks(2)
def test_hooks(rank: int, world_size: int) -> None:
    """Behaviour 51: which hooks run when; the layers' inputs need gradients, the root's do not: it comes last."""
    forward, backward = run_logged(
        sharded(2),
        rank,
        "root_pre_forward",
        "pre_forward",
        "post_forward",
        "pre_backward",
        "post_backward",
        "root_post_backward",
    )
    expect(
        rank,
        forward,
        """\
root_pre_forward (root)
pre_forward (root)
pre_forward layers.0
post_forward layers.0
pre_forward layers.1
post_forward layers.1
post_forward (root)
""",
    )
    expect(
        rank,
        backward,
        """\
pre_backward (root)
pre_backward layers.1
post_backward layers.1
pre_backward layers.0
post_backward layers.0
post_backward (root)
root_post_backward (root)
""",
    )


@on_ranks(2)
def test_inputs_without_gradient(rank: int, world_size: int) -> None:
    """Behaviour 51: a first layer whose input needs no gradient is finished at the end of backward."""
    model = sharded(root_weight=False)
    _, backward = run_logged(model, rank, *FORMS)
    expect(
        rank,
        backward,
        """\
unshard layers.2
unshard layers.1
reshard layers.2
unshard layers.0
reshard layers.1
reshard layers.0
""",
    )


class Late(Layers):
    """The root's parameter comes last, so that the input of layer 0 needs no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


@on_ranks(2)
def test_end_of_backward_in_pre_order(rank: int, world_size: int) -> None:
    """Behaviour 51: in the callback at the end of backward, the root comes before its first layer."""
    model = shard_blocks(fsdp2, Late(2), reshard_after_forward=True)
    _, backward = run_logged(model, rank, "post_backward", "root_post_backward", *FORMS)
    expect(
        rank,
        backward,
        """\
unshard (root)
unshard layers.1
unshard layers.0
post_backward layers.1
reshard layers.1
post_backward (root)
reshard (root)
post_backward layers.0
reshard layers.0
root_post_backward (root)
""",
    )
    _, backward = run_logged(model, rank, "reduce_scatter", "root_post_backward")
    expect(
        rank,
        backward,
        """\
reduce_scatter (root)
reduce_scatter layers.1
reduce_scatter layers.0
root_post_backward (root)
""",
    )


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_checkpointing_keeps_the_order(rank: int, world_size: int, use_reentrant: bool) -> None:
    """Behaviour 49, 58, 175: recomputing adds no all-gathers, reshards nothing early and leaves the order alone.

    A reentrant checkpoint runs its forward without gradients, so nothing knows then in which order backward will come:
    each layer is still gathered once, but when its turn comes, without prefetch.
    """
    model = shard_blocks(fsdp2, Layers(3, use_reentrant=use_reentrant))
    one_by_one = """\
unshard layers.2
reshard layers.2
unshard layers.1
reshard layers.1
unshard layers.0
reshard layers.0
reshard (root)
"""
    for _ in range(2):
        _, backward = run_logged(model, rank, *FORMS)
        if use_reentrant:
            assert backward == one_by_one
            continue
        expect(
            rank,
            backward,
            """\
unshard layers.2
unshard layers.1
reshard layers.2
unshard layers.0
reshard layers.1
reshard layers.0
reshard (root)
""",
        )
