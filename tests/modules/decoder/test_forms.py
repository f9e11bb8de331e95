"""Decoders as researchers write them: lifted with the code's FLOPs and parameters, or refused with the reason."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (as torch's users call it)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autoshard.errors import InputError
from autoshard.modules.decoder.reading import decoder_of, read_decoder, with_constants
from tests.modules.decoder import decoders
from tests.modules.decoder.decoders import LAYERS, TOKENS, VOCABULARY, Own, OwnLayer, of_transformers
from tests.modules.decoder.test_lift import graph_of, lifted, on_meta, with_layers
from tests.slower import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
WORK = "is planned by its work alone"
BIASED = (
    "layer: what makes the numbers that are added to the scores of attention is not in the plan; attention is planned "
    "by a kernel that reads these, and skips nothing"
)


def causal(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


def eight(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], -1, 8).transpose(1, 2)


class Layer(OwnLayer):
    """Layers here differ in the heads, in what is done with the scores, or in the whole forward pass."""

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return eight(self.query(x)), eight(self.key(x)), eight(self.value(x))

    def mixed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        scores = (query @ key.mT).masked_fill(~seen, float("-inf"))
        return scores.softmax(-1) @ value

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.mixed(*self.heads(x), causal(x)).transpose(1, 2).reshape(x.shape))


class Grouped(Layer):
    """Four queries for each head of keys, which are copied for them."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(64, 16), nn.Linear(64, 16)

    def heads(self, x: torch.Tensor) -> Any:
        query, key, value = super().heads(x)
        return query, key.repeat_interleave(4, 1), value.repeat_interleave(4, dim=1)


class Tiled(Grouped):
    """The same in another order."""

    def heads(self, x: torch.Tensor) -> Any:
        query, key, value = Layer.heads(self, x)
        return query, key.repeat(1, 4, 1, 1), value.repeat(1, 4, 1, 1)


class Gated(Layer):
    """What was attended has a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 64)

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mixed(*self.heads(x), causal(x)).transpose(1, 2).reshape(x.shape)
        return self.mix(mixed * torch.sigmoid(self.gate(x)))


class LowRank(Layer):
    """Queries are made by two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first_of_two, self.second_of_two = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def heads(self, x: torch.Tensor) -> Any:
        query = self.query(x) + self.second_of_two(self.first_of_two(x))
        return eight(query), eight(self.key(x)), eight(self.value(x))


class Adapter(nn.Module):
    """A matrix with another one of low rank beside it, as in LoRA."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.base, self.scale = nn.Linear(ins, outs), 0.5
        self.narrow, self.wide = nn.Linear(ins, 4, bias=False), nn.Linear(4, outs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.wide(self.narrow(x)) * self.scale


class Adapted(Layer):
    """Some matrices have adapters, and norms the eps of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.mix = (Adapter(64, 64) for _ in range(4))
        self.widen = Adapter(64, 88)
        self.first, self.second = nn.RMSNorm(64), nn.RMSNorm(64)


class Joined(Layer):
    """Queries, keys and values are one product, whose bias is joined of parts: keys have none, as in BEiT."""

    def __init__(self) -> None:
        super().__init__()
        del self.query, self.key, self.value
        self.all_three = nn.Linear(64, 192, bias=False)
        self.query_bias, self.value_bias = (nn.Parameter(torch.ones(64)) for _ in range(2))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(
            x, self.all_three.weight, torch.cat([self.query_bias, torch.zeros_like(self.query_bias), self.value_bias])
        )

    def heads(self, x: torch.Tensor) -> Any:
        return self.product(x).view(*x.shape[:2], 3, -1, 8).permute(2, 0, 3, 1, 4)


class Stretched(Layer):
    """Queries, keys and values are one product, which is scaled by numbers of its own before it is divided."""

    def __init__(self) -> None:
        super().__init__()
        del self.query, self.key, self.value
        self.all_three, self.scale = nn.Linear(64, 192), nn.Parameter(torch.ones(192))

    def heads(self, x: torch.Tensor) -> Any:
        return (self.all_three(x) * self.scale).view(*x.shape[:2], 3, -1, 8).permute(2, 0, 3, 1, 4)


class Scaled(Layer):
    """A number scales each branch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * super().attended(x)


class ByHand(Layer):
    """Norms that the forward pass of the layer itself computes."""

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.second
        self.weight, self.bias, self.other = (nn.Parameter(torch.ones(64)) for _ in range(3))

    def first(self, x: torch.Tensor) -> torch.Tensor:
        left = x - x.mean(-1, keepdim=True)
        return left / (left.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight + self.bias

    def second(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.other


class Plain(Layer):
    """A norm without a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.second(self.first(x + self.attended(normed) + self.narrow(F.gelu(self.widen(normed)))))


class Biased(Layer):
    """Positions are told by what is added to the scores."""

    def mixed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(seen), device=seen.device)
        added = (places - places[:, None])[None] * 0.5 ** torch.arange(8, device=seen.device)[:, None, None]
        return (query @ key.mT + added.masked_fill(~seen, float("-inf"))).softmax(-1) @ value


class Convolved(Layer):
    """A convolution over tokens before the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(64, 64, 4, groups=64, padding=3)

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        return super().attended(self.near(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))


class Wide(Layer):
    """A wider MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(64, 96), nn.Linear(96, 64)


class Placed(Own):
    """Positions are a parameter of their own, and words have two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(1, 64, 64))
        self.hashed = nn.Embedding(50, 64)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(tokens) + self.hashed(tokens * 31 % 50) + self.places[:, : tokens.shape[1]]


class Attended(Layer):
    """The attention of a layer alone."""

    def __init__(self) -> None:
        super().__init__()
        del self.second, self.widen, self.narrow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attended(self.first(x))


class AddedOutside(Own):
    """The decoder adds what layers make to what they take: behind each layer, the last one too."""

    def __init__(self) -> None:
        super().__init__()
        mlps = (nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 88), nn.GELU(), nn.Linear(88, 64)) for _ in range(LAYERS))
        self.blocks = nn.ModuleList(nn.ModuleList([Attended(), mlp]) for mlp in mlps)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(tokens)

    def layered(self, x: torch.Tensor) -> torch.Tensor:
        for parts in cast(Any, self.blocks):
            for part in parts:
                x = part(x) + x
        return x


class Deep(Own):
    """The head is an MLP, and the table of words is narrow and has rows for no word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.wider, self.more = nn.Embedding(VOCABULARY + 8, 16), nn.Linear(16, 64), nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wider(self.words(tokens)) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.out(F.gelu(self.more(self.norm(self.layered(x)))))


def of(layer: type[OwnLayer]) -> Callable[[], nn.Module]:
    return lambda: with_layers(layer, layer)


def added_outside() -> nn.Module:
    module = AddedOutside()
    del module.places
    return module


LIFTED: Mapping[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "copied keys": (of(Grouped), ()),
    "tiled keys": (of(Tiled), ()),
    "a gate": (of(Gated), (f"layer: sigmoid_own (sigmoid) {WORK}",)),
    "queries of two products": (of(LowRank), ()),
    "adapters": (of(Adapted), ("layer: mul_own and 4 more (mul) are planned by their work alone",)),
    "a number": (of(Scaled), (f"layer: mul_own (mul) {WORK}",)),
    "norms by hand": (of(ByHand), ()),
    "scores with positions": (of(Biased), (BIASED,)),
    "a convolution": (of(Convolved), (f"layer: conv1d_slice_own (conv1d, slice) {WORK}",)),
    "places of its own": (Placed, (f"embedding: slice_add_own (slice, add) {WORK}",)),
    "a deep head": (Deep, ()),
    "sums outside of layers": (added_outside, ()),
    "another width": (lambda: with_layers(Layer, Wide), ()),
    "experts chosen by what is no weight": (
        of_transformers(
            "Glm4Moe", n_routed_experts=4, num_experts_per_tok=3, n_group=1, topk_group=1, first_k_dense_replace=0,
            moe_intermediate_size=16,
        ),
        ("layer: its experts are chosen by sigmoids, and planned as if by a softmax",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", rest_is_slow(LIFTED, 3, 5))
def test_a_form_has_the_numbers_and_the_flops_of_its_code(name: str):
    make, notes = LIFTED[name]
    model, module = lifted(on_meta(make)), make().eval()
    assert model.traced and model.traced.unlifted == notes
    assert model.num_parameters == sum(one.numel() for one in module.parameters())
    if model.num_experts:  # torch counts no products of experts
        assert model.experts_per_token == 3
        return
    with FlopCounterMode(display=False) as counter:
        module(decoders.tokens("cpu"))
    graph = graph_of(model)
    ours = sum(block.repeat * block.matrix_flops("F", graph.sizes) for block in graph.blocks)
    assert ours == counter.get_total_flops()


def test_a_sum_behind_the_last_layer_is_of_that_layer_so_that_all_are_alike():
    assert len(lifted(on_meta(added_outside)).layer_counts) == 1


class Casting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x.float()


def test_code_that_switches_casts_off_has_the_module_made_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = "from tests.modules.decoder.test_forms import Casting, Own\n\ndef make():\n    module = Own()\n"
    (tmp_path / "mine.py").write_text(f"{source}    module.norm = Casting()\n    return module\n")
    monkeypatch.chdir(tmp_path)
    assert decoder_of("mine.py:make", TOKENS).num_layers == LAYERS


def test_a_table_of_positions_as_long_as_the_sequence_is_in_the_plan_whole():
    module: Any = on_meta(Placed)
    module.places = nn.Parameter(torch.empty(96, 64, device="meta"))
    model = read_decoder(module, 96)
    assert model.traced and not any("parameters" in note for note in model.traced.unlifted)
    assert model.num_parameters == sum(parameter.numel() for parameter in module.parameters())


class Routed(Layer):
    """Experts in a loop, each for all tokens, with shares of which most are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(64, 4), nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.router(x).softmax(-1).topk(2)
        for number, expert in enumerate(self.experts):
            x = x + (shares * (chosen == number)).sum(-1, keepdim=True) * expert(x)
        return super().forward(x)


class Linear(Layer):
    """Scores are no probabilities."""

    def mixed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(seen), device=seen.device)
        decay = 0.5 ** (places[:, None] - places).clamp(min=0) * seen
        return (query @ key.mT * decay) @ value


def test_a_dim_that_no_product_sums_over_and_heads_are_no_width_of_an_mlp():
    assert read_decoder(on_meta(of(Routed)), TOKENS).widths == (88,)
    assert read_decoder(on_meta(of(Linear)), TOKENS).ffn == 88


class Reading(Own):
    """Layers of a second list attend to keys and values that the first list makes once."""

    def __init__(self) -> None:
        super().__init__()
        self.others, self.pair = nn.ModuleList([PaddedLayer(), PaddedLayer()]), nn.Linear(64, 128)

    def layered(self, x: torch.Tensor) -> torch.Tensor:
        x = super().layered(x)
        key, value = map(eight, self.pair(x).chunk(2, -1))
        for layer in self.others:
            reader = cast(Any, layer)
            mixed = reader.mixed(eight(reader.query(x)), key, value, causal(x))
            x = x + reader.mix(mixed.transpose(1, 2).reshape(x.shape))
        return x


def test_attention_to_what_goes_along_is_planned_by_its_work():
    traced = read_decoder(on_meta(Reading), TOKENS).traced
    assert traced and any(note.startswith("layer_2: matmul_") and note.endswith(WORK) for note in traced.unlifted)


def test_layers_that_are_compiled_are_read_as_they_were_before():
    module: Any = on_meta(of(Wide))
    plain = read_decoder(module, TOKENS)
    module.blocks = nn.ModuleList(cast(nn.Module, torch.compile(block)) for block in module.blocks)
    assert read_decoder(module, TOKENS) == plain


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_rank_of_an_adapter_is_no_width_of_an_mlp(is_frozen: bool):
    module: Any = with_layers(Adapted, Adapted)
    for name, weight in module.blocks.named_parameters():
        weight.requires_grad_(not is_frozen or ".wide." in name or ".query.narrow." in name)
    assert read_decoder(with_constants(module), TOKENS).widths == (88,)


def test_a_bias_that_is_joined_of_parts_is_that_of_queries_keys_and_values():
    model = read_decoder(on_meta(of(Joined)), TOKENS)
    assert model.traced and not [line for line in model.traced.layer if "Opaque" in line]
    shifted = [line.split(" = ")[0] for line in model.traced.layer if "_shift = Add of" in line]
    assert {"q_shift", "k_shift", "v_shift"} <= {*shifted}
    (note,) = model.traced.unlifted
    assert "has 128 parameters more" in note and "some are constants, or used more than once" in note


def test_queries_that_are_planned_by_their_work_have_both_dims_of_their_heads():
    model = read_decoder(on_meta(of(Stretched)), TOKENS)
    assert model.traced and (model.num_heads, model.num_kv_heads, model.head_dim) == (8, 8, 8)
    (queries,) = (line for line in model.traced.layer if line.startswith("q_own = "))
    assert '"dims": ["batch", "seq", "kv_heads", "q_group", "head_dim"]' in queries


def test_what_sums_over_a_dim_needs_it_whole():
    model = read_decoder(on_meta(of(Plain)), TOKENS)
    assert model.traced and "pow_mean_add_own" in model.traced.layer[0]
    assert '"whole": ["hidden"]' in model.traced.layer[0]


class Blind(Layer):
    """Attention without a mask."""

    def mixed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value)


class Uneven(Layer):
    """Half of the heads see less."""

    def mixed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        near = (seen & seen.flip(0, 1).triu(-3)).expand(4, *seen.shape)
        each = torch.cat([seen.expand(4, *seen.shape), near])
        return F.scaled_dot_product_attention(query, key, value, each)


class OneTensor(Layer):
    """Keys are the values too."""

    def mixed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, key, is_causal=True)


def sharing() -> nn.Module:
    first, second = Layer(), Layer()
    second.widen.weight = first.widen.weight
    module = Own()
    module.blocks = nn.ModuleList([first, second])
    return module


class Changed(Own):
    """What is returned is made of the logits."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.change(super().forward(tokens))


class Again(Own):
    """All layers run twice."""

    def layered(self, x: torch.Tensor) -> torch.Tensor:
        return super().layered(super().layered(x))


class Marked(Own):
    """Words are ones and zeros."""

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.one_hot(tokens, VOCABULARY).float() @ self.words.weight


REFUSED: Mapping[str, tuple[Callable[[], nn.Module], str]] = {
    "no mask": (of(Blind), "blocks.0: sees what comes after a token, which logits are trained to tell"),
    "heads that see less": (
        of(Uneven),
        "blocks.0: has attention that sees neither all tokens nor a window of one size",
    ),
    "other heads": (
        lambda: with_layers(Tiled, Layer),
        "blocks.1: has 8 heads of keys and values, and blocks.0 has 2. All layers",
    ),
    "a weight of two layers": (sharing, "blocks.1: uses blocks.0.widen.weight, as blocks.0 does"),
    "keys that are values": (of(OneTensor), "blocks.0: brings tokens together by a softmax that is no attention"),
    "layers again": (Again, "blocks: does not run its layers in order, each once"),
    "the last token": (lambda: Changed(lambda x: x[:, -1]), "module: returns neither logits of each token, [batch"),
    "some words": (lambda: Changed(lambda x: x[..., :90]), "module: returns [batch seq 90], not the logits"),
    "no table": (Marked, "module: looks no tokens up in a table of weights"),
    "all in one list": (
        lambda: nn.Sequential(nn.Embedding(96, 64), Layer(), Layer(), nn.Linear(64, 96)),
        "3: is followed by nothing; the list must hold layers only",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_plan_can_say_is_refused_with_the_reason(name: str):
    make, reason = REFUSED[name]
    with pytest.raises(InputError) as refused:
        read_decoder(on_meta(make), TOKENS)
    assert str(refused.value).startswith(reason)


def test_a_weight_that_is_used_twice_is_said():
    class Twice(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = F.gelu(self.widen(self.second(x + self.attended(self.first(x)))))
            return x + inner @ self.widen.weight + self.narrow(inner)

    traced = read_decoder(on_meta(of(Twice)), TOKENS).traced
    assert traced and any("parameters more than the" in note for note in traced.unlifted)


class Buffered(Layer):
    """The mask of nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Buffer(torch.tril(torch.ones(64, 64)))

    def mixed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return super().mixed(query, key, value, self.bias[: len(seen), : len(seen)] == 1)


def buffered() -> nn.Module:
    return with_layers(Buffered, Buffered)


def test_a_mask_of_a_buffer_has_the_module_made_with_its_numbers():
    assert decoder_of("tests.modules.decoder.test_forms:buffered", 32).num_layers == 2


class OnHost(Layer):
    """Makes its mask of the last tokens where torch makes tensors, as scripts do that know one device."""

    def mixed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        places = torch.arange(query.shape[-2])
        distance = places[:, None] - places
        return super().mixed(query, key, value, (distance >= 0) & (distance < 8))


def on_host() -> nn.Module:
    return with_layers(OnHost, OnHost)


def test_a_mask_that_is_made_on_the_host_has_the_module_made_there():
    assert decoder_of("tests.modules.decoder.test_forms:on_host", 32).num_layers == 2


class Padded(nn.Module):
    """Which tokens there are is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.out = nn.Embedding(VOCABULARY, 64), nn.LayerNorm(64), nn.Linear(64, VOCABULARY)
        self.blocks = nn.ModuleList(PaddedLayer() for _ in range(2))

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, causal(x) & attention_mask[:, None, None, :].bool())
        return self.out(self.norm(x))


class PaddedLayer(Layer):
    """A layer that is given its mask."""

    def forward(self, x: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        (seen,) = masks
        x = x + self.mix(self.mixed(*self.heads(self.first(x)), seen).transpose(1, 2).reshape(x.shape))
        return x + self.narrow(F.gelu(self.widen(self.second(x))))


def test_a_mask_of_an_input_is_that_of_whole_sequences():
    module = on_meta(Padded)
    inputs = {name: decoders.tokens() for name in ("tokens", "attention_mask")}
    assert read_decoder(module, inputs=inputs).window is None
