"""Nested state (of a data loader, an optimizer, a user) as JSON, with its tensors stored separately. Pure.

JSON values stand for themselves. Anything else is an object with one key that names its kind::

    {"$tensor": name, ...}   a tensor, stored elsewhere under that name
    {"$float": "nan"}        also "inf", "-inf"
    {"$tuple": [...]}
    {"$dict": [[key, value], ...]}   keys that are not strings, or begin with "$"
    {"$ordered": {...}}      {"$counter": {...}}

Only these kinds are built, so a file cannot execute code. A save rejects all other types, including subclasses of
these, since they would be restored as something else.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

import torch

from fsdp2.errors import ArgumentError, CorruptError

__all__ = ["Leaf", "at_path", "decode", "encode"]

MAX_DEPTH = 40  # each level takes one to six levels of JSON; the commit rejects JSON that is too deep

DICTS: dict[str, type] = {"$ordered": OrderedDict, "$counter": Counter}  # MultiStepLR has a Counter

# Called with a tensor's path in the tree and the tensor; returns what represents it in the JSON besides its name.
Leaf = Callable[[str, torch.Tensor], dict[str, Any]]


def encode(value: Any, leaf: Leaf, where: str, path: str = "") -> Any:
    """JSON for `value`.

    Args:
        leaf: called for each tensor with its path (``"epoch/indices"``); returns the note for it.
        where: names the state, for messages.

    Raises:
        ArgumentError: it contains something that is neither a tensor nor plain data.
    """

    def inner(key: object, item: Any) -> Any:
        # The keys 1 and "1" are different.
        text = f"{type(key).__name__}:{key}" if isinstance(value, dict) and not isinstance(key, str) else str(key)
        return encode(item, leaf, where, f"{path}/{_quoted(text)}" if path else _quoted(text))

    if path.count("/") > MAX_DEPTH:
        raise ArgumentError(f"{where}: nested more than {MAX_DEPTH} levels deep (does it contain itself?)")
    kind = type(value)
    if kind in (type(None), bool, int, str):
        return value
    if isinstance(value, torch.Tensor):
        return {"$tensor": path, **leaf(path, value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind in (list, tuple):
        items = [inner(index, item) for index, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: inner(key, item) for key, item in value.items()}
        return {"$dict": [[encode(key, leaf, where, path), inner(key, item)] for key, item in value.items()]}
    for name, known in DICTS.items():
        if kind is known:
            return {name: encode(dict(value), leaf, where, path)}
    at = f" at '{path}'" if path else ""
    raise ArgumentError(
        f"{where}{at}: a checkpoint holds tensors, numbers, strings, and lists, tuples and dicts of them "
        f"(OrderedDict and Counter too), and got {kind.__module__}.{kind.__qualname__}. Save what its state_dict() "
        "returns, or convert it."
    )


# Convert keys to parts of paths, and back. Cached, because the states of parameters share a few keys.


@lru_cache(maxsize=4096)
def _quoted(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass").replace(".", "%2E")


@lru_cache(maxsize=4096)
def _unquoted(part: str) -> str:
    return unquote(part, errors="surrogatepass")


def at_path(value: Any, path: str) -> Any:
    """The value at a path (``"a/0/b"``) of nested state, or None."""
    for part in path.split("/") if path else ():
        try:
            # `get`, because indexing a defaultdict would create the key.
            value = value[int(part)] if isinstance(value, (list, tuple)) else value.get(_unquoted(part))
        except (AttributeError, IndexError, ValueError, TypeError):
            return None
    return value


def decode(value: Any, tensor: Callable[[dict[str, Any]], Any], where: str) -> Any:
    """The inverse of `encode`.

    Args:
        tensor: called with the note of each tensor.
        where: the file, for messages.

    Raises:
        CorruptError: the JSON was not made by `encode`.
    """
    if isinstance(value, list):
        return [decode(item, tensor, where) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next((key for key in value if key.startswith("$")), None)
    if kind is None:
        return {key: decode(item, tensor, where) for key, item in value.items()}
    content = value[kind]
    try:
        if kind == "$tensor":
            return tensor(value)
        if kind == "$float":
            return float(content)
        if kind == "$tuple":
            return tuple(decode(item, tensor, where) for item in content)
        if kind == "$dict":
            return {decode(key, tensor, where): decode(item, tensor, where) for key, item in content}
        if kind in DICTS:
            items = decode(content, tensor, where)
            if type(items) is not dict:
                raise TypeError(f"a {type(items).__name__} where a dict belongs")
            return DICTS[kind](items)
    except (TypeError, ValueError, OverflowError, LookupError) as error:
        raise CorruptError(f"{where}: {kind} with {str(content)[:80]!r} ({error})") from error
    raise CorruptError(f"{where}: unknown kind of value {kind[:80]!r}")
