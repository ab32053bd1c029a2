"""Models for the tests of deferred initialisation: nets as torchvision, timm and others write them, and modules that do
to their parameters, while they are built, what is hard to do to a parameter that has no memory.

`NETS`: name -> (build, inputs of a forward). `HABITS`: name -> build; each is one habit. `hugging_face(name)`: from
transformers, by configs.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

# --- nets -------------------------------------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    """Of torchvision's ResNet."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or width != out:
            self.downsample = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(x + identity)


class ResNet(nn.Module):
    """As torchvision initialises it: everything again after it was built, the last norm of each block to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(BasicBlock(5, 5, 1), BasicBlock(5, 7, 2))
        self.fc = nn.Linear(7, 3)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(m, nn.BatchNorm2d):
                nn.init.constant_(m.weight, 1)
                nn.init.constant_(m.bias, 0)
        for m in self.modules():
            if isinstance(m, BasicBlock) and m.bn2.weight is not None:
                nn.init.constant_(m.bn2.weight, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class ConvNextBlock(nn.Module):
    """With a layer scale and a rate of stochastic depth."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.layer_scale = nn.Parameter(torch.ones(width, 1, 1) * 1e-2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x + (1 - self.rate) * self.layer_scale * y


class ConvNext(nn.Module):
    """Rates from `linspace`, truncated normals by `apply`, channels last."""

    def __init__(self) -> None:
        super().__init__()
        rates = [x.item() for x in torch.linspace(0, 0.5, 3)]
        self.stem = nn.Conv2d(3, 6, 2, 2)
        self.blocks = nn.ModuleList(ConvNextBlock(6, rate) for rate in rates)
        self.head = nn.Linear(6, 3)
        self.apply(self._init)
        self.to(memory_format=torch.channels_last)

    def _init(self, m: nn.Module) -> None:
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            nn.init.trunc_normal_(m.weight, std=0.02)
            if m.bias is not None:
                m.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class VisionTransformer(nn.Module):
    """Class token, sinusoidal table in a plain attribute and in a buffer, encoder of deep copies."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, 8))
        position = torch.arange(5).unsqueeze(1)
        div = torch.exp(torch.arange(0, 8, 2) * (-math.log(100.0) / 8))
        table = torch.zeros(1, 5, 8)
        table[0, :, 0::2] = torch.sin(position * div)
        table[0, :, 1::2] = torch.cos(position * div)
        self.register_buffer("table", table, persistent=False)
        self.frequencies = torch.polar(torch.ones(5, 4), torch.outer(torch.arange(5.0), torch.linspace(1, 0.1, 4)))
        self.scales = [torch.full((1,), 0.5), {"k": torch.rand(8)}]
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
        self.head = nn.Linear(8, 3)
        fan_in = self.patch.in_channels * self.patch.kernel_size[0] * self.patch.kernel_size[1]
        nn.init.trunc_normal_(self.patch.weight, std=math.sqrt(1 / fan_in))
        nn.init.zeros_(self.head.weight[1:])

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.table
        x = torch.view_as_real(torch.view_as_complex(x.unflatten(2, (4, 2)).contiguous()) * self.frequencies).flatten(2)
        return self.head(self.encoder(x * self.scales[0] + self.scales[1]["k"]))


class TiedLanguageModel(nn.Module):
    """An LSTM between tied embedding and head, with a padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6, padding_idx=2)
        self.rnn = nn.LSTM(6, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 9)
        for name, param in self.rnn.named_parameters():
            if "weight_hh" in name:
                for gate in param.chunk(4):
                    nn.init.orthogonal_(gate)
            elif "bias" in name:
                param.data[6:12] = 1.0  # the forget gate
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


def transformer() -> nn.Module:
    """torch's own, with layers that are deep copies of one."""
    return nn.Transformer(8, 2, 2, 2, 12, dropout=0.0, batch_first=True)


def pictures() -> tuple[Tensor, ...]:
    return (torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8),)


def sequences() -> tuple[Tensor, ...]:
    return torch.linspace(-1, 1, 2 * 5 * 8).view(2, 5, 8), torch.linspace(1, -1, 2 * 3 * 8).view(2, 3, 8)


def tokens() -> tuple[Tensor, ...]:
    return (torch.arange(10).view(2, 5) % 9,)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "resnet": (ResNet, pictures),
    "convnext": (ConvNext, pictures),
    "vit": (VisionTransformer, pictures),
    "transformer": (transformer, sequences),
    "tied_lstm": (TiedLanguageModel, tokens),
}


def hugging_face(name: str) -> Callable[[], nn.Module]:
    """A builder of a small language model from transformers; skips the test without that package."""
    tf = pytest.importorskip("transformers")
    tf.logging.set_verbosity_error()
    sizes: dict[str, Any] = {
        "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    grouped = {**sizes, "intermediate_size": 16, "num_key_value_heads": 1}
    configs = {
        "llama": lambda: tf.LlamaConfig(**grouped),
        "gpt2": lambda: tf.GPT2Config(
            vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=1
        ),
        "bert": lambda: tf.BertConfig(**sizes, intermediate_size=12, max_position_embeddings=8),
        "t5": lambda: tf.T5Config(vocab_size=11, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2),
        "mixtral": lambda: tf.MixtralConfig(**grouped, num_local_experts=3, num_experts_per_tok=2),
    }
    autos = {"bert": tf.AutoModelForMaskedLM, "t5": tf.AutoModelForSeq2SeqLM}
    return partial(autos.get(name, tf.AutoModelForCausalLM).from_config, configs[name]())


HUGGING_FACE = ["llama", "gpt2", "bert", "t5", "mixtral"]


# --- habits -----------------------------------------------------------------------------------------------------------


def holder(**members: Any) -> nn.Module:
    """A module with these attributes."""
    module = nn.Module()
    for name, value in members.items():
        setattr(module, name, value)
    return module


def params(*values: Tensor) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(value) for value in values)


def every_initialiser() -> nn.Module:
    """All of torch.nn.init, on wide and tall matrices."""
    names = ["orthogonal_", "xavier_normal_", "xavier_uniform_", "kaiming_normal_", "kaiming_uniform_"]
    names += ["trunc_normal_", "eye_", "normal_", "uniform_", "ones_", "zeros_"]
    found = []
    for name in names:
        for shape in ((5, 9), (17, 3)):
            found.append(nn.Parameter(torch.empty(shape)))
            getattr(nn.init, name)(found[-1])
    found += [nn.Parameter(torch.empty(20, 6)), nn.Parameter(torch.empty(4, 4, 3)), nn.Parameter(torch.empty(3, 3))]
    nn.init.sparse_(found[-3], 0.3)
    nn.init.dirac_(found[-2], 2)
    nn.init.constant_(found[-1], 0.5)
    return nn.ParameterList(found)


def changes_parts() -> nn.Module:
    """Rows, columns and masks of a weight, under `no_grad` and through `.data`."""
    e = nn.Embedding(7, 4)
    with torch.no_grad():
        e.weight[3].zero_()
        e.weight[1:3] *= 2
        e.weight[:, 1].normal_()
        e.weight[e.weight < -1] = 0.25
    e.weight.data[0] = 5
    e.weight.data.t()[2].uniform_()
    return e


def copies_another_layer() -> nn.Module:
    """A weight that starts as another's, which changes afterwards."""
    a, b, c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad():
        b.weight.copy_(a.weight.t())
        a.weight.zero_()
        a.bias.copy_(b.bias + 1)
        c.weight.lerp_(b.weight, 0.5)
    c.load_state_dict({**c.state_dict(), "bias": a.bias})
    return nn.ModuleList([a, b, c])


def sets_data() -> nn.Module:
    """`.data =` something new, from a list, from numpy, from a file."""
    a, b, c, d = (nn.Linear(4, 3) for _ in range(4))
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    a.weight.data, a.bias.data = torch.randn(3, 4), torch.tensor([1.0, 2, 3])
    b.weight.data = torch.from_numpy(array) * 2
    c.weight.data = torch.from_numpy(array.copy())
    c.bias.data.copy_(torch.as_tensor(np.ones(3)))
    file = io.BytesIO()
    torch.save({"weight": array.tolist(), "bias": c.bias.tolist()}, file)
    array[:] = -1
    file.seek(0)
    for name, value in torch.load(file).items():
        getattr(d, name).data = torch.tensor(value)
    return nn.ModuleList([a, b, c, d])


def parametrised() -> nn.Module:
    """Weight norm, orthogonal weights, spectral norm (both kinds), and pruning, which ranks values."""
    pruned, thinned = nn.Linear(6, 4), nn.Linear(6, 4)
    prune.l1_unstructured(pruned, "weight", 0.4)
    prune.random_unstructured(thinned, "weight", 3)
    return nn.ModuleList(
        [
            parametrizations.weight_norm(nn.Linear(4, 3)),
            parametrizations.orthogonal(nn.Linear(4, 4)),
            parametrizations.spectral_norm(nn.Linear(5, 3)),
            nn.utils.spectral_norm(nn.Linear(5, 3)),
            pruned,
            thinned,
        ]
    )


def deep_copies() -> nn.Module:
    """Copies of layers and buffers; the original changes afterwards."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    norm = nn.BatchNorm1d(4)
    copies = [copy.deepcopy(layer), copy.deepcopy(norm)]
    nn.init.zeros_(layer.linear1.weight)
    norm.running_mean.fill_(2)
    return nn.ModuleList([layer, norm, *copies])


def asks_for_values() -> nn.Module:
    """Python decides by what is in a tensor."""
    m = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    assert m[0].weight.device.type == "cpu" and m[0].weight.is_cpu and not m[0].weight.is_meta
    for rate, layer in zip(torch.linspace(0, 0.3, 3).tolist(), m, strict=True):
        nn.init.normal_(layer.weight, std=rate + 0.1)
    if m[0].weight.sum() > 0:
        nn.init.ones_(m[1].bias)
    assert torch.equal(m[0].weight, m[0].weight + 0)
    weight = m[1].weight.detach()
    m.found = params(
        torch.full((3,), m[2].weight.std().item()),
        torch.tensor(m[0].weight.detach().numpy().sum() * np.ones(3)),
        torch.tensor(np.asarray(m[0].weight.detach())),
        weight[weight > 0],
    )
    assert f"{weight.max():.3f}" == f"{weight.numpy().max():.3f}"
    m.register_buffer("indices", torch.nonzero(m[0].weight.flatten() > 0))
    m.register_buffer("unique", torch.unique(torch.tensor([3, 1, 3])))
    return m


def all_generators() -> nn.Module:
    """A generator of its own beside the default one; seeds and forks in between; every kind of random operation."""
    generator = torch.Generator().manual_seed(3)
    a = nn.Linear(4, 4)
    nn.init.normal_(a.weight, generator=generator)
    m = params(torch.randn(5, generator=generator), torch.rand(3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        m.b = nn.Linear(3, 3)
    m.c = nn.Linear(3, 3)
    torch.manual_seed(7)
    for name, value in {
        "perm": torch.randperm(7),
        "coin": torch.bernoulli(torch.full((30,), 0.4)),
        "pick": torch.multinomial(torch.rand(6), 3),
        "ints": torch.randint(0, 9, (4,)),
        "means": torch.normal(torch.arange(4.0), torch.ones(4)),
        "dropped": nn.functional.dropout(torch.ones(9)),
        "like": torch.randn_like(a.weight.detach()),
        "many": torch.empty(40).exponential_(),
        "columns": torch.randn(5, 7).t(),
    }.items():
        m.register_buffer(name, value)
    m.a = a
    return m


def views_and_ties() -> nn.Module:
    """Parameters that share memory, expand, transpose; buffers that are views, conjugates and parts of others."""
    whole = torch.randn(3, 4, 4)
    m = params(*whole, torch.randn(4, 5).t(), torch.randn(4, 1).expand(4, 3))
    m.one, m.other = nn.Linear(4, 5), nn.Linear(4, 5)
    m.other.weight = m.one.weight
    m.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)), persistent=False)
    m.register_buffer("real", torch.view_as_real(m.turns))
    m.register_buffer("conjugate", m.turns.conj())
    m.register_buffer("imaginary", m.turns.conj().imag.clone())
    return m


def dtypes_and_devices() -> nn.Module:
    """Conversions within the constructor, another default dtype, a device context."""
    a = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    b, c = nn.Linear(4, 4).half().float(), nn.Linear(3, 3).double().cpu().to("cpu")
    torch.set_default_dtype(torch.float64)
    try:
        d, thirds = nn.Linear(4, 4), torch.arange(4) / 3
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("cpu"):
        e = nn.Linear(2, 2)
    d.bias.data.cpu().to("cpu").fill_(3)  # the very same memory
    source = torch.randn(4)
    copied = source.to("cpu", copy=True)
    source.zero_()
    return nn.ModuleList([a, b, c, d, e, params(thirds, copied)])


def linear_algebra() -> nn.Module:
    """Factorisations, sorts and reductions; in-place changes of shape; `out=`; lists of tensors."""
    w = torch.randn(6, 4)
    flat = torch.randn(3, 5)
    flat.t_()
    flat[1:].mul_(3)
    out, grown = torch.empty(4), torch.empty(0)
    grown.resize_(4).fill_(2)
    torch.add(grown, grown, out=out)
    many = [torch.randn(3) for _ in range(3)]
    torch._foreach_mul_(many, 2.0)
    q, _ = torch.linalg.qr(w)
    u, s, _ = torch.linalg.svd(w, full_matrices=False)
    put = torch.zeros(4).index_put_((torch.tensor([1]),), torch.tensor([2.0]))
    mask = torch.ones(3, 3).masked_fill(torch.ones(3, 3).triu(1) == 1, -math.inf)
    return params(
        q, u, s, w.sort(0)[0], w.flatten().topk(3)[0], torch.cat([w, w * 2]) / w.norm(dim=0), put, mask, flat, out,
        grown, *many, torch.einsum("ij,ik->jk", w, w), torch.inverse(w.t() @ w),
    )  # fmt: skip


def lazy() -> nn.Module:
    """Shapes from a dry run within the constructor."""
    m = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyConv1d(3, 1))
    m(torch.randn(2, 4, 5))
    return m


def skips_initialisation() -> nn.Module:
    """torch's own way to build without initialising, by way of the meta device; then an initialisation of its own."""
    layer = nn.utils.skip_init(nn.Linear, 4, 3)
    for param in layer.parameters():
        nn.init.uniform_(param)
    layer.register_buffer("like", torch.ones_like(layer.weight) + layer.weight.new_full((3, 4), 2))
    return layer


HABITS: dict[str, Callable[[], nn.Module]] = {
    build.__name__: build
    for build in (
        every_initialiser,
        changes_parts,
        copies_another_layer,
        sets_data,
        parametrised,
        deep_copies,
        asks_for_values,
        all_generators,
        views_and_ties,
        dtypes_and_devices,
        linear_algebra,
        lazy,
        skips_initialisation,
    )
}
