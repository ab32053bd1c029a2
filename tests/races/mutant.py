"""`Mutant`: a fault that is put into the library for a while."""

from __future__ import annotations

from dataclasses import dataclass

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
