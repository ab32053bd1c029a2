"""Aids beside a step: whole parameters for a while, tuned lanes, and why parameters stayed sharded. Layer: surface."""
