"""The containers and numbers, beside those of JSON, that nested state may contain. Each is restored as what it was.
Pure.

This is a registry, not a general mechanism: a file names a kind, and only the kinds listed here are built. No code
comes from a file, and no module is imported for one (except NumPy itself). All other types, including subclasses of
these, are refused by the save, since they would be restored as something else.
"""

import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from fsdp2.errors import UnsupportedError

__all__ = ["KINDS", "Kind", "kind_of"]

FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple)}
NUMBERS = frozenset(
    f"{kind}{bits}" for kind, sizes in {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}.items()
    for bits in sizes
) | {"bool"}  # fmt: skip
MAX_FIELDS = 255


@dataclass(frozen=True)
class Kind:
    """How values of a type are taken apart and built again.

    Attributes:
        name: the name of the type in files.
        head: strings (or lists of them) besides the content.
        body: the content: a dict, a list, or a Python number.
        build: (head, body) -> the value; `TypeError` or `ValueError` if they do not fit.
    """

    name: str
    head: Callable[[Any], list[Any]]
    body: Callable[[Any], Any]
    build: Callable[[list[Any], Any], Any]


def kind_of(value: Any) -> Kind | None:
    """The kind of a value; None for plain JSON and for types that are not supported."""
    kind = type(value)
    if kind in _BY_TYPE:
        found = _BY_TYPE[kind]
        known = found.name != "$default" or value.default_factory in (None, *FACTORIES.values())
        return found if known else None
    if isinstance(value, tuple) and _fields(kind) and not getattr(value, "__dict__", None):
        return KINDS["$named"]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        name = value.dtype.name
        return KINDS["$numpy"] if name in NUMBERS and numpy.dtype(name).type is kind else None
    return None


def _fields(kind: type) -> tuple[str, ...] | None:
    """The fields of a named tuple class; None for other classes."""
    fields = getattr(kind, "_fields", None)
    named = type(fields) is tuple and all(type(name) is str for name in fields) and len(fields) <= MAX_FIELDS
    return fields if named else None


def _default(head: list[Any], body: Any) -> Any:
    (name,) = head
    if name is not None and name not in FACTORIES:
        raise ValueError(f"no factory {name!r}")
    return defaultdict(None if name is None else FACTORIES[name], _of(dict, body))


def _named(head: list[Any], body: Any) -> Any:
    """The program's own class, if it is loaded; otherwise a new one of the same name and fields."""
    module, qualname, fields = head
    fields = tuple(_of(list, fields))
    if len(fields) != len(_of(list, body)) or len(fields) > MAX_FIELDS:
        raise ValueError(f"{len(fields)} names of fields for {len(body)} values")
    found: Any = sys.modules.get(module)
    for part in _of(str, qualname).split("."):
        # Not getattr: a module may import another one when an attribute is looked up.
        found = getattr(found, "__dict__", {}).get(part)
    if not isinstance(found, type) or not issubclass(found, tuple) or _fields(found) != fields:
        found = _class_of(qualname.rpartition(".")[2], fields)
    return tuple.__new__(found, body)  # calls nothing of the class


@lru_cache(maxsize=64)
def _class_of(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)  # checks that these are valid names


def _number(head: list[Any], body: Any) -> Any:
    (name,) = head
    if name not in NUMBERS or type(body).__name__ != name.strip("u0123456789"):
        raise ValueError(f"{body!r} as {name!r}")
    try:
        numpy: Any = import_module("numpy")
    except ImportError as error:
        raise UnsupportedError(f"a number of NumPy ({name}) was saved, and NumPy is not installed") from error
    with numpy.errstate(all="ignore"):  # no warnings: this is the value that was saved
        return numpy.dtype(name).type(body)


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _size(head: list[Any], body: Any) -> Any:
    if not all(type(item) is int for item in _of(list, body)):
        raise TypeError("sizes are integers")
    return torch.Size(body)


def _nothing(value: Any) -> list[Any]:
    return []


KINDS = {
    kind.name: kind
    for kind in (
        Kind("$ordered", _nothing, dict, lambda head, body: OrderedDict(_of(dict, body))),
        Kind("$counter", _nothing, dict, lambda head, body: Counter(_of(dict, body))),
        Kind("$default", lambda value: [value.default_factory and value.default_factory.__name__], dict, _default),
        Kind("$size", _nothing, list, _size),
        Kind(
            "$named",
            lambda value: [type(value).__module__, type(value).__qualname__, list(type(value)._fields)],
            list,
            _named,
        ),
        Kind("$numpy", lambda value: [value.dtype.name], lambda value: value.item(), _number),
    )
}
_BY_TYPE: dict[type, Kind] = {
    OrderedDict: KINDS["$ordered"],
    Counter: KINDS["$counter"],
    defaultdict: KINDS["$default"],
    torch.Size: KINDS["$size"],
}
