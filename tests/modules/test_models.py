"""Whole models of Hugging Face and of torch: traced, cut at random, solved, and trained on several processes."""

import copy
import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard.blocks.choices import op_cuts
from autoshard.errors import InputError
from autoshard.layout.legal import cut_operations
from autoshard.layout.lower import lower
from autoshard.modules.capture import capture
from autoshard.modules.proof import ModuleRun
from autoshard.modules.shard import ModuleSharding, shard_module
from autoshard.modules.sharded import run_on
from autoshard.spec.cluster_catalogue import load_cluster
from tests.modules.models import MODELS, mixtral, model
from tests.modules.test_sharded import cut_at_random
from tests.ranks.spawn import on_ranks
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
    drawn = [{op.name: dict(chosen.choice(op_cuts(block, op, ("data", "model")))) for op in cut_operations(block)}]
    wanted = {"loss", *(f"{tensor.name}.sum" for tensor in block.parameters)}
    for cuts in (found.solution.cuts, *drawn):
        lowered = lower(block, cuts, dict(found.mesh.axes), lambda change: 1.0, boundary={}, keeps_gathered=True)
        compared = run.compare(lowered, found.mesh)
        assert {one.name for one in compared} > wanted
        assert max(one.error for one in compared) < bar(name), [one for one in compared if one.error >= bar(name)]


@functools.cache
def traced(name: str, layers: int) -> tuple[nn.Module, Mapping[str, Any], ModuleSharding]:
    return sharded(name, layers, ["loss"])


def differences(names: Sequence[str], layers: int) -> dict[str, float]:
    """Train models plain and sharded at random: the largest difference of losses, gradients, parameters."""
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    found: dict[str, float] = {}
    for name in names:
        whole, inputs, sharding = traced(name, layers)
        plain, module = copy.deepcopy(whole), copy.deepcopy(whole)
        run_on(module, cut_at_random(sharding, random.Random(0)), devices)
        found[name] = difference(plain, module, inputs)
    return found


def difference(plain: nn.Module, module: nn.Module, inputs: Mapping[str, Any]) -> float:
    """Take two steps of SGD with both; return the largest difference, relative to the largest of its kind."""
    worst, optimizers = 0.0, [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, module)]
    for _ in range(2):
        losses = [cast(torch.Tensor, one(**inputs)["loss"]) for one in (plain, module)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
        worst = max(worst, float(((losses[0] - losses[1]) / losses[0]).detach().abs()))
        own = dict(module.named_parameters())
        gradients = {path: (one.grad, cast(Any, own[path]).grad) for path, one in plain.named_parameters()}
        largest = max(float(one.abs().max()) for one, _ in gradients.values() if one is not None)
        for path, (wanted, got) in gradients.items():
            assert (wanted is None) == (got is None), path
            if wanted is not None:
                worst = max(worst, float((wanted - got.full_tensor()).abs().max()) / largest)
        for optimizer in optimizers:
            optimizer.step()  # pyright: ignore[reportUnknownMemberType]
    for path, one in plain.named_parameters():
        other = cast(Any, module.get_parameter(path)).full_tensor()
        worst = max(worst, float((one - other).detach().abs().max()))
    return worst


@pytest.mark.parametrize(("names", "layers"), rest_is_slow([(("Mixtral",), 1), (tuple(MODELS), 2)], 0, 1))
def test_two_steps_on_four_processes_are_those_of_one(names: Sequence[str], layers: int):
    for found in on_ranks(4, differences, names, layers, timeout_s=800):
        wrong = {name: one for name, one in found.items() if one > (1e-11 if name in _DOUBLE else 1e-6)}
        assert not wrong and len(found) == len(names), wrong


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
