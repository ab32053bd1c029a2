"""What needs no process group and no module: pure functions."""
