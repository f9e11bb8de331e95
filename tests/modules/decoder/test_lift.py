"""Decoders and encoders read as lines off their code: with the numbers that torch counts, or refused with a reason."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from autoshard.cost.compute import seen_share
from autoshard.errors import InputError
from autoshard.graph.block import OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.kinds.attention import Attend
from autoshard.graph.op import Array
from autoshard.graph.written import parse_lines
from autoshard.modules.capture import capture
from autoshard.modules.decoder.lift import lift_decoder
from autoshard.modules.decoder.reading import read_decoder
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload
from tests.modules.decoder import decoders
from tests.modules.decoder.decoders import EXPERTS, FAMILIES, SEQUENCES, TOKENS, Own, OwnLayer, of_transformers, own
from tests.modules.training.own_decoders import LENGTH, Encoder, EncoderLayer, Gpt, GptLayer, Smoothed, biased, talking
from tests.slower import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def lifted(module: nn.Module) -> ModelSpec:
    return lift_decoder(capture(module.eval(), [decoders.tokens()]), module, name="mine", source="its code")


@functools.cache
def known(name: str) -> ModelSpec:
    return lifted(on_meta({**FAMILIES, **EXPERTS, "Own": own}[name]))


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


def graph_of(model: ModelSpec) -> OpGraph:
    work = Workload(seq_len=TOKENS, global_batch=SEQUENCES, precision=Precision.named("bf16"))
    return decoder_graph(model, work, load_kernels("torch_engine"), micro_batch=SEQUENCES)


def test_dropout_that_code_adds_is_said():
    module: Any = on_meta(of_transformers("Llama"))
    module.model.layers[0].mlp.act_fn = nn.Sequential(module.model.layers[0].mlp.act_fn, nn.Dropout(0.25))
    traced = lifted(module).traced
    assert traced and "dropout in training is not in the plan (model.layers.0.mlp.act_fn.1: 0.25)" in traced.unlifted


@pytest.mark.parametrize("name", rest_is_slow(EXPERTS, 0, 3))
def test_experts_are_found_however_they_are_computed(name: str):
    found = known(name)
    assert (found.num_experts, found.experts_per_token, found.widths[0]) == (4, 2, 16 if "Qwen" in name else 88)


@pytest.mark.slow
def test_a_shared_expert_is_as_wide_as_it_is():
    assert known("Qwen2-MoE, with a shared expert").widths == (16, 32)


class Mixture(nn.Module):
    """Stacked experts, and one that all tokens go to, in one module."""

    def __init__(self, normalised: bool) -> None:
        super().__init__()
        self.router, self.normalised = nn.Linear(64, 4, bias=False), normalised
        self.up, self.down = nn.Parameter(torch.randn(4, 64, 16)), nn.Parameter(torch.randn(4, 16, 64))
        self.widen, self.narrow = nn.Linear(64, 24, bias=False), nn.Linear(24, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 64)
        weights, chosen = self.router(flat).softmax(-1).topk(3, -1)
        weights = weights / weights.sum(-1, keepdim=True) if self.normalised else weights
        shares = torch.zeros(len(flat), 4, dtype=x.dtype, device=x.device).scatter(1, chosen, weights)
        inner = nn.functional.silu(torch.bmm(flat.expand(4, -1, -1), self.up))
        mixed = (torch.bmm(inner, self.down) * shares.t().unsqueeze(-1)).sum(0).view(x.shape)
        return mixed + self.narrow(nn.functional.silu(self.widen(x)))


class WithMixture(OwnLayer):
    def __init__(self, normalised: bool) -> None:
        super().__init__()
        self.mixture = Mixture(normalised)
        del self.widen, self.narrow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attended(self.first(x))
        return x + self.mixture(self.second(x))


@pytest.mark.parametrize(
    ("normalised", "notes"),
    [(True, ()), (False, ("layer: the weights of the chosen experts are planned as if they were normalised",))],
)
def test_a_shared_expert_in_the_module_of_the_experts_is_a_part_of_the_plan(normalised: bool, notes: tuple[str, ...]):
    module = on_meta(Own)
    module.blocks = nn.ModuleList(on_meta(lambda: WithMixture(normalised)) for _ in range(2))
    model = lifted(module)
    assert model.traced and model.traced.unlifted == notes and model.widths == (16, 24)
    assert model.num_parameters == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", rest_is_slow(["Own", *FAMILIES], 3))
def test_a_decoder_has_the_numbers_and_the_flops_that_torch_counts(name: str):
    make = {**FAMILIES, "Own": own}[name]
    module, model = make(), known(name)
    assert model.num_parameters == sum(one.numel() for one in module.parameters())
    if config := getattr(module, "config", None):
        config._attn_implementation = "eager"  # torch counts nothing for its fused attention
    with FlopCounterMode(display=False) as counter:
        module.eval()(decoders.tokens("cpu"))
    graph = graph_of(model)
    ours = sum(block.repeat * block.matrix_flops("F", graph.sizes) for block in graph.blocks)
    counts = counter.get_flop_counts()
    angles = sum(sum(of.values()) for path, of in counts.items() if path.endswith("rotary_emb"))  # of all positions
    assert ours == sum(counts["Global"].values()) - angles


@pytest.mark.parametrize("kv_heads", rest_is_slow([4, 8, 2, 1], 1))
def test_one_product_makes_queries_keys_and_values_of_any_number_of_heads(kv_heads: int):
    """With twice as many queries as keys a part of keys is half of that of queries, and none of its heads."""
    make = of_transformers("Phi3", num_key_value_heads=kv_heads)
    model = lifted(on_meta(make))
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (8, kv_heads, 8)
    assert model.traced and model.traced.unlifted == ()
    assert model.num_parameters == sum(parameter.numel() for parameter in make().parameters())


NOTES: Mapping[str, tuple[str, ...]] = {
    "Cohere": ("head: mul_own (mul) is planned by its work alone",),
    "Gemma 2": (
        "embedding: mul_own (mul) is planned by its work alone",
        "layer: tanh of the scores of attention is not in the plan",
        "1 of 2 layers see only 8 tokens; each layer is planned with the mean time of all",
        "head: div_tanh_mul_own (div, tanh, mul) is planned by its work alone",
    ),
    "OLMo 2": (
        "layer: q_own (pow, mean, add, rsqrt, mul) is planned by its work alone",
        "layer: k_own (pow, mean, add, rsqrt, mul) is planned by its work alone",
    ),
    "Phi-3": (),
    "StableLM": (),
}


@pytest.mark.parametrize("name", rest_is_slow(["StableLM", "Gemma 2", "Phi-3", "OLMo 2", "Cohere"], 1, 4))
def test_what_is_not_in_the_plan_is_said(name: str):
    model = known(name)
    assert model.traced and model.traced.unlifted == NOTES[name]


@pytest.mark.slow
def test_the_table_of_the_documentation_is_what_is_found(section_of_any_module: Callable[[str, Sequence[str]], None]):
    rows = ["| decoder | not in the plan, or planned by its work alone |", "| --- | --- |"]
    for name in sorted({**FAMILIES, **EXPERTS}):
        traced = read_decoder(on_meta({**FAMILIES, **EXPERTS}[name])).traced
        said = "; ".join(traced.unlifted) if traced else "nothing: it is the model of its config"
        rows.append(f"| {name} | {said or 'nothing'} |")
    section_of_any_module("decoders", rows)


@pytest.mark.slow
def test_a_window_that_all_layers_have_is_theirs():
    model = known("Gemma 3")
    attends = [op.kind for op in graph_of(model).block("layer").select("micro_batch", "F") if op.name == "attend"]
    assert model.window == 8 and attends == [Attend(window=8)]


def test_layers_with_several_windows_have_the_mean_of_the_pairs_that_each_window_lets_see():
    (attend,) = (op.kind for op in graph_of(known("Gemma 2")).block("layer").ops if op.name == "attend")
    assert attend == Attend(windows=((8, 1), (None, 1)), unfused=True) and known("Gemma 2").window is None
    for length, stretches in ((24, 1), (4096, 2)):
        each = [seen_share(Attend(window=window), length, stretches, 1) for window in (8, None)]
        assert seen_share(Attend(windows=((8, 1), (None, 1))), length, stretches, 1) == pytest.approx(sum(each) / 2)
        assert seen_share(Attend(windows=((8, 5), (None, 1))), length, stretches, 1) == pytest.approx(
            (5 * each[0] + each[1]) / 6
        )


# -- the lines compute what the code computes ----------------------------------------------------------


HF_ATTENTION = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
}  # fmt: skip
GATED = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
PLAIN = {"embed": "model.embed_tokens", "final_norm": "model.norm", "unembed": "lm_head", "layers": "model.layers"}
PATHS: Mapping[str, Mapping[str, str]] = {  # by family: of what the lines call otherwise
    "StableLM": {**HF_ATTENTION, **GATED, **PLAIN},
    "StarCoder 2": {**HF_ATTENTION, **PLAIN, "up": "mlp.c_fc", "down": "mlp.c_proj"},
    "Phi": {
        **HF_ATTENTION, **PLAIN, "o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2",
        "final_norm": "model.final_layernorm",
    },
    "Own": {
        "embed": "words", "place": "places", "q": "query", "k": "key", "v": "value", "o": "mix", "up": "widen",
        "down": "narrow", "attn_norm": "first", "mlp_norm": "second", "final_norm": "norm", "unembed": "out",
        "layers": "blocks",
    },
}  # fmt: skip


def logits_of_lines(module: nn.Module, model: ModelSpec, paths: Mapping[str, str], words: Array) -> Array:
    """Run the lines in numpy with the module's weights, layer by layer."""
    graph, weights = graph_of(model), dict(module.named_parameters(remove_duplicate=False))
    carried: Array = np.zeros(0)
    for number, (name, block) in enumerate(graph.instances()):
        values: dict[str, Array] = {
            "x": carried, "tokens": words, "positions": np.arange(TOKENS), "key_positions": np.arange(TOKENS)
        }  # fmt: skip
        before = f"{paths['layers']}.{number - 1}." if name.startswith("layer") else ""
        for tensor in block.parameters:
            own_name, _, which = tensor.name.rpartition(".")
            weight = weights[before + paths[own_name.removesuffix("_shift")] + "." + which]
            values[tensor.name] = weight.detach().numpy().reshape([graph.sizes[dim] for dim in tensor.dims])
        ops = block.select("micro_batch", "F")
        ends = [place for place, op in enumerate(ops) if op.name.startswith("unembed") and op.outputs[0] == op.name]
        ops = ops if name != "head.0" else ops[: ends[-1] + 1]  # the loss follows
        block.run(ops, graph.sizes, values)
        carried = values[ops[-1].outputs[0]]
    return carried


@pytest.mark.parametrize("name", rest_is_slow(["Own", "Phi", "StableLM", "StarCoder 2"], 2, 2))
def test_the_lines_compute_what_the_code_computes(name: str):
    torch.manual_seed(0)
    module = {**FAMILIES, "Own": own}[name]().double().eval()
    words = torch.randint(0, decoders.VOCABULARY, (SEQUENCES, TOKENS))
    expected = module(words)
    ours = logits_of_lines(module, lifted(module), PATHS[name], words.numpy())
    theirs = getattr(expected, "logits", expected).detach().numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max())  # some norms and angles are of FP32


# -- what only looks like an operation of the planner ----------------------------------------------------


class Leaning(nn.Module):
    """What a norm reads and gives, with a mean and a weight, and yet none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.weight * x.square().mean(-1, keepdim=True)


class LeaningLayer(OwnLayer):
    """A layer with what is no norm before its MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.second = Leaning()


class Placed(nn.Module):
    """A product to which a table of positions is added, where others turn."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.product(x).view(*x.shape[:2], 8, 8)
        return made + torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None, None]


class PlacedLayer(OwnLayer):
    """A layer whose queries know their positions by a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Placed()


@pytest.mark.parametrize(("layer", "own_line"), [(LeaningLayer, "square_mean_mul_own"), (PlacedLayer, "q_own")])
def test_what_only_looks_like_a_norm_or_a_rotation_is_work_that_is_said(layer: type[OwnLayer], own_line: str):
    model = lifted(on_meta(lambda: with_layers(layer, layer)))
    assert model.traced and any(note.startswith(f"layer: {own_line} (") for note in model.traced.unlifted)
    assert any(line.startswith(f"{own_line} = Opaque") for line in model.traced.layer)


class Twice(Own):
    """Every layer hands two tensors on."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = second = self.words(tokens)
        blocks: Any = self.blocks
        for block in blocks:
            first, second = block(first + second), block.first(second)
        return self.out(self.norm(first + second))


def test_a_second_tensor_goes_on_beside_the_hidden_state():
    model = lifted(on_meta(Twice))
    assert model.traced and any(" along beside the hidden state" in note for note in model.traced.unlifted)


# -- what is refused, and why -----------------------------------------------------------------------


class Open(OwnLayer):
    """Attention that sees all tokens."""

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], 8, 8)
        query, key, value = (one(x).view(shape).transpose(1, 2) for one in (self.query, self.key, self.value))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, seen)
        return self.mix(mixed.transpose(1, 2).reshape(x.shape))


def with_layers(*kinds: type[OwnLayer]) -> nn.Module:
    module = Own()
    module.blocks = nn.ModuleList(kind() for kind in kinds)
    return module


REFUSED: Mapping[str, tuple[Any, str]] = {
    "attention that is not causal": (lambda: with_layers(Open, Open), "blocks.0: sees what comes after a token, which"),
    "experts that no topk chooses": (
        of_transformers("Phimoe", num_local_experts=4, num_experts_per_tok=2),
        "model.layers.0.mlp.experts: computes grouped_mm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", rest_is_slow(REFUSED, 1, 2))
def test_what_is_no_stack_of_equal_layers_is_refused_with_the_reason(name: str):
    make, reason = REFUSED[name]
    with pytest.raises(InputError) as refused:
        lifted(on_meta(make))
    assert str(refused.value).startswith(reason)


PLANNED = "its own loss is planned as the cross-entropy of its logits"
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 48,
    "max_position_embeddings": 24, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip


class Masked(nn.Module):
    """An encoder of transformers that tells the words which it hides."""

    def __init__(self, kind: str, **more: Any) -> None:
        super().__init__()
        import transformers

        encoder: Any = getattr(transformers, f"{kind}ForMaskedLM")
        self.net = encoder(encoder.config_class(**{**_SIZES, **more}))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = (7 * tokens + torch.arange(tokens.shape[1], device=tokens.device)) % 4 == 0
        logits = self.net(input_ids=torch.where(hidden, 3, tokens)).logits
        return functional.cross_entropy(logits.flatten(0, 1), torch.where(hidden, tokens, -100).flatten())


def bert() -> nn.Module:
    return Masked("Bert")


def modern_bert() -> nn.Module:
    special = {f"{name}_token_id": 1 for name in ("cls", "bos", "sep", "eos")}
    return Masked("ModernBert", local_attention=8, global_attn_every_n_layers=2, **special)


def electra() -> nn.Module:
    return Masked("Electra", embedding_size=32)


def roberta() -> nn.Module:
    return Masked("Roberta", type_vocab_size=1)


ENCODERS: dict[str, tuple[Callable[[], nn.Module], Attend]] = {
    "BERT": (bert, Attend(sees_all=True)),
    "ModernBERT": (modern_bert, Attend(windows=((5, 2), (None, 1)), sees_all=True)),
    "ELECTRA": (electra, Attend(sees_all=True)),
    "RoBERTa": (roberta, Attend(sees_all=True)),
    "written here": (Encoder, Attend(sees_all=True)),
}


@pytest.mark.parametrize("name", rest_is_slow(ENCODERS, 0, 1))
def test_encoders_are_read_with_all_their_weights_and_attention_to_both_sides(name: str):
    make, attend = ENCODERS[name]
    module = make()
    model = read_decoder(module, LENGTH)
    assert model.traced and PLANNED in model.traced.unlifted
    assert model.traced.num_parameters == sum(parameter.numel() for parameter in module.parameters())
    (found,) = (op.kind for op in parse_lines(model.traced.layer) if op.name == "attend")
    assert found == attend


def test_a_decoder_with_a_loss_of_its_own_is_the_one_without():
    with_loss, plain = (read_decoder(module, LENGTH) for module in (Smoothed(), Gpt()))
    assert with_loss.traced and plain.traced
    assert (with_loss.traced.embed, with_loss.traced.layer, with_loss.traced.head) == (
        plain.traced.embed, plain.traced.layer, plain.traced.head
    )  # fmt: skip
    assert with_loss.traced.unlifted == (*plain.traced.unlifted, PLANNED)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("by_hand", [True, False])
def test_weights_that_are_added_to_scores_hide_nothing(is_causal: bool, by_hand: bool):
    model = read_decoder(biased(is_causal=is_causal, by_hand=by_hand), LENGTH)
    assert model.traced
    (kind,) = (op.kind for op in parse_lines(model.traced.layer) if op.name == "attend")
    assert kind == Attend(sees_all=not is_causal, biased=True, unfused=by_hand)
    assert seen_share(Attend(biased=True), 12, 1, 1) == seen_share(Attend(unfused=True), 12, 1, 1) == 1


def test_attention_that_mixes_heads_is_planned_by_all_of_its_work():
    module = talking()
    model = read_decoder(module, LENGTH)
    assert model.traced and not [note for note in model.traced.unlifted if "FLOPs" in note]
    assert model.traced.num_parameters == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("table", ["torch_engine", "torch_engine_gpu", "neuron_native"])
def test_attention_that_is_written_out_holds_its_scores(table: str):
    flash, by_hand = (load_kernels(table).entry("attend", biased=True, unfused=unfused) for unfused in (False, True))
    assert flash and by_hand and by_hand.saves and not by_hand.skips_masked
    assert by_hand.saves.count("scores") > (flash.saves or ()).count("scores")


@pytest.mark.parametrize("table", ["torch_engine", "torch_engine_gpu"])
def test_attention_that_adds_numbers_is_no_flash_kernel(table: str):
    plain, biased_kernel = (load_kernels(table).entry("attend", biased=biased) for biased in (False, True))
    assert plain and biased_kernel and plain.skips_masked and not biased_kernel.skips_masked
    assert biased_kernel.score_bytes.forward > plain.score_bytes.forward


class OfClasses(Encoder):
    """Tells what a whole sequence is."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.out(self.norm(x).mean(1)), tokens[:, 0])


class Short(Encoder):
    """Tells all words but the last."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.out(self.norm(x[:, :-1])).mT, tokens[:, 1:])


class HalfBlind(Encoder):
    """Its second layer sees only what comes before a token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([EncoderLayer(0.0), GptLayer(0.0)])


def test_what_is_no_loss_of_tokens_is_refused():
    with pytest.raises(InputError, match=r"module: makes its loss of no logits of each token, \[batch, sequence, voc"):
        read_decoder(OfClasses(), LENGTH)
    with pytest.raises(InputError, match=rf"makes its loss of \[batch {LENGTH - 1} 48\], not of the logits of each"):
        read_decoder(Short(), LENGTH)
    with pytest.raises(InputError, match=r"layers\.1: does not see what comes after a token, and layers\.0 does\. All"):
        read_decoder(HalfBlind(), LENGTH)


@pytest.mark.parametrize("window", [None, 1, 3, 40])
def test_the_share_of_pairs_seen_is_that_of_the_mask(window: int | None):
    kind, where = Attend(window=window, sees_all=True), np.arange(12)
    assert seen_share(kind, 12, 1, 1) == pytest.approx(kind.visible(where, where).mean())
