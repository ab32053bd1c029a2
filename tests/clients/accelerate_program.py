"""What `accelerate launch` starts in test_accelerate.py: a training program of its own, which knows nothing of fsdp2.

    accelerate launch ... [-m fsdp2.compat] tests/clients/accelerate_program.py OUT

Its plugin comes from the command line of `accelerate launch` alone. Each rank writes OUT.rank: losses, norms of
gradients, parameters, and for each module where its class and the classes above it come from.
"""

import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

DIM = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Sequential):
    _no_split_modules = ("Block",)  # asked for by Accelerate 1.6, also where the command line names the class


def main(out: str) -> None:
    if not torch.cuda.is_available():  # the one field without which Accelerate ignores FSDP on a CPU
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    set_seed(3)
    accelerator = Accelerator()
    model: Any = Model(*[Block() for _ in range(3)], nn.Linear(DIM, 1))
    optim: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data: Any = DataLoader(TensorDataset(torch.randn(16, DIM), torch.randn(16, 1)), batch_size=2)
    model, optim, data = accelerator.prepare(model, optim, data)
    losses, norms = [], []
    for x, y in data:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    parameters = {name: param.full_tensor() for name, param in model.state_dict().items()}
    homes = {name: [base.__module__ for base in type(module).__mro__] for name, module in model.named_modules()}
    result = {"losses": losses, "norms": norms, "parameters": parameters, "homes": homes}
    torch.save(result, f"{out}.{accelerator.process_index}")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
