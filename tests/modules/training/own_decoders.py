"""Decoders as people write them, none of them a card: GPT with tied words, Llama with tables and masks, a mixture."""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

WORDS, LENGTH, WIDTH, HEADS = 48, 16, 32, 4


class GptLayer(nn.Module):
    is_causal = True

    def __init__(self, dropped: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop: nn.Module = nn.Dropout(dropped)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, -1)
        query, key, value = (
            part.view(shape).transpose(1, 2) for part in self.attention(self.first(x)).split(WIDTH, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.drop(self.mix(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.narrow(functional.gelu(self.widen(self.second(x))))


class Gpt(nn.Module):
    """Positions are learned, and the head has the weights of the embedding."""

    def __init__(self, layers: int = 4, dropped: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.norm = nn.ModuleList(GptLayer(dropped) for _ in range(layers)), nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.2)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))

    def layered(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.layered(self.embedded(tokens)))


class SequenceFirst(Gpt):
    """Hidden states are [sequence, batch, hidden], in layers of torch; positions are a table that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        del self.layers

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = (self.words(tokens) + self.table).transpose(0, 1)
        where = torch.arange(len(x), device=x.device)
        x = self.encoder(x, mask=where[:, None] < where)
        return self.out(self.norm(x.transpose(0, 1)))


class Summing(Gpt):
    """Every layer reads the sum of all before it; the head scales it by a weight of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        results = [self.words(tokens)]
        for layer in self.layers:
            results.append(layer(torch.zeros_like(results[0]) + sum(results)))
        return self.out(self.norm(self.share * sum(results)))


class Recalling(Gpt):
    """Every layer reads the embedding as well, and so does the head."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = x = self.words(tokens)
        for layer in self.layers:
            x = layer(x + 0.5 * first)
        return self.out(self.norm(x) + first)


class Smoothed(Gpt):
    """Returns its own loss: smoothed labels, and a penalty of large logits."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits, labels = super().forward(tokens)[:, :-1], tokens[:, 1:]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return loss + 1e-2 * torch.logsumexp(logits, -1).pow(2).mean()


class Told(nn.Module):
    """Is told the next tokens, of which it leaves some out."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.gpt = Gpt(layers)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits, kept = self.gpt(tokens), torch.where(targets % 5 == 0, -1, targets)
        return functional.cross_entropy(logits.flatten(0, 1), kept.flatten(), ignore_index=-1)


class Penalised(Told):
    """Each layer gives a share of the loss beside its hidden state, as those with experts do."""

    class Layer(GptLayer):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore
            x = super().forward(x)
            return x, x.pow(2).mean()

    def __init__(self) -> None:
        super().__init__()
        self.gpt.layers = nn.ModuleList(self.Layer(0.0) for _ in range(4))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        gpt, penalty, x = self.gpt, torch.zeros(()), self.gpt.embedded(tokens)
        for layer in gpt.layers:
            x, share = layer(x)
            penalty = penalty + share
        return functional.cross_entropy(gpt.out(gpt.norm(x)).flatten(0, 1), targets.flatten()) + 0.1 * penalty


class Foretelling(Told):
    """A second head tells the tokens after the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.gpt.layered(self.gpt.embedded(tokens))
        loss = functional.cross_entropy(self.gpt.out(x).flatten(0, 1), targets.flatten())
        return loss + 0.3 * functional.cross_entropy(self.second(x[:, :-1]).flatten(0, 1), targets[:, 1:].flatten())


class ChoosingLayer(GptLayer):
    """Each expert chooses tokens of all sequences."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.into, self.back = (nn.Parameter(torch.randn(4, *shape) / 8) for shape in ((WIDTH, 48), (48, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        tokens = x.flatten(0, 1)
        shares, places = self.router(tokens).softmax(-1).t().topk(len(tokens) // 2, -1)
        results = torch.bmm(functional.gelu(torch.bmm(tokens[places], self.into)), self.back) * shares[..., None]
        return x + torch.zeros_like(tokens).index_add(0, places.flatten(), results.flatten(0, 1)).view_as(x)


class Choosing(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ChoosingLayer() for _ in range(4))


class EncoderLayer(GptLayer):
    is_causal = False


class Encoder(Gpt):
    """Tells words that it hides, by what stands before and after them, through a head of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(0.0) for _ in range(4))
        self.turn, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WORDS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        where = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = (7 * tokens + where) % 4 == 0
        x = self.words(torch.where(hidden, 0, tokens)) + self.places(where)
        for layer in self.layers:
            x = layer(x)
        logits = self.out(self.norm(functional.gelu(self.turn(x)))) + self.bias
        losses = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
        counted = hidden.flatten().to(losses.dtype)
        return (losses * counted).sum() / counted.sum().clamp(min=1)


class BiasedLayer(GptLayer):
    """Weights by distance are added to the scores of attention, which is written by hand or is torch's."""

    def __init__(self, *, is_causal: bool, by_hand: bool) -> None:
        super().__init__(0.0)
        self.is_causal, self.by_hand = is_causal, by_hand
        self.table = nn.Embedding(2 * LENGTH - 1, HEADS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        where = torch.arange(x.shape[1], device=x.device)
        bias = self.table(where[:, None] - where + LENGTH - 1).permute(2, 0, 1)
        if self.is_causal:
            bias = bias.masked_fill(where[:, None] < where, -torch.inf)
        shape = (*x.shape[:2], HEADS, -1)
        heads = (part.view(shape).transpose(1, 2) for part in self.attention(self.first(x)).split(WIDTH, dim=2))
        query, key, value = heads
        if self.by_hand:
            mixed = (query @ key.mT / query.shape[-1] ** 0.5 + bias).softmax(-1) @ value
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias[None])
        x = x + self.mix(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(functional.gelu(self.widen(self.second(x))))


def biased(*, is_causal: bool, by_hand: bool) -> nn.Module:
    """Layers with weights for distances, which see what comes before a token or all."""
    module = Gpt() if is_causal else Encoder()
    module.layers = nn.ModuleList(BiasedLayer(is_causal=is_causal, by_hand=by_hand) for _ in range(4))
    return module


class TalkingLayer(EncoderLayer):
    """Convolutions of one place mix the heads, before the softmax and behind it."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.before, self.behind = (nn.Conv2d(HEADS, HEADS, 1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, -1)
        heads = (part.view(shape).transpose(1, 2) for part in self.attention(self.first(x)).split(WIDTH, dim=2))
        query, key, value = heads
        mixed = self.behind(self.before(query @ key.mT / 3).softmax(-1)) @ value
        x = x + self.mix(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(functional.gelu(self.widen(self.second(x))))


def talking() -> nn.Module:
    """An encoder whose heads talk to each other."""
    module = Encoder()
    module.layers = nn.ModuleList(TalkingLayer() for _ in range(4))
    return module


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale


class Gated(nn.Module):
    def __init__(self, inner: int = 44) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*size, bias=False) for size in ((WIDTH, inner), (WIDTH, inner), (inner, WIDTH))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Wide(Gated):
    """The MLP of a first dense layer, which is wider than experts and than others."""

    def __init__(self) -> None:
        super().__init__(72)


class Squared(nn.Module):
    """Another kind of MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 44), nn.Linear(44, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.relu(self.up(x)))


class Experts(nn.Module):
    """Every expert computes every token, and two of four count."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, WIDTH, 12) / 6), nn.Parameter(torch.randn(4, 12, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(self.router(x).softmax(-1), 2, -1)
        shares = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype, device=x.device)
        shares = shares.scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        inner = functional.silu(torch.einsum("bsh,ehf->bsef", x, self.up))
        return torch.einsum("bsef,efh,bse->bsh", inner, self.down, shares)


class LlamaLayer(nn.Module):
    def __init__(self, mlp: Callable[[], nn.Module], window: int | None) -> None:
        super().__init__()
        self.first, self.second, self.window = RootMeanSquare(), RootMeanSquare(), window
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.mlp = mlp()

    def attended(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        def heads(product: nn.Linear) -> torch.Tensor:
            return product(normed).view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)

        def turned(y: torch.Tensor) -> torch.Tensor:
            left, right = y.chunk(2, -1)
            return y * cos + torch.cat((-right, left), -1) * sin

        normed = self.first(x)
        query, key, value = turned(heads(self.query)), turned(heads(self.key)), heads(self.value)
        key, value = (part.repeat_interleave(2, 1) for part in (key, value))
        if self.window:
            mask = mask & torch.ones_like(mask).triu(1 - self.window)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))

    def forward(self, x: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        x = self.attended(x, *tables)
        return x + self.mlp(self.second(x))


class AttentionLayer(LlamaLayer):
    """Attention alone."""

    def __init__(self) -> None:
        super().__init__(nn.Identity, None)
        del self.second, self.mlp

    def forward(self, x: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        return self.attended(x, *tables)


class MlpLayer(nn.Module):
    """An MLP alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = RootMeanSquare(), Gated()

    def forward(self, x: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Llama(nn.Module):
    """Tables of positions and the mask are made once, and every layer reads them."""

    def __init__(
        self, mlp: Callable[[], nn.Module] = Gated, windows: tuple[int | None, ...] = (None, None, None, None)
    ) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), RootMeanSquare()
        self.layers = nn.ModuleList(LlamaLayer(mlp, window) for window in windows)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        half = WIDTH // HEADS // 2
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(half) / half), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        where, x = torch.arange(tokens.shape[1], device=tokens.device), self.words(tokens) * 2.0
        angles = (where[:, None] * self.frequencies).repeat(1, 2)
        cos, sin, mask = angles.cos().to(x.dtype), angles.sin().to(x.dtype), where[:, None] >= where
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.out(self.norm(x))


class Typed(Llama):
    """The mask is added to scores in FP32, and is made in the format of the hidden state, as Meta writes it."""

    class Layer(LlamaLayer):
        def attended(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            def heads(product: nn.Linear) -> torch.Tensor:
                return product(normed).view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)

            normed = self.first(x)
            query, key, value = heads(self.query), heads(self.key), heads(self.value)
            key, value = (part.repeat_interleave(2, 1) for part in (key, value))
            scores = query @ key.transpose(2, 3) * (WIDTH // HEADS) ** -0.5 + mask
            mixed = scores.float().softmax(-1).type_as(query) @ value
            return x + self.out(mixed.transpose(1, 2).reshape(x.shape))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(Gated, None) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length, x = tokens.shape[1], self.words(tokens)
        mask = torch.full((length, length), float("-inf"), device=tokens.device).triu(1).type_as(x)
        for layer in self.layers:
            x = layer(x, mask, mask, mask)
        return self.out(self.norm(x)).float()


class Mixed(Llama):
    """A Llama with these layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @classmethod
    def of_mlps(cls, *mlps: Callable[[], nn.Module]) -> "Mixed":
        return cls(*(LlamaLayer(mlp, None) for mlp in mlps))


def gpt() -> nn.Module:
    return Gpt()


def dropping() -> Gpt:
    return Gpt(dropped=0.25)


def smoothed() -> nn.Module:
    return Smoothed()


def told() -> nn.Module:
    return Told()


def encoder() -> nn.Module:
    return Encoder()


def llama() -> nn.Module:
    return Llama()


def windows() -> nn.Module:
    return Llama(windows=(None, 4, None, 4))


def mixture() -> nn.Module:
    return Llama(Experts)


OWN: Mapping[str, Callable[[], nn.Module]] = {"gpt": gpt, "llama": llama, "windows": windows, "mixture": mixture}


def first_dense() -> nn.Module:
    return Mixed.of_mlps(Wide, Experts, Experts, Experts)


def turns() -> nn.Module:
    return Mixed.of_mlps(Gated, Experts, Gated, Experts)


def widths() -> nn.Module:
    return Mixed.of_mlps(Wide, Gated, Gated, Wide)


def kinds_of_mlp() -> nn.Module:
    return Mixed.of_mlps(Squared, Gated, Gated, Squared)


def halves() -> nn.Module:
    return Mixed(AttentionLayer(), MlpLayer(), AttentionLayer(), MlpLayer())


def recalling() -> nn.Module:
    module = Recalling()
    del module.places
    return module


class Logits(nn.Module):
    """A module of transformers, of whose results the logits are returned."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module(input_ids=tokens).logits


def state_space(name: str) -> nn.Module:
    import transformers

    more = {"head_dim": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 4} if name == "Mamba2" else {}
    config = getattr(transformers, f"{name}Config")
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "vocab_size": WORDS, "state_size": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return Logits(getattr(transformers, f"{name}ForCausalLM")(config(**sizes, **more, **ends)))


UNLIKE: Mapping[str, Callable[[], nn.Module]] = {  # whose layers are of two kinds
    "first dense": first_dense, "dense by turns": turns, "widths": widths, "kinds of MLP": kinds_of_mlp,
    "halves": halves, "recalling": recalling, "sequence first": SequenceFirst, "summing": Summing,
}  # fmt: skip

LOSSES: Mapping[str, Callable[[], nn.Module]] = {
    "smoothed": smoothed, "encoder": encoder, "told": told, "foretelling": Foretelling
}  # fmt: skip
