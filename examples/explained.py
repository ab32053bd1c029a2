"""A complete FSDP in one file, to be read from top to bottom. `docs/explained.md` walks through it.

The parameters are divided into *units*: here each block is one, and the rest of the model is another. Each rank keeps
some rows of every parameter, and the optimizer state of these rows::

    weight (4, 2) on two ranks        rank 0: rows 0, 1        rank 1: rows 2, 3

A unit is whole only while it computes. The next one is gathered at the same time::

    forward     gather 0 | gather 1, compute 0 | gather 2, compute 1 | compute 2
    backward    gather 2 | gather 1, compute 2 | gather 0, compute 1, reduce 2 | compute 0, reduce 1 | reduce 0

Run it:  torchrun --nproc-per-node 2 examples/explained.py
"""

import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

# Before torch 2.13 these had other names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Param:
    """One parameter in two forms: `sharded`, which the optimizer sees, and `whole`, which the module computes with."""

    def __init__(self, module: nn.Module, name: str, ranks: int) -> None:
        self.module, self.name = module, name
        self.original = getattr(module, name).detach()
        self.shape, self.stride = self.original.shape, self.original.stride()
        self.rows = -(-self.shape[0] // ranks)  # a full shard; the last ranks may have fewer rows, or none
        self.numel = self.rows * self.shape[1:].numel()

    def split(self, values: Tensor, ranks: int) -> Tensor:
        """Rows, padded with zeros to a multiple of the ranks: (ranks, numel of a shard)."""
        padded = values.new_zeros(ranks * self.rows, *self.shape[1:])
        padded[: self.shape[0]] = values
        return padded.view(ranks, self.numel)

    def dtensor(self, shard: Tensor, mesh: DeviceMesh) -> DTensor:
        """The rows of this rank, as a part of the whole. `shard` is flat and padded."""
        num_rows = min(max(self.shape[0] - mesh.get_local_rank() * self.rows, 0), self.rows)
        local = shard.view(self.rows, *self.shape[1:])[:num_rows]
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=self.shape, stride=self.stride)


class Unit:
    """Parameters that are gathered together, and whose gradients are reduced together.

    Per rank, for a weight (4, 2) and a bias (4,) on two ranks, with the numbers of elements::

        flat       | 4 | 2 |                      this rank's rows, end to end; `sharded` are views of it
        gathered   | 4 | 2 | 4 | 2 |              what the all-gather fills; lives for a moment
        storage    | weight: 8 | bias: 4 |        `whole` are views of it; without memory between uses
        packed     | 4 | 2 | 4 | 2 |              the gradients, as the reduce-scatter takes them
        reduced    | 4 | 2 |                      the gradients of this rank's rows; `sharded.grad` are views of it
    """

    def __init__(self, module: nn.Module, inner: set[nn.Module], root: "Root") -> None:
        self.root, self.mesh = root, root.mesh
        ranks, rank = self.mesh.size(), self.mesh.get_local_rank()
        own = [each for each in module.modules() if each not in inner]
        self.params = [Param(each, name, ranks) for each in own for name, _ in each.named_parameters(recurse=False)]
        self.sizes = [param.numel for param in self.params]

        # The shards. A DTensor knows the whole shape, so optimizers and checkpoints work as usual.
        self.flat = torch.cat([p.split(p.original, ranks)[rank] for p in self.params])
        for param, shard in zip(self.params, self.flat.split(self.sizes), strict=True):
            param.sharded = nn.Parameter(param.dtensor(shard, self.mesh))

        # The whole parameters, in one storage that is resized to nothing between uses. What autograd saves in forward
        # shares this storage, so it is valid again when backward has gathered the unit again.
        self.storage = self.flat.new_empty(sum(param.shape.numel() for param in self.params)).untyped_storage()
        self.nbytes, offset = self.storage.nbytes(), 0
        for param in self.params:
            # Two tensors on the same memory: filling one must not look to autograd like a change of the other.
            both = [self.flat.new_empty(0).set_(self.storage, offset, param.shape, param.stride) for _ in range(2)]
            param.memory, param.whole = both[0], nn.Parameter(both[1])
            param.whole.register_post_accumulate_grad_hook(self.gradient_arrived)
            offset += param.shape.numel()
            del param.original
        self.gathering: tuple[Tensor, Any] | None = None
        self.is_whole = True
        self.reshard()
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)

    def unshard(self) -> None:
        """Start the all-gather. On CUDA all of its memory belongs to the gather stream."""
        if self.is_whole or self.gathering is not None:
            return
        with self.root.on(self.root.gather_stream):
            gathered = self.flat.new_empty(self.mesh.size() * self.flat.numel())
            work = all_gather(gathered, self.flat, group=self.mesh.get_group(), async_op=True)
        self.gathering = gathered, work

    def wait(self) -> None:
        """Let the modules hold the whole parameters."""
        self.unshard()
        if self.gathering is not None:
            gathered, work = self.gathering
            with self.root.on(self.root.gather_stream), torch.no_grad():
                work.wait()
                self.storage.resize_(self.nbytes)
                by_rank = gathered.view(self.mesh.size(), -1)
                for param, columns in zip(self.params, by_rank.split(self.sizes, dim=1), strict=True):
                    param.memory.copy_(columns.reshape(-1, *param.shape[1:])[: param.shape[0]])
            self.root.compute_waits_for(self.root.gather_stream)
            self.gathering, self.is_whole = None, True
            for param in self.params:
                setattr(param.module, param.name, param.whole)

    def reshard(self) -> None:
        """Let the modules hold the sharded parameters, and free the whole ones."""
        if self.is_whole:
            self.is_whole = False
            with self.root.on(self.root.gather_stream, after_compute=True):  # which may still read it
                self.storage.resize_(0)
            for param in self.params:
                setattr(param.module, param.name, param.sharded)

    def before_forward(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gather this unit, and start to gather the one that ran next in the last step."""
        root = self.root
        if self is root.units[-1]:  # the model itself begins: the optimizer may have changed the shards
            root.last_order, root.order = root.order, []
            root.on(root.gather_stream, after_compute=True)
        root.order.append(self)
        self.wait()
        following = root.last_order[len(root.order) :]
        if following and root.last_order[: len(root.order)] == root.order:
            following[0].unshard()
        return tuple(_EndOfBackward.apply(self, each) if each.requires_grad else each for each in args)

    def after_forward(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Free this unit, unless it is the model itself, whose backward comes next."""
        if output.requires_grad:
            place = self.root.order.index(self)
            output.register_hook(lambda grad: self.before_backward(place))
        if self is not self.root.units[-1] or not output.requires_grad:
            self.reshard()

    def before_backward(self, place: int) -> None:
        """The output has its gradient. Gather this unit again, and start to gather the one before it."""
        torch.autograd.Variable._execution_engine.queue_callback(self.root.end_backward)  # once is enough
        self.wait()
        if place > 0:
            self.root.order[place - 1].unshard()

    def gradient_arrived(self, whole: Tensor) -> None:
        """Autograd has added to a gradient. The last gradient of the unit starts the reduction."""
        if all(param.whole.grad is not None for param in self.params):
            self.reduce()

    def reduce(self) -> None:
        """Sum the gradients over the ranks; each rank gets those of its own rows."""
        root, ranks, grads = self.root, self.mesh.size(), [param.whole.grad for param in self.params]
        root.finish_reductions(at_most=1)  # then at most two are in memory
        with root.on(root.reduce_stream, after_compute=True):
            packed = torch.cat([p.split(g, ranks) for p, g in zip(self.params, grads, strict=True)], dim=1)
            reduced = self.flat.new_empty(self.flat.numel())
            work = reduce_scatter(reduced, packed.view(-1), group=self.mesh.get_group(), async_op=True)
        root.reducing.append((self, reduced, work, (grads, packed)))  # kept until compute has waited
        for param in self.params:
            param.whole.grad = None


class _EndOfBackward(torch.autograd.Function):
    """On a unit's inputs: their gradients are the last thing that its backward computes."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, tensor: Tensor) -> Tensor:
        ctx.unit = unit
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.unit.reshard()
        return None, *grads


class Root:
    """Shards `model` in place: each of `blocks` is a unit, and the rest is another. Holds what the units share."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh) -> None:
        self.mesh = mesh
        streams = (torch.cuda.Stream() if mesh.device_type == "cuda" else None for _ in range(2))
        self.gather_stream, self.reduce_stream = streams
        inner = {each for block in blocks for each in block.modules()}
        self.units = [*(Unit(block, set(), self) for block in blocks), Unit(model, inner, self)]
        self.order, self.last_order = list[Unit](), list[Unit]()
        self.reducing = list[tuple[Unit, Tensor, Any, Any]]()

    def on(self, stream: torch.cuda.Stream | None, after_compute: bool = False) -> Any:
        """Run a block on a stream, after all queued compute if so asked. On the CPU there are no streams."""
        if stream is not None and after_compute:
            stream.wait_stream(torch.cuda.current_stream())
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def compute_waits_for(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)

    def finish_reductions(self, at_most: int) -> None:
        """Set the gradients of the sharded parameters, or add to them: the mean over the ranks."""
        while len(self.reducing) > at_most:
            unit, reduced, work, _ = self.reducing.pop(0)
            with self.on(self.reduce_stream):
                work.wait()
                reduced /= self.mesh.size()
            self.compute_waits_for(self.reduce_stream)
            for param, piece in zip(unit.params, reduced.split(unit.sizes), strict=True):
                grad, before = param.dtensor(piece, self.mesh), param.sharded.grad
                param.sharded.grad = grad if before is None else before + grad

    def end_backward(self) -> None:
        """Autograd calls this when the whole backward is over."""
        self.finish_reductions(at_most=0)
        for unit in self.units:
            unit.reshard()


def main() -> None:
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)  # the same values on every rank; each then keeps its rows
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 1)).to(mesh.device_type)
    Root(model, blocks, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # other data on every rank
    x = torch.randn(32, 16, device=mesh.device_type)
    for step in range(10):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
