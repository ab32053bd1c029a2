"""The keys that a config may have: our names and those of other tools. Layer: parallel; pure."""

import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fsdp2.errors import ArgumentError, UnsupportedError

__all__ = ["ALIASES", "SECTIONS", "fields_from"]

# Sections that contain only such keys: ours, Accelerate's, torchtitan's.
SECTIONS = ("parallel", "parallelism_config", "parallelism")

# Other names of fields.
ALIASES = {
    # Accelerate's ParallelismConfig, also with the prefix that its YAML files put before each
    "dp_replicate_size": "replicate",
    "dp_shard_size": "shard",
    "tp_size": "tensor",
    "cp_size": "context",
    # Axolotl (the names of data parallelism are Accelerate's)
    "tensor_parallel_size": "tensor",
    "context_parallel_size": "context",
    "sequence_parallel_degree": "context",
    # torchtitan
    "data_parallel_replicate_degree": "replicate",
    "data_parallel_shard_degree": "shard",
    "tensor_parallel_degree": "tensor",
    "context_parallel_degree": "context",
    "pipeline_parallel_degree": "pipeline",
}
_PREFIX = "parallelism_config_"

# How Accelerate moves keys and values, and which code does it. Here it is always our own ring, with equal results.
_WITHOUT_EFFECT = ("cp_comm_strategy", "cp_backend")

# Keys of the same tools for features that we do not have: accepted if they do not request anything.
_NOT_HERE = {
    "sp_size": "sequence parallelism in the manner of Ulysses; context = n splits sequences too",
    "expert_parallel_size": "expert parallelism; give experts a mesh of their own with shard_placement_fn",
    "expert_parallel_degree": "expert parallelism; give experts a mesh of their own with shard_placement_fn",
}

# A file with this key is Axolotl's: the degrees stand among all other keys of a run. Keys of such a file that may be
# ignored, by their names or prefixes.
_OF_AXOLOTL = "base_model"
_PASSED_OVER = """
    base_model base_model_config base_model_ignore_patterns revision_of_base_model model_type tokenizer_type
    tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_save_jinja_files processor_type trust_remote_code
    is_llama_derived_model is_falcon_derived_model is_mistral_derived_model is_qwen_derived_model strict plugins
    datasets test_datasets shuffle_merged_datasets shuffle_before_merging_datasets skip_prepare_dataset streaming
    pretraining_dataset pretrain_multipack_attn val_set_size chat_template chat_template_jinja
    default_system_message train_on_inputs group_by_length sequence_len excess_length_strategy min_sample_len
    max_prompt_len pad_to_sequence_len special_tokens tokens added_tokens_overrides resize_token_embeddings_to_32x
    shrink_embeddings embeddings_skip_upcast adapter load_in_8bit load_in_4bit gptq bnb_config_kwargs qat
    quantization quantize_moe_experts relora rl trl kto dpo orpo reward_model process_reward_model simpo_gamma
    rl_beta output_dir gradient_accumulation_steps micro_batch_size batch_size num_epochs max_steps optimizer
    optim_args optim_target_modules lr_scheduler lr_scheduler_kwargs lr_groups learning_rate lr_quadratic_warmup
    cosine_min_lr_ratio cosine_constant_lr_ratio weight_decay max_grad_norm warmup_steps warmup_ratio
    neftune_noise_alpha noisy_embedding_alpha label_smoothing_factor early_stopping_patience bf16 fp16 float16
    bfloat16 float32 fp8 tf32 gradient_checkpointing gradient_checkpointing_kwargs activation_offloading
    layer_offloading flash_attention flex_attention sdp_attention xformers_attention s2_attention eager_attention
    attn_implementation flex_attn_compile_kwargs unfrozen_parameters freeze_mm_modules use_kernels logging_steps
    include_tokens_per_second include_tkps log_prompts save_steps saves_per_epoch save_strategy save_total_limit
    save_safetensors save_only_model save_first_step evals_per_epoch do_eval do_bench_eval do_causal_lm_eval
    load_best_model_at_end metric_for_best_model greater_is_better resume_from_checkpoint
    auto_resume_from_checkpoints local_rank world_size device device_map max_memory ddp ddp_timeout
    ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters heads_k_stride ring_attn_func seed debug
    use_ray ray_num_workers ray_run_name deepspeed fsdp fsdp_version fsdp_config fsdp_final_state_dict_type
    accelerator_config torch_compile torch_compile_backend torch_compile_mode profiler_steps profiler_steps_start
    gc_steps remove_unused_columns loraplus_lr_ratio loraplus_lr_embedding experimental_skip_move_to_device
    overrides_of_model_config overrides_of_model_kwargs rope_scaling dynamic_checkpoint experts_implementation
    mean_resizing_embeddings
"""
_PASSED_OVER_BEGIN = (
    "lora_", "peft_", "dora_", "qlora_", "relora_", "wandb_", "mlflow_", "comet_", "trackio_", "swanlab_", "hub_",
    "eval_", "bench_", "dataset_", "dataloader_", "sample_packing", "multipack_", "adam_", "muon_", "dion_", "jagged_",
    "galore_", "liger_", "cut_cross_entropy", "flash_attn_", "unsloth_", "llmcompressor", "gradio_", "use_wandb",
    "use_mlflow", "use_comet", "use_tensorboard", "kd_", "image_", "vllm", "chunked_cross_entropy", "spectrum_",
)  # fmt: skip
# The ignored keys that say how to shard, and the key that says it here.
_SAID_HERE_BY = {
    "fsdp": "reshard_after_forward",
    "fsdp_config": "blocks, reshard_after_forward, cpu_offload",
    "bf16": "mixed_precision",
    "gradient_checkpointing": "activation_checkpointing",
    "torch_compile": "compile",
}

_MOST_UNKNOWN = 5  # listed in a message: the whole file of another tool may have a hundred


def fields_from(values: Mapping[str, Any], names: Sequence[str], source: str) -> dict[str, Any]:
    """The values under the names of our fields, in the form that the dataclass takes.

    Args:
        values: as read from a file. None counts as absent.
        names: of the fields.
        source: the beginning of messages.

    A file of Axolotl's may have all its other keys. A warning counts them, and names those that would shard otherwise.

    Raises:
        ArgumentError: a key is unknown, or two keys give one field different values.
        UnsupportedError: a key requests something that we do not have.
    """
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    unknown: list[str] = []
    passed_over: list[str] = []
    for key, value in values.items():
        name = str(key).removeprefix(_PREFIX)
        name = ALIASES.get(name, name)
        if name in _NOT_HERE:
            if value not in (None, 1):
                raise UnsupportedError(f"{source}: {key} = {value!r} asks for {_NOT_HERE[name]}. Set it to 1.")
        elif name not in names and name not in _WITHOUT_EFFECT:
            foreign = _OF_AXOLOTL in values and (name in _PASSED_OVER.split() or name.startswith(_PASSED_OVER_BEGIN))
            (passed_over if foreign else unknown).append(str(key))
        elif value is not None and name in names:
            value = _as_field(name, value)
            if name in found and found[name] != value:
                raise ArgumentError(
                    f"{source}: {spelled[name]} = {found[name]!r} and {key} = {value!r} both give '{name}'; keep one"
                )
            found[name], spelled[name] = value, str(key)
    if unknown:
        raise ArgumentError(_unknown(unknown, names, source))
    if passed_over:
        warnings.warn(_not_read(values, passed_over, source), stacklevel=4)
    return found


def _as_field(name: str, value: Any) -> Any:
    """Convert values that files can only express in another way."""
    if name == "blocks":
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    if name == "reshard_after_forward" and value == "auto":
        return None
    if name == "shard" and value == -1:
        return "auto"
    if name == "mixed_precision" and value is False:  # an unquoted `no` in YAML
        return "no"
    return value


def _not_read(values: Mapping[str, Any], keys: Sequence[str], source: str) -> str:
    text = f"{source}: {len(keys)} keys of Axolotl's were not read, as they are not about parallelism."
    said = [f"{key} (here: {_SAID_HERE_BY[key]})" for key in keys if key in _SAID_HERE_BY and values[key]]
    return text + (f" Of these, some have their like among ours, which hold: {', '.join(said)}." if said else "")


def _unknown(keys: Sequence[str], names: Sequence[str], source: str) -> str:
    spellings = [*names, *ALIASES, *(_PREFIX + alias for alias in ALIASES)]
    words = []
    for key in keys[:_MOST_UNKNOWN]:
        near = get_close_matches(key, spellings, n=1)
        words.append(f"'{key}'" + (f" (did you mean '{near[0]}'?)" if near else ""))
    if len(keys) > _MOST_UNKNOWN:
        words.append(f"and {len(keys) - _MOST_UNKNOWN} more")
    return (
        f"{source}: unknown key{'s' * (len(keys) > 1)} {', '.join(words)}. The keys are {', '.join(names)}. "
        "Keys of other programs may stay in the file if ours are in a section 'parallel' of their own."
    )
