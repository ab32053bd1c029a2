"""Messages that nobody waits for any more: an exception came before their wait, and the model is gone. Layer: comm.

gloo cannot withdraw a message. A receive that is freed before its message has come stops everything that comes after it
between the two ranks, whatever its tag: the next barrier hangs (torch 2.13). So its handle, which holds its memory, is
kept until the group is used again. By then all ranks have sent what they had begun.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["finish_unwaited", "keep_unwaited"]

_unwaited: WeakKeyDictionary[dist.ProcessGroup, list[dist.Work]] = WeakKeyDictionary()


def keep_unwaited(works: Sequence[dist.Work], group: dist.ProcessGroup) -> None:
    """Keep what is freed without a wait."""
    _unwaited.setdefault(group, []).extend(works)


def finish_unwaited(group: dist.ProcessGroup) -> None:
    """Wait for what was kept, and free it. Messages of a kind arrive in order, so the next ones come after these."""
    if _unwaited:
        for work in _unwaited.pop(group, ()):
            work.wait()
