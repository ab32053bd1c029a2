"""Read a pickle without executing it. Pure: bytes in, plain data out.

A pickle is a program. Run as it is, it gives the author of a checkpoint control over the reader's machine. Here the
standard library's reader runs it with an inert `find_class`: it builds plain data (numbers, strings, lists, dicts), and
where a pickle asks for a class or a function, the result contains a `Made`, a note of the name and the arguments.
Nothing is imported or called. Memory is bounded by the size of the file. Versions 2 to 5 of pickle, as `torch.save` and
DCP write them.
"""

import pickle
import struct
from collections.abc import Callable, Container, Mapping
from pickle import _Unpickler  # in Python: the one in C makes room for any number that a file gives to a memo's entry
from typing import Any, ClassVar

from fsdp2.errors import CorruptError

__all__ = ["Made", "Maker", "Named", "NotPlain", "plain", "shown", "unpickle"]

# Called with the arguments of a class or function.
Maker = Callable[..., Any]

MAX_DEPTH = 64
MAX_ITEMS = 20_000_000
MAX_INT_BYTES = 512  # Python does not print longer ones
MAX_NAME = 1000


class NotPlain(CorruptError):
    """What is intact, but no plain data."""


class Named:
    """A class or function that a pickle names, or a value of a module, such as ``torch.float32``. Calling it makes a
    note, or what `maker` returns.

    Attributes:
        kind: module and name.
    """

    def __init__(self, kind: str, maker: Maker | None = None):
        self.kind = kind
        self._maker = maker
        self.__new__ = lambda cls, *args: self(*args)  # type: ignore[method-assign]  # pickle calls it

    def __call__(self, *args: Any) -> Any:
        return Made(self.kind, args) if self._maker is None else self._maker(*args)

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class Made:
    """An object that executing the pickle would have created.

    Attributes:
        kind: module and name of its class, or of the function that would have created it.
        args: the arguments of that call.
        state: what it would have been filled with.
    """

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: str, args: tuple[Any, ...]):
        self.kind = kind
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"<an object of {self.kind}>"

    def field(self, name: str) -> Any:
        """An attribute that it would have had; None if it would not have it."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Dict(dict[Any, Any]):
    """An `OrderedDict`, without the attributes that a state dict of a module has."""

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        pass


def _size(sizes: Any = ()) -> Any:
    if type(sizes) is not tuple or not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        raise ValueError("a torch.Size of no sizes")
    return sizes


# What is plain data here. Nothing is copied: a file of few bytes could ask for that again and again.
_PLAIN: dict[str, Maker] = {
    "collections.OrderedDict": _Dict,
    "collections.defaultdict": lambda *args: {},
    "builtins.set": lambda items=(): items,
    "torch.Size": _size,
}


def unpickle(
    file: Any,
    where: str,
    allowed: Container[str] | None = None,
    persistent: Callable[[Any], Any] | None = None,
    makers: Mapping[str, Maker] | None = None,
) -> Any:
    """The content of a pickle.

    Args:
        file: with methods ``read(count)`` and ``readline()``.
        where: the file, for messages.
        allowed: the classes and functions that it may name; None for any (they only become notes).
        persistent: is called with a reference to something stored elsewhere, and returns what replaces it.
        makers: class or function -> what to call instead of making a note.

    Raises:
        CorruptError: it is damaged, or names something that is not allowed.
    """
    makers = {**_PLAIN, **(makers or {})}

    def named(module: str, name: str) -> Named:
        if len(module) + len(name) > MAX_NAME:
            raise ValueError("a name that is too long")
        kind = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if allowed is not None and kind not in allowed:
            raise CorruptError(f"{where}: asks for {kind[:200]}, which no such file needs. Nothing has been executed.")
        return Named(kind, makers.get(kind))

    reader: Any = _Reader(file)
    reader.find_class, reader.persistent_load = named, persistent
    try:
        return reader.load()
    except CorruptError:
        raise
    except (*_DAMAGE, pickle.UnpicklingError) as error:
        raise CorruptError(f"{where}: is not a pickle, or is damaged ({type(error).__name__}: {error})") from error


def plain(value: Any, where: str) -> Any:
    """A copy of `value`, if it consists of plain data only.

    Raises:
        NotPlain: it contains something else, or is nested too deeply, or too large.
    """
    items = 0

    def copy(item: Any, depth: int) -> Any:
        nonlocal items
        if type(item) in _LEAVES:
            return item
        if not isinstance(item, (list, tuple, dict)):
            raise NotPlain(f"{where}: expected numbers, strings, lists, tuples and dicts, got {shown(item)}")
        items += 100 + len(item)  # a container takes as much memory as many numbers
        if depth > MAX_DEPTH or items > MAX_ITEMS:
            raise NotPlain(f"{where}: plain data nested too deeply, or too much of them")
        if isinstance(item, dict):
            return {key: copy(one, depth + 1) for key, one in item.items()}
        return type(item)([copy(one, depth + 1) for one in item])

    return copy(value, 0)


def shown(value: Any) -> str:
    """A value for a message, shortened. (`repr` of a pickle's nested data may never end.)"""
    if type(value) is int and value.bit_length() > 8 * MAX_INT_BYTES:  # `repr` refuses these
        return f"an int of {value.bit_length()} bits"
    if type(value) in _LEAVES or isinstance(value, (Made, Named)):
        text = repr(value)
        return text if len(text) <= 200 else text[:197] + "..."
    return f"a {type(value).__name__}"


_LEAVES = frozenset({type(None), bool, int, float, str, bytes})
_DAMAGE = (IndexError, KeyError, TypeError, ValueError, struct.error, AttributeError, EOFError, OverflowError)
# The operations of versions 2 to 5 that cost no more than they have bytes.
_READ = (
    "PROTO FRAME MARK STOP POP POP_MARK NONE NEWTRUE NEWFALSE BININT1 BININT2 BININT LONG1 BINFLOAT BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "APPEND APPENDS EMPTY_DICT BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL BINPERSID REDUCE "
    "NEWOBJ BUILD SETITEM SETITEMS"
)


class _Reader(_Unpickler):
    """The standard library's reader of only these operations, and of keys whose hash is fast."""

    dispatch: ClassVar[dict[int, Any]] = {
        getattr(pickle, name)[0]: _Unpickler.dispatch[getattr(pickle, name)[0]] for name in _READ.split()
    }
    stack: list[Any]

    def load_frame(self) -> None:
        """Frames only help readers of streams."""
        self.read(8)  # type: ignore[attr-defined]

    def load_setitem(self) -> None:
        """Add to a dict."""
        items = self.stack[-2:]
        del self.stack[-2:]
        self._set(items)

    def load_setitems(self) -> None:
        """Add several items to a dict."""
        self._set(self.pop_mark())  # type: ignore[attr-defined]

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or not all(map(_is_key, items[::2])):
            raise ValueError("a key that is neither a number nor a text, or no dict")
        target.update(zip(items[::2], items[1::2], strict=True))

    dispatch |= {pickle.FRAME[0]: load_frame, pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems}


def _is_key(value: Any) -> bool:
    """Whether a value may be a key of a dict. Hashing nested tuples may never end."""
    if type(value) is tuple:
        return len(value) <= 16 and all(type(item) in (bool, int, str) for item in value)
    return type(value) in _LEAVES or isinstance(value, (Made, Named))
