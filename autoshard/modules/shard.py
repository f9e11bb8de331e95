"""The cheapest sharding of a torch module that nobody wrote a card for, in one call, with its proof."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from autoshard.blocks.choices import op_cuts
from autoshard.blocks.operators import OperatorSolution, solve
from autoshard.blocks.problem import OperatorProblem
from autoshard.blocks.shard_block import BlockSharding
from autoshard.cost.built_in import built_in
from autoshard.cost.calibration import Calibration
from autoshard.cost.collective import Number, Ring, mesh_ring
from autoshard.cost.compute import Rates
from autoshard.errors import inside, nearest, require
from autoshard.layout.layout import Collective, Cuts
from autoshard.layout.legal import cut_operations
from autoshard.layout.program import Compute, Given, Program
from autoshard.layout.table import TableSetting, program_of, strategies, written
from autoshard.modules.blocks import TracedBlock, traced_block
from autoshard.modules.capture import Captured, capture, read
from autoshard.modules.export import ExportedModule
from autoshard.modules.fingerprint import fingerprint
from autoshard.modules.pins import Places, allowed_cuts
from autoshard.modules.proof import ComparedTensor, ModuleRun
from autoshard.modules.running.placing import resting
from autoshard.plan.module_plan import ModulePlan
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.kernels import load_kernels
from autoshard.spec.mesh import Mesh
from autoshard.spec.workload import DTYPE_BYTES, Precision

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
    asked: "Asked"
    problem: OperatorProblem
    solution: OperatorSolution
    program: Program

    @property
    def sharding(self) -> BlockSharding:
        """The layouts as the lines of a plan's table, with time and memory."""
        table = written(strategies(self.program, self.traced.block), self.problem.atoms)
        return replace(BlockSharding.of(self.problem, self.solution), table=table)

    def plan(self) -> ModulePlan:
        """Return what a file keeps of it."""
        asked, found = self.asked, self.sharding
        given = {one.value.tensor: one.value.layout.cuts for one in self.program.instructions if isinstance(one, Given)}
        return ModulePlan(
            module=asked.module,
            fingerprint=fingerprint(self.traced),
            cluster=asked.cluster.name,
            mesh=",".join(f"{name}={size}" for name, size in self.mesh.axes),
            batch=asked.batch,
            precision=asked.precision,
            sizes=self.traced.sizes,
            parameters={
                path: f"[{', '.join(_shown(position, given[name]) for position in self.traced.dims[name])}]"
                for name, path in self.captured.parameters.items()
            },
            strategies=tuple(found.table.items()),
            rests={name: ".".join(over) for name, over in self.solution.rests.items()},
            kept_whole=self.kept_whole,
            time_s=found.time_s,
            bound_s=found.bound_s,
            memory_bytes=found.memory_bytes,
        )

    def refuse_unfit(self) -> None:
        """Refuse layouts that need more memory than was allowed."""
        least = f"nothing fits; the least is {self.sharding.memory_bytes:,.0f} bytes"
        require((self.solution.fits, "memory_bytes", least))

    def save(self, path: str | Path) -> None:
        """Write its plan into a file, which ``autoshard.shard(..., plan=...)`` executes."""
        self.refuse_unfit()
        self.plan().save(Path(path))

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
        return tuple(run.compare(self.program, virtual))

    def again(self, exported: ExportedModule) -> "ModuleSharding":
        """Shard the same module for another call: operations that both have are cut alike."""
        places = [place for place, _, is_buffer in exported.returned() if not is_buffer]
        results = [one for one in self.asked.results or () if one in places]
        captured = read(exported, self.asked.hints, results or None)
        problem, traced, laid = _asked(self.asked, captured, dict(self.mesh.axes))
        axes, old = [atom for atom, size in laid.axes if size > 1], self.solution
        ops = cut_operations(traced.block)
        same = [op.name for op in ops if old.cuts.get(op.name) in op_cuts(traced.block, op, axes)]
        new = old if len(same) == len(ops) else solve(problem)
        cuts = {op.name: (old if op.name in same else new).cuts[op.name] for op in ops}
        rests = {op.name: (old if op.name in same else new).rests.get(op.name, ()) for op in ops}
        return replace(
            self, captured=captured, traced=traced, problem=problem, solution=replace(new, cuts=cuts, rests=rests),
            program=setting_of(problem).lowered(traced.block, cuts),
        )  # fmt: skip

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
    of_torch = isinstance(module, torch.nn.Module)  # pyright: ignore[reportUnnecessaryIsInstance]
    require(
        (of_torch, "module", f"is {module!r:.60}, and no torch.nn.Module"),
        (isinstance(memory_bytes, int | float), "memory_bytes", f"is {memory_bytes!r}, and no number of bytes"),  # pyright: ignore
        (not isinstance(results, str), "results", f"is one text; write [{results!r}]"),
        *((isinstance(one, str), f"pins.{path}", f"is {one!r}, and no text") for path, one in (pins or {}).items()),  # pyright: ignore
    )
    asked = Asked(
        module=type(module).__name__, batch=batch, precision=precision,
        cluster=cluster if isinstance(cluster, Cluster) else load_cluster(str(cluster)), hints=hints, results=results,
    )  # fmt: skip
    captured = capture(module, inputs, hints, results)
    problem, traced, laid = _asked(asked, captured, sizes_of(mesh))
    places = places_of(captured, traced)
    allowed = allowed_cuts(traced.block, places, dict(laid.axes), pins or {})
    tied = {name: like for name, like in traced.tied.items() if allowed.get(name) == allowed.get(like)}
    problem = replace(problem, allowed=allowed, tied=tied, memory_limit_bytes=memory_bytes)
    solution = solve(problem)
    return ModuleSharding(
        captured=captured, traced=traced, mesh=laid, asked=asked, problem=problem, solution=solution,
        program=setting_of(problem).lowered(traced.block, solution.cuts),
    )  # fmt: skip


def sharding_of(
    plan: ModulePlan, module: torch.nn.Module, inputs: Inputs, results: Sequence[str] | None = None
) -> ModuleSharding:
    """Return what a file says of a module, which must be the one that was traced for it; edited lines are checked."""
    node = load_cluster(plan.cluster, ranks=math.prod(plan.axes.values()) if plan.cluster == "local" else None)
    nodes = math.prod(plan.axes.values()) // node.num_ranks
    cluster = node if nodes == 1 else load_cluster(plan.cluster, nodes)
    asked = Asked(
        module=plan.module, cluster=cluster, batch=plan.batch, precision=plan.precision, hints=None, results=results
    )
    captured = capture(module, inputs, results=results)
    problem, traced, laid = _asked(asked, captured, plan.axes)
    same = fingerprint(traced) == plan.fingerprint
    message = f"is that of another program than this {type(module).__name__} has for these inputs; shard it again"
    require((same, "fingerprint", message))
    with inside("strategies"):
        program = program_of(traced.block, plan.table, setting_of(problem))
    cuts = {one.op.name: one.cuts for one in program.instructions if isinstance(one, Compute) and one.op.pass_ == "F"}
    solution = OperatorSolution(
        cuts=cuts, cost_s=plan.time_s, kept_bytes=plan.memory_bytes, gap=1 - plan.bound_s / plan.time_s,
        rests={name: tuple(over.split(".")) for name, over in plan.rests.items()},
    )  # fmt: skip
    return ModuleSharding(
        captured=captured, traced=traced, mesh=laid, asked=asked, problem=problem, solution=solution, program=program
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a sharding was asked for, beside the mesh."""

    module: str
    cluster: Cluster
    batch: str
    precision: str
    hints: Mapping[str, Sequence[str]] | None
    results: Sequence[str] | None


def _asked(asked: Asked, captured: Captured, sizes: Mapping[str, int]) -> tuple[OperatorProblem, TracedBlock, Mesh]:
    require(*((False, "module", message) for message in captured.exported.own_gradients))
    laid, numbers = Mesh.named(asked.cluster, sizes), Precision.named(asked.precision)
    if captured.exported.call.autocast:
        numbers = replace(numbers, activations="bf16")
    traced = traced_block(captured.program, numbers)
    problem = _problem(traced, asked.cluster, laid, numbers)
    frozen = frozenset(name for name in captured.parameters if traced.block.tensors[name].role == "input")
    boundary = _boundary(captured, traced, laid, asked.batch)
    at_rest = partial(resting, traced.dims, traced.sizes, dict(laid.axes))
    return replace(problem, boundary=boundary, frozen=frozen, at_rest=at_rest), traced, laid


def setting_of(problem: OperatorProblem) -> TableSetting:
    """Return how a table of the problem's block is read and lowered."""
    price = problem.price("bf16")
    return TableSetting(
        atoms=dict(problem.atoms), price=price, boundary=problem.boundary, keeps_gathered=True, has_inputs=True
    )


def _shown(position: Sequence[str], cuts: Cuts) -> str:
    """Write a position of a tensor as pins do: the dim that is cut, or the product of dims."""
    cut = [f"{dim}/{'.'.join(cuts[dim])}" for dim in position if cuts.get(dim)]
    return ".".join(cut) or ".".join(position) or "1"


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
    whole = all(isinstance(one, int) for one in sizes.values())  # pyright: ignore[reportUnnecessaryIsInstance]
    require((whole, "mesh", f"has sizes that are no whole numbers: {sizes}"))
    require((1 <= len(sizes) <= _MOST_AXES, "mesh", f"has {len(sizes)} axes; 1 to {_MOST_AXES} can be searched"))
    return sizes


def places_of(captured: Captured, traced: TracedBlock) -> Places:
    """Return the tensors that pins may name: parameters, and results of submodules."""
    found = {path: (name, traced.dims[name]) for name, path in captured.parameters.items()}
    return {**traced.modules, **found}


def _problem(traced: TracedBlock, cluster: Cluster, mesh: Mesh, precision: Precision) -> OperatorProblem:
    calibration, names = built_in(cluster.name, chip=cluster.chip.name), [name for name, _ in mesh.axes]
    eager = load_kernels(cluster.kernels).eager

    @cache
    def ring(over: frozenset[str]) -> Ring:
        return mesh_ring(cluster, mesh, tuple(sorted(over, key=names.index)), calibration)

    def seconds(collective: Collective, message_bytes: Number) -> Number:
        return ring(frozenset(collective.atoms)).busy_s(collective, message_bytes, eager=eager)

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


def _boundary(captured: Captured, traced: TracedBlock, mesh: Mesh, batch: str) -> Cuts:
    """Cut the first dims of inputs with a gradient, and of results, but not of buffers."""
    sizes, axes = dict(mesh.axes), tuple(one for one in batch.split(".") if one)
    require(
        *((axis in sizes, "batch", f"{axis!r} is no axis of the mesh. {nearest(axis, list(sizes))}") for axis in axes)
    )
    real = tuple(axis for axis in axes if sizes[axis] > 1)
    returned = [one.name for one in captured.program.results if one.name in traced.results and not one.is_buffer]
    ends = [*(traced.dims[name] for name in traced.block.takes), *(traced.results[name][1] for name in returned)]
    first = {positions[0][0] for positions in ends if positions and positions[0]}
    return dict.fromkeys(sorted(first), real) if real else {}


def _rates(cluster: Cluster, calibration: Calibration, precision: Precision) -> Rates:
    peak = cluster.rank_matrix_flops_per_s(precision.activations)
    memory = cluster.rank_memory_bandwidth_bytes_per_s * calibration.memory_efficiency
    return Rates(
        matrix_flops_per_s=peak * calibration.matrix_efficiency,
        vector_flops_per_s=cluster.rank_vector_flops_per_s * calibration.vector_efficiency,
        memory_bytes_per_s=memory,
    )
