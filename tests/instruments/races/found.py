"""Whether the race detector finds a fault. Nothing is wrong with the values that such a program computes, because
operators run at once; so what is found is found by the detector."""

import gc

from fsdp2.comm.gloo import _unwaited
from tests.helpers.mutants import Mutant
from tests.helpers.ranks import run_on_ranks
from tests.instruments.races.mutants import MUTANTS
from tests.instruments.races.programs import num_ranks, run

__all__ = ["found", "look_for"]


def look_for(rank: int, world_size: int, index: int) -> str:
    """The body of a rank: what the detector says of a mutant; "" if nothing."""
    mutant = MUTANTS[index]
    with mutant.planted():
        text = ""
        try:
            run(mutant.program, rank, look=True)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    gc.collect()
    _unwaited.clear()  # the detector has waited for these messages
    return text


def found(mutant: Mutant) -> str:
    """What rank 0 says.

    Raises:
        RanksFailed: the ranks hung or died.
    """
    ranks, index = num_ranks(mutant.program), MUTANTS.index(mutant)
    answers: list[str] = run_on_ranks(look_for, ranks, index=index, timeout_s=100)
    return answers[0]
