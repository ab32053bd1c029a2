"""Readers of checkpoint folders, one per format; `opening` detects the format. Layer: checkpoint."""
