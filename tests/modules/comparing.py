"""A sharded module beside the plain one: random layouts, proofs on virtual ranks, training on real ones."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.blocks.choices import OpChoice, op_cuts
from autoshard.blocks.problem import weights_of
from autoshard.layout.legal import cut_operations
from autoshard.layout.lower import lower
from autoshard.modules.blocks import TracedBlock, traced_block
from autoshard.modules.capture import capture
from autoshard.modules.proof import ComparedTensor, ModuleRun
from autoshard.modules.shard import ModuleSharding, sizes_of
from autoshard.modules.sharded import run_on
from autoshard.spec.mesh import Mesh
from autoshard.spec.workload import Precision

Inputs = Sequence[Any] | Mapping[str, Any]
VIRTUAL = Mesh.virtual(edp=2, kv=2)


def run_to_compare(module: torch.nn.Module, inputs: Inputs) -> ModuleRun:
    """Trace a module, and run it once: what layouts on virtual ranks give is compared with this."""
    captured = capture(module, inputs)
    return ModuleRun(module, inputs, captured, traced_block(captured.program, Precision.named("fp32")))


def random_cuts(block: TracedBlock, chosen: random.Random, atoms: Sequence[str] = ("edp", "kv")) -> dict[str, Any]:
    return {op.name: dict(chosen.choice(op_cuts(block.block, op, atoms))) for op in cut_operations(block.block)}


def compared(
    run: ModuleRun, cuts: Mapping[str, Any], boundary: Any = None, mesh: Mesh = VIRTUAL
) -> list[ComparedTensor]:
    between = boundary or {}
    program = lower(run.traced.block, cuts, dict(mesh.axes), lambda change: 1.0, boundary=between, keeps_gathered=True)
    return run.compare(program, mesh)


def largest_error(run: ModuleRun, times: int, seed: int = 0) -> float:
    """The largest error of any result or gradient, of so many random cuts."""
    chosen = random.Random(seed)
    return max(part.error for _ in range(times) for part in compared(run, random_cuts(run.traced, chosen)))


def cut_at_random(found: ModuleSharding, chosen: random.Random) -> ModuleSharding:
    """The same module with random legal cuts of all operations, and weights that rest in random pieces."""
    axes, block = dict(found.mesh.axes), found.traced.block
    cuts, rests = dict[str, Any](), dict[str, tuple[str, ...]]()
    for op in cut_operations(block):
        cuts[op.name] = dict(chosen.choice(op_cuts(block, op, [*axes])))
        free = set(axes)
        for weight in weights_of(found.problem, op):
            free &= OpChoice(cuts=cuts[op.name]).awaited(block.tensors[weight].dims)
        if weights_of(found.problem, op):
            rests[op.name] = tuple(axis for axis in axes if axis in free and chosen.random() < 0.6)
    program = found.problem.table_setting(has_inputs=True).lowered(block, cuts)
    assert program.collectives(), "some layouts differ"
    return replace(found, program=program, solution=replace(found.solution, cuts=cuts, rests=rests))


def devices_of(mesh: str) -> DeviceMesh:
    """All ranks as a mesh; of several with the same axes, torch may ask groups of one that is gone."""
    sizes = sizes_of(mesh)
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def cut_on_ranks(
    module: torch.nn.Module, sharding: ModuleSharding, seed: int, devices: DeviceMesh, **options: Any
) -> torch.nn.Module:
    """Let a module run on ranks in a random layout."""
    return run_on(module, cut_at_random(sharding, random.Random(seed)), devices, **options)


def difference(plain: torch.nn.Module, module: torch.nn.Module, inputs: Inputs) -> float:
    """Take two steps of SGD with both; return the largest difference, relative to the largest number of its kind.

    Inputs by name are those of a model that returns its loss.
    """
    worst, optimizers = 0.0, [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, module)]
    for _ in range(2):
        seen: list[tuple[torch.Tensor, dict[str, Any], torch.Tensor | None]] = []
        for one, optimizer in zip((plain, module), optimizers, strict=True):
            parts = inputs.values() if isinstance(inputs, Mapping) else inputs
            own = [part.detach().clone().requires_grad_(part.requires_grad) for part in parts]
            named = isinstance(inputs, Mapping)
            result = cast(torch.Tensor, one(**dict(zip(inputs, own, strict=True)))["loss"] if named else one(*own))
            optimizer.zero_grad()
            result.backward(torch.ones_like(result).cumsum(-1) / result.numel() if result.dim() else None)  # pyright: ignore
            seen.append((result.detach(), {path: part.grad for path, part in one.named_parameters()}, own[0].grad))
            optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        (wanted, gradients, of_input), (result, own_gradients, of_own) = seen
        largest = max(float(one.abs().max()) for one in gradients.values() if one is not None)
        worst = max(worst, float((wanted - result).abs().max() / wanted.abs().max()))
        for path, gradient in gradients.items():
            assert (gradient is None) == (own_gradients[path] is None), path
            if gradient is not None:
                worst = max(worst, float((gradient - own_gradients[path].full_tensor()).abs().max()) / largest)
        if of_input is not None and of_own is not None:
            worst = max(worst, float((of_input - of_own).abs().max() / of_input.abs().max()))
    state = cast(dict[str, Any], get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)))
    if dist.get_rank() == 0:  # parameters, and buffers such as running statistics
        pairs = [(one.detach().double(), state[path].double()) for path, one in plain.state_dict().items()]
        worst = max(worst, *(float((one - own).abs().max()) for one, own in pairs if one.numel()))
    return worst
