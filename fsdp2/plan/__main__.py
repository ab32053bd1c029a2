"""``python -m fsdp2.plan``: see `cli.py`. Layer: plan."""

import sys

from fsdp2.plan.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
