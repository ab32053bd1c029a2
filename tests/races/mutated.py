"""A fault in the library for a while, and what the race detector says of it.

The functions that a mutant changes get their new code where they are, for one program, and their old code back. Nothing
is wrong with the values that such a program computes, because operators run at once; so what is found is found by the
detector.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from fsdp2.comm.unwaited import _unwaited
from tests.helpers.ranks import run_on_ranks
from tests.races.mutants import MUTANTS, Mutant
from tests.races.programs import num_ranks, run

__all__ = ["found", "look_for", "mutated"]


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """The functions of the module have the code of the mutant.

    Raises:
        AssertionError: the text is not there, or changes nothing.
    """
    module = importlib.import_module(f"fsdp2.{mutant.module}")
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(mutant.old) == 1, f"{mutant.name}: {source.count(mutant.old)} places"
    text = source.replace(mutant.old, mutant.new)
    new, before = codes_in(compile(text, module.__file__, "exec")), {}
    for function in functions_of(module):
        code = function.__code__
        other = new.get((code.co_qualname, code.co_argcount))
        if other is not None and (other.co_code, names_of(other)) != (code.co_code, names_of(code)):
            before[function] = code
            function.__code__ = other
    assert before, f"{mutant.name}: changes no function"
    try:
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code


def names_of(code: CodeType) -> object:
    return code.co_names, code.co_varnames, [each for each in code.co_consts if not isinstance(each, CodeType)]


def codes_in(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """The code of each function in a module, by qualified name and number of arguments (a property has two)."""
    found = {}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= {(each.co_qualname, each.co_argcount): each} | codes_in(each)
    return found


def functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """The functions of a module and the methods of its classes, without their decorators."""
    for value in vars(module).values():
        members = [value] if isinstance(value, FunctionType) else []
        if isinstance(value, type) and value.__module__ == module.__name__:
            members = list(vars(value).values())
        for member in members:
            if isinstance(member, property):
                member = member.fget
            while hasattr(member, "__wrapped__"):
                member = member.__wrapped__
            if isinstance(member, FunctionType) and member.__module__ == module.__name__:
                yield member


def look_for(rank: int, world_size: int, index: int) -> str:
    """The body of a rank: what the detector says of a mutant; "" if nothing."""
    mutant = MUTANTS[index]
    with mutated(mutant):
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
