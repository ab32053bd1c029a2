"""Ranks that differ: their order is compared, and waits that last too long are explained. Below the runtime.

::

    trail       what this rank has done in each process group, in order
    examine     what the trails of all ranks say: who did something else, who is missing
    board       the keys in the process group's store through which ranks tell each other
    current     what this process and its streams wait for
    collecting  what all ranks answer to a question
    watchdog    the thread that answers other ranks, and ends waits that cannot end
    order       the points at which a rank waits until all have done the same
    joint_step  a step that all ranks make, or none
"""
