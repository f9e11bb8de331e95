"""The cheapest sharding of a torch module that nobody wrote a card for, in one call, with its proof."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from autoshard.errors import require
from autoshard.layout.layout import Collective, Cuts
from autoshard.plan.lowering import ATOMS
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.mesh import Mesh
from autoshard.spec.workload import DTYPE_BYTES, Precision
from autoshard.trace.blocks import TracedBlock, traced_block
from autoshard.trace.capture import Captured, capture
from autoshard.trace.proof import ComparedTensor, ModuleRun

_AXES = ("pp", "dp", "ep", "cp", "tp", "rep")
_MOMENTS = 2  # of AdamW


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
        return {
            path: tuple(".".join(position) or "1" for position in self.traced.dims[name])
            for name, path in self.captured.parameters.items()
            if name in self.traced.dims
        }

    @property
    def kept_whole(self) -> tuple[str, ...]:
        """The operations of which nothing is known, so that nothing of them is cut, with their lines of code."""
        return self.captured.program.kept_whole

    def prove(self, module: torch.nn.Module, inputs: Sequence[Any]) -> tuple[ComparedTensor, ...]:
        """Run the sharded program on virtual ranks in numpy, and compare result and gradients with the module's own.

        Module and inputs must be float64, and of the shapes that were traced.
        """
        run = ModuleRun(module, inputs, self.captured, self.traced)
        sizes = {atom: size for atom, size in self.mesh.axes if size > 1}
        virtual = Mesh.virtual(**(sizes or {"edp": 1}))
        price = self.problem.price("bf16")
        return tuple(run.compare(self.solution.cuts, virtual, price, self.problem.boundary))

    def __str__(self) -> str:
        lines = [str(self.sharding), *(f"{path} [{', '.join(dims)}]" for path, dims in self.dims.items())]
        return "\n".join([*lines, *(f"kept whole: {line}" for line in self.kept_whole)])


def shard_module(  # noqa: PLR0913
    module: torch.nn.Module,
    inputs: Sequence[Any],
    cluster: Cluster | str | Path,
    mesh: str,
    *,
    hints: Mapping[str, Sequence[str]] | None = None,
    precision: str = "bf16",
    memory_bytes: float = math.inf,
) -> ModuleSharding:
    """Trace a module and return the fastest sharding of its forward and backward pass within a memory limit per rank.

    ``inputs`` are example inputs; their shapes are those of one micro-batch over all of dp. The first one of floating
    point gets a gradient, and its first dim is cut over dp where it arrives and where the result leaves. ``mesh`` holds
    sizes of axes (dp=2,tp=4), ``hints`` names of dims of inputs: {"x": ("batch", "seq", "hidden")}.
    """
    the_cluster = cluster if isinstance(cluster, Cluster) else load_cluster(str(cluster))
    sizes = _sizes(mesh)
    others = math.prod(size for key, size in sizes.items() if key in ("pp", "cp", "tp"))
    laid = Mesh.laid_on(the_cluster, {"dp": the_cluster.num_ranks // others, **sizes})
    numbers = Precision.named(precision)
    captured = capture(module, inputs, hints)
    traced = traced_block(captured.program, numbers)
    problem = _problem(traced, captured, the_cluster, laid, numbers, memory_bytes)
    return ModuleSharding(
        captured=captured, traced=traced, mesh=laid, problem=problem, solution=solve(problem)
    )  # fmt: skip


def _sizes(mesh: str) -> dict[str, int]:
    """Read the sizes of axes.

    >>> _sizes("dp=2,tp=8,rep=2")
    {'dp': 2, 'tp': 8, 'rep': 2}
    """
    pairs = [part.strip().partition("=") for part in mesh.split(",") if part.strip()]
    require(
        *((key in _AXES, f"mesh.{key}", f"is no axis. Known: {', '.join(_AXES)}") for key, _, _ in pairs),
        *((size.isdecimal(), f"mesh.{key}", f"must be a whole number, not {size!r}") for key, _, size in pairs),
    )
    return {key: int(size) for key, _, size in pairs}


def _problem(
    traced: TracedBlock, captured: Captured, cluster: Cluster, mesh: Mesh, precision: Precision, memory_bytes: float
) -> OperatorProblem:
    calibration = built_in(cluster.name)
    atoms = {atom: mesh.size(atom) for atom in ATOMS}

    @cache
    def ring(over: frozenset[str]) -> Ring:
        return mesh_ring(cluster, mesh, tuple(sorted(over, key=ATOMS.index)), calibration)

    def seconds(collective: Collective, message_bytes: Number) -> Number:
        return ring(frozenset(collective.atoms)).time_s(collective, message_bytes)

    masters = DTYPE_BYTES[precision.masters] if precision.masters else 0
    states = DTYPE_BYTES[precision.weights] + DTYPE_BYTES[precision.gradients] + masters
    return OperatorProblem(
        block=traced.block,
        sizes=traced.sizes,
        atoms=atoms,
        boundary=_boundary(traced, captured, atoms),
        rates=_rates(cluster, calibration, precision),
        seconds=seconds,
        memory_limit_bytes=memory_bytes,
        state_bytes_per_weight=states + _MOMENTS * DTYPE_BYTES[precision.moments],
        cuts_rest=True,
    )


def _boundary(traced: TracedBlock, captured: Captured, atoms: Mapping[str, int]) -> Cuts:
    """Cut the batch over dp where it arrives: the first dim of the carried input."""
    carried = next((one.name for one in captured.program.values if one.origin == "carried"), "")
    first = traced.dims.get(carried, ((),))[0]
    real = tuple(atom for atom in ("edp", "ep") if atoms[atom] > 1)
    return {first[0]: real} if first and real else {}


def _rates(cluster: Cluster, calibration: Calibration, precision: Precision) -> Rates:
    return Rates(
        matrix_flops_per_s=cluster.rank_matrix_flops_per_s(precision.activations) * calibration.matrix_efficiency,
        vector_flops_per_s=cluster.rank_vector_flops_per_s * calibration.vector_efficiency,
        memory_bytes_per_s=cluster.rank_memory_bandwidth_bytes_per_s * calibration.memory_efficiency,
    )
