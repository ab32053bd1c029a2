"""A context that does nothing, for steps without streams, profilers and transforms. Ground layer."""

from contextlib import AbstractContextManager
from typing import Any


class _Nothing:
    """`contextlib.nullcontext` with methods implemented in C: a unit enters fifty of these in each step."""

    __enter__ = staticmethod("".format)  # takes any arguments
    __exit__ = staticmethod("".format)  # returns a false value, so that errors propagate


_nothing: Any = _Nothing()
NOTHING: AbstractContextManager[object] = _nothing
