"""Modules that nobody wrote a card for, each with example inputs in float64."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

Made = tuple[nn.Module, tuple[Any, ...]]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class First(nn.Module):
    """The first result of a module that returns several, with what it needs beside the hidden state."""

    def __init__(self, layer: nn.Module, **more: Any) -> None:
        super().__init__()
        self.layer, self.more = layer, more

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        y = self.layer(x, *others, **self.more)
        return y[0] if isinstance(y, tuple) else y


class Rotated(nn.Module):
    """A decoder layer with its rotary embedding."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.layer(x, position_embeddings=self.rotary(x, positions), attention_mask=mask)
        return y[0] if isinstance(y, tuple) else y


def with_attention(config: Callable[..., Any], kind: str, **sizes: Any) -> Any:
    return config(**sizes, attn_implementation=kind)


def causal(size: int) -> torch.Tensor:
    return torch.triu(torch.full((size, size), -1e9, dtype=torch.float64), 1)[None, None]


class Attention(nn.Module):
    """Attention written by hand; queries, keys and values from one product, or from three."""

    def __init__(self, hidden: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        sizes = [3 * hidden] if fused else [hidden] * 3
        self.parts, self.out = nn.ModuleList(nn.Linear(hidden, size) for size in sizes), nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        parts = self.parts[0](x).split(hidden, dim=2) if self.fused else [part(x) for part in self.parts]
        q, k, v = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in parts)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.tokens = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.channels = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Language(nn.Module):
    """Tokens in, loss out; the table is used twice where it is tied."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(48, 16)
        self.last = nn.Linear(16, 32, bias=False)
        if tied:
            self.last.weight = self.table.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        x = x + self.down(F.silu(self.up(x)))
        return F.cross_entropy(self.last(x).flatten(0, 1), labels.flatten())


class Scan(nn.Module):
    """A gate that is summed along the sequence, as in a state space."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.decay = nn.Linear(16, 32), nn.Linear(32, 16), nn.Parameter(numbers(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.into(x)
        state = torch.cumsum(F.softplus(u) * torch.sigmoid(self.decay), dim=1)
        return x + self.out(state * torch.tanh(u))


class Skips(nn.Module):
    """Convolutions with a long skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = (
            nn.Conv2d(4, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(16, 4, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.down(x))
        return x + self.up(torch.cat([first, F.relu(self.middle(first))], dim=1))


def _llama() -> Made:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = with_attention(LlamaConfig, "sdpa", **sizes, num_hidden_layers=1)
    return Rotated(LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)), (
        numbers(3, 10, 48),
        torch.arange(10)[None],
    )


def _qwen() -> Made:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = with_attention(Qwen3Config, "sdpa", **sizes, num_hidden_layers=1)
    return Rotated(Qwen3DecoderLayer(config, 0), Qwen3RotaryEmbedding(config)), (
        numbers(2, 6, 32),
        torch.arange(6)[None],
    )


def _gemma() -> Made:
    from transformers import Gemma2Config
    from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer, Gemma2RotaryEmbedding

    sizes = {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
    }
    config = with_attention(Gemma2Config, "eager", **sizes, num_hidden_layers=2)
    made = Rotated(Gemma2DecoderLayer(config, 0), Gemma2RotaryEmbedding(config))
    return made, (numbers(2, 10, 24), torch.arange(10)[None], causal(10))


def _phi() -> Made:
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer, Phi3RotaryEmbedding

    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = with_attention(Phi3Config, "sdpa", **sizes, num_hidden_layers=1, pad_token_id=0)
    return Rotated(Phi3DecoderLayer(config, 0), Phi3RotaryEmbedding(config)), (numbers(2, 6, 24), torch.arange(6)[None])


def _gpt2() -> Made:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    return First(GPT2Block(with_attention(GPT2Config, "sdpa", n_embd=24, n_head=4), layer_idx=0)), (numbers(2, 10, 24),)


def _bert() -> Made:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = with_attention(BertConfig, "sdpa", hidden_size=24, num_attention_heads=4, intermediate_size=48)
    padding = torch.zeros(2, 1, 1, 10, dtype=torch.float64)
    padding[1, ..., 7:] = -1e9
    return First(BertLayer(config)), (numbers(2, 10, 24), padding)


def _vit() -> Made:
    from transformers import ViTConfig
    from transformers.models.vit.modeling_vit import ViTLayer

    config = with_attention(ViTConfig, "sdpa", hidden_size=24, num_attention_heads=4, intermediate_size=48)
    return First(ViTLayer(config)), (numbers(2, 9, 24),)  # a class token makes the sequence odd


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, 32, (4, 6))
    labels[0, :2] = -100  # which do not count
    return torch.randint(0, 32, (4, 6)), labels


MODULES: Mapping[str, Callable[[], Made]] = {
    "Llama layer": _llama,
    "Qwen3 layer": _qwen,
    "Gemma 2 layer": _gemma,
    "Phi-3 layer": _phi,
    "GPT-2 block": _gpt2,
    "BERT layer with padding": _bert,
    "ViT layer, odd sequence": _vit,
    "attention, fused product": lambda: (Attention(24, 4, fused=True), (numbers(2, 10, 24),)),
    "attention by hand": lambda: (Attention(24, 4, fused=False), (numbers(2, 10, 24),)),
    "MLP-Mixer": lambda: (Mixer(), (numbers(4, 6, 16),)),
    "square weight with residual": lambda: (Square(), (numbers(4, 6, 16),)),
    "language model with loss": lambda: (Language(tied=False), _tokens()),
    "language model, tied": lambda: (Language(tied=True), _tokens()),
    "scan along the sequence": lambda: (Scan(), (numbers(4, 6, 16),)),
    "convolutions with a skip": lambda: (Skips(), (numbers(4, 4, 6, 6),)),
}


def made(name: str) -> Made:
    """Return a module and its inputs, the same every time."""
    torch.manual_seed(0)
    module, inputs = MODULES[name]()
    if inputs[0].is_floating_point():
        inputs[0].requires_grad_()
    return module.double().eval(), inputs
