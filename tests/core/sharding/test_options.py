"""Every option against one process that trains the plain model, in sets of a few that go together. All sets hold every
pair at least once (a pairwise covering array): some hundred trainings in place of 1500.
"""

import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest

from tests.helpers.options import BY_NAME, REFUSED, SKIPPED
from tests.helpers.options_case import Case
from tests.helpers.ranks import RanksFailed, on_ranks, run_on_ranks

Names = tuple[str, ...]
SET_SIZE = 6
SEED = 0
NUM_BATCHES = {2: 8, 4: 4}  # by the number of ranks
NUM_PROTECTIVE = {2: 1, 4: 0}
SAMPLE_ON_4 = 30  # pairs that do not need four ranks


def goes_together(first: str, second: str) -> bool:
    """Whether a pair can be trained: it gives no argument twice, and is not in the tables."""
    pair = frozenset((first, second))
    return not BY_NAME[first].keys & BY_NAME[second].keys and pair not in REFUSED and pair not in SKIPPED


def pairs(world_size: int) -> list[Names]:
    """Those to train on that many ranks: all that need them, and on 4 a sample of the others."""
    every = [pair for pair in combinations(BY_NAME, 2) if goes_together(*pair)]
    needs_4 = [pair for pair in every if any(BY_NAME[name].needs_4 for name in pair)]
    others = [pair for pair in every if pair not in set(needs_4)]
    return others if world_size == 2 else needs_4 + random.Random(SEED).sample(others, SAMPLE_ON_4)


@cache
def covering(world_size: int) -> list[Names]:
    """Sets that hold all `pairs`: each begins with a pair that is missing and takes, one by one, what adds the most."""
    rng = random.Random(SEED)
    missing = {frozenset(pair) for pair in pairs(world_size)}
    order = pairs(world_size)
    rng.shuffle(order)
    sets = []
    for pair in order:
        if frozenset(pair) not in missing:
            continue
        chosen = list(pair)
        while len(chosen) < SET_SIZE:
            fit = [name for name in BY_NAME if name not in chosen and all(goes_together(name, c) for c in chosen)]
            if world_size == 2:
                fit = [name for name in fit if not BY_NAME[name].needs_4]
            gains = {name: sum(frozenset((name, c)) in missing for c in chosen) for name in fit}
            if not any(gains.values()):
                break
            most = max(gains.values())
            chosen.append(rng.choice([name for name, gain in gains.items() if gain == most]))
        missing -= {frozenset(each) for each in combinations(chosen, 2)}
        sets.append(tuple(chosen))
    return sets


def train_all(rank: int, world_size: int, sets: Sequence[Names]) -> None:
    """The body on every rank."""
    for names in sets:
        case = Case([BY_NAME[name] for name in names], rank, world_size)
        try:
            case.run()
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(
                f"{case.name} (rank {rank} of {world_size}): {type(error).__name__}: {error}"
            ) from error


def check(world_size: int, sets: Sequence[Names]) -> None:
    __tracebackhide__ = True
    try:
        run_on_ranks(train_all, world_size, timeout_s=min(60 + 5 * len(sets), 150), sets=sets)
    except RanksFailed as error:
        message = str(error)
    else:
        return
    pytest.fail(message, pytrace=False)


@on_ranks(4)
def test_refused(rank: int, world_size: int) -> None:
    """What does not go together is refused, with an error that says why, before anything runs."""
    for pair, refusal in REFUSED.items():
        names = sorted(pair)
        case = Case([BY_NAME[name] for name in names], rank, world_size)
        try:
            with pytest.raises(refusal.error, match=refusal.match):
                case.sharded()
        except BaseException as error:  # pytest's own for "did not raise" is no Exception
            raise AssertionError(f"{case.name}: expected {refusal}, got {error!r}") from error


@pytest.mark.parametrize(
    ("world_size", "batch"),
    [
        pytest.param(size, batch, marks=[pytest.mark.exhaustive] if batch >= NUM_PROTECTIVE[size] else [])
        for size, number in NUM_BATCHES.items()
        for batch in range(number)
    ],
)
def test_together(world_size: int, batch: int) -> None:
    """They train as one process does."""
    check(world_size, covering(world_size)[batch :: NUM_BATCHES[world_size]])
