"""A folder of checkpoints: commits, what replaces what, what is deleted when. Layer: checkpoint."""
