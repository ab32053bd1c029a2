"""DCP folders that are not what they seem: several models, files of two saves, what is no tensor, permuted tensors."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from fsdp2 import checkpoint
from fsdp2.checkpoint.__main__ import main
from fsdp2.errors import MismatchError, UnsupportedError
from tests.helpers.dcp_saves import save_dcp


def weights(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((4,), value), "b": torch.full((2, 3), value)}


def loaded(folder: Path) -> float:
    """The value of a model of which all weights have the same."""
    found = weights(-1)
    checkpoint.load(folder, model=found)
    values = {float(value) for tensor in found.values() for value in tensor.flatten()}
    assert len(values) == 1
    return values.pop()


# --- which tensors are the model's ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        {"state_dict": weights(1), "ema": {"model": weights(9)}},
        {"weights": weights(1), "ema": {"inner": {"model": weights(9)}}},
        {**weights(1), "ema": {"model": weights(9)}},
        {"app": {"model": weights(1), "ema": {"model": weights(9)}}, "rng": torch.zeros(3)},
    ],
)
def test_outermost_model_counts(tmp_path: Path, state: dict[str, Any]) -> None:
    """Averaged weights beside the model, under a likelier key further in."""
    assert loaded(save_dcp(tmp_path / "dcp", state)) == 1


def test_several_models_are_an_error(tmp_path: Path) -> None:
    """Nobody knows which is meant."""
    folder = save_dcp(tmp_path / "dcp", {"trainer": {"model": weights(1)}, "ema": {"model": weights(9)}})
    with pytest.raises(MismatchError, match=r"dcp: .*'ema\.model', 'trainer\.model'.*checkpoint\.load"):
        loaded(folder)


def test_a_save_without_collectives_is_refused(tmp_path: Path) -> None:
    """Its files do not say to which save they belong, so those of two could be mixed."""
    folder = save_dcp(tmp_path / "dcp", {"model": weights(1)})
    (folder / ".metadata").rename(folder / "__0.metadata")
    with pytest.raises(UnsupportedError, match=r"dcp: was saved with use_collectives=False.*on as many ranks"):
        loaded(folder)


def test_members_of_enums_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.2, of Debian 12, pickles the memory format of each tensor as `getattr` of an enum. No DCP folder that
    was written there could be read."""
    by_name = lambda self, _protocol: (getattr, (type(self), self.name))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
        save_dcp(tmp_path / "dcp", weights(3))
    assert b"getattr" in (tmp_path / "dcp" / ".metadata").read_bytes()
    assert loaded(tmp_path / "dcp") == 3


# --- what is no plain tensor of a model ------------------------------------------------------------------------------


def test_what_cannot_be_read_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor of complex numbers, and a module's state that is a file in memory: `verify` called the folder whole,
    `describe` and a strict load did not name them, and `convert` dropped them."""
    others = {"z": torch.zeros(2, dtype=torch.complex128), "_extra_state": io.BytesIO(b"state")}
    folder = save_dcp(tmp_path / "dcp", {"model": {**weights(1), **others}})
    with pytest.raises(MismatchError, match=r"unexpected in the checkpoint: model 'z' \(a tensor torch\.complex128"):
        loaded(folder)
    found = weights(-1)
    assert len(checkpoint.load(folder, model=found, strict=False).unexpected) == 2
    with pytest.raises(MismatchError, match=r"missing in the checkpoint: model 'z' \(a tensor torch\.complex128 \[2\]"):
        checkpoint.load(folder, model={**found, "z": others["z"]})
    left = {f"model '{name}'" for name in others}
    assert checkpoint.verify(folder).left_out.keys() == checkpoint.describe(folder).left_out.keys() == left
    assert main(["verify", str(folder)]) == 0
    assert "not read: model 'z': a tensor torch.complex128 [2]" in capsys.readouterr().out
    with pytest.raises(UnsupportedError, match=r"convert cannot read 'z' .*no tensor.* strict=False"):
        checkpoint.convert(folder, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


def test_permuted_tensors_are_refused(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "dcp", {"w": torch.arange(6.0).view(2, 3).t(), "b": torch.zeros(2, 3)})
    with pytest.raises(UnsupportedError, match=r"is stored with strides \[1, 3\]; .* make it contiguous"):
        checkpoint.load(folder, model={"w": torch.zeros(3, 2), "b": torch.zeros(2, 3)})
