"""Run a test body on every rank of a pool of real gloo processes.

    @on_ranks(2, 4)
    @pytest.mark.parametrize("bias", [True, False])
    def test_x(rank: int, world_size: int, bias: bool) -> None: ...

A pool (one per world size, see `ranks_pool.py`) is started at first use and serves the whole pytest session, so that a
test costs tens of milliseconds. In every worker the default process group spans exactly the pool. Parameters must be
picklable; fixtures may be used if their value is (`tmp_path` is). Plain `assert`s report their values, as elsewhere.

After a failure or a hang the pool is thrown away. A rank that hangs is reported with its stacks; a rank that fails with
its traceback.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.ranks_pool import DEFAULT_TIMEOUT_S, RanksFailed, close_pools, pool_of

__all__ = ["RanksFailed", "close_pools", "on_ranks", "run_on_ranks"]


def run_on_ranks(
    body: Callable[..., Any],
    world_size: int,
    /,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: str = "",
    **params: Any,
) -> list[Any]:
    """Call module-level `body(rank, world_size, **params)` on every rank; the picklable results in rank order.

    Args:
        device: a module that gives each rank an accelerator; see `ranks_pool.Pool`.

    Raises:
        RanksFailed: some rank raised, died or did not answer within `timeout_s`.
        pytest.skip.Exception: the body skipped.
    """
    body = getattr(body, "rank_body", body)
    return pool_of(world_size, device).run(body, params, timeout_s)


def on_ranks(
    *world_sizes: int, timeout_s: float = DEFAULT_TIMEOUT_S, device: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Parametrise a test by world size and run its body on every rank. See the module docstring.

    The first world size is in the protective tier, the others are `exhaustive`: name the one that matters most first.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        parameters = inspect.signature(body).parameters
        if list(parameters)[:2] != ["rank", "world_size"]:
            raise TypeError(f"{body.__qualname__} must take (rank, world_size, ...), got {list(parameters)}")

        @functools.wraps(body)
        def test(world_size: int, **params: Any) -> None:
            __tracebackhide__ = True
            try:
                run_on_ranks(body, world_size, timeout_s=timeout_s, device=device, **params)
            except RanksFailed as error:
                message = str(error)
            else:
                return
            pytest.fail(message, pytrace=False)

        del test.__wrapped__
        test.__signature__ = inspect.Signature([p for name, p in parameters.items() if name != "rank"])
        test.rank_body = body
        first, *others = world_sizes
        sizes = [pytest.param(first, id=f"ranks{first}")]
        sizes += [pytest.param(size, id=f"ranks{size}", marks=pytest.mark.exhaustive) for size in others]
        return pytest.mark.parametrize("world_size", sizes)(test)

    return decorate
