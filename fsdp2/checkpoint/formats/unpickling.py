"""Parse a pickle without executing it. Pure: bytes in, plain data out.

A pickle is a program. Python's reader runs it, so it gives the author of a checkpoint control over the reader's
machine. This parser only builds plain data (numbers, strings, lists, dicts, ...). Where a pickle asks for a class or a
function, the result contains a `Made`, a note of the name and the arguments: nothing is imported and nothing is called.
The caller handles the few notes that it understands. Supports versions 2 to 5 of pickle, as `torch.save` and DCP write
them.
"""

import struct
from collections.abc import Callable, Container, Mapping
from typing import Any

from fsdp2.errors import CorruptError

__all__ = ["Made", "Maker", "Named", "plain", "shown", "unpickle"]

# Given the arguments, returns what they build.
Maker = Callable[[tuple[Any, ...]], Any]

MAX_DEPTH = 64
MAX_CONTAINERS = 200_000
MAX_LEAVES = 20_000_000
MAX_INT_BYTES = 512  # Python does not print longer ones, and hashing them takes time
MAX_NAME = 1000
# Objects per byte: an empty list takes 64 times its code. Honest pickles build an object from every third byte.
FREE_OBJECTS = 1 << 20
BYTES_AN_OBJECT = 2
MAX_STREAMED = 1 << 16


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
    content: bytes,
    where: str,
    allowed: Container[str] | None = None,
    persistent: Callable[[Any], Any] | None = None,
    makers: Mapping[str, Maker] | None = None,
    more: Callable[[], bytes] | None = None,
) -> Any:
    """The content of a pickle.

    Args:
        content: the pickle, or its beginning.
        more: returns the bytes that follow, a part at a time; b"" at the end. With it, long texts are refused, so that
            a file that consists mostly of holes is not read.
        where: the file, for messages.
        allowed: the classes and functions that it may name; None for any (they only become notes).
        persistent: is called with a reference to something stored elsewhere, and returns what replaces it.
        makers: class or function -> what to call instead of making a note.

    Raises:
        CorruptError: it is damaged, or names something that is not allowed.
    """
    machine = _Machine(content, where, allowed, persistent, {**_PLAIN, **(makers or {})}, more)
    try:
        return machine.run()
    except CorruptError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, struct.error, UnicodeError, AttributeError) as error:
        raise CorruptError(f"{where}: is not a pickle, or is damaged ({type(error).__name__}: {error})") from error


def plain(value: Any, where: str) -> Any:
    """A copy of `value`, if it consists of plain data only.

    Raises:
        CorruptError: it contains something else, or is nested too deeply, or too large.
    """
    containers = leaves = 0

    def copy(item: Any, depth: int) -> Any:
        nonlocal containers, leaves
        kind = type(item)
        if kind in _LEAVES:
            return item
        if kind not in (list, tuple, dict):
            raise CorruptError(f"{where}: expected numbers, strings, lists, tuples and dicts, got {shown(item)}")
        containers, leaves = containers + 1, leaves + len(item)
        if depth > MAX_DEPTH or containers > MAX_CONTAINERS or leaves > MAX_LEAVES:
            raise CorruptError(f"{where}: plain data nested too deeply, or too much of them")
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
_MARK = object()


def _is_key(value: Any) -> bool:
    """Whether a value may be a key of a dict. Hashing it must be fast; hashing nested tuples may never end."""
    if type(value) is tuple:
        return len(value) <= 16 and all(type(item) in (bool, int, str) for item in value)
    return value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, (Made, Named))


def _pairs(args: tuple[Any, ...]) -> dict[Any, Any]:
    """``OrderedDict()``, or ``OrderedDict([[key, value], ...])`` in old files."""
    pairs = args[0] if args else []
    if type(pairs) not in (list, tuple) or not all(len(pair) == 2 and _is_key(pair[0]) for pair in pairs):
        raise ValueError("an OrderedDict of no pairs")
    return {key: value for key, value in pairs}  # noqa: C416 (dict() would take any iterable)


def _size(args: tuple[Any, ...]) -> tuple[Any, ...]:
    sizes = tuple(args[0])
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        raise ValueError("a torch.Size of no sizes")
    return sizes


# Classes whose objects are plain data here, and the function that old pickles use for bytes.
_PLAIN: dict[str, Maker] = {
    "collections.OrderedDict": _pairs,
    "collections.defaultdict": lambda args: {},
    "builtins.dict": lambda args: {},
    "builtins.list": lambda args: [],
    "builtins.set": lambda args: list(args[0]) if args and type(args[0]) is list else [],
    "torch.Size": _size,
    "_codecs.encode": lambda args: args[0].encode("latin1"),
}


class _Machine:
    """The stack machine that executes a pickle's operations."""

    def __init__(
        self,
        content: bytes,
        where: str,
        allowed: Container[str] | None,
        persistent: Callable[[Any], Any] | None,
        makers: Mapping[str, Maker],
        more: Callable[[], bytes] | None,
    ):
        self.content = bytearray(content)
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._where = where
        self._allowed = allowed
        self._persistent = persistent
        self._makers = makers
        self._more = more
        self._made = 0
        # Limits what makers may copy: honest pickles use each argument once, and need no more than their length.
        self._budget = 4 * len(content) + (1 << 16)

    def run(self) -> Any:
        """Execute all operations."""
        operations, content = _OPERATIONS, self.content
        while True:
            if self.at == len(content):
                self._fetch(1)
            code = content[self.at]
            self.at += 1
            if code in _COSTLY:
                self._made += 1
                if self._made > FREE_OBJECTS + self.at // BYTES_AN_OBJECT:
                    raise CorruptError(f"{self._where}: {self._made} objects in {self.at} bytes, more than is possible")
            if code == 0x2E:  # STOP
                return self.stack.pop()
            operation = operations.get(code)
            if operation is None:
                raise CorruptError(
                    f"{self._where}: has operation {code:#x} at byte {self.at - 1}, which is not expected"
                )
            operation(self)

    def take(self, count: int) -> bytes:
        """The next bytes of the program."""
        end = self.at + count
        if end > len(self.content):
            self._fetch(count)
        part = bytes(self.content[self.at : end])
        self.at = end
        return part

    def _fetch(self, count: int) -> None:
        """Make sure that the next bytes are loaded."""
        while len(self.content) < self.at + count:
            part = self._more() if self._more is not None and count <= MAX_STREAMED else b""
            if not part:
                raise ValueError(
                    "it ends too early" if self._more is None or not count > MAX_STREAMED else "a long text"
                )
            self.content += part

    def number(self, count: int) -> int:
        """An unsigned number of that many bytes."""
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        """Text up to the next end of line."""
        end = self.content.find(b"\n", self.at)
        while end < 0:
            if len(self.content) - self.at > MAX_NAME:
                raise ValueError("a long name")
            self._fetch(len(self.content) - self.at + 1)
            end = self.content.find(b"\n", self.at)
        text = self.content[self.at : end].decode()
        self.at = end + 1
        return text

    def popped(self) -> list[Any]:
        """Remove and return everything down to the last mark, which is removed too."""
        stack = self.stack
        index = len(stack) - 1
        while stack[index] is not _MARK:
            index -= 1
            if index < 0:
                raise ValueError("there is no mark")
        items = stack[index + 1 :]
        del stack[index:]
        return items

    def named(self, module: Any, name: Any) -> Named:
        """The class or function that a pickle names."""
        if type(module) is not str or type(name) is not str or len(module) + len(name) > MAX_NAME:
            raise ValueError("a name that is not a string, or is too long")
        kind = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if self._allowed is not None and kind not in self._allowed:
            raise CorruptError(
                f"{self._where}: asks for {kind[:200]}, which no such file needs. Nothing has been executed."
            )
        return Named(kind)

    def make(self, maker: Any, args: Any) -> Any:
        """Note a call, or the creation of an object."""
        if not isinstance(maker, Named) or type(args) is not tuple:
            raise ValueError("a call of what was not named")
        simple = self._makers.get(maker.kind)
        if simple is None:
            return Made(maker.kind, args)
        self._budget -= sum(len(arg) for arg in args if type(arg) in (str, bytes, list, tuple, dict))
        if self._budget < 0:
            raise ValueError("much more content than it has bytes")
        return simple(args)

    def build(self) -> None:
        """Set the state of the object on top; attributes of a dict's subclass are dropped."""
        state = self.stack.pop()
        item = self.stack[-1]
        if isinstance(item, Made):
            item.state = state
        elif type(item) is not dict:
            raise ValueError("a state for what has none")

    def refer(self) -> None:
        """Push what is stored elsewhere."""
        key = self.stack.pop()
        if self._persistent is None:
            raise ValueError("a reference to something outside")
        self.stack.append(self._persistent(key))

    def append(self, items: list[Any]) -> None:
        """Add to the list on top."""
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("items for something that is not a list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Add to the dict on top."""
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("entries for something that is not a dict")
        for index in range(0, len(items), 2):
            if not _is_key(items[index]):
                raise ValueError("a key that is neither a number nor a text")
            target[items[index]] = items[index + 1]

    def top(self, count: int) -> list[Any]:
        """Remove and return the last items."""
        if len(self.stack) < count:
            raise ValueError("too few items")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        if any(item is _MARK for item in items):
            raise ValueError("a mark among items")
        return items


def _push(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value(machine))


def _text(width: int) -> Callable[[_Machine], None]:
    return _push(lambda machine: machine.take(machine.number(width)).decode("utf-8", "surrogatepass"))


def _bytes(width: int) -> Callable[[_Machine], None]:
    return _push(lambda machine: machine.take(machine.number(width)))


def _tuple(count: int) -> Callable[[_Machine], None]:
    return _push(lambda machine: tuple(machine.top(count)))


def _long(width: int) -> Callable[[_Machine], None]:
    def long(machine: _Machine) -> None:
        count = machine.number(width)
        if count > MAX_INT_BYTES:
            raise ValueError(f"an int of {count} bytes, expected at most {MAX_INT_BYTES}")
        machine.stack.append(int.from_bytes(machine.take(count), "little", signed=True))

    return long


def _get(width: int) -> Callable[[_Machine], None]:
    return _push(lambda machine: machine.memo[machine.number(width)])


def _put(width: int) -> Callable[[_Machine], None]:
    def put(machine: _Machine) -> None:
        machine.memo[machine.number(width)] = machine.stack[-1]

    return put


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _proto(machine: _Machine) -> None:
    if not 2 <= machine.number(1) <= 5:
        raise ValueError("an unknown version of pickle")


# By the code of the operation; their names are those in the module `pickletools`.
_OPERATIONS: dict[int, Callable[[_Machine], Any]] = {
    0x80: _proto,
    0x95: lambda machine: machine.take(8),  # FRAME: only helps readers of streams
    ord("("): _push(lambda machine: _MARK),
    ord("0"): lambda machine: machine.stack.pop(),
    ord("1"): lambda machine: machine.popped(),
    ord("N"): _push(lambda machine: None),
    0x88: _push(lambda machine: True),
    0x89: _push(lambda machine: False),
    ord("K"): _push(lambda machine: machine.number(1)),
    ord("M"): _push(lambda machine: machine.number(2)),
    ord("J"): _push(lambda machine: int.from_bytes(machine.take(4), "little", signed=True)),
    0x8A: _long(1),
    0x8B: _long(4),
    ord("G"): _push(lambda machine: struct.unpack(">d", machine.take(8))[0]),
    ord("X"): _text(4),
    0x8C: _text(1),
    0x8D: _text(8),
    ord("B"): _bytes(4),
    ord("C"): _bytes(1),
    0x8E: _bytes(8),
    0x96: _bytes(8),
    ord(")"): _push(lambda machine: ()),
    ord("t"): _push(lambda machine: tuple(machine.popped())),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("]"): _push(lambda machine: []),
    ord("a"): lambda machine: machine.append(machine.top(1)),
    ord("e"): lambda machine: machine.append(machine.popped()),
    0x8F: _push(lambda machine: []),  # a set, as a list: nothing needs to be hashed
    0x90: lambda machine: machine.append(machine.popped()),
    0x91: _push(lambda machine: machine.popped()),
    ord("}"): _push(lambda machine: {}),
    ord("s"): lambda machine: machine.set_items(machine.top(2)),
    ord("u"): lambda machine: machine.set_items(machine.popped()),
    ord("h"): _get(1),
    ord("j"): _get(4),
    ord("q"): _put(1),
    ord("r"): _put(4),
    0x94: _memoize,
    ord("c"): _push(lambda machine: machine.named(machine.line(), machine.line())),
    0x93: _push(lambda machine: machine.named(*machine.top(2))),
    ord("R"): _push(lambda machine: machine.make(*machine.top(2))),
    0x81: _push(lambda machine: machine.make(*machine.top(2))),
    0x92: _push(lambda machine: machine.make(*machine.top(3)[:2])),  # keywords are dropped
    ord("b"): lambda machine: machine.build(),
    ord("Q"): lambda machine: machine.refer(),
}
# Operations that make an object, or an entry of the memo.
_COSTLY = frozenset(b"()]}tRqrbc\x81\x85\x86\x87\x8f\x91\x92\x93\x94")
