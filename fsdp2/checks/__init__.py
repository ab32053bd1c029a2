"""Checks for mistakes that would train silently. Each is an error or a warning that says what to do.

::

    emptied     parameters that `to_empty` left, and nobody filled
    left_out    trainable parameters that no unit manages
    replicas    replicas that start from different parameters
    unreduced   a step, clip or `zero_grad` while gradients wait to be reduced
    step_hook   where optimizers are checked, before they step
"""
