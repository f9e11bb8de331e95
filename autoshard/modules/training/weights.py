"""The first numbers of a module's weights: the first rank makes the module, and all others get their parts of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
import torch.distributed as dist

from autoshard.engine.programs import PlanPrograms
from autoshard.graph.op import Array
from autoshard.layout.layout import Layout
from autoshard.modules.training.planning import made_code
from autoshard.modules.training.reading import TracedCode, as_array
from autoshard.plan.plan import Plan
from autoshard.run.placement import Bounds, MeshRank


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOfWeight:
    """A weight of which a rank has its own block alone."""

    bounds: Bounds
    numbers: Array

    def __getitem__(self, box: tuple[slice, ...]) -> Array:
        """Return the block; no other part is there."""
        assert tuple((part.start, part.stop) for part in box) == self.bounds, f"{box} is not {self.bounds}"
        return self.numbers


def shared_code(plan: Plan, seed: int) -> TracedCode:
    """Return a plan's code with its buffers; every rank calls this. Only the first one has weights with numbers."""
    code = made_code(plan, seed if dist.get_rank() == 0 else None)
    buffers = {path: _sent(buffer) for path, buffer in sorted(code.module.named_buffers())}
    constants = code.graph.captured.exported.program.constants  # that forward has written down
    constants.update((name, _sent(value)) for name, value in sorted(constants.items()) if _is_tensor(value))
    return replace(code, buffers=buffers)


def shared_weights(code: TracedCode, plan: Plan, programs: PlanPrograms) -> Mapping[str, BlockOfWeight]:
    """Return this rank's block of every weight of its stages, by instance; every rank calls this."""
    mesh_rank = MeshRank(mesh=plan.mesh, rank=dist.get_rank(), sizes=programs.graph.sizes)
    layouts = dict(_layouts(plan, programs, mesh_rank))
    instances: dict[str, list[str]] = {}  # of weights, by their paths in the module
    for block, paths in code.graph.paths.items():
        for name, path in paths.items():
            instances.setdefault(path, []).append(f"{block}.{name}")
    blocks: dict[str, BlockOfWeight] = {}
    for path, names in instances.items():
        tensor = _sent(code.module.get_parameter(path))
        for name in (name for name in names if name in layouts):
            bounds = mesh_rank.bounds(layouts[name])
            part = as_array(tensor).reshape(code.graph.shape_of(name))[tuple(slice(*ends) for ends in bounds)]
            blocks[name] = BlockOfWeight(bounds=bounds, numbers=part.copy())
    return blocks


def _layouts(plan: Plan, programs: PlanPrograms, mesh_rank: MeshRank) -> Iterator[tuple[str, Layout]]:
    """Yield the weights of a rank's stages with their layouts."""
    for number, blocks in enumerate(programs.stages):
        if plan.schedule.place_of(number)[0] == mesh_rank.coordinate("pp"):
            for block, parts in blocks.items():
                for tensor in parts.block.parameters:
                    yield f"{block}.{tensor.name}", parts.input_value(tensor.name).layout


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the numbers that the first rank has."""
    is_first = dist.get_rank() == 0
    numbers = tensor.detach().contiguous() if is_first else torch.empty(tensor.shape, dtype=tensor.dtype)
    dist.broadcast(numbers, 0)
    return numbers
