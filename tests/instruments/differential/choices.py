"""What the generator chooses from, most with weights."""

LEAVES = {
    "Lin": 8,
    "Mlp": 8,
    "Norm": 2,
    "Scale": 3,
    "Embed": 2,
    "TiedPair": 2,
    "Drop": 2,
    "Batch": 2,
    "Unused": 2,
    "HalfFrozen": 2,
    "Frozen": 2,
    "HalfDouble": 1,
    "TwoDtypes": 1,
    "Scalar": 1,
}
FRAMEWORKS = {"GradByHand": 4, "Tiled": 4, "Hooked": 2, "Transforms": 3, "Awkward": 2, "Recursive": 2}
# No transform of torch.func goes through these: they have autograd functions, hooks, buffers or random numbers.
UNTRANSFORMED = {"Drop", "GradByHand", "Tiled", "Checkpointed", "Hooked", "Scale", "Batch", "Recursive"}
TORCH_REJECTS = ("Scalar", "TwoDtypes")
AROUND = {"Seq": 4, "Residual": 4, "Repeat": 2, "Checkpointed": 5, "Detached": 1, "Teacher": 1, "Views": 2}
POLICIES = (
    "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)",
    "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)",
    "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)",
    "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)",
    "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)",
)
# What torch lacks, of which a program has one of the first, and one of the second.
STAGES = (
    "",
    "",
    "zero=ZeroPolicy(stage=0)",
    "zero=ZeroPolicy(stage=1)",
    "zero=ZeroPolicy(stage=2)",
    "zero=ZeroPolicy(stage=3, secondary_shard_size=2)",
    "zero=ZeroPolicy(stage=3, shard_replicas=True)",
)
TRAVELS = (
    "",
    "offload_policy=CPUOffloadPolicy(pin_memory=False)",
    "mp_policy=Fsdp2Policy(all_gather_dtype=torch.int8)",
    "mp_policy=Fsdp2Policy(reduce_scatter_dtype=torch.bfloat16)",
    "mp_policy=Fsdp2Policy(reduce_dtype=torch.float16)",
)
OPTIMIZERS = (
    "torch.optim.SGD({}, lr=0.05)",
    "torch.optim.SGD({}, lr=0.05, momentum=0.9)",
    "torch.optim.AdamW({}, lr=0.01, eps=1e-2)",
    "local_optimizer(torch.optim.SGD, {}, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)",
    "local_optimizer(torch.optim.AdamW, {}, lr=0.01, eps=1e-2)",
    "local_optimizer(torch.optim.Adam, {}, lr=0.01, eps=1e-2, amsgrad=True)",
    "local_optimizer(torch.optim.RMSprop, {}, lr=0.01, eps=1e-2, centered=True)",
    "local_optimizer(torch.optim.Adagrad, {}, lr=0.01, eps=1e-2)",
    "local_optimizer(torch.optim.NAdam, {}, lr=0.01, eps=1e-2)",
)
RECURSIVE = {
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
}
SETTERS = {
    "set_requires_gradient_sync": 6,
    "set_requires_all_reduce": 4,
    "set_is_last_backward": 3,
    "set_reshard_after_forward": 3,
    "set_reshard_after_backward": 3,
    "set_unshard_in_backward": 1,
    "set_gradient_divide_factor": 3,
    "set_reduce_scatter_divide_factor": 1,
    "set_reduce_scatter_unused_params": 2,
    "set_reduce_scatter_max_input_buffers": 1,
    "set_all_reduce_hook": 1,
    "set_modules_to_forward_prefetch": 3,
    "set_modules_to_backward_prefetch": 3,
    "set_custom_all_gather": 1,
    "set_custom_reduce_scatter": 1,
}
BEYOND_TORCH = {
    "set_auto_forward_prefetch": 3,
    "set_keep_unsharded_storage": 3,
    "set_separate_reduce_scatter_group": 2,
}
ODD = {
    "unshard": 3,
    "reshard": 3,
    "wait": 2,
    "state_dict": 2,
    "freeze": 3,
    "train": 2,
    "fail": 3,
    "hand": 1,
    "forget": 1,
    "to": 1,
    "hook": 1,
    "deepcopy": 2,
}
