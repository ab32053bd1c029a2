"""Optimizers and clipping."""
