"""The whole step in numpy against transformers in float64: loss, every gradient, norm, new weights."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from autoshard.graph.block import OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.kinds.optimizer import AdamW
from autoshard.graph.op import Array
from autoshard.spec.hf_config import spec_from_config
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload
from tests.reference_step import StepResult, evaluate_step
from tests.small_configs import SMALL_FAMILIES, small_config

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
overrides: Any = pytest.importorskip("torch.overrides")

Read = Callable[[str], Array]  # a transformers parameter, or its gradient, by name
BATCH, SEQ, ACCUMULATED, RATE = 2, 7, 2, 1e-2
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
OF_3_1 = {"head_dim": 8, "rope_theta": 50.0, "rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    **{family: small_config(family) for family in SMALL_FAMILIES},
    "llama, tied, scaled as in 3.1": small_config("llama", **OF_3_1),
}


class InFloat64(overrides.TorchFunctionMode):
    """Lets transformers compute in float64 where its source says float32: norms, angles, softmax, loss."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = [torch.float64 if arg is torch.float32 else arg for arg in args]
        named = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*wide, **named)


# -- which of their tensors each of ours is --------------------------------------------------------


def llama_layer(read: Read, at: str, model: ModelSpec) -> Iterator[tuple[str, Array]]:
    kv, group, size, hidden = model.num_kv_heads, model.queries_per_kv_head, model.head_dim, model.hidden
    heads = {"q": (kv, group, size), "k": (kv, size), "v": (kv, size)}
    for name, shape in heads.items():
        yield f"{name}.weight", read(f"{at}.self_attn.{name}_proj.weight").reshape(*shape, hidden)
        if model.qkv_bias:
            yield f"{name}_shift.bias", read(f"{at}.self_attn.{name}_proj.bias").reshape(*shape)
    for name in ("q_norm", "k_norm") if model.qk_norm else ():
        yield f"{name}.weight", read(f"{at}.self_attn.{name}.weight")
    yield "o.weight", read(f"{at}.self_attn.o_proj.weight").reshape(hidden, kv, group, size)
    yield "attn_norm.weight", read(f"{at}.input_layernorm.weight")
    yield "mlp_norm.weight", read(f"{at}.post_attention_layernorm.weight")
    if not model.num_experts:
        yield from ((f"{name}.weight", read(f"{at}.mlp.{name}_proj.weight")) for name in ("gate", "up", "down"))
        return
    both = read(f"{at}.mlp.experts.gate_up_proj")  # experts, gate then up, hidden
    yield "router.weight", read(f"{at}.mlp.gate.weight")
    yield "gate.weight", both[:, : model.ffn]
    yield "up.weight", both[:, model.ffn :]
    yield "down.weight", read(f"{at}.mlp.experts.down_proj")


def gpt2_layer(read: Read, at: str, model: ModelSpec) -> Iterator[tuple[str, Array]]:
    """Its products are stored transposed, and query, key and value follow each other."""
    heads, size, hidden = model.num_heads, model.head_dim, model.hidden
    weights = read(f"{at}.attn.c_attn.weight").T.reshape(3, heads, size, hidden)
    biases = read(f"{at}.attn.c_attn.bias").reshape(3, heads, size)
    yield from split_heads(weights, biases)
    yield "o.weight", read(f"{at}.attn.c_proj.weight").T.reshape(hidden, heads, 1, size)
    yield "o_shift.bias", read(f"{at}.attn.c_proj.bias")
    for ours, theirs in (("up", "mlp.c_fc"), ("down", "mlp.c_proj")):
        yield f"{ours}.weight", read(f"{at}.{theirs}.weight").T
        yield f"{ours}_shift.bias", read(f"{at}.{theirs}.bias")
    for ours, theirs in (("attn_norm", "ln_1"), ("mlp_norm", "ln_2")):
        yield from ((f"{ours}.{part}", read(f"{at}.{theirs}.{part}")) for part in ("weight", "bias"))


def neox_layer(read: Read, at: str, model: ModelSpec) -> Iterator[tuple[str, Array]]:
    """Query, key and value follow each other inside each head."""
    heads, size, hidden = model.num_heads, model.head_dim, model.hidden
    weights = read(f"{at}.attention.query_key_value.weight").reshape(heads, 3, size, hidden).swapaxes(0, 1)
    biases = read(f"{at}.attention.query_key_value.bias").reshape(heads, 3, size).swapaxes(0, 1)
    yield from split_heads(weights, biases)
    yield "o.weight", read(f"{at}.attention.dense.weight").reshape(hidden, heads, 1, size)
    yield "o_shift.bias", read(f"{at}.attention.dense.bias")
    for ours, theirs in (("up", "mlp.dense_h_to_4h"), ("down", "mlp.dense_4h_to_h")):
        yield f"{ours}.weight", read(f"{at}.{theirs}.weight")
        yield f"{ours}_shift.bias", read(f"{at}.{theirs}.bias")
    for ours, theirs in (("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
        yield from ((f"{ours}.{part}", read(f"{at}.{theirs}.{part}")) for part in ("weight", "bias"))


def split_heads(weights: Array, biases: Array) -> Iterator[tuple[str, Array]]:
    """Every query head has a key/value head of its own."""
    for index, name in enumerate("qkv"):
        one = (slice(None), None) if name == "q" else (slice(None),)
        yield f"{name}.weight", weights[index][one]
        yield f"{name}_shift.bias", biases[index][one]


def ours_from(read: Read, family: str, model: ModelSpec) -> dict[str, Array]:
    """Name and shape what ``read`` gives as the graph does; right for weights and for gradients alike."""
    rows: dict[str, tuple[str, str, str, Any]] = {
        "gpt2": ("transformer.wte", "transformer.h", "transformer.ln_f", gpt2_layer),
        "gpt_neox": ("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", neox_layer),
    }
    embed, layers, norm, layer = rows.get(family, ("model.embed_tokens", "model.layers", "model.norm", llama_layer))
    found = {
        "embed.0.embed.weight": read(f"{embed}.weight"),
        "head.0.final_norm.weight": read(f"{norm}.weight"),
    }
    if model.positions == "learned":
        found["embed.0.place.weight"] = read("transformer.wpe.weight")
    if model.norm_has_bias:
        found["head.0.final_norm.bias"] = read(f"{norm}.bias")
    if not model.tied_embeddings:
        found["head.0.unembed.weight"] = read("lm_head.weight")
    for number in range(model.num_layers):
        parts: Iterator[tuple[str, Array]] = layer(read, f"{layers}.{number}", model)
        found |= {f"layer.{number}.{name}": array for name, array in parts}
    return found


# -- one step of each ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Theirs:
    """A step of a transformers module; the last three are read by parameter name."""

    loss: float
    norm: float
    num_parameters: int
    weights: Read
    gradients: Read
    new_weights: Read


def theirs(config: Mapping[str, Any], tokens: Array) -> Theirs:
    fields = {key: value for key, value in config.items() if key != "model_type"}
    with InFloat64():
        options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float64}
        hf_config = transformers.AutoConfig.for_model(config["model_type"], **fields)
        module = transformers.AutoModelForCausalLM.from_config(hf_config, **options)
        parameters = dict(module.named_parameters())
        generator = torch.Generator().manual_seed(5)
        for parameter in parameters.values():
            assert parameter.dtype == torch.float64
            parameter.data.normal_(0, 0.4, generator=generator)
        old = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        batch = torch.tensor(tokens)
        loss = module(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in parameters.items()}
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    kind = AdamW()
    betas = (kind.beta1, kind.beta2)
    tables = [one for one in parameters.values() if one.ndim > 1]  # norms and biases are vectors, and nothing else is
    vectors = [one for one in parameters.values() if one.ndim == 1]
    kinds = [{"params": tables, "weight_decay": kind.decay}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(kinds, lr=RATE, betas=betas, eps=kind.eps).step()
    reads = [lambda name, of=of: of[name].detach().numpy() for of in (old, gradients, parameters)]
    size = sum(parameter.numel() for parameter in parameters.values())
    return Theirs(float(loss.detach()), float(norm), size, *reads)


def build(config: Mapping[str, Any]) -> tuple[ModelSpec, OpGraph]:
    model = spec_from_config(config, name="m", source="made for this test")
    # Room for every token at every expert: nothing is dropped, as in transformers.
    capacity = model.num_experts / model.experts_per_token if model.num_experts else None
    workload = Workload(
        seq_len=SEQ,
        global_batch=BATCH * ACCUMULATED,
        precision=Precision.named("bf16"),
        expert_capacity=capacity,
    )
    return model, decoder_graph(model, workload, load_kernels("torch_cpu"), micro_batch=BATCH)


def ours(graph: OpGraph, weights: dict[str, Array], tokens: Array) -> StepResult:
    """Transformers shifts the labels itself and has none for the last token: ours has weight 0 there."""
    labels = np.concatenate([tokens[:, 1:], np.zeros_like(tokens[:, :1])], axis=1)
    weight = np.full(tokens.shape, 1 / (len(tokens) * (SEQ - 1)))
    weight[:, -1] = 0
    for other, owner in graph.tied.items():
        weights[other.replace(".", ".0.", 1)] = weights[owner.replace(".", ".0.", 1)]
    where = {"positions": np.arange(SEQ), "key_positions": np.arange(SEQ)}
    parts = [slice(start, start + BATCH) for start in range(0, len(tokens), BATCH)]
    batches = [{"tokens": tokens[p], "labels": labels[p], "token_weight": weight[p], **where} for p in parts]
    return evaluate_step(graph, weights, batches, learning_rate=RATE)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_equals_that_of_the_transformers_module(name: str):
    config = CONFIGS[name]
    tokens = np.random.default_rng(3).integers(0, config["vocab_size"], (BATCH * ACCUMULATED, SEQ))
    module = theirs(config, tokens)
    model, graph = build(config)
    result = ours(graph, ours_from(module.weights, config["model_type"], model), tokens)
    assert result.loss == pytest.approx(module.loss, rel=1e-12)
    assert result.norm == pytest.approx(module.norm, rel=1e-10)
    gradients = ours_from(module.gradients, config["model_type"], model)
    assert sum(gradient.size for gradient in gradients.values()) == module.num_parameters
    assert result.gradients.keys() == gradients.keys()
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    tiny = [parameter for parameter, gradient in gradients.items() if np.abs(gradient).max() < 1e-9 * largest]
    assert [parameter for parameter in tiny if not parameter.endswith("k_shift.bias")] == []  # all but rounding
    for parameter, gradient in gradients.items():
        distance = np.abs(result.gradients[parameter] - gradient).max() / largest
        assert distance <= 1e-9, f"{parameter} is off by {distance}"
    for parameter, weight in ours_from(module.new_weights, config["model_type"], model).items():
        np.testing.assert_allclose(result.weights[parameter], weight, rtol=0, atol=1e-7, err_msg=parameter)


def test_every_instance_of_a_block_gets_its_weights():
    model, graph = build(CONFIGS["mixtral"])
    assert [name for name, _ in graph.instances()] == ["embed.0", "layer.0", "layer.1", "head.0"]
    assert graph.sizes["slots"] == BATCH * SEQ
    assert graph.num_parameters() == model.num_parameters
