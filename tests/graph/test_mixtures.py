"""The mixture of a layer against the modules of DeepSeek-V2 and V3 in transformers, in float64."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from autoshard.graph.decoder import decoder_graph
from autoshard.graph.op import Array
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.model_parts import Router
from autoshard.spec.workload import Precision, Workload
from tests.graph.choosing_references import excess_of
from tests.graph.test_against_transformers import InFloat64

torch: Any = pytest.importorskip("torch")
v2: Any = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
v3: Any = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")

BATCH, SEQ = 2, 9
COMMON: Mapping[str, Any] = {
    "hidden_size": 16, "moe_intermediate_size": 24, "n_routed_experts": 12, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "hidden_act": "silu", "num_attention_heads": 4,
}  # fmt: skip
IN_GROUPS = {"n_group": 4, "topk_group": 2}


@dataclass(frozen=True)
class Mixture:
    """A router of ours, and the class and configuration of theirs."""

    router: Router
    module: Any
    config: Any
    options: Mapping[str, Any]

    def built(self) -> Any:
        """Make the module, with random weights."""
        config = self.config(**COMMON, **self.options, experts_implementation="eager")
        module, generator = self.module(config), torch.Generator().manual_seed(3)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = torch.empty(tensor.shape, dtype=torch.float64).normal_(0, 0.4, generator=generator)
        return module


OF_V2 = v2.DeepseekV2Moe, v2.DeepseekV2Config
OF_V3 = v3.DeepseekV3MoE, v3.DeepseekV3Config
CORRECTED = Router(scores="sigmoid", scale=2.5, correction=True)
MIXTURES: Mapping[str, Mixture] = {
    "V2, in the groups with the best experts": Mixture(
        Router(normalised=False, scale=1.7, groups=4, chosen_groups=2), *OF_V2,
        {**IN_GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7},
    ),
    "V2, in all groups": Mixture(
        Router(normalised=False), *OF_V2, {"topk_method": "greedy", "routed_scaling_factor": 1.0}
    ),
    "V3, in the groups with the best two experts": Mixture(
        replace(CORRECTED, groups=4, chosen_groups=2, group_score="best two"), *OF_V3, IN_GROUPS
    ),
    "V3, weights as they are": Mixture(
        replace(CORRECTED, normalised=False, groups=2, chosen_groups=1, group_score="best two"), *OF_V3,
        {"n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    ),
    "V3, in all groups": Mixture(CORRECTED, *OF_V3, {"n_group": 3, "topk_group": 3}),
}  # fmt: skip


def model_of(router: Router) -> ModelSpec:
    sizes: Mapping[str, Any] = {"hidden": 16, "ffn": 24, "num_experts": 12, "experts_per_token": 3, "shared_ffn": 48}
    return replace(load_model("tiny-llama"), num_layers=1, vocab=8, router=router, **sizes)


def arrays_of(module: Any, *, gradients: bool = False) -> dict[str, Array]:
    """Return their weights, or gradients, by the names of ours."""
    shared = module.shared_experts
    named = {
        "router.weight": module.gate.weight, "gate_up": module.experts.gate_up_proj,
        "down.weight": module.experts.down_proj, "shared_gate.weight": shared.gate_proj.weight,
        "shared_up.weight": shared.up_proj.weight, "shared_down.weight": shared.down_proj.weight,
    }  # fmt: skip
    arrays = {name: (weight.grad if gradients else weight.detach()).numpy() for name, weight in named.items()}
    gate, up = np.split(arrays.pop("gate_up"), 2, axis=1)
    return {**arrays, "gate.weight": gate, "up.weight": up}


def ours(model: ModelSpec, weights: Mapping[str, Array]) -> dict[str, Array]:
    """Run a layer forward and backward on random numbers, with these weights of its mixture."""
    workload = Workload(seq_len=SEQ, global_batch=BATCH, precision=Precision.named("fp32"), expert_capacity=4.0)
    graph = decoder_graph(model, workload, load_kernels("torch_cuda"), micro_batch=BATCH)
    block, rng = graph.block("layer"), np.random.default_rng(1)
    made = {name for op in block.select("micro_batch") for name in op.outputs}
    values: dict[str, Array] = {}
    for tensor in block.tensors.values():
        shape = [graph.sizes[dim] for dim in tensor.dims]
        if tensor.name not in made:
            values[tensor.name] = np.arange(shape[0]) if tensor.dtype == "int64" else rng.normal(size=shape)
        if tensor.role == "state":
            values[tensor.name] = np.zeros(shape)
    values |= weights
    block.run(block.select("micro_batch"), graph.sizes, values)
    return values


@pytest.mark.parametrize("name", MIXTURES)
def test_results_and_gradients_are_those_of_the_module(name: str):
    mixture, chosen = MIXTURES[name], list[Any]()
    with InFloat64():
        module = mixture.built()
        weights = arrays_of(module)
        if mixture.router.correction:
            weights["correction.weight"] = module.gate.e_score_correction_bias.numpy()
        values = ours(model_of(mixture.router), weights)
        module.gate.register_forward_hook(lambda _, __, made: chosen.append(made[2]))
        x = torch.tensor(values["mlp_in"], requires_grad=True)
        result = module(x)
        result.backward(torch.tensor(values["mlp_out.d0"]))
    np.testing.assert_allclose(values["mlp_out"], result.detach().numpy(), rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(values["mlp_in.d0"], x.grad.numpy(), rtol=1e-10, atol=1e-10)
    for name_here, gradient in arrays_of(module, gradients=True).items():
        np.testing.assert_allclose(values[f"{name_here}.sum"], gradient, rtol=1e-10, atol=1e-10, err_msg=name_here)
    if mixture.router.correction:
        np.testing.assert_array_equal(values["correction.weight.sum"], excess_of(chosen[0], 12).numpy())
