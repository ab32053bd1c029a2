"""verl's FSDP2 helpers, without ray: units, a state dict from rank 0, its own clipping, resharding off for an
evaluation, offloading between steps."""

import torch
import torch.distributed as dist

from tests.clients.clients import Run, run_both
from tests.clients.training import llama, tokens, train, without


def script() -> Run:
    without("ray", "tensordict", "tensordict.tensorclass")
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from verl.utils import fsdp_utils as verl

    if not torch.cuda.is_available():
        verl.get_device_id = lambda: "cpu"
    dist.init_process_group("gloo")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    model = llama()
    full = model.state_dict() if dist.get_rank() == 0 else {}
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    placing = verl.get_shard_placement_fn(dist.get_world_size())
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True, "shard_placement_fn": placing}
    verl.apply_fsdp2(model, options, {"forward_prefetch": True})
    verl.fsdp2_load_full_state_dict(model, full, mesh)

    def before(step: int, is_last: bool) -> None:
        model.set_is_last_backward(is_last)
        if is_last:
            return
        verl.set_reshard_after_forward(model, False)
        with torch.no_grad():
            model(tokens(step))
        forms.append([type(layer.mlp.up_proj.weight).__name__ for layer in model.model.layers])
        verl.set_reshard_after_forward(model, True)
        model.reshard()
        verl.offload_fsdp2_model_to_cpu(model, empty_cache=False)
        verl.load_fsdp2_model_to_gpu(model)

    forms: list[list[str]] = []
    run = train(model, before=before, clip=verl.fsdp2_clip_grad_norm_)
    run.values |= {"forms": forms, "state": verl.get_fsdp_full_state_dict(model)}
    return run


def test_trains_as_on_torch() -> None:
    both = run_both(script, 2)
    both.assert_equal()
    assert both.ours[0].values["forms"][-1] == ["Parameter"] * 3
