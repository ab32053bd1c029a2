"""What is saved and filled: models, optimizers and extra state, with the names of tensors. Layer: checkpoint."""
