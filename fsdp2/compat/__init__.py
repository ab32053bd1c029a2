"""Run code that was written for `torch.distributed.fsdp` on fsdp2, without changing it.

While compat is installed, torch's FSDP2 names resolve to ours. Layer: compat, the top; nothing in fsdp2 imports it.

    import fsdp2.compat.auto                      # one line, first in the program
    fsdp2.compat.install()                        # the same by hand; uninstall() puts everything back
    python -m fsdp2.compat train.py --steps 10    # no line at all
"""

from fsdp2.compat.installing import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
