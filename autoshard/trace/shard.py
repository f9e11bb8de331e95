"""The cheapest sharding of a torch module that nobody wrote a card for, in one call, with its proof."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from autoshard.blocks.operators import OperatorSolution, solve
from autoshard.blocks.problem import OperatorProblem
from autoshard.blocks.shard_block import BlockSharding
from autoshard.cost.calibration import Calibration, built_in
from autoshard.cost.collective import Number, Ring, mesh_ring
from autoshard.cost.compute import Rates
from autoshard.errors import nearest, require
from autoshard.layout.layout import Collective, Cuts
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.mesh import Mesh
from autoshard.spec.workload import DTYPE_BYTES, Precision
from autoshard.trace.blocks import TracedBlock, traced_block
from autoshard.trace.capture import Captured, capture
from autoshard.trace.pins import Places, allowed_cuts
from autoshard.trace.proof import ComparedTensor, ModuleRun

_SIZE = re.compile(r"([A-Za-z_]\w*)=([0-9]{1,9})")
_MOMENTS = 2  # of AdamW
_MOST_AXES = 3  # choices of an operation are a product over axes

Inputs = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSharding:
    """A module with the cheapest layout of each of its operations, and what they cost on a rank."""

    captured: Captured
    traced: TracedBlock
    mesh: Mesh
    problem: OperatorProblem
    solution: OperatorSolution

    @property
    def sharding(self) -> BlockSharding:
        """The layouts as the lines of a plan's table, with time and memory."""
        return BlockSharding.of(self.problem, self.solution)

    @property
    def dims(self) -> Mapping[str, tuple[str, ...]]:
        """The shape of every parameter in named dims: a product of dims where several stand at one place."""
        paths = self.captured.parameters.values()
        return {
            path: tuple(".".join(position) or "1" for position in positions)
            for path, (_, positions) in places_of(self.captured, self.traced).items()
            if path in paths
        }

    @property
    def kept_whole(self) -> tuple[str, ...]:
        """The operations of which nothing is known, so that nothing of them is cut, with their lines of code."""
        return self.captured.program.kept_whole

    def prove(self, module: torch.nn.Module, inputs: Inputs) -> tuple[ComparedTensor, ...]:
        """Run the sharded program on virtual ranks in numpy, and compare results and gradients with the module's own.

        Module and inputs must be float64, and of the shapes that were traced.
        """
        run = ModuleRun(module, inputs, self.captured, self.traced)
        sizes = {atom: size for atom, size in self.mesh.axes if size > 1}
        virtual = Mesh.virtual(**(sizes or {"ranks": 1}))
        price = self.problem.price("bf16")
        return tuple(run.compare(self.solution.cuts, virtual, price, self.problem.boundary))

    def __str__(self) -> str:
        lines = [str(self.sharding), *(f"{path} [{', '.join(dims)}]" for path, dims in self.dims.items())]
        return "\n".join([*lines, *(f"kept whole: {line}" for line in self.kept_whole)])


def shard_module(  # noqa: PLR0913
    module: torch.nn.Module,
    inputs: Inputs,
    cluster: Cluster | str | Path,
    mesh: str | Mapping[str, int],
    *,
    hints: Mapping[str, Sequence[str]] | None = None,
    pins: Mapping[str, str] | None = None,
    batch: str = "",
    results: Sequence[str] | None = None,
    precision: str = "bf16",
    memory_bytes: float = math.inf,
) -> ModuleSharding:
    """Trace a module and return the fastest sharding of its forward and backward pass within a memory limit per rank.

    ``inputs`` are example inputs of a whole batch, in order or by name; those that require a gradient get one. ``mesh``
    holds one to three axes of any names with their sizes (data=2,model=4). ``batch`` names the axis, or several
    (data.model), over which the first dim of inputs with a gradient and of results is cut where they arrive and leave;
    without it they are whole there. ``hints`` names dims of inputs: {"x": ("batch", "seq", "hidden")}. ``pins`` fixes
    layouts of parameters and of results of submodules by paths or patterns: {"*.up.weight": "[ffn/model, _]"}.
    ``results`` says which of several results are wanted. Without it all are; gradients begin at a loss if there is one.
    """
    the_cluster = cluster if isinstance(cluster, Cluster) else load_cluster(str(cluster))
    laid = Mesh.named(the_cluster, sizes_of(mesh))
    numbers = Precision.named(precision)
    captured = capture(module, inputs, hints, results)
    traced = traced_block(captured.program, numbers)
    places = places_of(captured, traced)
    allowed = allowed_cuts(traced.block, places, dict(laid.axes), traced.sizes, pins or {})
    problem = replace(
        _problem(traced, the_cluster, laid, numbers),
        boundary=_boundary(traced, laid, batch),
        allowed=allowed,
        tied={name: like for name, like in traced.tied.items() if allowed[name] == allowed[like]},
        memory_limit_bytes=memory_bytes,
    )
    return ModuleSharding(
        captured=captured, traced=traced, mesh=laid, problem=problem, solution=solve(problem)
    )  # fmt: skip


def sizes_of(mesh: str | Mapping[str, int]) -> Mapping[str, int]:
    """Read the axes of a mesh with their sizes.

    >>> sizes_of("data=2,model=4")
    {'data': 2, 'model': 4}
    """
    if isinstance(mesh, str):
        matches = [_SIZE.fullmatch(part.strip()) for part in mesh.split(",")]
        sizes = {match[1]: int(match[2]) for match in matches if match}
        require((len(sizes) == len(matches), "mesh", f"{mesh!r} is no mesh. Write it like 'data=2,model=4'"))
    else:
        sizes = dict(mesh)
    require((1 <= len(sizes) <= _MOST_AXES, "mesh", f"has {len(sizes)} axes; 1 to {_MOST_AXES} can be searched"))
    return sizes


def places_of(captured: Captured, traced: TracedBlock) -> Places:
    """Return the tensors that pins may name: parameters, and results of submodules."""
    found = {path: (name, traced.dims[name]) for name, path in captured.parameters.items()}
    return {**traced.modules, **found}


def _problem(traced: TracedBlock, cluster: Cluster, mesh: Mesh, precision: Precision) -> OperatorProblem:
    calibration, names = built_in(cluster.name), [name for name, _ in mesh.axes]

    @cache
    def ring(over: frozenset[str]) -> Ring:
        return mesh_ring(cluster, mesh, tuple(sorted(over, key=names.index)), calibration)

    def seconds(collective: Collective, message_bytes: Number) -> Number:
        return ring(frozenset(collective.atoms)).time_s(collective, message_bytes)

    masters = DTYPE_BYTES[precision.masters] if precision.masters else 0
    states = DTYPE_BYTES[precision.weights] + DTYPE_BYTES[precision.gradients] + masters
    return OperatorProblem(
        block=traced.block,
        sizes=traced.sizes,
        atoms=dict(mesh.axes),
        boundary={},
        rates=_rates(cluster, calibration, precision),
        seconds=seconds,
        state_bytes_per_weight=states + _MOMENTS * DTYPE_BYTES[precision.moments],
        cuts_rest=True,
    )


def _boundary(traced: TracedBlock, mesh: Mesh, batch: str) -> Cuts:
    """Cut the first dims of inputs with a gradient, and of results."""
    sizes, axes = dict(mesh.axes), tuple(one for one in batch.split(".") if one)
    require(
        *((axis in sizes, "batch", f"{axis!r} is no axis of the mesh. {nearest(axis, list(sizes))}") for axis in axes)
    )
    real = tuple(axis for axis in axes if sizes[axis] > 1)
    ends = [traced.dims[name] for name in traced.block.takes] + [positions for _, positions in traced.results.values()]
    first = {positions[0][0] for positions in ends if positions and positions[0]}
    return dict.fromkeys(sorted(first), real) if real else {}


def _rates(cluster: Cluster, calibration: Calibration, precision: Precision) -> Rates:
    return Rates(
        matrix_flops_per_s=cluster.rank_matrix_flops_per_s(precision.activations) * calibration.matrix_efficiency,
        vector_flops_per_s=cluster.rank_vector_flops_per_s * calibration.vector_efficiency,
        memory_bytes_per_s=cluster.rank_memory_bandwidth_bytes_per_s * calibration.memory_efficiency,
    )
