"""Sharded modules on several processes: they train as the plain module does, with torch's own optimizers and tools."""

import copy
import functools
import gc
import math
import random
import re
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from autoshard.blocks.choices import OpChoice
from autoshard.blocks.problem import resting_bytes, weights_of
from autoshard.errors import InputError
from autoshard.layout.legal import cut_operations
from autoshard.modules.shard import ModuleSharding, shard_module, sizes_of
from autoshard.modules.sharded import run_on, shard
from autoshard.spec.cluster_catalogue import load_cluster
from tests.modules.comparing import cut_at_random, cut_on_ranks, devices_of, difference
from tests.modules.modules import MODULES, SINGLE, Own, made
from tests.ranks.spawn import each_rank, on_ranks
from tests.slower import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@functools.cache
def traced(name: str, mesh: str) -> tuple[torch.nn.Module, tuple[Any, ...], ModuleSharding]:
    module, inputs = made(name)
    ranks = math.prod(sizes_of(mesh).values())
    return module, inputs, shard_module(module, inputs, load_cluster("local", ranks=ranks), mesh, precision="fp32")


def differences(mesh: str, seed: int, names: Sequence[str]) -> dict[str, float]:
    """Train modules plain and sharded: the largest difference of results, gradients and parameters of each."""
    devices, found = devices_of(mesh), dict[str, float]()
    for name in names:
        whole, inputs, sharding = traced(name, mesh)
        plain, module = copy.deepcopy(whole), cut_on_ranks(copy.deepcopy(whole), sharding, seed, devices)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*step by step")  # every module here becomes functions
            found[name] = difference(plain, module, inputs)
    return found


def train_at_random(mesh: str, seed: int, names: Sequence[str] = tuple(MODULES)) -> None:
    """Hold the training of modules on this mesh against that of one process."""
    for found in on_ranks(math.prod(sizes_of(mesh).values()), differences, mesh, seed, names, timeout_s=800):
        wrong = {name: one for name, one in found.items() if one > (1e-6 if name in SINGLE else 1e-11)}
        assert not wrong and len(found) == len(names), wrong


@pytest.mark.slow
def test_two_steps_on_four_processes_are_those_of_one():
    few = tuple(MODULES)[::28]  # all of them: the slow test below
    train_at_random("data=2,model=2", 0, (*few, "vision with layers of einops"))


@pytest.mark.parametrize(
    ("mesh", "seed"), rest_is_slow([("a=2,b=2", 0), ("a=3", 1), ("a=2,b=3", 2), ("a=2,b=2,c=2", 3)], 0, 0)
)
def test_random_cuts_on_meshes_of_all_kinds(mesh: str, seed: int):
    """Each rank traces by itself, as users' ranks do; on many ranks a third of the modules is tried."""
    few = 1 if math.prod(sizes_of(mesh).values()) <= 4 else 3
    train_at_random(mesh, seed, tuple(MODULES)[seed % few :: few])


def adapted(own: Any, x: torch.Tensor) -> torch.Tensor:
    """A frozen weight that is used twice, with an adapter that is trained."""
    return x + own.a(torch.tanh(own.a(x) + own.b(x)))


@pytest.mark.parametrize("seed", rest_is_slow(range(3), 0))
@each_rank(4)
def test_frozen_weights_have_no_gradient_and_may_be_cut_in_several_ways(seed: int):
    torch.manual_seed(0)
    module, x = Own(adapted).double(), torch.randn(4, 6, 8, dtype=torch.float64)
    module.a.requires_grad_(False)
    found = shard_module(module, [x], load_cluster("local", ranks=4), "a=2,b=2", precision="fp32")
    assert difference(copy.deepcopy(module), cut_on_ranks(module, found, seed, devices_of("a=2,b=2")), [x]) < 1e-12


_HELD = ("attention, fused product", "nanoGPT block", "MLP-Mixer", "Llama layer", "convolutions with a skip")


def held(seed: int) -> dict[str, tuple[float, int]]:
    """Return how many numbers of parameters a rank holds at most, as is predicted, and how many this one holds."""
    devices, found = devices_of("data=2,model=2"), dict[str, tuple[float, int]]()
    for name in _HELD:
        module, _, sharding = traced(name, "data=2,model=2")
        sharding = cut_at_random(sharding, random.Random(seed))
        problem, solution = replace(sharding.problem, state_bytes_per_weight=1.0), sharding.solution
        tensors, predicted = sharding.traced.block.tensors, 0.0
        for op in cut_operations(sharding.traced.block):
            for weight in weights_of(problem, op):
                layout = OpChoice(cuts=solution.cuts[op.name]).layout(tensors[weight].dims)
                predicted += float(resting_bytes(problem, weight, layout, solution.rests[op.name]))
        module = copy.deepcopy(module)
        run_on(module, sharding, devices)
        own = sum(cast(DTensor, one).to_local().numel() for one in module.parameters())
        found[name] = predicted, own
    return found


@pytest.mark.parametrize("seed", rest_is_slow(range(3), 0))
def test_ranks_hold_as_many_numbers_of_weights_as_is_predicted(seed: int):
    ranks = on_ranks(4, held, seed)
    for name in _HELD:
        predicted = ranks[0][name][0]
        assert max(one[name][1] for one in ranks) == predicted, name


def test_frozen_weights_count_in_memory_and_are_cut_where_it_is_short():
    layer = torch.nn.Linear(512, 512, bias=False).requires_grad_(False)
    module, x = torch.nn.Sequential(layer, torch.nn.Linear(512, 4)).double(), torch.randn(4, 512, dtype=torch.float64)
    whole = shard_module(module, [x], load_cluster("local", ranks=4), "a=4")
    trained_bytes, saved_bytes = (512 * 4 + 4) * (2 + 4 + 4 + 8), 4 * 512 * 2  # with gradient, master and moments
    assert whole.solution.kept_bytes == 512 * 512 * 2 + trained_bytes + saved_bytes
    limit = 0.6 * whole.solution.kept_bytes
    found = shard_module(module, [x], load_cluster("local", ranks=4), "a=4", memory_bytes=limit)
    assert found.solution.fits and found.solution.kept_bytes <= limit
    assert max(one.error for one in found.prove(module, [x])) < 1e-12


def example() -> str:
    """The script of the page that shards a Hugging Face model."""
    text = (Path(__file__).parents[2] / "docs" / "guides" / "my-model.md").read_text(encoding="utf-8")
    return next(one for one in re.findall(r"```python.*?\n(.*?)```", text, re.DOTALL) if "autoshard.shard(" in one)


def losses_of(script: str) -> list[float]:
    torch.set_num_threads(1)
    space: dict[str, Any] = {"losses": []}
    exec(script.replace("print(loss.item())", "losses.append(loss.item())"), space)
    return space["losses"]


@pytest.mark.slow
def test_the_example_of_the_page_trains_as_one_process_does():
    script = example()
    alone = re.sub(r"model = autoshard.shard\(.*?\)\n", "", script, flags=re.DOTALL)
    assert alone != script and "AdamW" in script
    wanted = on_ranks(1, losses_of, alone)[0]
    assert len(wanted) == 10 and wanted[-1] < 0.9 * wanted[0]
    for found in on_ranks(4, losses_of, script, timeout_s=120):
        assert found == pytest.approx(wanted, rel=2e-5)


@each_rank(4)
def test_torch_clips_saves_and_loads_a_sharded_module(tmp_path: Path):
    plain, inputs = made("attention, fused product")
    module = shard(copy.deepcopy(plain), inputs, "data=2,model=2", pins={"parts.0.weight": "[parts_2/model, _]"})
    assert (type(module).__name__, type(module).__module__) == ("ShardedAttention", type(plain).__module__)
    for one in (plain, module):
        (one(*inputs) ** 2).sum().backward()
    norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (plain, module)]
    ours = cast(DTensor, norms[1]).full_tensor()
    assert abs(float(norms[0] / ours) - 1) <= 1e-12
    with torch.no_grad():
        assert float((plain(*inputs) - module(*inputs)).abs().max()) <= 1e-12
    state = cast(dict[str, Any], get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)))
    if dist.get_rank() == 0:  # bit for bit the plain module's
        assert not [name for name, one in plain.state_dict().items() if not torch.equal(state[name], one)]
    own = module.state_dict()
    dcp.save(own, checkpoint_id=tmp_path)  # pyright: ignore[reportPrivateImportUsage]
    kept = {name: one.to_local().clone() for name, one in own.items()}
    for one in own.values():
        one.to_local().zero_()
    dcp.load(own, checkpoint_id=tmp_path)  # pyright: ignore[reportPrivateImportUsage]
    assert not [name for name, one in own.items() if not torch.equal(one.to_local(), kept[name])], "read"
    other = {name: one + 1 for name, one in plain.state_dict().items()}
    set_model_state_dict(module, dict(other), options=StateDictOptions(full_state_dict=True))
    state = cast(dict[str, Any], get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)))
    if dist.get_rank() == 0:
        assert not [name for name, one in other.items() if not torch.equal(state[name], one)], "loaded"


@each_rank(2)
def test_wrong_calls_are_refused_by_name():
    module, inputs = made("square weight with residual")
    with pytest.raises(InputError, match="6 ranks do not run here"):
        shard(module, inputs, "data=3,model=2")
    with pytest.raises(InputError, match="sharded differently on some ranks"):
        size = 4 + 4 * dist.get_rank()
        shard(torch.nn.Linear(size, 4), [torch.ones(2, size)], "data=2")
    with pytest.raises(InputError, match=r"do not fit the module's forward.*: too many positional arguments"):
        shard(module, inputs, "data=2,model=1")(*inputs, inputs[0])


@pytest.mark.parametrize("compiles", rest_is_slow([False, True]))
@each_rank(2)
def test_no_rank_keeps_whole_weights(compiles: bool):
    """After a step, and after a call of another shape."""
    module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    alive = {path: weakref.ref(one) for path, one in module.named_parameters()}
    module = shard(module, [torch.ones(4, 16)], "data=2", compile=compiles)
    for count in (4, 2):
        module(torch.ones(count, 16)).sum().backward()
    gc.collect()
    assert not [path for path, one in alive.items() if one() is not None]


@each_rank(2)
def test_a_second_backward_is_refused():
    module, inputs = made("square weight with residual")
    loss = shard(module, inputs, "data=2")(*inputs).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has run backward for this result already"):
        loss.backward()
