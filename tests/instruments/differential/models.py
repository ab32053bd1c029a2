"""The modules that programs are made of. Every block maps (rows, DIM) to (rows, DIM), so any fits anywhere."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers.collectives import Gathers, Scatters  # noqa: F401 - programs use them

DIM = 6
ROWS = 4


class Boom(Exception):
    """What a block raises when it is told to fail."""


class FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Boom("backward")


class Block(nn.Module):
    """A block that fails once when `fails` is set to "forward" or "backward"."""

    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        fails, self.fails = self.fails, ""
        if fails == "forward":
            raise Boom("forward")
        x = self.compute(x)
        return FailInBackward.apply(x) if fails == "backward" else x

    def compute(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Net(nn.Module):
    """Parameters of its own around blocks, of which a call runs those of its route."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(DIM, DIM, bias=False)
        for block in self.modules():
            if isinstance(block, Recursive):
                block.net = weakref.ref(self)

    def forward(self, x: Tensor, route: tuple[int, ...]) -> Tensor:
        x = self.embed(x)
        for index in route:
            x = self.blocks[index](x)
        return self.head(x)


# --- leaves -----------------------------------------------------------------------------------------------------------


class Lin(Block):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(DIM, DIM)

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


class Mlp(Block):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, size)
        self.down = nn.Linear(size, DIM, bias=False)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Norm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)

    def compute(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Scale(Block):
    """Parameters of one and of three dims, and a buffer that counts calls."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(DIM) + 0.5)
        self.cube = nn.Parameter(torch.randn(size, 2, DIM))
        self.register_buffer("calls", torch.zeros(()))

    def compute(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight + self.cube.mean((0, 1))


class Scalar(Block):
    """A parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def compute(self, x: Tensor) -> Tensor:
        return x * self.scale


class Embed(Block):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, DIM)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.table((x.detach() > 0).sum(-1) % self.table.num_embeddings)


class TiedPair(Block):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.second.weight = self.first.weight

    def compute(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Drop(Lin):
    def compute(self, x: Tensor) -> Tensor:
        return F.dropout(self.lin(x), 0.25, self.training)


class Batch(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def compute(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Unused(Block):
    """A parameter that no forward reads, between two that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.rand(DIM))
        self.unused = nn.Parameter(torch.rand(5, DIM))
        self.last = nn.Parameter(torch.rand(DIM))

    def compute(self, x: Tensor) -> Tensor:
        return x * self.first + self.last


class HalfFrozen(Block):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, size).requires_grad_(False)
        self.down = nn.Linear(size, DIM)

    def compute(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Frozen(Lin):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def compute(self, x: Tensor) -> Tensor:
        return self.lin(x)


class HalfDouble(Lin):
    """A frozen float64 weight beside trainable float32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(DIM, dtype=torch.float64), requires_grad=False)

    def compute(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.table.to(x.dtype)


class TwoDtypes(Lin):
    """Trainable weights of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(DIM, dtype=torch.float64))

    def compute(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.gain.to(x.dtype)


# --- what frameworks do with weights ----------------------------------------------------------------------------------


class WritesGrad(torch.autograd.Function):
    """Adds the weight's gradient to `weight.grad` by itself, as fused weight-gradient accumulation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, hidden: list[Tensor]) -> Tensor:
        weight = hidden[0] if hidden else weight
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, saved = ctx.saved_tensors
        weight = ctx.weight
        with torch.no_grad():
            grad = grad.to(saved.dtype)  # under autocast another
            new = grad.flatten(0, -2).t() @ x.to(saved.dtype).flatten(0, -2)
            if weight.requires_grad:
                weight.grad = new if weight.grad is None else weight.grad + new
        return (grad @ saved).to(x.dtype), None, None


class GradByHand(Block):
    """A hidden weight is none of the function's inputs: autograd knows nothing of it."""

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 3)
        self.hidden = hidden

    def compute(self, x: Tensor) -> Tensor:
        return WritesGrad.apply(x, None, [self.weight]) if self.hidden else WritesGrad.apply(x, self.weight, [])


class InTiles(torch.autograd.Function):
    """A module run tile by tile over the rows, again in backward, each tile with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, tiles: int, *params: Tensor) -> Tensor:
        ctx.module, ctx.tiles = module, tiles
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([module(part) for part in x.chunk(tiles)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        grads = []
        for part, of_part in zip(x.detach().chunk(ctx.tiles), grad.chunk(ctx.tiles), strict=True):
            part = part.clone().requires_grad_()
            with torch.enable_grad():
                out = ctx.module(part)
            torch.autograd.backward(out, of_part)
            grads.append(part.grad)
        return torch.cat(grads), None, None, *(None for _ in ctx.module.parameters())


class Tiled(Block):
    """Long-context training's tiled MLP; the number of tiles may differ between ranks."""

    def __init__(self, tiles: int, by_rank: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(DIM, 5), nn.Tanh(), nn.Linear(5, DIM))
        self.tiles, self.by_rank = tiles, by_rank

    def compute(self, x: Tensor) -> Tensor:
        tiles = self.tiles
        if self.by_rank and torch.distributed.is_initialized():
            tiles += torch.distributed.get_rank() % 2
        return InTiles.apply(x, self.inner, tiles, *self.inner.parameters())


class Hooked(Lin):
    """Registers a hook on its unsharded weight in each forward, which halves the gradient."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def compute(self, x: Tensor) -> Tensor:
        if self.lin.weight.requires_grad and torch.is_grad_enabled():
            if self.when == "accumulated":

                def halve(param: Tensor) -> None:
                    handle.remove()
                    param.grad.mul_(0.5)

                handle = self.lin.weight.register_post_accumulate_grad_hook(halve)
            else:
                weight = self.lin.weight
                handle = weight.register_hook(lambda grad: (handle.remove(), grad * 0.5)[1])
        return torch.tanh(self.lin(x))


class Transforms(Lin):
    """Uses torch.func on itself in its forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def compute(self, x: Tensor) -> Tensor:
        def f(t: Tensor) -> Tensor:
            return torch.tanh(self.lin(t))

        if self.kind == "jvp":
            value, tangent = torch.func.jvp(f, (x,), (torch.ones_like(x),))
            return value + tangent
        if self.kind == "vjp":
            value, pull = torch.func.vjp(f, x)
            return value + pull(torch.ones_like(value))[0]
        if self.kind == "vmap":
            return torch.func.vmap(f)(x)
        return f(x) + torch.func.grad(lambda t: f(t).sum())(x)


class Awkward(Lin):
    """Names of its own that a wrapper might take."""

    def __init__(self) -> None:
        super().__init__()
        self._set(1.5)

    def _set(self, gain: float) -> None:
        self._gain = gain

    def _unit(self, x: Tensor) -> Tensor:
        return x / (1 + x.abs())

    def _units(self) -> int:
        return 2

    def _groups_of_one_mesh(self, x: Tensor) -> list[Tensor]:
        return [x, x * self._gain]

    def _use_memory(self, x: Tensor) -> Tensor:
        return x * 0.5

    def compute(self, x: Tensor) -> Tensor:
        self._set(1.25)
        return self._use_memory(sum(self._groups_of_one_mesh(self._unit(self.lin(x)))) / self._units())


class Recursive(Lin):
    """Asks the whole net, of which it is a part, from within its own forward."""

    net: Any = None

    def compute(self, x: Tensor) -> Tensor:
        return self.lin(x) + torch.tanh(self.net()(x, ())) + self.lin(x * 0.5)


# --- around others ----------------------------------------------------------------------------------------------------


class Seq(Block):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def compute(self, x: Tensor) -> Tensor:
        for each in self.inner:
            x = each(x)
        return x


class Residual(Seq):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__(*inner)
        self.gain = nn.Parameter(torch.rand(DIM))

    def compute(self, x: Tensor) -> Tensor:
        return x + self.gain * sum(each(x) for each in self.inner)


class Repeat(Seq):
    def compute(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for each in self.inner:
                x = each(x)
        return x


class Checkpointed(Seq):
    def __init__(self, *inner: nn.Module, reentrant: bool) -> None:
        super().__init__(*inner)
        self.reentrant = reentrant

    def compute(self, x: Tensor) -> Tensor:
        for each in self.inner:
            x = checkpoint(each, x, use_reentrant=self.reentrant)
        return x


class Detached(Seq):
    """Its inner blocks get no gradient."""

    def compute(self, x: Tensor) -> Tensor:
        return x + sum(each(x).detach() for each in self.inner)


class Teacher(Seq):
    """Runs its inner blocks without gradients, then with."""

    def compute(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = sum(each(x) for each in self.inner)
        return x * 0.5 + sum(each(x) for each in self.inner) - target


class Views(Seq):
    """The inner blocks' outputs go on as views, in a dict, and by keyword."""

    def compute(self, x: Tensor) -> Tensor:
        for each in self.inner:
            out = {"left": each(x)[..., :3], "right": x[..., 3:]}
            x = torch.cat([out["right"], out["left"]], -1)
        return x


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def batch(index: int, rank: int) -> Tensor:
    """The rows of `rank` in the batch of number `index`."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return torch.randn(ROWS, DIM, generator=generator)
