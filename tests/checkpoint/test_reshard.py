"""Any sharding to any other: what was saved on 1 to 4 ranks, laid out in any way, loads bit-equal into every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fsdp2.checkpoint as fc
from tests.helpers.checkpoint_cases import (
    LAYOUTS,
    Awkward,
    assert_part,
    fill,
    spoil,
    state_of,
    tensors_of,
    with_state,
)
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
    """Everything that was saved, one after the other, into one layout: half of it from rank files, half consolidated;
    the next layout takes the other halves."""
    model = LAYOUTS[name].apply(Awkward())
    forms, first = list(FORMS), list(LAYOUTS).index(name)
    for number, source in enumerate(LAYOUTS):
        folder = f"{root}/{source}-{forms[(first + number) % 2]}"
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
