"""``python -m fsdp2.checkpoint``: see `cli.py`. Layer: checkpoint."""

import sys

from fsdp2.checkpoint.tools.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
