"""Aids beside a step: whole parameters for a while, layers in tiles, activations in host memory. Layer: surface."""
