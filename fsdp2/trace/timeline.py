"""`Timeline`: what ran when, and what was in memory. Layer: trace, bottom."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["LANES", "Sample", "Span", "Timeline"]

# From top to bottom.
LANES = (
    *("compute", "optimizer", "waiting", "all-gather", "reduce-scatter", "all-reduce", "tensor parallel", "copies"),
    "host",
)


@dataclass
class Span:
    """Something that went on for a while.

    Attributes:
        lane: one of `LANES`.
        name: the unit, and what it did.
        begin_s, end_s: seconds since the timeline's start.
    """

    lane: str
    name: str
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Sample:
    """What was in memory from this moment on: bytes by kind."""

    at_s: float
    nbytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.nbytes.values())


@dataclass
class Timeline:
    """Some steps of one rank.

    Attributes:
        title: what ran, and whether it was measured or predicted.
        spans: in any order.
        samples: in order of time.
    """

    title: str
    spans: Sequence[Span] = field(default_factory=list)
    samples: Sequence[Sample] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        """The last moment."""
        return max([span.end_s for span in self.spans] + [sample.at_s for sample in self.samples], default=0.0)
