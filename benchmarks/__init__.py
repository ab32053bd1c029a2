"""Benchmarks: one folder per question, with its README, program and raw results. `common.py` is what they share."""
