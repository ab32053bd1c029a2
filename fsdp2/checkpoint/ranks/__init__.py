"""The ranks that save or load together, and how they agree without collectives. Layer: checkpoint."""
