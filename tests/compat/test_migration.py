"""Every row of the tables of docs/migration.md does what it says; the cases are in `migration_from_*`."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import fields

import pytest
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_wrap
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from tests.helpers import (  # noqa: F401  (they register cases)
    migration_from_ddp,
    migration_from_deepspeed,
    migration_from_fsdp1,
    migration_from_fsdp1_states,
    migration_from_torch,
)
from tests.helpers.migration_cases import (
    CASES,
    ROWS,
)
from tests.helpers.ranks import run_on_ranks

# --- the tests --------------------------------------------------------------------------------------------------------


def run_row(rank: int, world_size: int, section: str, left: str) -> None:
    CASES[section, left].body(rank, world_size)


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    """Migration: the tables and the cases above name the same rows, each once."""
    rows = Counter((row.section, row.left) for row in ROWS)
    assert not [key for key, times in rows.items() if times > 1], "twice in a section"
    assert not set(rows) - set(CASES), "rows without a case"
    assert not set(CASES) - set(rows), "cases without a row"


def test_what_is_missing_says_why() -> None:
    """Migration: rows that begin with "none" or "not yet" are the ones registered so, and give a reason."""
    for row in ROWS:
        says = re.match(r"(none|not yet)\b", row.ours)
        assert bool(says) == CASES[row.section, row.left].missing, f"{row.left}: {row.ours}"
        if says:
            reason = r"none, because .{10}" if says[1] == "none" else r"not yet\b.*: .{10}"
            assert re.match(reason, row.ours), f"{row.left}: say why, got {row.ours!r}"
        else:
            assert row.ours, f"{row.left}: empty"


@pytest.mark.sampled
@pytest.mark.parametrize("key", CASES, ids=lambda key: f"{key[0]}: {key[1]}")
def test_row(key: tuple[str, str]) -> None:
    """Migration: what the row says happens."""
    found = CASES[key]
    if found.ranks == 0:
        found.body(0, 1)
    else:
        run_on_ranks(run_row, found.ranks, section=key[0], left=key[1])


def test_all_of_fsdp1_is_in_the_tables() -> None:
    """Migration: every constructor argument, strategy, state dict type, policy, dtype option and public method."""
    lefts = " ".join(row.left for row in ROWS if row.section == "FSDP1")
    named = set(re.findall(r"\w+", lefts))
    wanted = set(inspect.signature(FullyShardedDataParallel).parameters)
    wanted |= {member.name for enum in (ShardingStrategy, torch_fsdp.StateDictType) for member in enum}
    wanted |= {field.name for field in fields(MixedPrecision)} | set(torch_wrap.__all__)
    public = set(vars(FullyShardedDataParallel)) - {"forward", "named_buffers", "named_parameters"}
    wanted |= {name for name in public if not name.startswith("_")}
    wanted |= set(inspect.signature(FullyShardedDataParallel.summon_full_params).parameters)
    assert not wanted - named


DEEPSPEED_AND_ACCELERATE = """
stage offload_optimizer offload_param device cpu pin_memory overlap_comm reduce_bucket_size allgather_bucket_size
stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters sub_group_size
contiguous_gradients round_robin_gradients zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients
mics_shard_size stage3_gather_16bit_weights_on_model_save bf16 fp16 gradient_accumulation_steps gradient_clipping
gradient_predivide_factor communication_data_type Init GatheredParameters reduce_scatter stage3_max_reuse_distance
fsdp_version sharding_strategy reshard_after_forward backward_prefetch mixed_precision_policy auto_wrap_policy
cpu_offload ignored_modules state_dict_type state_dict_config optim_state_dict_config limit_all_gathers use_orig_params
param_init_fn sync_module_states forward_prefetch activation_checkpointing cpu_ram_efficient_loading
transformer_cls_names_to_wrap min_num_params dp_replicate_size dp_shard_size tp_size cp_size
"""


def test_the_keys_that_people_have_are_in_the_tables() -> None:
    """Migration: the settings of DeepSpeed's and Accelerate's documentation, of which neither is installed."""
    lefts = " ".join(row.left for row in ROWS if row.section in ("DeepSpeed", "Accelerate"))
    assert not set(DEEPSPEED_AND_ACCELERATE.split()) - set(re.findall(r"\w+", lefts))
