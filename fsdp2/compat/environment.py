"""Make child processes install too, through two environment variables. Layer: compat.

Python imports a module `sitecustomize` at startup if it finds one. The one in `bootstrap/` does nothing unless
``FSDP2_COMPAT`` is 1; then it waits for torch to be imported, and installs. If that folder is on ``PYTHONPATH``, all
Python child processes inherit it: the workers of torchrun or `accelerate launch`, and those that
`torch.multiprocessing.spawn` starts.
"""

import os
from pathlib import Path

from fsdp2.errors import ArgumentError

__all__ = ["BOOTSTRAP", "for_children", "is_wanted"]

BOOTSTRAP = Path(__file__).parent / "bootstrap"
_VARIABLE = "FSDP2_COMPAT"


def is_wanted() -> bool:
    """Whether importing `fsdp2.compat.auto` should install: ``FSDP2_COMPAT`` is unset or 1, not 0.

    Raises:
        ArgumentError: it has another value.
    """
    value = os.environ.get(_VARIABLE, "1")
    if value not in ("0", "1"):
        raise ArgumentError(f"{_VARIABLE}: expected 1 (torch's FSDP2 names are fsdp2's) or 0, got {value!r}")
    return value == "1"


def for_children() -> None:
    """Make Python processes that this one starts from now on install as well."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(BOOTSTRAP) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(BOOTSTRAP), *paths])
    os.environ[_VARIABLE] = "1"
