"""Whole models of Hugging Face and of torch: traced, cut at random, solved, and trained on several processes."""

import copy
import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import nn

from autoshard.errors import InputError
from autoshard.modules.capture import capture
from autoshard.modules.proof import ModuleRun
from autoshard.modules.shard import ModuleSharding, shard_module
from autoshard.spec.cluster_catalogue import load_cluster
from tests.modules.comparing import compared, cut_on_ranks, devices_of, difference, random_cuts
from tests.modules.models import MODELS, mixtral, model
from tests.ranks.spawn import each_rank
from tests.slower import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
_DOUBLE = ("ViT", "BERT with padding", "torch's TransformerEncoder")  # others compute norms or their loss in FP32
_MESH = "data=2,model=2"


def sharded(name: str, layers: int, results: list[str] | None) -> tuple[nn.Module, Mapping[str, Any], ModuleSharding]:
    module, inputs = model(name, layers)
    cluster = load_cluster("local", ranks=4)
    return module, inputs, shard_module(module, inputs, cluster, _MESH, precision="fp32", results=results)


def bar(name: str) -> float:
    return 1e-12 if name in _DOUBLE else 1e-6


_SHORT = ("ViT", "Llama", "Gemma 2", "Mixtral")


@pytest.mark.parametrize("name", rest_is_slow([*_SHORT, *(name for name in MODELS if name not in _SHORT)], 1, 3))
def test_whole_models_are_solved_and_proven_with_any_cuts(name: str):
    module, inputs, found = sharded(name, 4, None)
    block, program = found.traced.block, found.captured.program
    assert not program.kept_whole and found.solution.gap == 0.0 and found.problem.tied
    assert len(block.parameters) == len({id(one) for one in module.parameters()})
    run, chosen = ModuleRun(module, inputs, found.captured, found.traced), random.Random(0)
    wanted = {"loss", *(f"{tensor.name}.sum" for tensor in block.parameters)}
    for cuts in (found.solution.cuts, random_cuts(found.traced, chosen, ("data", "model"))):
        tensors = compared(run, cuts, mesh=found.mesh)
        assert {one.name for one in tensors} > wanted
        assert max(one.error for one in tensors) < bar(name), [one for one in tensors if one.error >= bar(name)]


@functools.cache
def traced(name: str, layers: int) -> tuple[nn.Module, Mapping[str, Any], ModuleSharding]:
    return sharded(name, layers, ["loss"])


@pytest.mark.parametrize(("names", "layers"), rest_is_slow([(("Mixtral",), 1), (tuple(MODELS), 2)], 0, 1))
@each_rank(4, timeout_s=800)
def test_two_steps_on_four_processes_are_those_of_one(names: Sequence[str], layers: int):
    devices = devices_of(_MESH)
    for name in names:
        whole, inputs, sharding = traced(name, layers)
        module = cut_on_ranks(copy.deepcopy(whole), sharding, 0, devices)
        assert difference(copy.deepcopy(whole), module, inputs) <= (1e-11 if name in _DOUBLE else 1e-6), name


def test_experts_that_a_loop_chooses_are_refused_with_the_line_of_the_loop():
    module, inputs = mixtral(1, experts="eager")
    with pytest.raises(InputError, match=r"modeling_mixtral.*for expert_idx in expert_hit.*only a run knows"):
        capture(module.double().eval(), inputs)


@pytest.mark.parametrize("name", rest_is_slow(["GPT-2", "Llama", "Phi-3"], 2))
def test_dims_of_a_model_have_names(name: str):
    module, inputs = model(name, 2)
    hints = {"input_ids": ("batch", "seq")}
    found = shard_module(module, inputs, load_cluster("local", ranks=1), "tp=1", hints=hints, results=["loss"])
    first = "transformer.wte" if name == "GPT-2" else "model.embed_tokens"
    assert [dim for (dim,) in found.traced.modules[first][1]] == ["batch", "seq", "hidden"]
    norms = [dims for path, dims in found.dims.items() if path.endswith(("norm.weight", "ln_1.weight"))]
    assert norms and all(dims == ("hidden",) for dims in norms)
