"""The whole step in numpy against transformers in float64: loss, every gradient, norm, new weights."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from autoshard.graph.block import OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.kinds.optimizer import AdamW
from autoshard.graph.op import Array
from autoshard.graph.router import router_losses
from autoshard.spec.hf.config import spec_from_config
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload
from tests.engine.hf_whole import from_hf
from tests.graph.choosing_references import excess_of
from tests.kit import DIFFERENT_LAYERS, SMALL_FAMILIES, small_config
from tests.reference_step import StepResult, evaluate_step
from tests.slower import each_third_is_fast

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
overrides: Any = pytest.importorskip("torch.overrides")

BATCH, SEQ, ACCUMULATED, RATE, SPEED = 2, 7, 2, 1e-2, 1e-3
CORRECTION = "e_score_correction_bias"
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 8}
OF_3_1 = {"head_dim": 8, "rope_theta": 50.0, "rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.5, "beta_slow": 0.25}
YARN |= {"original_max_position_embeddings": 16}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    **{family: small_config(family) for family in SMALL_FAMILIES},
    "llama, tied, scaled as in 3.1": small_config("llama", **OF_3_1),
    "llama, biases, tied": small_config(
        "llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, num_key_value_heads=4
    ),
    "gpt_neox in sequence": small_config("gpt_neox", use_parallel_residual=False),
    **{f"{family}, layers differ": small_config(family, **changes) for family, changes in DIFFERENT_LAYERS},
    "qwen3_moe, probabilities of all experts": small_config("qwen3_moe", norm_topk_prob=False),
    "deepseek_v3, biases, scaled as published": small_config(
        "deepseek_v3", rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}, attention_bias=True, rope_theta=50.0
    ),
    "deepseek_v2, queries of a narrow state": small_config("deepseek_v2", q_lora_rank=9, rms_norm_eps=0.3),
    "qwen2, yarn": small_config("qwen2", rope_scaling=YARN, rope_theta=50.0),
    "llama, yarn that is not rounded": small_config(
        "llama", rope_scaling=YARN | {"truncate": False, "attention_factor": 1.3}, head_dim=16, rope_theta=50.0
    ),
    "llama, yarn of one number of turns": small_config(
        "llama", rope_scaling=YARN | {"beta_slow": 1.5}, head_dim=16, rope_theta=50.0
    ),
    "llama, linear scaling": small_config("llama", rope_scaling={"rope_type": "linear", "factor": 4.0}),
}


class InFloat64(overrides.TorchFunctionMode):
    """Lets transformers compute in float64 where its source says float32: norms, angles, softmax, loss."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = [torch.float64 if arg is torch.float32 else arg for arg in args]
        named = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*wide, **named)


# -- one step of each ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Theirs:
    """A step of a transformers module; arrays by parameter name."""

    loss: float
    norm: float
    weights: dict[str, Array]
    gradients: dict[str, Array]
    new_weights: dict[str, Array]


def theirs(config: Mapping[str, Any], tokens: Array, added: Callable[[Any], Any] | None = None) -> Theirs:
    """A step on all tokens at once; what is ``added`` to the loss is computed from the outputs of the module."""
    fields = {key: value for key, value in config.items() if key != "model_type"}
    with InFloat64():
        options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float64}
        hf_config = transformers.AutoConfig.for_model(config["model_type"], **fields)
        module = transformers.AutoModelForCausalLM.from_config(hf_config, **options)
        parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
        generator = torch.Generator().manual_seed(5)
        for parameter in parameters.values():
            assert parameter.dtype == torch.float64
            parameter.data.normal_(0, 0.4, generator=generator)
        untrained = {**dict(module.named_parameters()), **dict(module.named_buffers())}  # corrections among them
        corrections = {name: one for name, one in untrained.items() if name.endswith(CORRECTION)}
        for correction in corrections.values():  # as different as scores are, so that it decides choices
            correction.data.normal_(0, 0.4, generator=generator)
        old = {name: tensor.detach().clone() for name, tensor in {**parameters, **corrections}.items()}
        excess = {name: watched(module, name, one.numel()) for name, one in corrections.items()}
        batch = torch.tensor(tokens)
        outputs = module(input_ids=batch, labels=batch, use_cache=False)
        loss = outputs.loss + (added(outputs) if added else 0)
        loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in parameters.items()}
    for name, counts in excess.items():
        gradients[name] = torch.stack(counts).sum(0).double().reshape(corrections[name].shape)
        corrections[name].data.sub_(SPEED * gradients[name].sign())
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    kind = AdamW()
    betas = (kind.beta1, kind.beta2)
    # Norms and biases are vectors, or those of experts, and nothing else is.
    still = [one.ndim == 1 or name.endswith("_bias") for name, one in parameters.items()]
    tables, vectors = (
        [one for one, is_still in zip(parameters.values(), still, strict=True) if is_still == each]
        for each in (False, True)
    )
    kinds = [{"params": tables, "weight_decay": kind.decay}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(kinds, lr=RATE, betas=betas, eps=kind.eps).step()
    new = {**parameters, **corrections}
    arrays = [{name: tensor.detach().numpy() for name, tensor in of.items()} for of in (old, gradients, new)]
    return Theirs(float(loss.detach()), float(norm), *arrays)


def watched(module: Any, correction: str, num_experts: int) -> list[Any]:
    """Return a list to which the router with this correction adds by how much each expert is chosen too often."""
    counts: list[Any] = []
    owner = module.get_submodule(correction.rpartition(".")[0].removesuffix(".moe_statics"))  # of ERNIE's router
    router = getattr(owner, "gate", owner)  # MiniMax-M2 keeps corrections beside its router
    router.register_forward_hook(lambda _, __, made: counts.append(excess_of(made[2], num_experts)))
    return counts


def build(config: Mapping[str, Any], micro_batch: int = BATCH, **losses: Any) -> tuple[ModelSpec, OpGraph, Workload]:
    model = spec_from_config(config, name="m", source="made for this test")
    # Room for every token at every expert: nothing is dropped, as in transformers.
    capacity = model.num_experts / model.experts_per_token if model.num_experts else None
    workload = Workload(
        seq_len=SEQ, global_batch=BATCH * ACCUMULATED, precision=Precision.named("bf16"), expert_capacity=capacity,
        router_bias_speed=SPEED, **losses,
    )  # fmt: skip
    return model, decoder_graph(model, workload, load_kernels("torch_cuda"), micro_batch=micro_batch), workload


def ours(graph: OpGraph, weights: dict[str, Array], tokens: Array, workload: Workload) -> StepResult:
    """Transformers shifts the labels itself and has none for the last token: ours has weight 0 there."""
    labels = np.concatenate([tokens[:, 1:], np.zeros_like(tokens[:, :1])], axis=1)
    weight = np.full(tokens.shape, 1 / (len(tokens) * (SEQ - 1)))
    weight[:, -1] = 0
    where = {"positions": np.arange(SEQ), "key_positions": np.arange(SEQ)}
    size = graph.sizes["batch"]
    parts = [slice(start, start + size) for start in range(0, len(tokens), size)]
    batches = [{"tokens": tokens[p], "labels": labels[p], "token_weight": weight[p], **where} for p in parts]
    return evaluate_step(graph, weights, batches, learning_rate=RATE, losses=router_losses(workload))


@pytest.mark.parametrize("name", each_third_is_fast(CONFIGS))
def test_a_step_equals_that_of_the_transformers_module(name: str):
    config = CONFIGS[name]
    tokens = np.random.default_rng(3).integers(0, config["vocab_size"], (BATCH * ACCUMULATED, SEQ))
    module = theirs(config, tokens)
    model, graph, workload = build(config)
    result = ours(graph, from_hf(config["model_type"], model, module.weights, np.empty), tokens, workload)
    assert result.loss == pytest.approx(module.loss, rel=1e-12)
    hold(config["model_type"], model, graph, result, module)


LOSSES: Mapping[str, Any] = {"router_balance_loss": 0.7, "router_z_loss": 0.3}
BALANCED = ("mixtral", "qwen3_moe", "gpt_oss")  # whose classes have a loss of routers


@pytest.mark.parametrize("family", BALANCED)
def test_the_balance_loss_of_a_layer_is_that_of_transformers(family: str):
    """Of one layer: over several transformers computes one loss, in which an expert's number says nothing."""
    config = small_config(family, num_hidden_layers=1)
    tokens = np.random.default_rng(3).integers(0, config["vocab_size"], (BATCH * ACCUMULATED, SEQ))
    module = theirs({**config, "output_router_logits": True, "router_aux_loss_coef": 0.7}, tokens)
    model, graph, workload = build(config, len(tokens), router_balance_loss=0.7)
    result = ours(graph, from_hf(family, model, module.weights, np.empty), tokens, workload)
    assert result.loss + 0.7 * result.router["router_balance"] == pytest.approx(module.loss, rel=1e-12)
    hold(family, model, graph, result, module)


@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_losses_of_routers_are_those_of_each_layer_added_and_means_over_micro_batches(over: str):
    config = small_config("qwen3_moe")
    tokens = np.random.default_rng(3).integers(0, config["vocab_size"], (BATCH * ACCUMULATED, SEQ))
    load_balancing = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    count = ACCUMULATED if over == "batch" else len(tokens)  # the parts of the tokens that are balanced

    def added(outputs: Any) -> Any:
        total = torch.zeros((), dtype=torch.float64)
        for logits in outputs.router_logits:
            parts = logits.reshape(count, -1, logits.shape[-1])
            balance = [load_balancing.load_balancing_loss_func((part,), parts.shape[-1], 2) for part in parts]
            total = total + 0.7 * sum(balance) / count + 0.3 * logits.logsumexp(-1).square().mean()
        return total

    module = theirs({**config, "output_router_logits": True, "router_aux_loss_coef": 0.0}, tokens, added)
    model, graph, workload = build(config, router_balance_over=over, **LOSSES)
    result = ours(graph, from_hf("qwen3_moe", model, module.weights, np.empty), tokens, workload)
    losses = 0.7 * result.router["router_balance"] + 0.3 * result.router["router_z"]
    assert result.loss + model.num_layers * losses == pytest.approx(module.loss, rel=1e-12)
    hold("qwen3_moe", model, graph, result, module)


def hold(family: str, model: ModelSpec, graph: OpGraph, result: StepResult, module: Theirs) -> None:
    """Hold norm, gradients and new weights against theirs."""

    def as_ours(arrays: dict[str, Array]) -> dict[str, Array]:
        return from_hf(family, model, arrays, np.empty)

    assert result.norm == pytest.approx(module.norm, rel=1e-10)
    tied = [other.replace(".", ".0.", 1) for other in graph.tied]
    gradients = {name: array for name, array in as_ours(module.gradients).items() if name not in tied}
    assert sum(array.size for array in gradients.values()) == sum(array.size for array in module.weights.values())
    assert result.gradients.keys() == gradients.keys()
    for parameter in [name for name in gradients if name.endswith("correction.weight")]:
        np.testing.assert_array_equal(result.gradients[parameter], gradients.pop(parameter), err_msg=parameter)
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    tiny = [parameter for parameter, gradient in gradients.items() if np.abs(gradient).max() < 1e-9 * largest]
    assert [parameter for parameter in tiny if not parameter.endswith("k_shift.bias")] == []  # all but rounding
    for parameter, gradient in gradients.items():
        distance = np.abs(result.gradients[parameter] - gradient).max() / largest
        assert distance <= 1e-9, f"{parameter} is off by {distance}"
    for parameter, weight in as_ours(module.new_weights).items():
        if parameter not in tied:
            np.testing.assert_allclose(result.weights[parameter], weight, rtol=0, atol=1e-7, err_msg=parameter)
