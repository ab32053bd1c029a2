"""The meshes of a config, and who reads which data: every combination of degrees on up to four ranks."""

import itertools
from functools import partial
from math import prod
from typing import Any

import torch.distributed as dist

from fsdp2.errors import ArgumentError
from fsdp2.parallel import ParallelConfig, build_meshes
from fsdp2.parallel.config import AXES
from tests.helpers.models import error_of
from tests.helpers.ranks import close_pools, on_ranks, run_on_ranks


def combinations(ranks: int) -> list[tuple[int, ...]]:
    """All degrees whose product is the number of ranks, in the order of `AXES`."""
    divisors = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
    return [degrees for degrees in itertools.product(divisors, repeat=5) if prod(degrees) == ranks]


def configs(ranks: int) -> list[ParallelConfig]:
    return [ParallelConfig(**dict(zip(AXES, degrees, strict=True))) for degrees in combinations(ranks)]


def coordinates(config: ParallelConfig, rank: int) -> dict[str, int]:
    """The position of a rank on each axis, outermost first."""
    places = [*itertools.product(*map(range, config.degrees.values()))]
    return dict(zip(AXES, places[rank], strict=True))


def ranks_of(mesh: Any) -> list[int] | None:
    """The ranks of this rank's group of a 1-D mesh, as the process group itself says."""
    return None if mesh is None else dist.get_process_group_ranks(mesh.get_group())


@on_ranks(1, 2, 4)
def test_groups_are_what_the_coordinates_say(rank: int, world_size: int) -> None:
    """Ranks are in one group of an axis exactly if they differ in that coordinate alone."""
    for config in configs(world_size):
        meshes = build_meshes(config, "cpu")
        here = coordinates(config, rank)

        def expected(*axes: str, here: Any = here, config: Any = config) -> list[int]:
            others = [name for name in AXES if name not in axes]
            places = {other: coordinates(config, other) for other in range(world_size)}
            return [other for other, place in places.items() if all(place[name] == here[name] for name in others)]

        for name, mesh in (("tensor", meshes.tensor), ("context", meshes.context), ("pipeline", meshes.pipeline)):
            assert ranks_of(mesh) == (expected(name) if config.degrees[name] > 1 else None), (config, name)
        assert ranks_of(meshes.loss) == expected("replicate", "shard", "context"), config
        shards, replicas = config.degrees["shard"] * config.degrees["context"], config.replicate
        if shards > 1 and replicas > 1:
            assert ranks_of(meshes.data[meshes.data.mesh_dim_names[0]]) == expected("replicate"), config
            assert dist.get_process_group_ranks(meshes.data.get_group(1)) == expected("shard", "context"), config
        else:
            assert ranks_of(meshes.data) == expected("replicate", "shard", "context"), config
        assert meshes.only_replicates == (replicas > 1 and shards == 1)
        assert meshes.stage == here["pipeline"]
        assert meshes.data_rank == here["replicate"] * config.degrees["shard"] + here["shard"], config
        assert meshes.data_ranks == replicas * config.degrees["shard"]


@on_ranks(4)
def test_axis_names(rank: int, world_size: int) -> None:
    def names(**degrees: int) -> tuple[Any, Any]:
        meshes = build_meshes(ParallelConfig(**{"shard": 1, **degrees}), "cpu")
        return meshes.root.mesh_dim_names, meshes.data.mesh_dim_names

    assert names(shard=4) == (("dp_shard",), ("dp_shard",))
    assert names(replicate=4) == (("dp_replicate",), ("dp_replicate",))
    assert names(replicate=2, shard=2) == (("dp_replicate", "dp_shard"), ("dp_replicate", "dp_shard"))
    assert names(shard=2, context=2) == (("dp_shard", "cp"), ("dp_shard_cp",))
    assert names(replicate=2, context=2) == (("dp_replicate", "cp"), ("dp_replicate", "cp"))
    assert names(pipeline=2, tensor=2) == (("pp", "dp_shard", "tp"), ("dp_shard",))
    assert names(context=2, tensor=2) == (("cp", "tp"), ("cp",))


@on_ranks(4)
def test_made_once(rank: int, world_size: int) -> None:
    meshes = build_meshes(ParallelConfig(tensor=2), "cpu")
    assert build_meshes(ParallelConfig(tensor=2, shard=2), "cpu") is meshes
    other = build_meshes(ParallelConfig(tensor=2, activation_checkpointing="full"), "cpu")
    assert other.root is meshes.root and other.config.activation_checkpointing == "full"


def test_ranks_with_different_configs() -> None:
    """Say, a file that was changed on one machine only: all ranks raise, instead of waiting for each other. In new
    processes: what ranks have agreed on once they do not ask again."""
    close_pools()
    run_on_ranks(build_different_meshes, 2)


def build_different_meshes(rank: int, world_size: int) -> None:
    degrees = {"shard": 2} if rank == 0 else {"shard": 1, "tensor": 2}
    mesh_of = partial(build_meshes, ParallelConfig(**degrees), "cpu")
    message = error_of(ArgumentError, mesh_of)
    assert message.startswith("build_meshes: ") and "rank 1: " in message and "same config" in message, message


def test_without_a_process_group() -> None:
    assert "init_process_group" in error_of(ArgumentError, lambda: build_meshes(ParallelConfig()))


@on_ranks(4)
def test_stage_indices(rank: int, world_size: int) -> None:
    meshes = build_meshes(ParallelConfig(pipeline=2), "cpu")
    stage = rank // 2
    assert meshes.stage_indices() == (stage,)
    assert meshes.stage_indices(4) == (stage, stage + 2)
    assert meshes.stage_indices(4, style="v") == (stage, 3 - stage)
    for num_stages, style in ((3, "loop"), (6, "v"), (4, "zigzag")):
        message = error_of(ArgumentError, lambda n=num_stages, s=style: meshes.stage_indices(n, s))
        assert message.startswith("stage_indices: expected a multiple of the 2 pipeline ranks in style")
