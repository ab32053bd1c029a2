"""Detects ranks that differ: compares their order, and explains waits that take too long. Below the runtime.

::

    trail       what this rank has done in each process group, in order
    examine     compares the trails of all ranks: which did something else, which are missing
    board       the keys in the process group's store through which ranks report
    current     what this process and its streams wait for
    collecting  collects the answers of all ranks to a question
    watchdog    the thread that answers other ranks, and ends waits that cannot end
    order       points at which ranks compare what they have done
    joint_step  a step that all ranks complete, or none
"""
