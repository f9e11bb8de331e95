"""The blocks of the decoder: in each, a child module for every forward operation of the graph, by the same name.

An engine replaces children by name, one by one or a run of them by one module (``Block.join``). What the graph delivers
from one to the next, a block hands over as it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.engine.decoder.attend import Attend
from autoshard.engine.decoder.experts import Choose, Combine, Dispatch, ExpertProduct, Queue, Share
from autoshard.engine.decoder.leaves import (
    Activate,
    Add,
    Factory,
    Lookup,
    Multiply,
    Norm,
    Product,
    Shift,
    Sizes,
    Turn,
    rotary_turns,
)
from autoshard.engine.decoder.loss import BelowTop, Exp, Log, Pick, Subtract, SumOfAll, ToFp32, Top, Total
from autoshard.spec.model import ModelSpec

# The run of children of a layer from the logits of experts to what these send back.
EXPERTS = ("router", "choose", "share", "queue", "dispatch", "gate", "up", "act", "product", "down", "combine")
# The run of children of the head from the logits to the loss of every token.
TOKEN_LOSS = ("logits_fp32", "top", "shifted", "power", "total", "log_total", "picked", "token_loss")


class Decoder(nn.Module):
    """A decoder-only transformer with its loss; every option of a model card, any device (``meta`` too), any dtype.

    Without ``expert_capacity`` no token is dropped.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        expert_capacity: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: Factory = {"device": device, "dtype": dtype}
        self.model = model
        self.embed = Embed(model, factory)
        self.layers = nn.ModuleList(Layer(model, factory, expert_capacity) for _ in range(model.num_layers))
        self.head = Head(model, factory)
        if model.tied_embeddings:
            self.head.unembed.weight = self.embed.embed.weight

    def forward(
        self, tokens: Tensor, labels: Tensor, token_weight: Tensor, positions: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the loss of a micro-batch, [batch, seq] each: the sum of token weights times token losses."""
        return self.head(self.hidden(tokens, positions, document_starts), labels, token_weight)

    def logits(self, tokens: Tensor, positions: Tensor | None = None, document_starts: Tensor | None = None) -> Tensor:
        """Return the logits of every token, [batch, seq, vocab]."""
        return self.head.logits(self.hidden(tokens, positions, document_starts))

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, document_starts: Tensor | None = None) -> Tensor:
        """Return what the last layer hands to the head; positions count up from 0 unless they are given.

        ``document_starts`` says for every token where its document starts in the sequence, [batch, seq]: attention
        stops there, and positions count from there. Without it all tokens of a sequence see those before them.
        """
        where = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        where = where if document_starts is None else where - document_starts
        x = self.embed(tokens, where)
        turns = rotary_turns(self.model, where, x.dtype) if self.model.positions == "rotary" else None
        for layer in self.layers:
            x = layer(x, turns, document_starts)
        return x


class Block(nn.Module):
    """What blocks share: products, with a bias where the model has one, and runs of children that one may replace."""

    def join(self, names: Sequence[str], module: nn.Module) -> None:
        """Put one module in the place of a run of children, some of which may have been joined before."""
        ends = range(1, len(names) + 1)
        inside = {"_".join(names[start:end]) for end in ends for start in range(end)}
        for name in inside.intersection(self._modules):
            delattr(self, name)
        self.add_module("_".join(names), module)

    def _joint(self, *names: str) -> nn.Module | None:
        """Return what has taken the place of a run, if anything has."""
        return self._modules.get("_".join(names))

    def _linear(self, name: str, out: Sizes, contracted: Sizes, factory: Factory, *, bias: bool) -> None:
        self.add_module(name, Product(out, contracted, factory))
        if bias:
            self.add_module(f"{name}_shift", Shift(out, factory))

    def _through(self, *names: str, x: Tensor) -> tuple[Tensor, ...]:
        """Multiply one input with several weights."""
        joint = self._joint(*names) if len(names) > 1 else None
        products = joint(x) if joint else [self.get_submodule(name)(x) for name in names]
        return tuple(self._shifted(name, product) for name, product in zip(names, products, strict=True))

    def _shifted(self, name: str, product: Tensor) -> Tensor:
        shift = self._modules.get(f"{name}_shift")
        return product if shift is None else shift(product)


class Embed(Block):
    """Words to vectors, and the positions' vectors where they are learned."""

    def __init__(self, model: ModelSpec, factory: Factory) -> None:
        super().__init__()
        self.embed = Lookup({"vocab": model.vocab, "hidden": model.hidden}, factory)
        self._learned = model.positions == "learned"
        if self._learned:
            self.place = Lookup({"positions": model.max_positions, "hidden": model.hidden}, factory)
            self.embed_add = Add()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden state of every token."""
        x = self.embed(tokens)
        return self.embed_add(x, self.place(positions)) if self._learned else x


class Layer(Block):
    """Attention and an MLP or experts, each behind a norm and beside a residual; children in the graph's order."""

    def __init__(self, model: ModelSpec, factory: Factory, expert_capacity: float | None = None) -> None:
        super().__init__()
        self._model = model
        self._make_attention(model, factory)
        self.attn_add = Add()
        self.mlp_norm = Norm(model, model.hidden, factory)
        if model.num_experts:
            self._make_experts(model, factory, expert_capacity)
        else:
            self._make_mlp(model, factory)
        self.mlp_add = Add()

    def forward(self, x: Tensor, turns: Tensor | None = None, document_starts: Tensor | None = None) -> Tensor:
        """Return the next hidden state; ``turns`` are those of ``rotary_turns``."""
        after = self.attn_add(x, self._attention(self.attn_norm(x), turns, document_starts))
        normed = self.mlp_norm(x if self._model.parallel_residual else after)
        made = self._experts(normed) if self._model.num_experts else self._mlp(normed)
        return self.mlp_add(after, made)

    def _make_attention(self, model: ModelSpec, factory: Factory) -> None:
        hidden = {"hidden": model.hidden}
        keys = {"kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
        queries = {"kv_heads": model.num_kv_heads, "q_group": model.queries_per_kv_head, "head_dim": model.head_dim}
        self.attn_norm = Norm(model, model.hidden, factory)
        for name, heads in {"q": queries, "k": keys, "v": keys}.items():
            self._linear(name, heads, hidden, factory, bias=model.qkv_bias)
        if model.qk_norm:
            self.q_norm, self.k_norm = (Norm(model, model.head_dim, factory) for _ in "qk")
        if model.positions == "rotary":
            self.q_rotary, self.k_rotary = Turn(), Turn()
        self.attend = Attend(model.window)
        self._linear("o", hidden, queries, factory, bias=model.out_bias)

    def _attention(self, x: Tensor, turns: Tensor | None, document_starts: Tensor | None) -> Tensor:
        query, key, value = self._through("q", "k", "v", x=x)
        if self._model.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if turns is not None:
            query, key = self.q_rotary(query, turns), self.k_rotary(key, turns)
        stops = () if document_starts is None else (document_starts,)  # other engines' attention knows no documents
        return self._through("o", x=self.attend(query, key, value, *stops))[0]

    def _make_mlp(self, model: ModelSpec, factory: Factory) -> None:
        hidden, ffn = {"hidden": model.hidden}, {"ffn": model.ffn}
        self._linear("up", ffn, hidden, factory, bias=model.mlp_bias)
        if model.gated_mlp:
            self._linear("gate", ffn, hidden, factory, bias=model.mlp_bias)
        self.act = Activate(model.activation)
        if model.gated_mlp:
            self.product = Multiply()
        self._linear("down", hidden, ffn, factory, bias=model.mlp_bias)

    def _mlp(self, x: Tensor) -> Tensor:
        joint = self._joint("up", "gate", "act", "product", "down")
        if joint:
            return joint(x)
        if self._model.gated_mlp:
            up, gate = self._through("up", "gate", x=x)
            inner = self._gated(up, gate)
        else:
            inner = self.act(self._through("up", x=x)[0])
        return self._through("down", x=inner)[0]

    def _gated(self, up: Tensor, gate: Tensor) -> Tensor:
        joint = self._joint("act", "product")
        return joint(gate, up) if joint else self.product(self.act(gate), up)

    def _make_experts(self, model: ModelSpec, factory: Factory, expert_capacity: float | None) -> None:
        inner = {"experts": model.num_experts, "ffn": model.ffn, "hidden": model.hidden}
        outer = {"experts": model.num_experts, "hidden": model.hidden, "ffn": model.ffn}
        self.router = Product({"experts": model.num_experts}, {"hidden": model.hidden}, factory)
        self.choose = Choose(model.experts_per_token)
        self.share = Share()
        self.queue = Queue(model, expert_capacity)
        self.dispatch = Dispatch()
        self.gate, self.up = ExpertProduct(inner, factory), ExpertProduct(inner, factory)
        self.act = Activate(model.activation)
        self.product = Multiply()
        self.down = ExpertProduct(outer, factory)
        self.combine = Combine()

    def _experts(self, x: Tensor) -> Tensor:
        joint = self._joint(*EXPERTS)
        if joint:
            return joint(x)
        chosen, expert = self.choose(self.router(x))
        row, rows = self.queue(expert)
        slots = self.dispatch(x, row, rows)
        inner = self.product(self.act(self.gate(slots, rows)), self.up(slots, rows))
        return self.combine(self.down(inner, rows), self.share(chosen), row)


class Head(Block):
    """The last norm, the logits, and the loss."""

    def __init__(self, model: ModelSpec, factory: Factory) -> None:
        super().__init__()
        self.final_norm = Norm(model, model.hidden, factory)
        self.unembed = Product({"vocab": model.vocab}, {"hidden": model.hidden}, factory)
        self.logits_fp32 = ToFp32()
        self.top, self.shifted, self.power = Top(), BelowTop(), Exp()
        self.total, self.log_total, self.picked = Total(), Log(), Pick()
        self.token_loss, self.weighted, self.loss = Subtract(), Multiply(), SumOfAll()

    def forward(self, x: Tensor, labels: Tensor, token_weight: Tensor) -> Tensor:
        """Return the loss."""
        return self.loss(self.weighted(self._token_losses(x, labels), token_weight))

    def _token_losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """Logits leave memory as soon as the next step has read them."""
        joint = self._joint(*TOKEN_LOSS)
        if joint:
            return joint(self.logits(x), labels)
        logits = self.logits_fp32(self.logits(x))
        shifted = self.shifted(logits, self.top(logits))
        del logits
        picked = self.picked(shifted, labels)
        return self.token_loss(self.log_total(self.total(self.power(shifted))), picked)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits in the model's own format."""
        return self.unembed(self.final_norm(x))


def graph_name(parameter: str) -> str:
    """Return how the graph's instances name a parameter of the decoder.

    >>> graph_name("layers.3.q.weight"), graph_name("head.final_norm.weight")
    ('layer.3.q.weight', 'head.0.final_norm.weight')
    """
    block, _, name = parameter.partition(".")
    return f"layer.{name}" if block == "layers" else f"{block}.0.{name}"


def state_of(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return arrays by the graph's names as a state dict of the decoder."""
    return {_parameter(name): torch.as_tensor(array) for name, array in weights.items()}


def _parameter(name: str) -> str:
    block, number, rest = name.split(".", 2)
    return f"layers.{number}.{rest}" if block == "layer" else f"{block}.{rest}"
