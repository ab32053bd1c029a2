"""torchrun without its own traceback: ``python examples/launch.py --nproc_per_node=2 SCRIPT ...``.

Takes torchrun's arguments. A worker that fails says why itself, and one that is interrupted ends cleanly; torchrun
then prints some thirty lines of traceback of its own, which is what this leaves out. On a cluster use torchrun.
"""

import os
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core a process; torchrun would warn that it does the same
    # Without it, ranks that are started again look for the dead ones (examples/launch/multi_node.sh).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        main()
    except ChildFailedError as error:
        sys.exit(error.get_first_failure()[1].exitcode)
    except SignalException:
        sys.exit(0)  # the workers have saved and told how to resume
