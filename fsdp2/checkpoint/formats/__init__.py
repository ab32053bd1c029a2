"""Readers of folders, one a format; `opening` finds out which. Layer: checkpoint."""
