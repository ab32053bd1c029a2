"""Publishes the weights of a model to inference engines and other jobs.

A trainer's ranks hold shards. An engine needs whole tensors, or its own slices, under other names and in another dtype.
`weights` plans this without communication. See docs/weights.md.
"""

from fsdp2.transfer.boxes import Part, Place, Wanted
from fsdp2.transfer.buckets import Bucket
from fsdp2.transfer.changes import Change, Snapshot
from fsdp2.transfer.items import Meta
from fsdp2.transfer.plan import Weights, weights

__all__ = ["Bucket", "Change", "Meta", "Part", "Place", "Snapshot", "Wanted", "Weights", "weights"]
