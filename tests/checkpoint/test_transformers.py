"""Folders that transformers wrote with `save_pretrained`, whose names and layouts are not those of the model's class:
`load` follows the mapping that transformers publishes."""

import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import checkpoint
from fsdp2.checkpoint import stacked
from fsdp2.errors import UnsupportedError
from tests.helpers.checkpoint_cases import assert_bits, spoil
from tests.helpers.parity_models import shard_like
from tests.helpers.ranks import on_ranks

transformers = pytest.importorskip("transformers", minversion="5.0")
from tests.helpers.transformers_models import BUILDERS, mixtral, sharded, vit  # noqa: E402


def written(rank: int, folder: Path, build: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    """A folder of transformers' own, and what its `from_pretrained` makes of it."""
    if rank == 0:
        torch.manual_seed(0)
        model = build()
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                nn.init.normal_(tensor)
        model.save_pretrained(folder, max_shard_size="20KB")
    if dist.is_initialized():
        dist.barrier()
    with torch.device("meta"):
        kind = type(build())
    return dict(kind.from_pretrained(folder).state_dict())


@pytest.mark.exhaustive
@on_ranks(2)
@pytest.mark.parametrize("kind", BUILDERS)
def test_a_folder_of_its_own_class(rank: int, world_size: int, kind: str, tmp_path: Path) -> None:
    """Mixtral's experts are 3 files' tensors each and one parameter here; ViT's layers are called otherwise. All of it
    was "missing in the checkpoint"."""
    expected = written(rank, tmp_path, BUILDERS[kind])
    for load, device in ((checkpoint.load, "cpu"), (checkpoint.load, "meta"), (checkpoint.load_from_rank, "cpu")):
        model = sharded(BUILDERS[kind], device)
        for param in model.parameters():
            spoil(param) if device == "cpu" else None
        with warnings.catch_warnings():  # the frequencies of rotary embeddings are in no file
            warnings.filterwarnings("ignore", message="still on the meta device", category=UserWarning)
            loaded = load(tmp_path, model=model)
        assert loaded.missing == loaded.unexpected == []
        state = model.state_dict()
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            assert_bits(name, tensor, shard_like(expected[name], tensor))


@on_ranks(2)
def test_each_operation(rank: int, world_size: int, tmp_path: Path) -> None:
    """Those that none of these classes needs, with a mapping of our own, which transformers follows too."""
    from transformers import conversion_mapping as published
    from transformers.core_model_loading import Chunk, Split, Transpose, WeightConverter

    heads = ["q_proj", "k_proj", "v_proj"]
    mapping = [
        WeightConverter("up.weight", "mlp.fc1.weight", [Transpose(0, 1)]),
        WeightConverter("mlp.fc2.weight", "mlp.fc2.weight", [Transpose(-1, -2, check_dims=True)]),
        WeightConverter("qkv.weight", [f"{head}.weight" for head in heads], [Split(0)]),
        WeightConverter("qkv.bias", [f"{head}.bias" for head in heads], [Chunk(0)]),
    ]
    with patch.object(published, "_checkpoint_conversion_mapping_cache", {"ViTModel": mapping, "legacy": []}):
        expected = written(rank, tmp_path, vit)
        model = sharded(vit, "cpu")
        for param in model.parameters():
            spoil(param)
        checkpoint.load(tmp_path, model=model)
    for name, tensor in model.state_dict().items():
        assert_bits(name, tensor, shard_like(expected[name], tensor))


def test_of_one_process(tmp_path: Path) -> None:
    """Not sharded, and the base model alone of a folder of the whole one, as `from_pretrained` has it."""
    expected = written(0, tmp_path, vit)
    model = vit().vit
    loaded = checkpoint.load(tmp_path, model=model, strict=False)
    assert loaded.missing == [] and loaded.unexpected == ["model 'classifier.bias'", "model 'classifier.weight'"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[f"vit.{name}"])


def test_names_of_the_model_itself(tmp_path: Path) -> None:
    """`save(consolidated=True)` writes the model's own names, and they are taken as they are; with the manifest and
    without."""
    model = mixtral()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoint.save(tmp_path / "own", model=model, consolidated=True).wait()
    for _ in range(2):
        for param in model.parameters():
            spoil(param)
        checkpoint.load(tmp_path / "own", model=model)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
        (tmp_path / "own" / "checkpoint.json").unlink(missing_ok=True)


def large() -> nn.Module:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256, "num_local_experts": 8}
    config = transformers.MixtralConfig(vocab_size=8, num_hidden_layers=1, num_key_value_heads=1, **sizes)
    return transformers.MixtralForCausalLM(config)


def test_an_operation_that_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, with what to do about it; and what the user says of that name comes first."""
    from fsdp2.checkpoint.formats import transformers_weights

    expected = written(0, tmp_path, large)
    model = large()
    monkeypatch.delitem(transformers_weights.KNOWN, "MergeModulelist")
    with pytest.raises(
        UnsupportedError, match=r"'model.layers.0.mlp.experts.\w+' from .* by MergeModulelist.*sources="
    ):
        checkpoint.load(tmp_path, model=model)
    part = "model.layers.0.block_sparse_moe.experts"
    down = stacked(*(f"{part}.{number}.w2.weight" for number in range(8)))
    names = (f"{part}.{number}" for number in range(8))
    up = stacked(*(checkpoint.concatenated(f"{name}.w1.weight", f"{name}.w3.weight") for name in names))
    own = {"model.layers.0.mlp.experts.down_proj": down, "model.layers.0.mlp.experts.gate_up_proj": up}
    checkpoint.load(tmp_path, model=model, sources=own)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
