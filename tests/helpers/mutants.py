"""Planted faults: functions of the library that have other code for a while, in this process."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

__all__ = ["Mutant", "mutated"]


@dataclass(frozen=True)
class Mutant:
    """A fault of the library, such as a wait that is taken out.

    Attributes:
        module: below ``fsdp2``.
        old, new: text that the module has once, and what stands there instead.
        program: runs the line with something at stake.
        also: more of these texts.
    """

    name: str
    module: str
    old: str
    new: str
    program: str = ""
    also: tuple[tuple[str, str], ...] = ()

    def planted(self) -> AbstractContextManager[None]:
        """The library has the fault."""
        return mutated(self.module, [(self.old, self.new), *self.also])


@contextmanager
def mutated(module: str, changes: Sequence[tuple[str, str]]) -> Iterator[None]:
    """The functions of `fsdp2.module` have the code of its changed source.

    Args:
        changes: text that the source has once, and what stands there instead.

    Raises:
        AssertionError: the text is not there, or no function changes.
    """
    found = importlib.import_module(f"fsdp2.{module}")
    assert found.__file__ is not None
    source = Path(found.__file__).read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"fsdp2.{module} has {source.count(old)} places: {old}"
        source = source.replace(old, new)
    codes, before = codes_in(compile(source, found.__file__, "exec")), {}
    for function in functions_of(found):
        code = function.__code__
        other = codes.get((code.co_qualname, code.co_argcount))
        if other is not None and content(other) != content(code):
            before[function] = code
            function.__code__ = other
    assert before, f"fsdp2.{module}: no function changes by {changes}"
    try:
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code


def content(code: CodeType) -> object:
    """What a function does, without its lines."""
    constants = [content(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, constants


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
