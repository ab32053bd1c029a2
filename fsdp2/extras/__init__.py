"""Aids beside a step: whole parameters for a while, layers in tiles, tuned lanes, why parameters stayed sharded. Layer:
surface."""
