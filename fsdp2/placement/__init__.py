"""The parts of a DTensor on each rank, as plain numbers, for checkpoints and optimizers. Layer: below runtime."""
