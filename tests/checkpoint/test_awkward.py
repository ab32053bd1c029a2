"""Names that no file can hold, tensors that are not dense, models in wrappers, processes that fork during a save."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp2 import ArgumentError, checkpoint
from fsdp2.checkpoint import saving
from fsdp2.checkpoint.state import extra as extra_module
from fsdp2.checkpoint.tools.converting import convert
from tests.helpers.dcp_saves import save_dcp
from tests.helpers.ranks import on_ranks


@pytest.mark.parametrize("name", ["__metadata__", "half \ud800", "\udfff"], ids=ascii)
def test_names_that_files_cannot_hold(name: str, tmp_path: Path) -> None:
    """A tensor called ``__metadata__`` was saved in place of what the file says of itself, and never loaded; half a
    surrogate ended in a UnicodeEncodeError of the writing thread, or of the store."""
    with pytest.raises(ArgumentError, match="rename"):
        checkpoint.save(tmp_path / "a", model={name: torch.ones(2)})
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(torch.ones(2)))
    with pytest.raises(ArgumentError, match="rename"):
        checkpoint.save(tmp_path / "a", model=model)
    if name != "__metadata__":
        for extra in ({name: 1}, {name: torch.ones(2)}):
            with pytest.raises(ArgumentError, match="rename"):
                checkpoint.save(tmp_path / "a", extra=extra)
    assert not any(tmp_path.iterdir())
    extra = {"words": {name: name, "deep": {name: torch.ones(3)}}}
    checkpoint.save(tmp_path / "b", extra=extra, model={"x": torch.ones(1)})
    loaded = checkpoint.load(tmp_path / "b").extra["words"]
    assert (loaded[name], loaded["deep"][name].tolist()) == (name, [1, 1, 1])


def test_a_converted_tensor_with_the_name_of_the_metadata(tmp_path: Path) -> None:
    save_dcp(tmp_path / "a", {"model": {"__metadata__": torch.ones(2), "b": torch.ones(3)}})
    with pytest.raises(ArgumentError, match="'__metadata__', a name that safetensors keeps"):
        convert(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("kind", ["coo", "csr", "meta"])
def test_tensors_without_dense_values_in_extra(kind: str, tmp_path: Path) -> None:
    """A sparse tensor ended in "sparse tensors do not have strides", wherever it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR tensors beta
        tensor = {"coo": torch.eye(3).to_sparse, "csr": torch.eye(3).to_sparse_csr}.get(
            kind, lambda: torch.ones(3, device="meta")
        )()
    with pytest.raises(ArgumentError, match=r"extra 'sampler' at 'graph/0': .* dense tensors"):
        checkpoint.save(tmp_path / "a", extra={"sampler": {"graph": [tensor]}})
    assert not any(tmp_path.iterdir())


class Watched:
    """Knows which threads have hashed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        real = extra_module._digest

        def digest(*args: Any) -> str:
            self.threads.append(threading.current_thread().name)
            return real(*args)

        monkeypatch.setattr(extra_module, "_digest", digest)


def test_extra_state_is_hashed_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread waited a quarter of a second for 400 MB of a data loader's state. What changes after the call
    is not what is saved."""
    watched = Watched(monkeypatch)
    order = torch.arange(1000)
    pending = checkpoint.save(tmp_path / "a", extra={"loader": {"order": order}}, async_op=True)
    order.zero_()
    pending.wait()
    assert watched.threads == ["fsdp2-save"]
    assert checkpoint.load(tmp_path / "a").extra["loader"]["order"].tolist() == list(range(1000))


def test_a_process_that_is_forked_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a data loader, which saves what it has seen, waited for its parent's save: for a thread that is not
    in its process."""
    begun, go_on = threading.Event(), threading.Event()
    real = saving.write_files

    def slow(*args: Any) -> Any:
        begun.set()
        go_on.wait(60)
        return real(*args)

    monkeypatch.setattr(saving, "write_files", slow)
    pending = checkpoint.save(tmp_path / "parent", model={"a": torch.ones(4)}, async_op=True)
    assert begun.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of Python warn of threads
        child = os.fork()
    if not child:
        code = 1
        try:
            go_on.set()  # the child's own
            checkpoint.save(tmp_path / "child", model={"a": torch.zeros(4)})
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + 30
    status = 0
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.02)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        status = -1
    go_on.set()
    pending.wait()
    assert status == 0
    for name, value in (("parent", 1.0), ("child", 0.0)):
        into = {"a": torch.full((4,), 7.0)}
        checkpoint.load(tmp_path / name, model=into)
        assert into["a"].tolist() == [value] * 4


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


@on_ranks(2)
def test_a_model_in_ddp(rank: int, world_size: int, tmp_path: Path) -> None:
    """Its names all began with ``module.``, so neither the model itself nor a sharded one could load them."""
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    optimizer = trained(wrapped)
    checkpoint.save(tmp_path / "a", model=wrapped, optimizer=optimizer)
    assert [tensor.name for tensor in checkpoint.describe(tmp_path / "a").tensors][:2] == ["0.weight", "0.bias"]
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    its = torch.optim.AdamW(plain.parameters())
    checkpoint.load(tmp_path / "a", model=plain, optimizer=its)
    again = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    checkpoint.load(tmp_path / "a", model=again)
    for one, two, three in zip(wrapped.parameters(), plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
        assert torch.equal(optimizer.state[one]["exp_avg"], its.state[two]["exp_avg"])


@on_ranks(1)
def test_names_that_ddp_gave(rank: int, world_size: int, tmp_path: Path) -> None:
    """What was saved with the prefix, by fsdp2 before it took that away or by another library, loads into the model
    with and without DDP, on the meta device too; a model whose own names begin so is left alone."""
    outer, inner = nn.Module(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    outer.module = inner
    outer.forward = inner.forward  # type: ignore[method-assign]
    optimizer = trained(outer)
    checkpoint.save(tmp_path / "a", model=outer, optimizer=optimizer)
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    its = torch.optim.AdamW(plain.parameters())
    loaded = checkpoint.load(tmp_path / "a", model=plain, optimizer=its)
    assert (loaded.missing, loaded.unexpected) == ([], [])
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    checkpoint.load(tmp_path / "a", model=wrapped)
    same = nn.Module()
    same.module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    checkpoint.load(tmp_path / "a", model=same)
    for one, *others in zip(*(each.parameters() for each in (inner, plain, wrapped, same)), strict=True):
        assert all(torch.equal(one, other) for other in others)
    for one, two in zip(inner.parameters(), plain.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], its.state[two]["exp_avg"])


@pytest.mark.parametrize("where", ["model", "extra"])
def test_a_nested_tensor_is_named(where: str, tmp_path: Path) -> None:
    """Torch's own error was "NestedTensorImpl doesn't support sizes. Please file an issue"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    state: dict[str, Any] = {where: {"lengths": nested}}
    with pytest.raises(ArgumentError, match=r"'lengths'.* a nested one"):
        checkpoint.save(tmp_path / "a", **state)


def test_plans_of_many_tensors_keep_the_collector_out(tmp_path: Path) -> None:
    """It went over all objects of torch again and again: most of what a save of thousands of tensors cost."""
    values = {f"layers.{number}.weight": torch.ones(2) for number in range(3000)}
    checkpoint.save(tmp_path / "a", model=values)
    full: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        full.extend([info["generation"]] if phase == "start" and info["generation"] else [])

    gc.collect()
    gc.callbacks.append(note)
    try:
        checkpoint.save(tmp_path / "b", model=values)
        checkpoint.load(tmp_path / "b", model=values)
    finally:
        gc.callbacks.remove(note)
    assert len(full) < 10, full
    assert gc.isenabled()
    gc.disable()
    try:
        checkpoint.load(tmp_path / "b", model=values)
        assert not gc.isenabled()
    finally:
        gc.enable()
