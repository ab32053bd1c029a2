"""Train on ranks that share a GPU, and compare with the CPU."""

from __future__ import annotations

from tests.gpu import nccl
from tests.instruments.device.training import FEATURES, ON_FOUR, expected_of, sharded, train

__all__ = ["check"]

ROUNDED = ("16 bits", "fp16", "int8", "whole matrices")  # within, though losses are of 32 bits


def check(name: str, rank: int, world_size: int) -> None:
    """Losses and parameters with this feature are near those of the CPU."""
    feature = FEATURES.get(name) or ON_FOUR[name]
    expected = expected_of(name, rank, world_size)
    actual = train(sharded(feature, "cuda", world_size), feature, "cuda", rank)
    nccl.assert_near(actual, expected, 0.2 if any(word in name for word in ROUNDED) else 1e-3)
