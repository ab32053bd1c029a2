"""`fsdp2.init.seeded` on real ranks: sharded models are those that one process makes, bit for bit."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy

from fsdp2 import ArgumentError, UnsupportedError, ZeroPolicy, fully_shard
from fsdp2.init import blocks, seeded, sequential
from tests.helpers.parity_models import TORCH_VERSION, full, local, mesh_2d, shard_like
from tests.helpers.ranks import on_ranks
from tests.helpers.threads import fake_world
from tests.helpers.tp_models import PLANS, TpLm, dp_axes, dp_tp, hsdp_tp, parallelize

every_mode = pytest.mark.parametrize("mode", ["sequential", "blocks"])


class Zoo(nn.Module):
    """The layers of torch.nn whose initialisation takes different ways. Sizes divide by neither 2, 3 nor 4."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 10, padding_idx=-4)
        self.encoder = nn.TransformerEncoderLayer(10, 2, 7, dropout=0.0, batch_first=True)
        self.conv = nn.Conv1d(10, 5, 3, padding=1)
        self.norm = nn.GroupNorm(1, 5)
        self.bilinear = nn.Bilinear(5, 5, 3)
        self.position = nn.Parameter(torch.empty(1, 4, 10))
        self.scale = nn.Parameter(torch.empty(()))
        self.head = nn.Linear(3, 11, bias=False)

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.position, std=0.02, a=-0.02, b=0.02)
        nn.init.constant_(self.scale, 1.5)
        nn.init.orthogonal_(self.head.weight, gain=2)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.encoder(self.embed(numbers) + self.position)
        x = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2) * self.scale
        return self.head(self.bilinear(x.contiguous(), x.contiguous()))


def reset(module: nn.Module) -> None:
    """What a training script does, and with torch's names for it."""
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(method := getattr(module, name, None)):
            method()


def assert_same_model(sharded: nn.Module, plain: nn.Module) -> None:
    """This rank's parts are those of the plain model's parameters, bit by bit."""
    for (name, param), (_, whole) in zip(sharded.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(local(param), shard_like(whole, param)), name


def initialised(mode: str | None) -> tuple[Zoo, Tensor]:
    """The model of one process, in the context or (None) in plain torch, and what it draws next."""
    plain = Zoo()
    if mode is None:
        torch.manual_seed(5)
        plain.apply(reset)
    else:
        with seeded(5, mode=mode):
            plain.apply(reset)
            return plain, torch.randn(20)
    return plain, torch.randn(20)


# --- whole models -----------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@every_mode
def test_a_model_is_that_of_one_process(rank: int, world_size: int, mode: str) -> None:
    """From the meta device, as a training script does it; the first loss is the same, too."""
    plain, drawn = initialised(None if mode == "sequential" else mode)
    with torch.device("meta"):
        model = Zoo()
    fully_shard(model.encoder)
    fully_shard(model)
    model.to_empty(device="cpu")
    with seeded(5, mode=mode):
        model.apply(reset)
        assert torch.equal(torch.randn(20), drawn)
    assert_same_model(model, plain)
    assert plain.embed.weight[-4].eq(0).all()
    numbers = torch.randint(11, (2, 4), generator=torch.Generator().manual_seed(0))
    losses = [cross_entropy(m(numbers).flatten(0, 1), numbers.flatten()) for m in (model, plain)]
    assert torch.equal(*losses)


@on_ranks(4)
@every_mode
def test_layouts_of_data_parallelism(rank: int, world_size: int, mode: str) -> None:
    plain, drawn = initialised(None if mode == "sequential" else mode)
    layouts: list[dict[str, Any]] = [
        {"mesh": mesh_2d(2, 2)},
        {"zero": ZeroPolicy(3, shard_size=2, shard_replicas=True)},
        {"shard_placement_fn": lambda param: Shard(param.ndim - 1) if param.ndim else None},
        {"zero": ZeroPolicy(0)},
    ]
    for options in layouts:
        model = Zoo()
        fully_shard(model.encoder, **options)
        fully_shard(model, **options)
        with seeded(5, mode=mode):
            model.apply(reset)
            assert torch.equal(torch.randn(20), drawn)
        for (name, param), (_, whole) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert torch.equal(full(param), whole), (name, options)


@on_ranks(4)
@every_mode
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_tensor_parallelism_below(rank: int, world_size: int, mode: str, plan: str, replicas: int) -> None:
    """`_StridedShard` over Shard of the same dim, Shard over Shard of another, and fans of the whole weights."""
    mesh = dp_tp() if replicas == 1 else hsdp_tp(2, 1)
    plain, model = TpLm(), TpLm()
    parallelize(model, mesh["tp"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=dp_axes(mesh))
    fully_shard(model, mesh=dp_axes(mesh))
    for one in (plain, model):
        with seeded(5, mode=mode), torch.no_grad():
            one.apply(reset)
            for param in one.parameters():
                param.add_(torch.rand_like(param))
                if param.ndim == 2:
                    nn.init.kaiming_normal_(param)
    for (name, param), (_, whole) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(local(param), shard_like(whole, param)), name
    assert torch.equal(full(model.blocks[0].up.weight), plain.blocks[0].up.weight)


@every_mode
@pytest.mark.parametrize("sizes", [(8,), (2, 4), (64,)])
def test_more_ranks(mode: str, sizes: tuple[int, ...]) -> None:
    """On paper: collectives move nothing there, and are not needed. With 64 ranks most own nothing of most."""
    plain, drawn = nn.TransformerEncoderLayer(10, 2, 19, batch_first=True), []
    with seeded(2, mode=mode):
        plain.apply(reset)
        drawn.append(torch.randn(3))
    for rank in (0, 3, math.prod(sizes) - 1):
        with fake_world(rank, math.prod(sizes)):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
            model = fully_shard(nn.TransformerEncoderLayer(10, 2, 19, batch_first=True), mesh=mesh)
            with seeded(2, mode=mode):
                model.apply(reset)
                drawn.append(torch.randn(3))
            assert_same_model(model, plain)
    assert all(torch.equal(one, drawn[0]) for one in drawn)


# --- operations -------------------------------------------------------------------------------------------------------


def write_slices(w: Tensor) -> None:
    """Through one index, several, steps, and another dim."""
    w.normal_()
    w[1:6:2].uniform_()
    w[:, 1:4].normal_()
    w[2:, 0].normal_()
    w[:, 1:3] = torch.randn(w.shape[0], 2)
    w[0] = w[5]
    w[3] = 0.25
    w[:, 0] = 0.5
    w[3].fill_(7)
    w[-1, 2] = 5


def fill_chunks(w: Tensor) -> None:
    """As fused projections are initialised."""
    for chunk in w.chunk(3):
        nn.init.xavier_uniform_(chunk)


def fill_pieces(w: Tensor) -> None:
    """By rows, and in pieces of different sizes."""
    for row in range(w.shape[0]):
        w[row].normal_(std=2)
    for piece in w.split([1, w.shape[1] - 1], dim=1):
        piece.mul_(torch.randn(piece.shape))


def fill_rows(w: Tensor) -> None:
    w.normal_().index_fill_(0, torch.tensor([1, 4]), 2.0).index_fill_(1, torch.tensor([3]), w[0, 0])


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "kaiming_uniform": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
    "kaiming_normal": lambda w: nn.init.kaiming_normal_(w, mode="fan_out"),
    "trunc_normal": nn.init.trunc_normal_,
    "trunc_normal far out": lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 1.5, 3.0),
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda w: nn.init.sparse_(w, 0.3),
    "eye": nn.init.eye_,
    "rows and columns": fill_rows,
    "exponential": lambda w: w.exponential_(2),
    "cauchy": lambda w: w.cauchy_(),
    "geometric": lambda w: w.geometric_(0.3),
    "bernoulli": lambda w: w.bernoulli_(0.3),
    "bernoulli of a plain tensor": lambda w: w.bernoulli_(torch.rand(w.shape[1])),
    "bernoulli of itself": lambda w: w.copy_(torch.bernoulli(w.uniform_())),
    "random": lambda w: w.random_(),
    "random_to": lambda w: w.random_(9),
    "random_from": lambda w: w.random_(-9, 9),
    "randn_like": lambda w: w.copy_(torch.randn_like(w)),
    "randint_like": lambda w: w.copy_(torch.randint_like(w, 3, 9)).add_(torch.randint_like(w, 5)),
    "like with a generator": lambda w: w.copy_(torch.randn_like(w, generator=torch.Generator().manual_seed(2))),
    "plain operands": lambda w: w.copy_(torch.randn(w.shape)).add_(torch.rand(w.shape[1])).mul_(torch.rand(w.shape)),
    "transposed": lambda w: w.t().normal_(),
    "data": lambda w: w.data.normal_(),
    "numbers of the whole": lambda w: w.random_(5).normal_(std=w.sum().item()),
    "slices": write_slices,
    "chunks": fill_chunks,
    "pieces": fill_pieces,
}


def cut(whole: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """As a DTensor, without communication: every rank has the whole."""
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def check_function(
    function: Callable[[Tensor], Any], shape: tuple[int, ...], mode: str, mesh: DeviceMesh, *placements: Placement
) -> None:
    """`function` on a sharded parameter and on a plain one: the same values, and the same stream afterwards."""
    plain = nn.Parameter(torch.zeros(shape))
    sharded = nn.Parameter(cut(torch.zeros(shape), mesh, [*placements]))
    drawn = []
    for param in (plain, sharded):
        with seeded(3, mode=mode), torch.no_grad():
            function(param)
            drawn.append(torch.randn(3))
    assert torch.equal(sharded.to_local(), cut(plain.detach(), mesh, [*placements]).to_local())
    assert torch.equal(*drawn)


@on_ranks(2, 3)
@every_mode
def test_functions(rank: int, world_size: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several spans, and in several blocks."""
    monkeypatch.setattr(sequential, "SPAN_NUMEL", 32)
    monkeypatch.setattr(blocks, "BLOCK_NUMEL", 19)
    mesh = init_device_mesh("cpu", (world_size,))
    for function in FUNCTIONS.values():
        for shape in ((9, 5), (6, 8), (13, 11)):
            for placement in (Shard(0), Shard(1), Replicate()):
                check_function(function, shape, mode, mesh, placement)


@on_ranks(4)
@every_mode
@pytest.mark.skipif(TORCH_VERSION == (2, 12), reason="its DTensors refuse to copy what was cut over two axes at once")
def test_functions_where_ranks_own_nothing(rank: int, world_size: int, mode: str) -> None:
    """A row for some of the ranks only, cut over two axes, and cut in both dims; more than two dims."""
    mesh = mesh_2d(2, 2)
    for function in map(FUNCTIONS.__getitem__, ("normal", "orthogonal", "chunks", "plain operands", "trunc_normal")):
        for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(0)]):
            check_function(function, (3, 2), mode, mesh, *placements)
    for function in (nn.init.orthogonal_, nn.init.dirac_, lambda w: nn.init.xavier_normal_(w)):
        for dim in range(3):
            check_function(function, (6, 3, 3), mode, mesh, Replicate(), Shard(dim))
            check_function(function, (1, 2, 4), mode, mesh, Shard(0), Shard(dim))


@on_ranks(2)
@every_mode
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_dtypes(rank: int, world_size: int, mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "SPAN_NUMEL", 16)
    monkeypatch.setattr(blocks, "BLOCK_NUMEL", 11)
    mesh = init_device_mesh("cpu", (2,))
    ops: list[Callable[[Tensor], Any]] = [lambda w: w.random_(), lambda w: w.bernoulli_(0.4)]
    if dtype.is_floating_point:
        ops += [lambda w: w.normal_(), lambda w: w.uniform_(-1, 1), lambda w: w.exponential_()]
    for op in ops:
        plain, sharded = torch.zeros(7, 5, dtype=dtype), cut(torch.zeros(7, 5, dtype=dtype), mesh, [Shard(0)])
        for tensor in (plain, sharded):
            with seeded(3, mode=mode):
                op(tensor)
        assert torch.equal(sharded.to_local(), plain.chunk(2)[rank])


@on_ranks(2)
@every_mode
def test_spans_of_large_parameters(rank: int, world_size: int, mode: str) -> None:
    """More elements than are made at a time; afterwards the streams agree."""
    mesh = init_device_mesh("cpu", (2,))
    rows = sequential.SPAN_NUMEL // 256 + 3
    for dim in (0, 1):
        for function in (nn.init.normal_, nn.init.uniform_):
            check_function(function, (rows, 512), mode, mesh, Shard(dim))


@on_ranks(2)
@every_mode
def test_channels_last(rank: int, world_size: int, mode: str) -> None:
    """There torch draws in the order of memory, and normal values in another way."""
    for dim, fill in itertools.product((0, 1), (nn.init.uniform_, nn.init.normal_)):
        plain, model = (nn.Conv2d(5, 7, 3, bias=False).to(memory_format=torch.channels_last) for _ in range(2))
        fully_shard(model, shard_placement_fn=lambda _, dim=dim: Shard(dim))
        for one in (plain, model):
            with seeded(5, mode=mode):
                fill(one.weight)
        assert_same_model(model, plain)


# --- the context ------------------------------------------------------------------------------------------------------


@on_ranks(2)
@every_mode
def test_generators(rank: int, world_size: int, mode: str) -> None:
    """Given a seed, the default one is put back; without one it goes on; one passed to an operation is used instead."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = cut(torch.zeros(6, 6), mesh, [Shard(0)])
    torch.manual_seed(rank)
    with seeded(1, mode=mode):
        first = sharded.normal_().full_tensor()
    assert torch.initial_seed() == rank
    assert torch.equal(torch.randn(5), torch.randn(5, generator=torch.Generator().manual_seed(rank)))
    torch.manual_seed(1)
    with seeded(mode=mode):
        assert torch.equal(sharded.normal_().full_tensor(), first)
        again = sharded.normal_().full_tensor()
    assert not torch.equal(again, first)
    torch.manual_seed(rank)  # need not be the same, if it is not used
    own = torch.Generator().manual_seed(1)
    with seeded(mode=mode):
        assert torch.equal(nn.init.normal_(sharded, generator=own).full_tensor(), first)
        assert torch.equal(nn.init.normal_(sharded, generator=own).full_tensor(), again)


@on_ranks(2)
def test_the_context_ends(rank: int, world_size: int) -> None:
    """Also by an exception; then DTensor does what it always did, and a seed is not left behind."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = cut(torch.zeros(6, 6), mesh, [Shard(0)])
    torch.manual_seed(40 + rank)
    with pytest.raises(RuntimeError, match="on purpose"), seeded(1):
        raise RuntimeError("on purpose")
    assert torch.initial_seed() == 40 + rank
    with pytest.warns(UserWarning, match="DTensor random operators"):
        sharded.normal_()
    expected = torch.empty(3, 6).normal_(generator=torch.Generator().manual_seed(40 + rank))
    assert torch.equal(sharded.to_local(), expected)


@on_ranks(2)
@every_mode
def test_other_default_devices_and_dtypes(rank: int, world_size: int, mode: str) -> None:
    """Where a model is built on the meta device, or in bfloat16, real parameters can be initialised as ever."""
    mesh = init_device_mesh("cpu", (2,))
    for name in ("uniform", "geometric", "normal"):
        plain, sharded = torch.zeros(7, 5), cut(torch.zeros(7, 5), mesh, [Shard(0)])
        with seeded(3, mode=mode):
            FUNCTIONS[name](plain)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"), seeded(3, mode=mode):
                FUNCTIONS[name](sharded)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(sharded.to_local(), plain.chunk(2)[rank])


@on_ranks(3)
@every_mode
def test_initialisation_does_not_communicate(rank: int, world_size: int, mode: str) -> None:
    """But for `trunc_normal_`, of which the docstring says so, and slices."""
    model = fully_shard(nn.TransformerEncoderLayer(10, 2, 7, batch_first=True))
    extra = [nn.init.orthogonal_, nn.init.xavier_normal_, lambda w: w.copy_(torch.randn(w.shape))]
    with CommDebugMode() as seen, seeded(1, mode=mode), torch.no_grad():
        model.apply(reset)
        for function in extra:
            function(model.linear1.weight)
    assert not seen.get_total_counts()


@on_ranks(2)
@every_mode
def test_errors(rank: int, world_size: int, mode: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded = cut(torch.ones(6, 6), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.ones(6, 6), mesh, [Partial()])
    with pytest.raises(ArgumentError, match="'sequential', 'blocks'"), seeded(1, mode="fast"):
        pass
    with seeded(1, mode=mode):
        with pytest.raises(ArgumentError, match="expected Shard or Replicate"):
            partial.normal_()
        with pytest.raises(UnsupportedError, match="leave it before forward"):
            torch.multinomial(sharded, 1)
        with pytest.raises(UnsupportedError, match="copy_ it into the parameter"):
            sharded[2].unsqueeze(0).normal_()
        with pytest.raises(RuntimeError, match="std"):
            sharded.normal_(0, -1)
    assert torch.equal(sharded.to_local(), torch.ones(3, 6))
