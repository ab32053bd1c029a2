"""A Hugging Face folder to fine-tune when there is none at hand: a tiny Llama with random weights, and a tokenizer.

Imported by `finetune.py`. Nothing is downloaded: the tokenizer knows the 256 bytes and no merges.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers  # its names are taken where they are used: each of them takes seconds to import
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def make_tiny_model(folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
