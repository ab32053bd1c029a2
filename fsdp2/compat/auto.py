"""``import fsdp2.compat.auto`` installs compat, unless the environment has ``FSDP2_COMPAT=0``.

Layer: compat.
"""

import os

from fsdp2.compat.installing import install
from fsdp2.errors import ArgumentError

__all__: list[str] = []

_value = os.environ.get("FSDP2_COMPAT", "1")
if _value not in ("0", "1"):
    raise ArgumentError(f"FSDP2_COMPAT: expected 1 (torch's FSDP2 names are fsdp2's) or 0, got {_value!r}")
if _value == "1":
    install()
