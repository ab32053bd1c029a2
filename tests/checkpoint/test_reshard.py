"""Any sharding to any other: what was saved on 1 to 4 ranks, laid out in any way, loads bit-equal into every layout. So
do random trees of tensors.

A random case is a function of its seed. ``FSDP2_CHECKPOINT_SEEDS=1000`` runs more cases than the default,
``FSDP2_CHECKPOINT_SEEDS=17:18`` runs one.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp2.checkpoint as fc
from tests.helpers.checkpoint_cases import (
    DTYPES,
    LAYOUTS,
    Awkward,
    assert_bits,
    assert_part,
    fill,
    mesh_of,
    random_bits,
    spoil,
    state_of,
    tensors_of,
    with_state,
)
from tests.helpers.parity_models import local, shard_like
from tests.helpers.ranks import run_on_ranks

FORMS = {"ranks": {}, "consolidated": {"consolidated": True, "max_file_bytes": 2000}}


def save_all(rank: int, world_size: int, root: str) -> None:
    """All layouts of this world size, in both forms."""
    for name, layout in LAYOUTS.items():
        if layout.world_size != world_size:
            continue
        model = layout.apply(Awkward())
        optimizer = with_state(model, lr=0.25)
        for key, value in tensors_of(model):
            fill(key, value)
        for form, options in FORMS.items():
            fc.save(f"{root}/{name}-{form}", model=model, optimizer=optimizer, **options)


def load_all(rank: int, world_size: int, root: str, name: str) -> None:
    """Every second layout that was saved, one after the other, into this one: from rank files and consolidated in turn;
    the next layout takes the others."""
    model = LAYOUTS[name].apply(Awkward())
    forms, first = list(FORMS), list(LAYOUTS).index(name)
    for number, source in enumerate([*LAYOUTS][first % 2 :: 2]):
        folder = f"{root}/{source}-{forms[(first // 2 + number) % 2]}"
        for _, value in tensors_of(model):
            spoil(value)
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1.0)
        fc.load(folder, model=model, optimizer=optimizer)
        for key, value in tensors_of(model):
            assert_part(key, value)
        for key, value in state_of(model, optimizer):
            assert_part(key, value)
        assert len(list(state_of(model, optimizer))) == 2 * len(optimizer.param_groups[0]["params"])
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with every layout in every form."""
    root = str(tmp_path_factory.mktemp("grid"))
    for world_size in sorted({layout.world_size for layout in LAYOUTS.values()}):
        run_on_ranks(save_all, world_size, root=root)
    assert len(list(Path(root).iterdir())) == len(LAYOUTS) * len(FORMS)
    return root


@pytest.mark.sampled
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_loads_into(saved: str, name: str) -> None:
    run_on_ranks(load_all, LAYOUTS[name].world_size, root=saved, name=name)


# --- random trees -----------------------------------------------------------------------------------------------------


MESHES = {
    1: [(1,), (1, 1)],
    2: [(2,), (2, 1), (1, 2)],
    3: [(3,), (1, 3), (3, 1)],
    4: [(4,), (2, 2), (4, 1), (2, 1, 2), (1, 2, 2)],
}
WORLDS = sorted(MESHES)
SIZES = [0, 1, 1, 2, 3, 3, 4, 5, 7, 8, 11, 13]
WORDS = ["layers", "0", "1", "10", "weight", "bias", "a b", "ü", "x/y", '"', "\\", "step", "__metadata", "%d", "{}"]


@dataclass(frozen=True)
class Case:
    """What is saved (section -> name -> dtype, shape), where, how, and where it is loaded."""

    seed: int
    sections: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]
    options: dict[str, Any]
    save_on: int
    load_on: int


def random_name(rng: random.Random) -> str:
    return ".".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4)))


def random_shape(rng: random.Random) -> tuple[int, ...]:
    if rng.random() < 0.05:  # larger than a block of checksums together with its like
        return (rng.randint(300, 700), rng.randint(300, 700))
    return tuple(rng.choice(SIZES) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3, 4])))


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    sections = {
        section: {random_name(rng): (rng.choice(DTYPES), random_shape(rng)) for _ in range(rng.randint(0, 12))}
        for section in ("model", "optimizer")[: rng.randint(1, 2)]
    }
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options = {"consolidated": True, "max_file_bytes": rng.choice([100, 1000, 10**6])}
    if rng.random() < 0.3:
        options["async_op"] = True
    return Case(seed, sections, options, rng.choice(WORLDS), rng.choice(WORLDS))


def random_placements(rng: random.Random, ndim: int, sizes: Sequence[int]) -> list[Any]:
    if ndim and len(sizes) > 1 and rng.random() < 0.3:  # as fully_shard makes it of a tensor-parallel parameter
        dim = rng.randrange(ndim)
        return [
            *[Replicate()] * (len(sizes) - 2),
            _StridedShard(dim, split_factor=sizes[-1]),
            Shard(dim),
        ]
    return [Shard(rng.randrange(ndim)) if ndim and rng.random() < 0.7 else Replicate() for _ in sizes]


def in_some_order(rng: random.Random, part: Tensor) -> Tensor:
    """The same values, perhaps in another order or with gaps in memory."""
    how = rng.choice(["contiguous", "transposed", "gaps", "offset"])
    if how == "transposed" and part.ndim > 1:
        return part.mT.contiguous().mT
    if how == "gaps" and part.ndim:
        return torch.stack([part, part], -1)[..., 1]
    if how == "offset":
        flat = torch.cat([part.reshape(-1)[:1], part.reshape(-1)]) if part.numel() else part.reshape(-1)
        return flat[flat.numel() - part.numel() :].view(part.shape)
    return part.clone()


def random_tensor(rng: random.Random, whole: Tensor, world_size: int) -> Tensor:
    """The whole, or a DTensor of it, laid out at random."""
    sizes = rng.choice(MESHES[world_size])
    placements = random_placements(rng, whole.ndim, sizes)
    if rng.random() < 0.2:
        return in_some_order(rng, whole)
    mesh = mesh_of(*sizes)
    meta: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    part = shard_like(whole, DTensor.from_local(torch.empty(0), mesh, placements, **meta))
    assert part is not None
    return DTensor.from_local(in_some_order(rng, part), mesh, placements, **meta)


def random_tensors(case: Case, purpose: str, world_size: int) -> dict[str, dict[str, Tensor]]:
    """The case's tensors by section, laid out as this purpose ("save", "load") has it."""
    rng = random.Random(f"{case.seed} {purpose}")
    return {
        section: {
            name: random_tensor(rng, random_bits(f"{case.seed} {section} {name}", shape, dtype), world_size)
            for name, (dtype, shape) in tensors.items()
        }
        for section, tensors in case.sections.items()
    }


def save_cases(rank: int, world_size: int, root: str, seeds: list[int]) -> None:
    for seed in seeds:
        case = random_case(seed)
        try:
            fc.save(f"{root}/{seed}", **random_tensors(case, "save", world_size), **case.options).wait()
        except Exception as error:
            raise AssertionError(f"cannot save {case}") from error


def load_cases(rank: int, world_size: int, root: str, seeds: list[int]) -> None:
    for seed in seeds:
        case = random_case(seed)
        tensors = random_tensors(case, "load", world_size)
        expected = {section: {k: local(v).clone() for k, v in named.items()} for section, named in tensors.items()}
        for named in tensors.values():
            for value in named.values():
                spoil(value)
        try:
            fc.load(f"{root}/{seed}", **tensors)
            for section, named in tensors.items():
                for name, value in named.items():
                    assert_bits(f"{section} {name}", value, expected[section][name])
        except Exception as error:
            raise AssertionError(f"cannot load {case}") from error


def seeds_to_run() -> range:
    first, _, last = os.environ.get("FSDP2_CHECKPOINT_SEEDS", "40").rpartition(":")
    return range(int(first or 0), int(last))


def test_random_trees_load_bit_equal(tmp_path: Path) -> None:
    cases = [random_case(seed) for seed in seeds_to_run()]
    for world_size in WORLDS:
        seeds = [case.seed for case in cases if case.save_on == world_size]
        run_on_ranks(save_cases, world_size, root=str(tmp_path), seeds=seeds, timeout_s=300)
    for world_size in WORLDS:
        seeds = [case.seed for case in cases if case.load_on == world_size]
        run_on_ranks(load_cases, world_size, root=str(tmp_path), seeds=seeds, timeout_s=300)
