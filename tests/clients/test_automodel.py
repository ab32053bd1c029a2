"""NeMo Automodel's parallelizer on a mesh of its own, with its gradient accumulation, its clipping, and the head that
its models call in the dtype that the head's FSDP2 unit computes in; without its recipes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from tests.clients.clients import Run, run_both
from tests.clients.training import llama, train


class Model(LlamaForCausalLM):
    """Ends as Automodel's own models do."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
        from nemo_automodel.components.models.common.utils import compute_lm_head_logits

        logits = compute_lm_head_logits(self.lm_head, self.model(input_ids).last_hidden_state.float()).logits
        return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size))


def script(replicate: int, activation_checkpointing: bool) -> Run:
    from nemo_automodel.components.distributed.config import FSDP2Config
    from nemo_automodel.components.distributed.mesh import MeshContext, ParallelismSizes
    from nemo_automodel.components.distributed.model_parallelizer import parallelize_model
    from nemo_automodel.components.distributed.utils import get_sync_ctx
    from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

    dist.init_process_group("gloo")
    config = FSDP2Config(enable_fsdp2_prefetch=True, activation_checkpointing=activation_checkpointing)
    mesh = MeshContext.build(config, ParallelismSizes(dp_replicate_size=replicate))
    model = parallelize_model(llama(Model), mesh)

    def clip(params: Any, max_norm: float) -> Any:
        return scale_grads_and_clip_grad_norm(max_norm, [model], device_mesh=mesh.device_mesh)

    return train(model, before=lambda step, is_last: get_sync_ctx(model, is_last, True), clip=clip)


@pytest.mark.parametrize(("ranks", "replicate"), [(2, 1), (4, 2)])
def test_trains_as_on_torch(ranks: int, replicate: int) -> None:
    """With the parallelizer of NeMo Automodel."""
    run_both(script, ranks, replicate=replicate, activation_checkpointing=replicate == 1).assert_equal()
