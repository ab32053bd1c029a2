"""The command ``python -m fsdp2.replicas --port 29400``: the store through which replicas meet, which outlives them.
Layer: replicas."""

import argparse
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the process is killed."""
    parser = argparse.ArgumentParser("python -m fsdp2.replicas", description="The store through which replicas meet.")
    parser.add_argument("--host", default="0.0.0.0", help="the address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=29400, help="default 29400; 0 for a free one")
    given = parser.parse_args(arguments)
    kind: Any = dist.TCPStore  # type: ignore[attr-defined]  # public
    store = kind(given.host, given.port, is_master=True, wait_for_workers=False)
    print(f"replicas meet at port {store.port}", flush=True)  # noqa: T201
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
