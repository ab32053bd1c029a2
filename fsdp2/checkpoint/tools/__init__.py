"""Tools to describe, check and convert checkpoints, in Python and on the command line. Layer: checkpoint."""
