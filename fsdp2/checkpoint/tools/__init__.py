"""Tools to describe, check, compare and rewrite checkpoints, in Python and on the command line. Layer: checkpoint."""
