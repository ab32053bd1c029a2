"""`Mutant`: a wait, record or keep-alive that is taken out of the library for a while."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from tests.helpers.mutants import mutated

__all__ = ["Mutant"]


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        module: below ``fsdp2``.
        old, new: text that the module has once, and what stands there instead.
        program: of `programs`, which runs the line with something at stake.
        harmless: why nothing is wrong with it, for one that the detector rightly does not report.
    """

    name: str
    module: str
    old: str
    new: str
    program: str
    harmless: str = ""

    def planted(self) -> AbstractContextManager[None]:
        """The library has the fault."""
        return mutated(self.module, [(self.old, self.new)])
