"""``import fsdp2.compat.auto`` installs at once; with ``FSDP2_COMPAT=0`` in the environment it does not.

Layer: compat.
"""

from fsdp2.compat.environment import is_wanted
from fsdp2.compat.installing import install

__all__: list[str] = []

if is_wanted():
    install()
