"""Hugging Face folders: one file or several, damaged indices, links of the hub's cache."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fsdp2
from fsdp2 import checkpoint
from fsdp2.errors import CorruptError, MismatchError, UnsupportedError
from tests.helpers.ranks import on_ranks

STATE = {"0.weight": torch.arange(35.0).view(7, 5), "0.bias": torch.ones(7), "1.weight": torch.full((3, 7), 2.0)}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))


def check(folder: Path, model: nn.Module | None = None) -> None:
    """All values come out of the folder."""
    model = model or net()
    checkpoint.load(folder, model=model)
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole, STATE[name]), name


def write_two(folder: Path, **changes: Any) -> None:
    """Two files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {"0.weight": "model-00001-of-00002.safetensors", "0.bias": "model-00001-of-00002.safetensors"}
    places["1.weight"] = "model-00002-of-00002.safetensors"
    for file in set(places.values()):
        own = {name: value for name, value in STATE.items() if places[name] == file}
        save_file(own, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**places, **changes}}))


@on_ranks(1, 3)
def test_files_of_others_are_sharded(rank: int, world_size: int, tmp_path: Path) -> None:
    """Each rank writes a folder of its own; plain files without metadata, and with files beside that nobody listed."""
    folder = tmp_path / str(rank) / "net"
    write_two(folder)
    (folder / "config.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"\x80\x02cos\nsystem\n.")
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"of an older save")
    model = net()
    fsdp2.fully_shard(model)
    check(folder, model)


@pytest.mark.parametrize("name", ["model", "adapter_model", "diffusion_pytorch_model"])
def test_single_file(tmp_path: Path, name: str) -> None:
    save_file(STATE, tmp_path / f"{name}.safetensors")
    check(tmp_path)


def test_a_single_file_comes_before_an_index(tmp_path: Path) -> None:
    """As transformers has it: an index beside is of an older save."""
    write_two(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    save_file(STATE, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check(tmp_path)


def test_torch_files(tmp_path: Path) -> None:
    """They are pickles. What the error says makes safetensors of them."""
    torch.save({name: nn.Parameter(value) for name, value in STATE.items()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin: is a file of torch\.save.*weights_only=True"):
        check(tmp_path)
    save_file(torch.load(tmp_path / "pytorch_model.bin", weights_only=True), tmp_path / "model.safetensors")
    check(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"weight_map": []}', "has no weight_map"),
        ("{", "not valid JSON"),
        ('{"weight_map": {"0.weight": "model-00009-of-00002.safetensors"}}', "is missing"),
        ('{"weight_map": {"other": "model-00001-of-00002.safetensors"}}', "lacks 'other'"),
    ],
)
def test_damaged_index(tmp_path: Path, content: str, message: str) -> None:
    write_two(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CorruptError, match=message):
        check(tmp_path)


def test_what_the_index_does_not_list(tmp_path: Path) -> None:
    write_two(tmp_path)
    save_file({"1.weight": STATE["1.weight"], "2.bias": torch.ones(3)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(MismatchError, match=r"unexpected in the checkpoint: model '2.bias' \(in .*not in the index"):
        check(tmp_path)


def cached(root: Path) -> Path:
    """The layout of the hub's cache."""
    snapshot = root / "models--org--net" / "snapshots" / "0123abcd"
    blobs = root / "models--org--net" / "blobs"
    write_two(blobs)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    return snapshot


def test_links_of_the_hub_cache(tmp_path: Path) -> None:
    """Every file of a snapshot is a link to a blob beside: these are followed."""
    check(cached(tmp_path))


@pytest.mark.parametrize("target", ["outside", "other repository", "folder", "chain"])
def test_no_other_links(tmp_path: Path, target: str) -> None:
    snapshot = cached(tmp_path)
    link = snapshot / "model-00001-of-00002.safetensors"
    secret = tmp_path / "secret"
    secret.write_bytes(link.read_bytes())
    (tmp_path / "models--x" / "blobs").mkdir(parents=True)
    other = tmp_path / "models--x" / "blobs" / "1"
    other.write_bytes(link.read_bytes())
    blob = link.resolve()
    link.unlink()
    if target == "chain":  # from a blob on to somewhere else
        blob.unlink()
        blob.symlink_to(secret)
    link.symlink_to({"outside": secret, "other repository": other, "folder": snapshot, "chain": blob}[target])
    with pytest.raises(CorruptError, match=r"is missing \(or a link\)"):
        check(snapshot)


def test_ours_is_never_taken_for_one(tmp_path: Path) -> None:
    """A consolidated checkpoint has the files of Hugging Face. With its manifest damaged it would load as such a
    folder, and nothing would be checked any more."""
    checkpoint.save(tmp_path / "own", model=STATE, consolidated=True).wait()
    manifest = tmp_path / "own" / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace("F32", "F16"))
    with pytest.raises(CorruptError, match=r"checkpoint\.json"):
        check(tmp_path / "own")
    manifest.unlink()  # deliberately: now it is one
    check(tmp_path / "own")
