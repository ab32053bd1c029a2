"""A differential fuzzer: random models and random sequences of what users do, on torch's FSDP2, on fsdp2 and in one
process, in lock-step. What differs is shrunk, printed, and kept as JSON, which `--program` runs again.

    python -m tests.instruments.differential --seconds 60 --ranks 2      # or: make fuzz-runtime ARGS="--seconds 60"

A program is data (`program.py`), and every action in it is a line of Python that a user could have written: the
interpreter (`interpret.py`) executes these lines on each of the three sides. `generate.py` makes programs from a seed,
and with `between.py` those of what is done between steps. `models.py` has the modules they are made of,
`one_process.py` says what one process on the whole batch gives, `known.py` lists the differences that are wanted,
`judge.py` looks into that list, `shrink.py` makes a program small.
"""
