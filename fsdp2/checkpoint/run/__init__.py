"""The folder of a run: commits, replacement and deletion of checkpoints. Layer: checkpoint."""
