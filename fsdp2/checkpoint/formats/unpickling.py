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
from pickle import _Unpickler  # in Python, since the operations of the one in C cannot be replaced
from typing import Any

from fsdp2.errors import CorruptError

__all__ = ["Made", "Maker", "Named", "NotPlain", "plain", "shown", "unpickle"]

# Given the arguments, returns what they build.
Maker = Callable[[tuple[Any, ...]], Any]

MAX_DEPTH = 64
MAX_ITEMS = 20_000_000
MAX_INT_BYTES = 512  # Python does not print longer ones
MAX_NAME = 1000
# Objects per byte: an empty list takes 64 times its code. Honest pickles build an object from every third byte.
FREE_OBJECTS = 1 << 20
BYTES_AN_OBJECT = 2


class NotPlain(CorruptError):
    """What is intact, but no plain data."""


class Named:
    """A class or function that a pickle names, or a value of a module, such as ``torch.float32``.

    Attributes:
        kind: module and name.
    """

    __slots__ = ("kind",)

    def __init__(self, kind: str):
        self.kind = kind

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

    def __repr__(self) -> str:
        return f"<an object of {self.kind}>"

    def field(self, name: str) -> Any:
        """An attribute that it would have had; None if it would not have it."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def unpickle(
    file: Any,
    where: str,
    allowed: Container[str] | None = None,
    persistent: Callable[[Any], Any] | None = None,
    makers: Mapping[str, Maker] | None = None,
) -> Any:
    """The content of a pickle.

    Args:
        file: with methods ``read(count)``, ``readline()`` and ``tell()``.
        where: the file, for messages.
        allowed: the classes and functions that it may name; None for any (they only become notes).
        persistent: is called with a reference to something stored elsewhere, and returns what replaces it.
        makers: class or function -> what to call instead of making a note.

    Raises:
        CorruptError: it is damaged, or names something that is not allowed.
    """
    reader = _Reader(file, where, allowed, persistent, {**_PLAIN, **(makers or {})})
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
        kind = type(item)
        if kind in _LEAVES:
            return item
        if kind not in (list, tuple, dict):
            raise NotPlain(f"{where}: expected numbers, strings, lists, tuples and dicts, got {shown(item)}")
        items += 100 + len(item)  # a container takes as much memory as many numbers
        if depth > MAX_DEPTH or items > MAX_ITEMS:
            raise NotPlain(f"{where}: plain data nested too deeply, or too much of them")
        if kind is dict:
            return {key: copy(one, depth + 1) for key, one in item.items()}
        return kind([copy(one, depth + 1) for one in item])

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


def _is_key(value: Any) -> bool:
    """Whether a value may be a key of a dict. Hashing it must be fast; hashing nested tuples may never end."""
    if type(value) is tuple:
        return len(value) <= 16 and all(type(item) in (bool, int, str) for item in value)
    return type(value) in _LEAVES or isinstance(value, (Made, Named))


def _empty(args: tuple[Any, ...]) -> dict[Any, Any]:
    if args and args != ([],):
        raise ValueError("a dict made of something")
    return {}


def _size(args: tuple[Any, ...]) -> tuple[Any, ...]:
    sizes = tuple(args[0])
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        raise ValueError("a torch.Size of no sizes")
    return sizes


# Classes whose objects are plain data here, and the function that old pickles use for bytes.
_PLAIN: dict[str, Maker] = {
    "collections.OrderedDict": _empty,
    "collections.defaultdict": lambda args: {},
    "builtins.dict": _empty,
    "builtins.list": lambda args: [],
    "builtins.set": lambda args: list(args[0]) if args and type(args[0]) is list else [],
    "torch.Size": _size,
    "_codecs.encode": lambda args: args[0].encode("latin1"),
}


class _Reader(_Unpickler):
    """The standard library's reader, with those operations replaced that would import, call or hash what a file
    names."""

    stack: list[Any]

    def __init__(
        self,
        file: Any,
        where: str,
        allowed: Container[str] | None,
        persistent: Callable[[Any], Any] | None,
        makers: Mapping[str, Maker],
    ):
        super().__init__(file)
        self._file, self._where, self._allowed, self._persistent = file, where, allowed, persistent
        self._makers = makers
        self._made = self._copied = 0

    def find_class(self, module: str, name: str) -> Any:
        """The note of a class or function."""
        if len(module) + len(name) > MAX_NAME:
            raise ValueError("a name that is too long")
        kind = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if self._allowed is not None and kind not in self._allowed:
            raise CorruptError(
                f"{self._where}: asks for {kind[:200]}, which no such file needs. Nothing has been executed."
            )
        return Named(kind)

    def persistent_load(self, pid: Any) -> Any:
        """What is stored elsewhere."""
        if self._persistent is None:
            raise ValueError("a reference to something outside")
        return self._persistent(pid)

    def make(self, keywords: int = 0) -> None:
        """Note a call, or the creation of an object; keywords are dropped."""
        del self.stack[len(self.stack) - keywords :]
        maker, args = self.stack[-2:]
        if not isinstance(maker, Named) or type(args) is not tuple:
            raise ValueError("a call of what was not named")
        simple = self._makers.get(maker.kind)
        if simple is not None:
            # Honest pickles use each argument once, and need no more than their length.
            self._copied += sum(len(arg) for arg in args if type(arg) in (str, bytes, list, tuple, dict))
            if self._copied > 4 * self._file.tell() + (1 << 16):
                raise ValueError("much more content than it has bytes")
        self.stack[-2:] = [Made(maker.kind, args) if simple is None else simple(args)]

    def count(self) -> None:
        """Count an object, or an entry of the memo."""
        self._made += 1
        if self._made > FREE_OBJECTS and self._made > FREE_OBJECTS + self._file.tell() // BYTES_AN_OBJECT:
            raise CorruptError(
                f"{self._where}: {self._made} objects in {self._file.tell()} bytes, more than is possible"
            )

    def build(self) -> None:
        """Set the state of the object on top; attributes of a dict's subclass are dropped."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Made):
            self.stack[-1].state = state
        elif type(self.stack[-1]) is not dict:
            raise ValueError("a state for what has none")

    def set_items(self, items: list[Any]) -> None:
        """Add to the dict on top."""
        if type(self.stack[-1]) is not dict or not all(map(_is_key, items[::2])):
            raise ValueError("a key that is neither a number nor a text, or no dict")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def set_item(self) -> None:
        """Likewise, one entry."""
        items = [*self.stack[-2:]]
        del self.stack[-2:]
        self.set_items(items)


_DAMAGE = (IndexError, KeyError, TypeError, ValueError, struct.error, AttributeError, EOFError, OverflowError)
# The operations of versions 2 to 5, but for those that make large objects of a few bytes.
_READ = (
    "PROTO FRAME MARK STOP POP POP_MARK NONE NEWTRUE NEWFALSE BININT1 BININT2 BININT LONG1 BINFLOAT BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "APPEND APPENDS EMPTY_DICT BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL BINPERSID"
)
_theirs: dict[int, Callable[[Any], None]] = _Unpickler.dispatch
_Reader.dispatch = {getattr(pickle, name)[0]: _theirs[getattr(pickle, name)[0]] for name in _READ.split()} | {
    pickle.FRAME[0]: lambda self: self.read(8),  # only helps readers of streams
    # Sets are lists here: nothing needs to be hashed.
    pickle.EMPTY_SET[0]: _theirs[pickle.EMPTY_LIST[0]],
    pickle.ADDITEMS[0]: _theirs[pickle.APPENDS[0]],
    pickle.FROZENSET[0]: _theirs[pickle.LIST[0]],
    pickle.SETITEM[0]: _Reader.set_item,
    pickle.SETITEMS[0]: lambda self: self.set_items(self.pop_mark()),
    pickle.REDUCE[0]: _Reader.make,
    pickle.NEWOBJ[0]: _Reader.make,
    pickle.NEWOBJ_EX[0]: lambda self: self.make(1),
    pickle.BUILD[0]: _Reader.build,
}


def _counted(operation: Callable[[Any], None]) -> Callable[[Any], None]:
    def run(reader: _Reader) -> None:
        reader.count()
        operation(reader)

    return run


for _code in b"()]}tRqrbc\x81\x85\x86\x87\x8f\x91\x92\x93\x94":  # those that make an object, or an entry of the memo
    _Reader.dispatch[_code] = _counted(_Reader.dispatch[_code])
