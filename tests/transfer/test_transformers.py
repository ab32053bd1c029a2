"""`fsdp2.weights(names="transformers")`: the tensors that `save_pretrained` writes, which engines load."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import fsdp2
from fsdp2 import ArgumentError, UnsupportedError
from fsdp2.transfer import Wanted
from tests.helpers.ranks import on_ranks

transformers = pytest.importorskip("transformers", minversion="5.0")
from tests.helpers.transformers_models import BUILDERS, sharded  # noqa: E402


def tied_llama() -> nn.Module:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12, "vocab_size": 32}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


KINDS = {**BUILDERS, "tied llama": tied_llama}


def written_and_sharded(rank: int, folder: Path, kind: str) -> tuple[dict[str, Tensor], nn.Module]:
    """What transformers writes of a model, and the same model sharded."""
    torch.manual_seed(0)
    model = KINDS[kind]()
    if rank == 0:
        model.save_pretrained(folder)
    dist.barrier()
    torch.manual_seed(0)
    return load_file(folder / "model.safetensors"), sharded(KINDS[kind], "cpu")


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_as_save_pretrained_writes_them(rank: int, world_size: int, kind: str, tmp_path: Path) -> None:
    """Names, shapes and values; in buckets of any size, as slices for a consumer, and as changes."""
    expected, model = written_and_sharded(rank, tmp_path, kind)
    plan = fsdp2.weights(model, "transformers")
    assert {name: shape for name, _, shape in plan.metadata()} == {k: tuple(v.shape) for k, v in expected.items()}
    for bucket_bytes in (1, 1 << 20):
        count = 0
        for bucket in plan.full(bucket_bytes):
            for name, tensor in bucket:
                assert torch.equal(tensor, expected[name]), name
                count += 1
        assert count == len(expected)
    wanted = [
        Wanted(name, 0, tuple(n // 3 for n in each.shape), tuple(n - n // 3 for n in each.shape))
        for name, each in expected.items()
    ]
    sent: list[Any] = [None] * world_size
    dist.all_gather_object(sent, [(part.wanted, part.start, part.tensor) for part in plan.send_boxes(wanted)])
    filled = [torch.full(each.shape, torch.nan) for each in wanted]
    for index, start, tensor in (part for parts in sent for part in parts):
        place = tuple(slice(s, s + n) for s, n in zip(start, tensor.shape, strict=True))
        assert filled[index][place].isnan().all()
        filled[index][place] = tensor
    for each, found in zip(wanted, filled, strict=True):
        box = tuple(slice(s, s + n) for s, n in zip(each.start, each.shape, strict=True))
        assert torch.equal(found, expected[each.name][box]), each.name
    known = plan.snapshot()
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.to_local().view(-1)[number % 3 :: 5] += 1  # type: ignore[operator]
    for name, indices, values, shape in plan.changes(known):
        assert tuple(expected[name].shape) == shape
        expected[name].view(-1)[indices.long()] = values
    assert all(torch.equal(tensor, expected[name]) for name, tensor in plan)


def test_every_operation(tmp_path: Path) -> None:
    """Transposed, and joined of several; what is computed otherwise is named."""
    from transformers import conversion_mapping as published
    from transformers.core_model_loading import Chunk, Interleave, Transpose, WeightConverter

    heads = ["q_proj", "k_proj", "v_proj"]
    mapping = [
        WeightConverter("up.weight", "mlp.fc1.weight", [Transpose(0, 1)]),
        WeightConverter("qkv.weight", [f"{head}.weight" for head in heads], [Chunk(0)]),
    ]
    torch.manual_seed(0)
    model = BUILDERS["vit"]()
    with patch.object(published, "_checkpoint_conversion_mapping_cache", {"ViTModel": mapping, "legacy": []}):
        model.save_pretrained(tmp_path)
        plan = fsdp2.weights(model, "transformers")
    expected = load_file(tmp_path / "model.safetensors")
    found = {name: tensor.clone() for name, tensor in plan}
    assert any("qkv" in name for name in found) and found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    joined = next(name for name in found if "qkv" in name)
    with pytest.raises(ArgumentError, match=f"'{joined}' is made of .*use send_boxes"):
        plan.local(joined)
    mapping[:] = [WeightConverter("mlp.fc1.weight", "mlp.fc1.weight", [Interleave(0)])]
    with (
        patch.object(published, "_checkpoint_conversion_mapping_cache", {"ViTModel": mapping, "legacy": []}),
        pytest.raises(UnsupportedError, match=r"writes '.*fc1.weight' in a way that is more than cutting"),
    ):
        fsdp2.weights(model, "transformers")
    with pytest.raises(ArgumentError, match="needs a model of transformers, got Linear"):
        fsdp2.weights(nn.Linear(2, 2), "transformers")
    with pytest.raises(ArgumentError, match="or 'transformers', got 'vllm'"):
        fsdp2.weights(nn.Linear(2, 2), "vllm")  # type: ignore[arg-type]
