"""transformers' models, initialised sharded by their own `init_weights()`, have the values of one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import fully_shard
from fsdp2.init import materialize
from tests.helpers.parity_models import local, shard_like
from tests.helpers.ranks import on_ranks

BATCH, LENGTH, VOCAB = 4, 6, 11
HUGGING_FACE = ["llama", "gpt2", "t5"]


def hugging_face(name: str) -> Callable[[], nn.Module]:
    """A builder of a small language model from transformers; skips the test without that package."""
    tf = pytest.importorskip("transformers")
    tf.logging.set_verbosity_error()
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    configs = {
        "llama": lambda: tf.LlamaConfig(vocab_size=11, num_hidden_layers=2, **sizes, **ids),
        "gpt2": lambda: tf.GPT2Config(
            vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=1
        ),
        "t5": lambda: tf.T5Config(vocab_size=11, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2),
    }
    auto = tf.AutoModelForSeq2SeqLM if name == "t5" else tf.AutoModelForCausalLM
    return partial(auto.from_config, configs[name]())


def shard_blocks(model: nn.Module, kind: str) -> nn.Module:
    """Units: the transformer's blocks, then the root."""
    blocks = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block", "t5": "T5Block"}
    found = [module for module in model.modules() if type(module).__name__ == blocks[kind]]
    assert len(found) == (4 if kind == "t5" else 2)
    for block in found:
        fully_shard(block)
    return fully_shard(model)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def assert_same(model: nn.Module, eager: nn.Module) -> None:
    """What this rank holds is that part of the eager model, and what is tied there is tied here."""
    mine, wanted = tensors_of(model), tensors_of(eager)
    assert list(mine) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(local(mine[name]).detach(), shard_like(tensor.detach(), mine[name])), name
        assert [k for k in wanted if wanted[k] is tensor] == [k for k in mine if mine[k] is mine[name]], name


def train(model: nn.Module, kind: str, num_steps: int, part: slice) -> list[Tensor]:
    """The losses over `part` of the same batches of sequences. Dropout is off, for ranks draw other masks."""
    model.eval()
    if kind == "t5":
        model.config.decoder_start_token_id = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(num_steps):
        ids, labels = torch.randint(3, VOCAB, (2, BATCH, LENGTH), generator=generator)
        loss = model(input_ids=ids[part], labels=labels[part], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def initialised_by_itself(model: nn.Module, seed: int) -> nn.Module:
    """What their own `init_weights` makes in one process: it passes over what flags say is initialised."""
    for each in (*model.modules(), *model.parameters()):
        each._is_hf_initialized = False  # type: ignore[union-attr]
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights()
    return model


@on_ranks(2)
@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_from_the_meta_device_it_trains_as_in_one_process(rank: int, world_size: int, kind: str) -> None:
    """What a script does to train from scratch. (It took GPT-2 and T5 for the user's own: values were lost.)"""
    build: Any = hugging_face(kind)
    torch.manual_seed(rank)  # has no say
    with torch.device("meta"):
        model = build()
    shard_blocks(model, kind)
    materialize(model, seed=7)
    one_process = initialised_by_itself(build(), 7)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert_same(model, one_process)

    rows = BATCH // world_size
    losses = torch.stack(train(model, kind, 3, slice(rank * rows, (rank + 1) * rows)))
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    expected = torch.stack(train(one_process, kind, 3, slice(None)))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    assert len(expected.unique()) == 3
