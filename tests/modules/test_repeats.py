"""Equal layers of a traced model: decided once, with the same layouts, and as cheap as decided one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from autoshard.blocks.elimination import CostFactor
from autoshard.blocks.operators import solve
from autoshard.modules.shard import ModuleSharding, shard_module
from autoshard.spec.cluster_catalogue import load_cluster

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def llama(layers: int, hidden: int = 48) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_attention_heads=6, num_key_value_heads=2, vocab_size=64,
        num_hidden_layers=layers, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (4, 8))
    return LlamaForCausalLM(config).double().eval(), {"input_ids": tokens, "labels": tokens}


def sharded(layers: int, mesh: str = "dp=4,tp=2") -> ModuleSharding:
    module, inputs = llama(layers, hidden=768)
    return shard_module(module, inputs, load_cluster("h100-80", 1), mesh, results=["loss"])


@pytest.mark.slow
def test_equal_layers_are_decided_once_and_cost_as_much_as_if_each_were_free():
    found = sharded(4)
    table, tied = found.solution.cuts, found.problem.tied
    assert len(tied) >= 3 * 10 and all(table[name] == table[like] for name, like in tied.items())
    free = solve(replace(found.problem, tied={}))
    assert found.solution.gap == free.gap == 0.0
    assert found.solution.cost_s == pytest.approx(free.cost_s, rel=1e-9)
    assert found.solution.kept_bytes == pytest.approx(free.kept_bytes, rel=1e-9)


@pytest.mark.slow
def test_a_limit_of_memory_counts_every_layer():
    found = sharded(4)
    less = replace(found.problem, memory_limit_bytes=0.7 * found.solution.kept_bytes)
    tied, free = solve(less), solve(replace(less, tied={}))
    assert tied.fits and tied.kept_bytes <= less.memory_limit_bytes
    assert free.cost_s * (1 - free.gap) <= tied.cost_s * (1 + 1e-9)


class Chain(nn.Module):
    """Products in a row, which Megatron cuts by columns and by rows in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_small_members_of_a_list_choose_on_their_own():
    x = torch.randn(8, 4, 64, dtype=torch.float64, requires_grad=True)
    assert not shard_module(Chain().double(), [x], load_cluster("local", ranks=2), "tp=2").problem.tied


@pytest.mark.slow
def test_a_pin_of_one_layer_leaves_the_others_alone():
    module, inputs = llama(4, hidden=768)
    pins = {"model.layers.1.mlp.up_proj.weight": "[_, _]", "model.layers.*.mlp.down_proj": "[_, _, _]"}
    found = shard_module(module, inputs, load_cluster("h100-80", 1), "dp=4,tp=2", results=["loss"], pins=pins)
    own = [name for name in found.solution.cuts if "layers_1_mlp_up_proj" in name]
    assert own and all(name not in {*found.problem.tied, *found.problem.tied.values()} for name in own)
    up = next(dim for dim in found.dims["model.layers.1.mlp.up_proj.weight"])
    assert not found.solution.cuts[own[0]].get(up)
    assert any(found.solution.cuts[name].get("batch") is None for name in own)


def test_a_factor_between_two_operations_that_become_one_is_that_of_equal_choices():
    table = np.arange(12.0).reshape(3, 2, 2)
    factor = CostFactor(variables=("x", "a.0", "a.1"), table=table, weight=2 * table).repeated(3)
    joined = factor.renamed({"a.1": "a.0"})
    assert joined.variables == ("x", "a.0") and joined.weight is not None
    for x in range(3):
        for a in range(2):
            assert joined.table[x, a] == 3 * table[x, a, a] and joined.weight[x, a] == 6 * table[x, a, a]
