"""Read and write parts of tensors, on several threads. Layer: checkpoint."""
