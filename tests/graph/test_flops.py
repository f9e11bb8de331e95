"""FLOPs and parameters of the graph against closed forms, the model cards, and torch's own counter."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autoshard.graph.block import OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.fusing import recompute
from autoshard.spec.hf.config import spec_from_config
from autoshard.spec.kernels import Kernels, load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.model_parts import LinearAttention
from autoshard.spec.workload import Precision, Workload
from tests.kit import small_config
from tests.slower import rest_is_slow

FAMILIES = ("llama", "gpt_neox", "deepseek_v3", "deepseek_v2", "gpt2", "qwen3", "mixtral", "gpt_oss")
GraphOf = Callable[..., OpGraph]


def graph(model: ModelSpec, seq_len: int, batch: int = 1, capacity: float | None = None) -> OpGraph:
    workload = Workload(
        seq_len=seq_len, global_batch=batch, precision=Precision.named("bf16"), expert_capacity=capacity
    )
    return decoder_graph(model, workload, load_kernels("te"), micro_batch=batch)


def closed_form(model: ModelSpec, seq_len: int) -> int:
    """6 FLOPs per weight that a token meets, 12 per key, head and number of the head."""
    attention, value_dim = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim * model.hidden, model.head_dim
    if latent := model.latent:
        value_dim, narrow = latent.value_dim, latent.query_rank or 0
        made = (narrow + latent.kv_rank + latent.rotary_dim) * model.hidden
        queries = (narrow or model.hidden) * model.head_dim
        keys_and_values = latent.kv_rank * (model.head_dim - latent.rotary_dim + value_dim)
        attention = made + model.num_heads * (queries + keys_and_values + value_dim * model.hidden)
    attention += model.gated_attention * model.num_heads * model.head_dim * model.hidden
    weights, pairs = model.vocab * model.hidden, 0
    for kind, count in model.layer_counts.items():
        layer = model.of_kind(kind)
        if linear := layer.linear:
            weights += count * linear_attention(linear, model.hidden)
        else:
            weights, pairs = weights + count * attention, pairs + count * model.num_heads * (model.head_dim + value_dim)
        met = max(1, layer.experts_per_token) * layer.ffn + layer.shared_ffn
        met = (3 if model.gated_mlp else 2) * met + layer.num_experts + layer.shared_gated
        weights += count * met * model.hidden
    return 6 * weights + 6 * pairs * seq_len


def linear_attention(linear: LinearAttention, hidden: int) -> int:
    """Products of a token: with weights, of a state with key, query and value, and with 64 tokens of its chunk."""
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    products = (2 * keys + 3 * values + 2 * linear.value_heads) * hidden
    of_chunk = 64 * (3 * linear.key_dim + 2 * linear.value_dim)
    return products + linear.value_heads * (3 * linear.key_dim * linear.value_dim + of_chunk)


@pytest.mark.parametrize("name", model_names())
def test_flops_and_parameters_of_every_card_equal_the_closed_forms(name: str):
    model, seq = load_model(name), 2048
    built = graph(model, seq, batch=15)  # so that 160 experts get equally many tokens
    assert built.model_flops_per_token() == closed_form(model, seq)
    assert (built.num_parameters(), built.num_layers) == (model.num_parameters, model.num_layers)


def test_capacity_pads_the_slots_and_their_flops():
    model, seq = load_model("tiny-mixtral"), 64
    experts = 6 * model.num_layers * model.experts_per_token * 3 * model.hidden * model.ffn
    padded = graph(model, seq, capacity=1.25).model_flops_per_token()
    assert padded == graph(model, seq).model_flops_per_token() + 0.25 * experts


@pytest.mark.parametrize(("capacity", "slots"), [(None, 50), (1.0, 50), (1.1, 55), (1.01, 51), (0.5, 25)])
def test_slots_are_the_capacity_times_an_even_share_rounded_up(capacity: float | None, slots: int):
    assert graph(load_model("tiny-mixtral"), 100, capacity=capacity).sizes["slots"] == slots


def test_model_flops_do_not_count_what_is_computed_again(kernels: Kernels):
    plain = graph(load_model("tiny-llama"), 64)
    again = tuple(recompute(block, kernels, None) for block in plain.blocks)
    assert sum(op.again for block in again for op in block.ops) > 20
    assert replace(plain, blocks=again).model_flops_per_token() == plain.model_flops_per_token()


def test_backward_does_twice_the_products_of_forward(model: ModelSpec, graph_of: GraphOf):
    built = graph_of(model, "torch_cuda")
    for block in built.blocks:
        forward, inputs, weights = (block.matrix_flops(passes, built.sizes) for passes in "FIW")
        assert inputs + weights == 2 * forward
        assert block.matrix_flops("FIW", built.sizes) == 3 * forward


@pytest.mark.parametrize("family", rest_is_slow(FAMILIES, fast=2))
def test_torch_counts_the_same_flops_on_the_transformers_model(family: str):
    """Forward and backward of the module, on the meta device where nothing depends on the numbers.

    Attention must be eager: the counter does not know the fused kernel of a CPU.
    """
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    flop_counter: Any = pytest.importorskip("torch.utils.flop_counter")
    stated = small_config(family)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = transformers.AutoConfig.for_model(**stated, **options)
    device = "cpu" if "num_experts_per_tok" in stated else "meta"  # which tokens an expert gets is not known on meta
    with torch.device(device):
        module = transformers.AutoModelForCausalLM.from_config(config)
        tokens = torch.zeros(2, 16, dtype=torch.int64) + torch.arange(16)
        mask = torch.zeros(2, 1, 16, 16)  # a finished mask, or transformers looks at the numbers to make one
        with flop_counter.FlopCounterMode(display=False) as counter:
            module(input_ids=tokens, labels=tokens, attention_mask=mask, use_cache=False).loss.backward()
    model = spec_from_config(stated, name=family, source="made for this test")
    assert counter.get_total_flops() == 2 * 16 * graph(model, 16, batch=2).model_flops_per_token()
