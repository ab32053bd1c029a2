"""The folders of a run, from the outside: what is there, what is refused, what goes; saves in the background."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fsdp2.checkpoint as fc
from fsdp2.errors import CheckpointError
from tests.helpers.ranks import on_ranks


@on_ranks(1, 2)
def test_checkpoints_of_a_run(rank: int, world_size: int, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert fc.latest(root) is None
    assert fc.checkpoints(root) == []
    for step in (5, np.int64(100), 20, 123_456_789_012):
        handle = fc.save(root, extra={"step": int(step)}, step=step)  # type: ignore[arg-type]
        assert handle.done()
        assert handle.wait() == handle.folder == str(root / f"step-{step:08d}")
    dist.barrier()
    (root / "step-00000777").mkdir(exist_ok=True)  # no manifest: no checkpoint
    (root / ".tmp-step-00000999-x").mkdir(exist_ok=True)
    (root / "notes.txt").write_text("mine")
    dist.barrier()
    assert fc.checkpoints(root) == [str(root / f"step-{step:08d}") for step in (5, 20, 100, 123_456_789_012)]
    newest = fc.latest(root)
    assert newest == str(root / "step-123456789012")
    loaded = fc.load(newest)
    assert (loaded.step, loaded.extra, loaded.folder) == (123_456_789_012, {"step": 123_456_789_012}, newest)


@on_ranks(1, 2)
@pytest.mark.parametrize("beside", ["config.json", "step-00000001"])
def test_what_lies_beside_a_checkpoint_is_not_deleted(rank: int, world_size: int, beside: str, tmp_path: Path) -> None:
    """All of the folder was, with what a user had put there, and with the checkpoints of a run that lay in it."""
    fc.save(tmp_path / "a", model={"w": torch.ones(2)}, consolidated=True)
    if beside == "config.json":
        (tmp_path / "a" / beside).write_text("{}")
    else:
        fc.save(tmp_path / "a", extra={}, step=1)
    dist.barrier()
    for write in (
        lambda: fc.save(tmp_path / "a", extra={}, overwrite=True),
        lambda: fc.convert(tmp_path / "a", tmp_path / "a", overwrite=True),
    ):
        with pytest.raises(CheckpointError, match=rf"other files than those of the checkpoint, {beside}, .*Move them"):
            write()
        dist.barrier()
    assert sorted(path.name for path in (tmp_path / "a").iterdir())[:1] == ["checkpoint.json"]
    assert (tmp_path / "a" / beside).exists()


# --- in the background ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_waiting_with_a_time_limit(rank: int, world_size: int, tmp_path: Path) -> None:
    """One rank is late: the other's handle says that it is not done, and later that it is."""
    folder = tmp_path / "late"  # no save of this name has failed on these ranks, so none waits for all of them
    if rank == 1:
        dist.barrier()  # which rank 0 reaches when it has waited in vain
    handle = fc.save(folder, extra={"a": rank}, async_op=True)
    if rank == 0:
        assert not handle.done()
        with pytest.raises(TimeoutError):
            handle.wait(0.05)
        dist.barrier()
    assert handle.wait() == str(folder)
    assert handle.done()
    assert handle.wait(0) == str(folder)
    assert fc.load(folder).extra == {"a": rank}


@on_ranks(2)
def test_a_save_that_one_rank_skipped(rank: int, world_size: int, tmp_path: Path) -> None:
    """Once all ranks come again, the same name works, here and in another folder."""
    for number in range(2):
        if rank == number:
            with pytest.raises(CheckpointError, match=str(1 - rank)):
                fc.save(tmp_path / "skipped", extra={}, timeout_s=0.2)
        dist.barrier()
        fc.save(tmp_path / str(number) / "skipped", extra={"a": rank}, timeout_s=10)
        assert fc.load(tmp_path / str(number) / "skipped").extra == {"a": rank}
    fc.save(tmp_path / "skipped", extra={"a": rank}, timeout_s=10)
    assert fc.load(tmp_path / "skipped").extra == {"a": rank}
