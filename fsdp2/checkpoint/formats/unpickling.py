"""Read a pickle without executing it. Pure: bytes in, plain data out.

A pickle is a program. Executed normally, it gives the author of a checkpoint control over the reader's machine. Here
the standard library's reader runs it without calling anything: it builds plain data (numbers, strings, lists, dicts),
with a `Note` in place of each class, function or object that the pickle refers to. Memory is bounded by the size of the
file. Supports versions 2 to 5 of pickle, as torch writes them.
"""

import pickle
from collections.abc import Callable, Container
from pickle import _Unpickler  # not the one in C, whose memo allocates room for any index that a file names
from typing import Any, ClassVar

from fsdp2.errors import CorruptError, FSDPError

__all__ = ["Note", "unpickle"]


class Note:
    """A class, function or value of a module that a pickle names, or an object that executing it would have created.

    Attributes:
        kind: module and name; for an object, those of its class, or of the function that would have created it.
        args: the arguments of that call; None if nothing would be called.
        state: the state that the object would have been given.
    """

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: str, args: tuple[Any, ...] | None = None):
        self.kind, self.args = kind, args
        self.state: Any = None

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def unpickle(file: Any, where: str, allowed: Container[str], persistent: Callable[[Any], Any] | None = None) -> Any:
    """The content of a pickle.

    Args:
        file: with methods ``read(count)`` and ``readline()``.
        where: the file, for messages.
        allowed: the classes and functions that it may name.
        persistent: called with a reference to something stored elsewhere; returns what to use instead.

    Raises:
        CorruptError: it is damaged, or names something that is not allowed.
    """

    def named(module: str, name: str) -> Note:
        if len(module) + len(name) > 1000:
            raise ValueError("a name that is too long")
        kind = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if kind not in allowed:
            raise CorruptError(f"{where}: refers to {kind[:200]}, which no such file needs. Nothing was executed.")
        return Note(kind)

    reader: Any = _Reader(file)
    reader.find_class, reader.persistent_load = named, persistent
    try:
        return reader.load()
    except (FSDPError, OSError):
        raise
    except Exception as error:
        raise CorruptError(f"{where}: is not a pickle, or is damaged ({type(error).__name__}: {error})") from error


# The operations of versions 2 to 5 whose cost is bounded by their size in the file.
_READ = (
    "PROTO MARK STOP POP POP_MARK NONE NEWTRUE NEWFALSE BININT1 BININT2 BININT LONG1 BINFLOAT BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "APPEND APPENDS EMPTY_DICT BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL BINPERSID"
)
_KEYS = (type(None), bool, int, float, str, bytes, Note)  # no tuples: hashing nested ones may take forever


class _Reader(_Unpickler):
    """The standard library's reader with only these operations, and with replacements that call nothing for others."""

    stack: list[Any]

    def load_frame(self) -> None:
        """Skip the size of a frame, which only matters to readers of streams."""
        self.read(8)  # type: ignore[attr-defined]

    def load_call(self) -> None:
        """A call of a class or function."""
        args, called = self.stack.pop(), self.stack.pop()
        if not isinstance(called, Note) or type(args) is not tuple:
            raise ValueError("a call of something else than a class or function")
        self.stack.append(Note(called.kind, args))

    def load_build(self) -> None:
        """The state of an object."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Note):
            raise ValueError("a state of something else than an object")
        self.stack[-1].state = state

    def load_setitem(self) -> None:
        """Add to a dict."""
        self._set([self.stack.pop(-2), self.stack.pop()])

    def load_setitems(self) -> None:
        """Add several items to a dict."""
        self._set(self.pop_mark())  # type: ignore[attr-defined]

    def _set(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not dict or not all(type(key) in _KEYS for key in items[::2]):
            raise ValueError("a key that is neither a number nor a text, or no dict")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    dispatch: ClassVar[dict[int, Any]] = {
        **{getattr(pickle, name)[0]: _Unpickler.dispatch[getattr(pickle, name)[0]] for name in _READ.split()},
        pickle.FRAME[0]: load_frame,
        pickle.REDUCE[0]: load_call,
        pickle.NEWOBJ[0]: load_call,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }
