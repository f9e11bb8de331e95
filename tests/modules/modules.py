"""Modules that nobody wrote a card for, each with example inputs in float64."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from einops import einsum, rearrange, repeat
from einops.layers.torch import Rearrange, Reduce
from torch import nn

Made = tuple[nn.Module, tuple[Any, ...]]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Own(nn.Module):
    """A function of inputs and of two layers, a matrix, a shift and further parts."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function, self.a, self.b = function, nn.Linear(8, 8), nn.Linear(8, 8)
        self.matrix, self.shift = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        for name, one in parts.items():
            setattr(self, name, one)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


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


class LinearAttention(nn.Module):
    """Attention whose decay is that of all pairs of tokens, after a table that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(numbers(6, 16), requires_grad=False)
        self.into, self.decay, self.out = nn.Linear(16, 48), nn.Linear(16, 4), nn.Linear(16, 16)
        self.scale = nn.Parameter(numbers(16))

    @torch.no_grad()
    def places(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.table[torch.arange(length)].sin(), self.scale.abs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places, size = self.places(x.shape[1])
        q, k, v = (one.unflatten(-1, (4, 4)).transpose(1, 2) for one in self.into(x + places).chunk(3, -1))
        sums = F.logsigmoid(self.decay(x)).cumsum(1).transpose(1, 2)
        pairs = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril().exp().tril()
        made = torch.baddbmm(x, (q @ k.mT * pairs @ v).transpose(1, 2).flatten(2), self.out.weight.expand(4, 16, 16))
        return torch.maximum(made, x) * self.scale / size


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


class GPTBlock(nn.Module):
    """A block as nanoGPT writes it: one product for queries, keys and values, which a split takes apart."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention, self.heads = nn.Linear(hidden, 3 * hidden), heads
        self.out, self.up, self.down = (
            nn.Linear(hidden, hidden), nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.size()
        q, k, v = self.attention(self.first(x)).split(hidden, dim=2)
        q, k, v = (one.view(batch, seq, self.heads, hidden // self.heads).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(batch, seq, hidden))
        return x + self.down(F.gelu(self.up(self.second(x))))


class VisionTransformer(nn.Module):
    """Patches, a class token, learned positions of an odd sequence, a block, and a head on the class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.block = nn.Conv2d(3, 16, 4, stride=4), GPTBlock(16, 4)
        self.token, self.positions = nn.Parameter(numbers(1, 1, 16)), nn.Parameter(numbers(1, 5, 16))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.block(x))[:, 0])


class EinopsVision(nn.Module):
    """Patches and a mean of tokens as layers of einops, attention in groups with its functions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Sequential(
            Rearrange("batch channel (row height) (column width) -> batch (row column) (channel height width)",
                      height=2, width=2),
            nn.Linear(12, 16),
        )  # fmt: skip
        self.query, self.keys_values = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.token, self.norm = nn.Parameter(numbers(16)), nn.LayerNorm(16)
        self.head = nn.Sequential(Reduce("batch seq hidden -> batch hidden", "mean"), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x)
        x = x + repeat(self.token, "hidden -> batch seq hidden", batch=x.shape[0], seq=x.shape[1])
        y = self.norm(x)
        q = rearrange(self.query(y), "batch seq (kv_heads q_group head_dim) -> batch kv_heads q_group seq head_dim",
                      kv_heads=2, q_group=2)  # fmt: skip
        k, v = rearrange(self.keys_values(y), "batch seq (kv kv_heads head_dim) -> kv batch kv_heads seq head_dim",
                         kv=2, kv_heads=2)  # fmt: skip
        scores = einsum(q, k, "batch kv_heads q_group seq head_dim, batch kv_heads kv_seq head_dim"
                              " -> batch kv_heads q_group seq kv_seq")  # fmt: skip
        mixed = einsum(torch.softmax(scores, -1), v, "batch kv_heads q_group seq kv_seq,"
                       " batch kv_heads kv_seq head_dim -> batch kv_heads q_group seq head_dim")  # fmt: skip
        x = x + rearrange(mixed, "batch kv_heads q_group seq head_dim -> batch seq (kv_heads q_group head_dim)")
        return self.head(x)


class SelectiveScan(nn.Module):
    """A block as of Mamba: a convolution of each channel along time, and a state that a loop carries on."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 32, bias=False), nn.Linear(16, 8, bias=False)
        self.convolution = nn.Conv1d(16, 16, 3, groups=16, padding=2)
        self.sizes, self.steps = nn.Linear(16, 2 + 2 * 4, bias=False), nn.Linear(2, 16)
        self.logs, self.skip = nn.Parameter(numbers(16, 4)), nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seq = x.shape[1]
        u, gate = self.into(x).chunk(2, dim=-1)
        u = F.silu(self.convolution(u.transpose(1, 2))[..., :seq].transpose(1, 2))
        rank, into, out = self.sizes(u).split([2, 4, 4], dim=-1)
        step = F.softplus(self.steps(rank))
        decay = torch.exp(-step[..., None] * torch.exp(self.logs))
        added = step[..., None] * into[:, :, None] * u[..., None]
        state, made = torch.zeros_like(added[:, 0]), []
        for time in range(seq):
            state = decay[:, time] * state + added[:, time]
            made.append((state * out[:, time, None]).sum(-1))
        return x + self.out((torch.stack(made, dim=1) + u * self.skip) * F.silu(gate))


class Experts(nn.Module):
    """A mixture of experts: each token goes to two, by masks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.up, self.down = nn.Parameter(numbers(4, 8, 16)), nn.Parameter(numbers(4, 16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chances = self.router(x).softmax(-1)
        best, chosen = torch.topk(chances, 2, dim=-1)
        weights = (F.one_hot(chosen, 4) * (best / best.sum(-1, keepdim=True))[..., None]).sum(-2)
        each = torch.einsum("bsef,efh->bseh", F.silu(torch.einsum("bsh,ehf->bsef", x, self.up)), self.down)
        return x + torch.einsum("bseh,bse->bsh", each, weights)


class SlotExperts(nn.Module):
    """A mixture of experts of one choice and a fixed number of slots: tokens are gathered, and added back."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = (
            nn.Linear(8, 2),
            nn.Parameter(numbers(2, 8, 16)),
            nn.Parameter(numbers(2, 16, 8)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        chances = self.router(tokens).softmax(-1)
        total = torch.zeros_like(tokens)
        for expert in range(2):
            best, places = torch.topk(chances[:, expert], 6)
            one = F.gelu(tokens.index_select(0, places) @ self.up[expert]) @ self.down[expert]
            total = total.index_add(0, places, one * best[:, None])
        return x + total.view_as(x)


class UNet(nn.Module):
    """Down and up again, with norms of groups and a long skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Sequential(nn.Conv2d(into, out, 3, padding=1), nn.GroupNorm(2, out), nn.SiLU())
            for into, out in ((4, 8), (8, 16), (24, 8))
        )
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        middle = F.interpolate(self.middle(F.max_pool2d(first, 2)), scale_factor=2, mode="nearest")
        return x + self.out(self.last(torch.cat([first, middle], dim=1)))


class Classifier(nn.Module):
    """A convnet with batch norm in training: its statistics are of the whole batch."""

    def __init__(self, *, tracked: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8, track_running_stats=tracked) for _ in range(2))
        self.head = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norms[0](self.first(x)))
        x = F.relu(self.norms[1](self.second(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class InPlace(nn.Module):
    """Parts of a tensor that are written over, and functions that change what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y[:, 0] = 0
        y[:, :, 2:5] += self.second(x)[:, :, 1:4]
        y += x
        return F.relu(y, inplace=True)


class Autoencoder(nn.Module):
    """A loss of numbers, which is the mean over the batch as well."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(16, 4), nn.Linear(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(torch.tanh(self.down(x - x.mean(0))))
        return F.mse_loss(y, x) + 0.1 * y.abs().mean()


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


def _t5() -> Made:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Block

    config = with_attention(
        T5Config, "eager", d_model=24, d_kv=6, num_heads=4, d_ff=48, relative_attention_num_buckets=8
    )
    return First(T5Block(config, has_relative_attention_bias=True)), (numbers(2, 10, 24),)


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
    "nanoGPT block": lambda: (GPTBlock(24, 4), (numbers(2, 10, 24),)),
    "ViT with a class token": lambda: (VisionTransformer(), (numbers(4, 3, 8, 8),)),
    "vision with layers of einops": lambda: (EinopsVision(), (numbers(4, 3, 4, 8),)),
    "T5 encoder block": _t5,
    "linear attention with decay": lambda: (LinearAttention(), (numbers(4, 6, 16),)),
    "selective scan": lambda: (SelectiveScan(), (numbers(2, 6, 8),)),
    "mixture of experts by masks": lambda: (Experts(), (numbers(2, 6, 8),)),
    "mixture of experts by slots": lambda: (SlotExperts(), (numbers(2, 6, 8),)),
    "U-Net": lambda: (UNet(), (numbers(2, 4, 8, 8),)),
    "convnet, batch norm in training": lambda: (Classifier(tracked=False), (numbers(4, 4, 6, 6), torch.arange(4))),
    "convnet with running statistics": lambda: (Classifier(tracked=True), (numbers(4, 4, 6, 6), torch.arange(4))),
    "convnet, batch norm as learned": lambda: (Classifier(tracked=True), (numbers(4, 4, 6, 6), torch.arange(4))),
    "changes in place": lambda: (InPlace(), (numbers(4, 6, 8),)),
    "autoencoder with loss": lambda: (Autoencoder(), (numbers(4, 6, 16),)),
}


TRAINED = ("convnet, batch norm in training", "convnet with running statistics")  # others are called as for a result

# Their norms and rotations are in FP32.
SINGLE = ("Llama layer", "Qwen3 layer", "Gemma 2 layer", "Phi-3 layer", "T5 encoder block")


def made(name: str) -> Made:
    """Return a module and its inputs, the same every time."""
    torch.manual_seed(0)
    module, inputs = MODULES[name]()
    if inputs[0].is_floating_point():
        inputs[0].requires_grad_()
    return module.double().train(name in TRAINED), inputs
