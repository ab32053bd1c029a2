"""Detect clients that are too old to use FSDP2, when they are imported. Layer: compat.

Such a client runs but never uses the names that `install` replaces, so its user would believe to train on fsdp2.
Nothing is imported here, and the version of a package is not looked up before the package is imported.
"""

import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fsdp2.errors import UnsupportedError

__all__ = ["CLIENTS", "Client", "check_loaded", "unwatch", "watch"]


@dataclass(frozen=True)
class Client:
    """A package, and the version since which it uses FSDP2.

    Attributes:
        package: its name for pip.
        oldest: the first version that uses the names of FSDP2.
        instead: what older ones do.
    """

    package: str
    oldest: str
    instead: str


# By the module whose import shows that this part of the client is used. torchtitan, torchao and PEFT are not listed:
# none of their versions on PyPI that torch 2.13 can import is too old.
CLIENTS = {
    "accelerate": Client("accelerate", "1.6.0", "has FSDP1 only"),
    "transformers.trainer": Client("transformers", "4.51.0", "has a Trainer that cannot prepare a model for FSDP2"),
}


class _Watch(MetaPathFinder):
    """Finds the modules of `CLIENTS` as the other finders do, and checks the version when they are imported.

    Finding a module is not importing it: transformers looks for accelerate whenever it is imported.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for all other modules."""
        if fullname not in CLIENTS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def check_and_load(module: ModuleType) -> None:
                if self in sys.meta_path:
                    _check(CLIENTS[fullname])
                load(module)

            loader.exec_module = check_and_load
        return spec


_the_watch = _Watch()


def watch() -> None:
    """Check each client's version when it is imported, from now on."""
    if _the_watch not in sys.meta_path:
        sys.meta_path.insert(0, _the_watch)


def unwatch() -> None:
    """Stop checking."""
    if _the_watch in sys.meta_path:
        sys.meta_path.remove(_the_watch)


def check_loaded() -> None:
    """Check the versions of the clients that are already imported.

    Raises:
        UnsupportedError: as on import: see `_check`.
    """
    for module, client in CLIENTS.items():
        if module in sys.modules:
            _check(client)


def _check(client: Client) -> None:
    """Warn if the installed version is too old. A package whose version cannot be read is accepted.

    Raises:
        UnsupportedError: it is too old, and Accelerate was told to shard (`accelerate launch --use_fsdp`).
    """
    try:
        found = metadata.version(client.package)
    except metadata.PackageNotFoundError:
        return  # a folder on the path
    if not _numbers(found) or _numbers(found) >= _numbers(client.oldest):
        return
    message = (
        f"fsdp2.compat: {client.package} {found} is too old: it {client.instead}, so it will not use fsdp2. The oldest "
        f"version that does is {client.oldest}: python -m pip install '{client.package}>={client.oldest}'"
    )
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise UnsupportedError(message)
    warnings.warn(f"{message}. Ignore this if the program shards without it.", stacklevel=3)


def _numbers(version: str) -> tuple[int, ...]:
    """(1, 6) for "1.6.0.dev0": without trailing zeros, so that 1.6 equals 1.6.0. Empty if there are no numbers."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
