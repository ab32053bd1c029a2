"""Run a script as one of several ranks of torchrun's that share a GPU over NCCL.

python -m tests.gpu.script examples/train_lm/train_lm.py [ARGUMENTS]
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from benchmarks.gpu import groups


def main() -> None:
    groups.share_gpu()
    os.environ["LOCAL_RANK"] = "0"
    _, script, *arguments = sys.argv
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
