"""Which rank has which part of a DTensor, as plain numbers; for checkpoints and optimizers. Layer: below runtime."""
