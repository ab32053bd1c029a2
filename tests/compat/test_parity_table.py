"""docs/parity.md: every row's claim runs on torch's FSDP2 and on ours, and the page shows what was seen."""

import runpy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fsdp2
from fsdp2 import FSDPModule
from tests.helpers.parity_rows import ABSENT, ROWS, Row
from tests.helpers.ranks import on_ranks
from tests.helpers.source_tree import ROOT


def seen(api: Any, row: Row) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return row.check(api)
        except Exception as error:
            return f"raised {error!r}"


def test_the_page_shows_the_rows() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_parity.py"))["page"]()
    assert (ROOT / "docs" / "parity.md").read_text() == page, "run: python docs/make_parity.py > docs/parity.md"


@on_ranks(2)
def test_every_claim_holds_here(rank: int, world_size: int) -> None:
    """Behaviour 70, 136, 139, 141, 181: and much else."""
    problems = []
    for row in ROWS:
        found = seen(fsdp2, row)
        if found != row.expected:
            problems.append(f"{row.name}, {row.claim}: expected {row.expected!r}, saw {found!r}")
    assert not problems, "\n".join(problems)


@pytest.mark.exhaustive
@on_ranks(2)
def test_every_claim_holds_on_torch(rank: int, world_size: int) -> None:
    """The table is of torch 2.13: later versions may have come to do what we do."""
    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"the table shows torch 2.13, this is {torch.__version__}")
    problems = []
    for row in ROWS:
        found = ABSENT if row.torch == ABSENT else seen(torch_fsdp, row)
        if found != row.torch:
            problems.append(f"{row.name}, {row.claim}: expected {row.torch!r}, saw {found!r}")
    assert not problems, "\n".join(problems)


def test_every_public_name_has_a_row() -> None:
    """Of torch's FSDP2, and of the methods that ours adds."""
    public = {"fully_shard", "register_fsdp_forward_method", "share_comm_ctx", "UnshardHandle", "OffloadPolicy"}
    public |= {
        "GradientReductionHandle",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
    }
    methods = {*dir(FSDPModule), *vars(torch_fsdp.FSDPModule)} - set(dir(nn.Module))
    public |= {name for name in methods if not name.startswith("_")}
    public |= {f"{name}=" for name in ("mesh", "reshard_after_forward", "shard_placement_fn", "mp_policy")}
    public |= {f"{name}=" for name in ("offload_policy", "ignored_params", "dp_mesh_dims")}
    names = " ".join(row.name for row in ROWS)
    assert [name for name in sorted(public) if name not in names] == []


def test_a_difference_has_a_reason() -> None:
    assert [row.claim for row in ROWS if row.ours is not None and row.torch != ABSENT and not row.why] == []
    assert [row.claim for row in ROWS if row.ours is None and row.why] == []
