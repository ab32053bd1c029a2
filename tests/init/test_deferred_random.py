"""Random operations of torch within `deferred`: their values, the next parameter's, and where the generator stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    Cauchy,
    Chi2,
    ContinuousBernoulli,
    Dirichlet,
    Exponential,
    FisherSnedecor,
    Gamma,
    Geometric,
    Gumbel,
    HalfCauchy,
    HalfNormal,
    Kumaraswamy,
    Laplace,
    LKJCholesky,
    LogNormal,
    LowRankMultivariateNormal,
    Multinomial,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    OneHotCategorical,
    Pareto,
    Poisson,
    RelaxedBernoulli,
    RelaxedOneHotCategorical,
    StudentT,
    Uniform,
    VonMises,
    Weibull,
    Wishart,
)

from fsdp2.init import deferred
from fsdp2.init.deferred import Recording

aten: Any = torch.ops.aten
SIZE = (33, 5)  # not a multiple of what generators make at once
Make = Callable[[], Any]


def half() -> Tensor:
    return torch.full(SIZE, 0.5)


def two() -> Tensor:
    return torch.full(SIZE, 2.0)


def many() -> Tensor:
    return torch.full(SIZE, 20.0)


# aten's operations by name, called so that every overload which can be called from outside is.
OPERATIONS: dict[str, Make] = {
    "_fill_mem_eff_dropout_mask_": lambda: None,  # needs CUDA, as what follows with the same
    "_sample_dirichlet": lambda: torch._sample_dirichlet(two()),
    "_standard_gamma": lambda: torch._standard_gamma(two()),
    "alpha_dropout": lambda: F.alpha_dropout(two(), 0.5, True),
    "alpha_dropout_": lambda: F.alpha_dropout(two(), 0.5, True, inplace=True),
    "bernoulli": lambda: torch.bernoulli(half()),
    "bernoulli.p": lambda: torch.bernoulli(two(), 0.3),
    "bernoulli.Tensor": lambda: aten.bernoulli.Tensor(two(), half()),
    "bernoulli_.Tensor": lambda: two().bernoulli_(half()),
    "bernoulli_.float": lambda: two().bernoulli_(0.3),
    "binomial": lambda: torch.binomial(many(), half()),
    "cauchy": lambda: aten.cauchy(two()),
    "cauchy_": lambda: two().cauchy_(),
    "dropout": lambda: F.dropout(two(), 0.5, True),
    "dropout_": lambda: F.dropout(two(), 0.5, True, inplace=True),
    "exponential": lambda: aten.exponential(two()),
    "exponential_": lambda: two().exponential_(),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(two(), 0.5, True),
    "feature_dropout": lambda: F.dropout1d(two(), 0.5, True),
    "geometric": lambda: aten.geometric(two(), 0.3),
    "geometric_": lambda: two().geometric_(0.3),
    "gru": lambda: nn.GRU(5, 3, 2, dropout=0.5)(two())[0],
    "log_normal": lambda: aten.log_normal(two()),
    "log_normal_": lambda: two().log_normal_(),
    "lstm": lambda: nn.LSTM(5, 3, 2, dropout=0.5)(two())[0],
    "multinomial": lambda: torch.multinomial(two(), 3).float(),
    "multinomial, replaced": lambda: torch.multinomial(two(), 9, replacement=True).float(),
    "native_dropout": lambda: torch.native_dropout(two(), 0.5, True)[0],
    "normal.Tensor_Tensor": lambda: torch.normal(two(), half()),
    "normal.Tensor_float": lambda: torch.normal(two(), 0.5),
    "normal.float_Tensor": lambda: torch.normal(2.0, half()),
    "normal.float_float": lambda: torch.normal(2.0, 0.5, SIZE),
    "normal_": lambda: two().normal_(),
    "normal_functional": lambda: aten.normal_functional(two()),
    "out": lambda: torch.normal(two(), half(), out=torch.empty(SIZE)),
    "poisson": lambda: torch.poisson(two()),
    "rand": lambda: torch.rand(SIZE),
    "rand_like": lambda: torch.rand_like(two()),
    "randint": lambda: torch.randint(9, SIZE).float(),
    "randint.low": lambda: torch.randint(3, 9, SIZE).float(),
    "randint_like": lambda: torch.randint_like(two(), 9),
    "randint_like.low_dtype": lambda: torch.randint_like(two(), 3, 9),
    "randn": lambda: torch.randn(SIZE),
    "randn, complex": lambda: torch.randn(SIZE, dtype=torch.complex64),
    "randn, bfloat16": lambda: torch.randn(SIZE, dtype=torch.bfloat16),
    "randn_like": lambda: torch.randn_like(two()),
    "random": lambda: aten.random(two()),
    "random_": lambda: two().random_(),
    "random_.from": lambda: two().random_(3, 9),
    "random_.to": lambda: two().random_(9),
    "randperm": lambda: torch.randperm(33).float(),
    "rnn_relu": lambda: nn.RNN(5, 3, 2, nonlinearity="relu", dropout=0.5)(two())[0],
    "rnn_tanh": lambda: nn.RNN(5, 3, 2, dropout=0.5)(two())[0],
    "rrelu": lambda: F.rrelu(-two(), training=True),
    "rrelu_": lambda: F.rrelu(-two(), training=True, inplace=True),
    "rrelu_with_noise": lambda: aten.rrelu_with_noise(-two(), half(), training=True),
    "rrelu_with_noise_": lambda: aten.rrelu_with_noise_(-two(), half(), training=True),
    "rrelu_with_noise_functional": lambda: aten.rrelu_with_noise_functional(-two(), half(), training=True)[0],
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(*[many()[None, None]] * 3, dropout_p=0.5),
    "uniform": lambda: aten.uniform(two()),
    "uniform_": lambda: two().uniform_(),
}

# Below what is called from outside, or of other devices.
WITHIN = (
    "_cudnn",
    "_efficient_attention",
    "_flash_attention",
    "_fused",
    "_lstm_mps",
    "_nested",
    "_scaled_dot_product",
    "_triton",
    "feature_alpha_dropout_",
    "feature_dropout_",
    "miopen",
)

DISTRIBUTIONS: dict[str, Callable[[], Any]] = {
    "Bernoulli": lambda: Bernoulli(half()),
    "Beta": lambda: Beta(two(), half()),
    "Binomial": lambda: Binomial(many(), half()),
    "Categorical": lambda: Categorical(half()),
    "Cauchy": lambda: Cauchy(two(), half()),
    "Chi2": lambda: Chi2(two()),
    "ContinuousBernoulli": lambda: ContinuousBernoulli(half()),
    "Dirichlet": lambda: Dirichlet(two()),
    "Exponential": lambda: Exponential(two()),
    "FisherSnedecor": lambda: FisherSnedecor(two(), two()),
    "Gamma": lambda: Gamma(two(), half()),
    "Geometric": lambda: Geometric(half()),
    "Gumbel": lambda: Gumbel(two(), half()),
    "HalfCauchy": lambda: HalfCauchy(two()),
    "HalfNormal": lambda: HalfNormal(two()),
    "Kumaraswamy": lambda: Kumaraswamy(two(), half()),
    "LKJCholesky": lambda: LKJCholesky(5, 1.0),
    "Laplace": lambda: Laplace(two(), half()),
    "LogNormal": lambda: LogNormal(two(), half()),
    "LowRankMultivariateNormal": lambda: LowRankMultivariateNormal(torch.zeros(5), torch.ones(5, 1), torch.ones(5)),
    "Multinomial": lambda: Multinomial(9, torch.full((5,), 0.2)),
    "MultivariateNormal": lambda: MultivariateNormal(torch.zeros(5), torch.eye(5)),
    "NegativeBinomial": lambda: NegativeBinomial(many(), half()),
    "Normal": lambda: Normal(two(), half()),
    "OneHotCategorical": lambda: OneHotCategorical(half()),
    "Pareto": lambda: Pareto(two(), two()),
    "Poisson": lambda: Poisson(two()),
    "RelaxedBernoulli": lambda: RelaxedBernoulli(torch.tensor(0.5), half()),
    "RelaxedOneHotCategorical": lambda: RelaxedOneHotCategorical(torch.tensor(0.5), half()),
    "StudentT": lambda: StudentT(two()),
    "Uniform": lambda: Uniform(half(), two()),
    "VonMises": lambda: VonMises(two(), half()),
    "Weibull": lambda: Weibull(two(), half()),
    "Wishart": lambda: Wishart(torch.tensor(60.0), torch.eye(5)),
}

INITIALISERS: dict[str, Callable[[Tensor], Any]] = {
    "uniform_": nn.init.uniform_,
    "normal_": nn.init.normal_,
    "trunc_normal_": lambda tensor: nn.init.trunc_normal_(tensor, std=2.0, a=-1.0, b=1.0),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda tensor: nn.init.sparse_(tensor, 0.3),
}

# Those that take a generator by a public name.
WITH_GENERATOR: dict[str, Callable[[torch.Generator], Any]] = {
    "bernoulli": lambda g: torch.bernoulli(half(), generator=g),
    "binomial": lambda g: torch.binomial(many(), half(), generator=g),
    "dirichlet": lambda g: torch._sample_dirichlet(two(), generator=g),
    "gamma": lambda g: torch._standard_gamma(two(), generator=g),
    "multinomial": lambda g: torch.multinomial(two(), 3, generator=g).float(),
    "normal": lambda g: torch.normal(two(), half(), generator=g),
    "normal_": lambda g: two().normal_(generator=g),
    "poisson": lambda g: torch.poisson(two(), generator=g),
    "rand": lambda g: torch.rand(SIZE, generator=g),
    "randint": lambda g: torch.randint(9, SIZE, generator=g).float(),
    "randperm": lambda g: torch.randperm(33, generator=g).float(),
    "trunc_normal_": lambda g: nn.init.trunc_normal_(two(), generator=g),
}


class Drawn(nn.Module):
    """What an operation gives, and a parameter after it."""

    def __init__(self, make: Callable[[torch.Generator], Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.drawn = nn.Parameter(make(generator).detach())
        self.next = nn.Parameter(torch.randn(7))
        self.own = nn.Parameter(torch.randn(7, generator=generator))


def check(make: Callable[[torch.Generator], Any], is_arithmetic: bool = False) -> None:
    torch.manual_seed(3)
    eager = Drawn(make)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with deferred() as recording:
        model = Drawn(make)
    assert torch.equal(torch.get_rng_state(), after)
    recording.replay(model)
    assert torch.equal(torch.get_rng_state(), after)
    for (name, param), (_, wanted) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        if name == "drawn" and is_arithmetic:
            torch.testing.assert_close(param, wanted)
        else:
            assert torch.equal(param, wanted), name
    check_with_seed(make)


def check_with_seed(make: Callable[[torch.Generator], Any]) -> None:
    """With streams of its own, recording leaves the default generator alone (but for values that are asked for), and
    gives the same twice."""

    def record() -> tuple[Drawn, Recording]:
        with deferred(seed=1) as recording:
            return Drawn(make), recording

    (one, recording), (two_, other) = record(), record()
    recording.replay(one)
    other.replay(two_)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two_.parameters(), strict=True))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith("_fill")])
def test_operations(name: str) -> None:
    """`torch.binomial`, and what `Beta` and `Dirichlet` draw from, have no kernel for the meta device: they were run
    once for the generator and once more for the shape of their result, so that all that came later was another
    number."""
    # torch multiplies the matrices of these by other kernels where it believes that they are on the meta device. Which
    # of them round differently depends on the processor.
    check(lambda generator: OPERATIONS[name](), is_arithmetic=name in ("gru", "lstm", "rnn_relu", "rnn_tanh"))


@pytest.mark.filterwarnings("ignore:Singular sample detected")  # of Wishart, whatever it is asked for
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name: str) -> None:
    check(lambda generator: DISTRIBUTIONS[name]().sample((3,)).float())


@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisers(name: str) -> None:
    def make(generator: torch.Generator) -> Tensor:
        tensor = torch.empty(SIZE)
        INITIALISERS[name](tensor)
        return tensor

    check(make)


@pytest.mark.parametrize("name", WITH_GENERATOR)
def test_generators_of_the_models_own(name: str) -> None:
    """Some operations take a generator by position: it was kept on the tape, and drew again at replay from where it had
    come to by then."""
    check(WITH_GENERATOR[name])


def test_all_of_torchs_operations_are_here() -> None:
    """A new random operation of torch fails here until it is tried."""
    random = set()
    for full_name in torch._C._dispatch_get_all_op_names():
        name = full_name.removeprefix("aten::")
        base, _, overload = name.partition(".")
        if name != full_name and hasattr(aten, base) and hasattr(getattr(aten, base), overload or "default"):
            op = getattr(getattr(aten, base), overload or "default")
            if torch.Tag.nondeterministic_seeded in op.tags or any(a.name == "generator" for a in op._schema.arguments):
                random.add(base)
    assert random >= {"normal_", "binomial"}
    known = {name.split(".")[0] for name in OPERATIONS}
    assert not {name for name in random - known if not name.startswith(WITHIN)}
    assert set(DISTRIBUTIONS) >= {
        name
        for name, kind in vars(torch.distributions).items()
        if isinstance(kind, type) and {"sample", "rsample"} & vars(kind).keys() and name not in NOT_BY_THEMSELVES
    }


# Made of other distributions.
NOT_BY_THEMSELVES = {
    "Distribution",
    "ExponentialFamily",
    "GeneralizedPareto",
    "Independent",
    "InverseGamma",
    "LogisticNormal",
    "MixtureSameFamily",
    "OneHotCategoricalStraightThrough",
    "TransformedDistribution",
}
