"""Models whose blocks `auto_shard` has to find."""

from torch import Tensor, nn

from tests.helpers.models import TransformerBlock


class Attention(nn.Module):
    """Grouped-query attention as in Llama, without positions."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.size = dim // num_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * self.size, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * self.size, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(attended.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Gated, as in Llama."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class DecoderLayer(nn.Module):
    """A layer of `Llama`; with `num_experts` its feed-forward is the mean of that many."""

    def __init__(self, dim: int, num_experts: int = 0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim, 4, 2)
        self.experts = nn.ModuleList(FeedForward(dim, 3 * dim) for _ in range(num_experts or 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + sum(expert(self.norm2(x)) for expert in self.experts) / len(self.experts)


class Llama(nn.Module):
    """Tokens to logits; layers in a ModuleDict, as in torchtitan."""

    def __init__(self, depth: int = 3, dim: int = 8, vocab: int = 11, num_experts: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleDict({str(index): DecoderLayer(dim, num_experts) for index in range(depth)})
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))


class Translator(nn.Module):
    """torch's own encoder-decoder between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.transformer = nn.Transformer(8, 2, 2, 3, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.transformer(x, x.flip(1)))


def encoder() -> nn.Module:
    """torch's own encoder alone."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 2)


class Stage(nn.Module):
    """A stage of a hierarchical model: a stack, and a layer that changes the width."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(8, 2) for _ in range(depth))
        self.merge = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Many(nn.Module):
    """Holds the modules it is given; never run."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError
