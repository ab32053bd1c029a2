"""Plain state dicts, large tensors, and ranks that have different things or save among themselves."""

import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import fsdp2.checkpoint as fc
from fsdp2 import ZeroPolicy, fully_shard
from fsdp2.errors import CheckpointError, MismatchError
from tests.helpers.checkpoint_cases import (
    Awkward,
    Block,
    assert_bits,
    assert_part,
    by_form,
    check,
    filled,
    mesh_of,
    put,
    shard,
    spoil,
    state_of,
    tensors_of,
    value_of,
    with_state,
)
from tests.helpers.ranks import on_ranks, run_on_ranks

# --- plain state dicts ------------------------------------------------------------------------------------------------


@on_ranks(2)
@by_form
def test_state_dict_of_a_model(rank: int, world_size: int, options: dict[str, Any], tmp_path: Path) -> None:
    """A model loads what was saved of its state dict, and the other way round; and a state dict of some names."""
    model = filled(shard(Awkward()))
    fc.save(tmp_path / "dict", model=model.state_dict(), **options)
    fc.save(tmp_path / "model", model=model, **options)
    other = filled(shard(Awkward()), seed=1)
    fc.load(tmp_path / "dict", model=other)
    check(other)
    other = filled(shard(Awkward()), seed=1)
    fc.load(tmp_path / "model", model=other.state_dict())
    check(other)
    other = filled(shard(Awkward()), seed=1)
    some = {name: value for name, value in other.state_dict().items() if name.startswith("blocks.1")}
    loaded = fc.load(tmp_path / "model", model=some, strict=False)
    assert loaded.missing == []
    assert any("blocks.0.up.weight" in name for name in loaded.unexpected)
    for name, value in tensors_of(other):
        assert_part(name, value, seed=0 if name.startswith("blocks.1") else 1)
    with pytest.raises(MismatchError, match=r"blocks\.0\.up\.weight"):
        fc.load(tmp_path / "model", model=some)


@on_ranks(2)
def test_views_of_one_storage_are_not_one_tensor(rank: int, world_size: int, tmp_path: Path) -> None:
    """Only the same part of the same storage is a tie."""
    base = torch.arange(12.0).reshape(3, 4)
    saved = {"all": base, "row": base[1], "t": base.t(), "column": base[:, 2], "again": base, "flat": base.view(12)}
    expected = {name: value.clone() for name, value in saved.items()}
    fc.save(tmp_path / "a", model=saved)
    state = {name: torch.zeros(value.shape) for name, value in saved.items()}
    fc.load(tmp_path / "a", model=state)
    for name, value in state.items():
        assert_bits(name, value, expected[name])


@on_ranks(2)
@by_form
def test_plain_tensors_that_differ_are_somebodys(
    rank: int, world_size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Nothing says that plain tensors are equal on all ranks. What is stored is what one rank had, not a mixture."""
    tensors = {"large": torch.full((1_000_003,), float(rank)), "small": torch.full((5,), float(rank))}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fc.save(tmp_path / "a", model={**tensors, "same": torch.ones(3)}, **options)
    said: list[list[str]] = [[]] * world_size
    dist.all_gather_object(said, [str(one.message) for one in caught])
    (text,) = [text for texts in said for text in texts]  # by the rank that committed
    assert text.startswith("save: model 'large' (ranks 0 and 1), model 'small' (ranks 0 and 1): plain tensors whose")
    fc.load(tmp_path / "a", model=tensors, strict=False)
    for value in tensors.values():
        assert value.min() == value.max()


# --- ranks that differ ------------------------------------------------------------------------------------------------


def stage(rank: int, num_blocks: int = 2) -> nn.Module:
    """Ranks 0, 1 have the first of two pipeline stages, ranks 2, 3 the second; each is sharded over its two ranks."""
    mesh = mesh_of(2, 2)["b"]
    model = nn.ModuleDict({f"block{rank // 2 + 2 * index}": Block() for index in range(num_blocks)})
    for block in model.values():
        fully_shard(block, mesh=mesh)
    return model


def save_stages(rank: int, world_size: int, folder: str) -> None:
    model = stage(rank)
    optimizer = with_state(model, lr=0.1 * (1 + rank // 2))
    filled(model)
    with pytest.raises(CheckpointError, match="convert"):  # nobody knows what is in the common files
        fc.save(folder, model=model, consolidated=True)
    fc.save(folder, model=model, optimizer=optimizer, extra={"stage": rank // 2})


def load_stages(rank: int, world_size: int, folder: str) -> None:
    """Four ranks: their stages. Two ranks: all blocks in one model, one at a time is left out."""
    if world_size == 4:
        model = stage(rank)
        optimizer = torch.optim.AdamW(model.parameters())
        loaded = fc.load(folder, model=model, optimizer=optimizer, strict=False)
        assert loaded.extra["stage"] == rank // 2
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (1 + rank // 2))
    else:
        model = nn.ModuleDict({f"block{number}": fully_shard(Block()) for number in range(4)})
        groups = [[model[f"block{n}"], model[f"block{n + 2}"]] for n in (0, 1)]
        optimizer = torch.optim.AdamW(
            [{"params": [p for module in modules for p in module.parameters()]} for modules in groups]
        )
        loaded = fc.load(folder, model=model, optimizer=optimizer)
        assert loaded.unexpected == []
    assert loaded.missing == []
    check(model)
    for key, value in state_of(model, optimizer):
        assert_part(key, value)


def test_pipeline_stages(tmp_path: Path) -> None:
    """Ranks that have different modules make one checkpoint, and share it out again in any way."""
    run_on_ranks(save_stages, 4, folder=str(tmp_path / "a"))
    run_on_ranks(load_stages, 4, folder=str(tmp_path / "a"))
    run_on_ranks(load_stages, 2, folder=str(tmp_path / "a"))


@on_ranks(4)
@by_form
def test_subgroup_of_the_ranks(rank: int, world_size: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks save and load by themselves, each pair its own checkpoint, at the same time; one rank reads alone."""
    mesh = mesh_of(2, 2)["b"]
    group, alone, pair = mesh.get_group(), mesh_of(4, 1)["b"].get_group(), rank // 2
    model = shard(Awkward(), mesh=mesh)
    optimizer = with_state(model)
    filled(model, seed=pair)
    fc.save(tmp_path / str(pair), model=model, optimizer=optimizer, process_group=group, extra={"r": rank}, **options)
    dist.barrier()
    other = filled(shard(Awkward(), mesh=mesh), seed=7)
    loaded = fc.load(tmp_path / str(1 - pair), model=other, process_group=group)
    check(other, seed=1 - pair)
    assert loaded.extra["r"] == (rank + 2) % 4
    if rank == 3:
        with pytest.raises(MismatchError, match=r"nowhere"):
            fc.load(tmp_path / "0", model={"nowhere": torch.zeros(1)}, process_group=alone)
        whole = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in other.state_dict().items()}
        fc.load(tmp_path / "0", model=whole, process_group=alone)
        for name, _ in tensors_of(other):
            assert_bits(name, whole[name], value_of(name, whole[name].shape, whole[name].dtype))


@on_ranks(4)
@by_form
@pytest.mark.parametrize("axis", ["a", "b"])
def test_one_axis_of_a_larger_mesh(
    rank: int, world_size: int, axis: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Sharded over one axis only; along the other (context parallel, say) every rank has the same, and nothing of the
    model says so."""
    model = shard(Awkward(), mesh=mesh_of(2, 2)[axis])
    optimizer = with_state(model)
    filled(model)
    fc.save(tmp_path / "a", model=model, optimizer=optimizer, **options)
    other = shard(Awkward())
    other_optimizer = with_state(other)
    for _, value in [*tensors_of(other), *state_of(other, other_optimizer)]:
        spoil(value)
    fc.load(tmp_path / "a", model=other, optimizer=other_optimizer)
    check(other)
    for key, value in state_of(other, other_optimizer):
        assert_part(key, value)


@on_ranks(2)
@pytest.mark.parametrize("keep", [True, "host"])
def test_loading_into_a_state_dict_is_a_change(
    rank: int, world_size: int, keep: bool | Literal["host"], tmp_path: Path
) -> None:
    """The next forward computed with what was kept of the frozen parameters."""
    net: Any = nn.Linear(4, 4, bias=False).requires_grad_(False)
    fully_shard(net, zero=ZeroPolicy(keep_frozen=keep))
    fc.save(tmp_path / "a", model={"weight": torch.full((4, 4), 2.0)})
    for _ in range(2):
        net(torch.ones(1, 4))
    fc.load(tmp_path / "a", model=net.state_dict())
    assert net(torch.ones(1, 4)).eq(8).all()


@on_ranks(2)
def test_a_rank_that_gives_no_rows(rank: int, world_size: int, tmp_path: Path) -> None:
    """Without an error the checkpoint would count, and lack its rows."""
    state: dict[str, Any] = {"both": torch.ones(3)}
    rows = put(value_of("w", (7, 5)), mesh_of(2), [Shard(0)])
    if rank == 0:
        state["rows"] = rows
    with pytest.raises(CheckpointError, match=r"'rows': is on ranks \[0, 1\], of which \[1\] did not save it"):
        fc.save(tmp_path / "b", model=state)
