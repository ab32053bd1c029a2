"""Run a script on the lagging device, as a rank of torchrun's.

python -m tests.instruments.device.script SEED examples/train_lm/train_lm.py [ARGUMENTS]
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tests.instruments.device import lagging


def main() -> None:
    seed, script, *arguments = sys.argv[1:]
    lagging.register()
    lagging.set_delays(int(seed))
    os.environ["LOCAL_RANK"] = "0"  # each process has one such device
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
