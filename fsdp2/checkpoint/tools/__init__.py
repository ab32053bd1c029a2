"""Looking at checkpoints, checking, comparing and rewriting them, from Python and from the command line.
Layer: checkpoint.
"""
