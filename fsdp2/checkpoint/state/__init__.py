"""What is saved and filled: models, optimizers, extra state, and the names of tensors. Layer: checkpoint."""
