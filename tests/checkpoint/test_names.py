"""Names of tensors and keys: those that files cannot hold, that are given twice, or that wrappers add."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp2 import ArgumentError, checkpoint
from fsdp2.checkpoint.tools.converting import convert
from tests.helpers.dcp_saves import save_dcp


def test_two_tensors_under_one_name(tmp_path: Path) -> None:
    """The second took the place of the first, or the file could not be read."""
    extra = {"a/b": {"c": torch.zeros(2)}, "a": {"b": {"c": torch.ones(2)}}}
    with pytest.raises(ArgumentError, match="two tensors would be stored under this name"):
        checkpoint.save(tmp_path / "a", extra=extra)


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
    with pytest.raises(ArgumentError, match="'__metadata__', a name that safetensors reserves"):
        convert(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()
