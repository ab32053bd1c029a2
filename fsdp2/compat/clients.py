"""Clients that are older than their use of FSDP2: said when they are imported. Layer: compat.

Such a client runs, and never asks for the names that `install` replaces; its user would believe to train on fsdp2.
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
    """A package, and since when it uses FSDP2.

    Attributes:
        package: its name for pip.
        oldest: the first version that takes the names of FSDP2.
        instead: what older ones do.
    """

    package: str
    oldest: str
    instead: str


# By the module whose import says that this part of the client is wanted. torchtitan, torchao and PEFT are not here: of
# their versions on PyPI, none that torch 2.13 can import is too old for this.
CLIENTS = {
    "accelerate": Client("accelerate", "1.6.0", "has FSDP1 only"),
    "transformers.trainer": Client("transformers", "4.51.0", "has a Trainer that cannot prepare a model for FSDP2"),
}


class _Watch(MetaPathFinder):
    """Finds the modules of `CLIENTS` as the other finders do, and lets their import begin with a look at the version.

    To look for a module is not to import it: transformers looks for accelerate wherever it is imported.
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
    """From now on, look at each client's version when it is imported."""
    if _the_watch not in sys.meta_path:
        sys.meta_path.insert(0, _the_watch)


def unwatch() -> None:
    """Look no more."""
    if _the_watch in sys.meta_path:
        sys.meta_path.remove(_the_watch)


def check_loaded() -> None:
    """Look at the versions of the clients that have been imported already.

    Raises:
        UnsupportedError: as their import would have: see `_check`.
    """
    for module, client in CLIENTS.items():
        if module in sys.modules:
            _check(client)


def _check(client: Client) -> None:
    """Warn if the installed version is too old; a package without a version that can be read is let through.

    Raises:
        UnsupportedError: it is too old, and Accelerate has been told to shard (`accelerate launch --use_fsdp`).
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
    """(1, 6) of "1.6.0.dev0": without the zeros at the end, so that 1.6 is 1.6.0. Empty if there are none."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
