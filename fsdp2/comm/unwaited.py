"""Messages that will not be waited for: an exception was raised before their wait, and the model is gone. Layer: comm.

gloo cannot withdraw a message. If a receive is freed before its message arrives, all later messages between the two
ranks are blocked, whatever their tag: the next barrier hangs (torch 2.13). So the handle of the receive, which holds
its memory, is kept until the group is used again. By then all ranks have sent the messages that they had begun.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist

_unwaited: WeakKeyDictionary[dist.ProcessGroup, list[dist.Work]] = WeakKeyDictionary()


def keep_unwaited(works: Sequence[dist.Work], group: dist.ProcessGroup) -> None:
    """Keep the handles of messages that are freed without a wait."""
    _unwaited.setdefault(group, []).extend(works)


def finish_unwaited(group: dist.ProcessGroup) -> None:
    """Wait for the kept handles and free them. Messages of one kind arrive in order, so new ones come after these."""
    if _unwaited:
        for work in _unwaited.pop(group, ()):
            work.wait()
