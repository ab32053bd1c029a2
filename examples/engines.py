"""`fsdp2.weights` in the forms that engines take. Copy what you need: their interfaces change with each version.

    vLLM 0.26     trainer = SomeTrainerEngine.trainer_init(config, info, client=client, source=vllm_source(plan))
                  engine.send_weights(vllm_patches(plan, known))      # what has changed since plan.snapshot()
    SGLang 0.5    for bucket in sglang_buckets(plan): ...             # load_format="flattened_bucket"
    verl 0.9.1    engine.get_per_tensor_param_shard = lambda: verl_shards(plan)

Every rank makes the same calls, to the end. Each function imports its engine when it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.transfer import Snapshot, Weights


def vllm_source(plan: Weights) -> Any:
    """A `WeightSource` of vLLM, for its trainer engines."""
    base = import_module("vllm.distributed.weight_transfer.base")

    class Source(base.WeightSource):  # type: ignore[misc, name-defined]
        def metadata(self) -> list[Any]:
            return [base.ParamMeta(*each) for each in plan.metadata()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            # vLLM packs several tensors before it sends them, and a bucket is valid until the next one.
            return ((name, tensor.clone()) for name, tensor in plan)

    return Source()


def vllm_patches(plan: Weights, known: Snapshot) -> Iterator[Any]:
    """Sparse patches of vLLM: flat positions in the tensors of the checkpoint, and what stands there now."""
    patch = import_module("vllm.distributed.weight_transfer.sparse_nccl_engine").SparseWeightPatch
    size = len(fields(patch))  # later versions want the shape of the whole tensor too
    return (patch(*change[:size]) for change in plan.changes(known))


def sglang_buckets(plan: Weights, bucket_bytes: int = 1 << 28) -> Iterator[Any]:
    """Flattened buckets of SGLang. Its own class flattens, whose layout differs between versions. Let all tensors have
    one dtype: some versions convert others."""
    bucket_of = import_module("sglang.srt.weight_sync.tensor_bucket").FlattenedTensorBucket
    return (bucket_of(named_tensors=[*bucket]) for bucket in plan.full(bucket_bytes))


def verl_shards(plan: Weights) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """(name, flat local shard, `ShardSpec`) of verl, for the engines of its delta sync. The spec has the place of the
    shard as a block, so uneven strided shards work too. With names="transformers" the tensors are those of the
    checkpoint, and need no converters."""
    spec = import_module("verl.workers.engine.spec")
    places = {place.name: place for place in plan.boxes()}
    for name, _, shape in plan.metadata():
        place = places.get(name)  # None: this rank has nothing of it
        start, size = ((0,) * len(shape),) * 2 if place is None else (place.start, place.local_shape)
        block = spec.BlockPlacement(local_shape=size, global_offset=start, full_shape=shape)
        gives = place is not None and place.is_primary
        where = spec.ShardSpec(full_shape=shape, place=block, gather_group=dist.group.WORLD, contributes=gives)
        yield name, plan.local(name).reshape(-1), where
