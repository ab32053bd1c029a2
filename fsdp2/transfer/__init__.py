"""The weights of a model on their way to others: inference engines, other jobs, other values in the same shards.

A trainer's ranks hold shards, an engine wants whole tensors, or its own slices, under other names and in another dtype.
`weights` makes a plan of that, without communication. See docs/weights.md.
"""

from fsdp2.transfer.boxes import Part, Place, Wanted
from fsdp2.transfer.buckets import Bucket
from fsdp2.transfer.changes import Change, Snapshot
from fsdp2.transfer.items import Meta
from fsdp2.transfer.plan import Weights, weights

__all__ = ["Bucket", "Change", "Meta", "Part", "Place", "Snapshot", "Wanted", "Weights", "weights"]
