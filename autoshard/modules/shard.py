"""The cheapest sharding of a torch module that nobody wrote a card for, in one call, with its proof."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from autoshard.blocks.choices import op_cuts
from autoshard.blocks.operators import OperatorSolution, solve
from autoshard.blocks.problem import OperatorProblem
from autoshard.blocks.reported import Platform
from autoshard.blocks.shard_block import BlockSharding
from autoshard.cost.built_in import built_in
from autoshard.cost.calibration import Calibration
from autoshard.cost.collective import Number, Ring, mesh_ring
from autoshard.cost.compute import rank_rates
from autoshard.cost.sharded import LoweredBlock
from autoshard.errors import inside, nearest, require
from autoshard.graph.kinds.optimizer import UPDATES
from autoshard.layout.layout import Collective, Cuts, Layout
from autoshard.layout.legal import cut_operations
from autoshard.layout.program import Compute, Given, Program
from autoshard.layout.table import program_of
from autoshard.modules.blocks import TracedBlock, traced_block
from autoshard.modules.capture import Captured, capture, read
from autoshard.modules.describing import cut_lines, parameter_lines, sent_lines
from autoshard.modules.export import ExportedModule
from autoshard.modules.fingerprint import block_hash
from autoshard.modules.pins import Places, pinned_cuts
from autoshard.modules.proof import ComparedTensor, ModuleRun
from autoshard.modules.region import Alias, Positions
from autoshard.modules.running.batches import example_inputs
from autoshard.modules.running.placing import placeable, resting
from autoshard.plan.module_plan import ModulePlan
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.kernels import Kernels, load_kernels
from autoshard.spec.mesh import Mesh
from autoshard.spec.workload import Optimizer, Precision

_SIZE = re.compile(r"([A-Za-z_]\w*)=([0-9]{1,9})")
_MOST_AXES = 3  # choices of an operation are a product over axes

Inputs = Sequence[Any] | Mapping[str, Any] | torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSharding:
    """A module with the cheapest layout of each of its operations, and what they cost on a rank."""

    captured: Captured
    traced: TracedBlock
    mesh: Mesh
    question: "ModuleQuestion"
    problem: OperatorProblem
    solution: OperatorSolution
    program: Program

    @property
    def sharding(self) -> BlockSharding:
        """The layouts as the lines of a plan's table, with time and memory."""
        platform = self.question.platform(self.mesh)
        return BlockSharding.of(self.problem, self.solution, self.lowered, self.program, platform)

    @property
    def lowered(self) -> LoweredBlock:
        """The kernels of the program; a tensor under another name is none."""
        lowered = LoweredBlock.of(self.traced.block, self.program, self.question.kernels)
        runs = (run for run in lowered.runs if not all(isinstance(op.kind, Alias) for op in run.ops))
        return replace(lowered, runs=tuple(runs))

    def plan(self) -> ModulePlan:
        """Return what a file keeps of it."""
        question, sharding = self.question, self.sharding
        taken_cuts = {
            entry.value.tensor: entry.value.layout.cuts
            for entry in self.program.instructions
            if isinstance(entry, Given)
        }
        return ModulePlan(
            module=question.module,
            fingerprint=block_hash(self.traced),
            cluster=question.cluster.name,
            mesh=",".join(f"{name}={size}" for name, size in self.mesh.axes),
            batch=question.batch,
            precision=question.precision,
            optimizer=question.optimizer,
            sizes=self.traced.sizes,
            parameters={
                path: f"[{', '.join(_shown(position, taken_cuts[name]) for position in self.traced.dims[name])}]"
                for name, path in self.captured.parameters.items()
            },
            strategies=tuple(sharding.table.items()),
            rests={name: ".".join(over) for name, over in self.solution.rests.items()},
            kept_whole=self.kept_whole,
            time_s=sharding.time_s,
            memory_bytes=sharding.memory_bytes,
            gap=sharding.gap,
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
        run = ModuleRun(module, example_inputs(inputs), self.captured, self.traced)
        sizes = {atom: size for atom, size in self.mesh.axes if size > 1}
        virtual = Mesh.virtual(**(sizes or {"ranks": 1}))
        return tuple(run.compare(self.program, virtual))

    def again(self, exported: ExportedModule) -> "ModuleSharding":
        """Shard the same module for another call: operations that both have are cut alike."""
        places = [place for place, _, is_buffer in exported.returned() if not is_buffer]
        results = [place for place in self.question.results or () if place in places]
        captured = read(exported, self.question.hints, results or None)
        problem, traced, mesh = _traced_problem(self.question, captured, dict(self.mesh.axes), is_first=False)
        axes, old = [axis for axis, size in mesh.axes if size > 1], self.solution
        ops = cut_operations(traced.block)
        same = [op.name for op in ops if old.cuts.get(op.name) in op_cuts(traced.block, op, axes)]
        new = old if len(same) == len(ops) else solve(problem)
        cuts = {op.name: (old if op.name in same else new).cuts[op.name] for op in ops}
        rests = {op.name: (old if op.name in same else new).rests.get(op.name, ()) for op in ops}
        return replace(
            self, captured=captured, traced=traced, problem=problem, solution=replace(new, cuts=cuts, rests=rests),
            program=problem.table_setting(has_inputs=True).lowered(traced.block, cuts),
        )  # fmt: skip

    def __str__(self) -> str:
        """Say what cuts the parameters, and what a rank sends; ``sharding`` prints every operation."""
        question, traced, mesh, sharding = self.question, self.traced, self.mesh, self.sharding
        axes, ranks = ", ".join(f"{name}={size}" for name, size in mesh.axes), math.prod(size for _, size in mesh.axes)
        cost, *_ = str(sharding).splitlines()
        weights = parameter_lines(self.captured.parameters, traced, self.program, sharding.rests)
        sections = {
            "what is cut": cut_lines(self.captured.parameters, traced, self.solution.cuts),
            "the axes that cut each dim of a parameter": weights,
            "sent in a step, with the bytes of a rank": sent_lines(traced, self.program, mesh, sharding.rests),
            "whole on every rank, because nothing is known of the operation": iter(self.kept_whole),
        }
        lines = [f"{question.module} on {ranks} ranks ({axes}): {cost}"]
        for title, section in sections.items():
            listed = [f"  {line}" for line in section]
            lines += [f"{title}:", *listed] if listed else []
        return "\n".join(lines)


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
    optimizer: Optimizer = "adamw",
    memory_bytes: float = math.inf,
) -> ModuleSharding:
    """Trace a module and return the fastest sharding of its forward and backward pass within a memory limit per rank.

    ``inputs`` are example inputs of a whole batch, in order or by name; those that require a gradient get one. ``mesh``
    holds one to three axes of any names with their sizes (data=2,model=4). ``batch`` names the axis, or several
    (data.model), over which the first dim of inputs with a gradient and of results is cut where they arrive and leave;
    without it they are whole there. ``hints`` names dims of inputs: {"x": ("batch", "seq", "hidden")}. ``pins`` fixes
    layouts of parameters and of results of submodules by paths or patterns: {"*.up.weight": "[ffn/model, _]"}.
    ``results`` says which of several results are wanted. Without it all are; gradients begin at a loss if there is one.
    ``precision`` and ``optimizer`` say what a rank holds for every weight.
    """
    of_torch = isinstance(module, torch.nn.Module)  # pyright: ignore[reportUnnecessaryIsInstance]
    require(
        (of_torch, "module", f"is {module!r:.60}, and no torch.nn.Module"),
        (isinstance(memory_bytes, int | float), "memory_bytes", f"is {memory_bytes!r}, and no number of bytes"),  # pyright: ignore
        (not isinstance(results, str), "results", f"is one text; write [{results!r}]"),
        (
            optimizer in UPDATES,
            "optimizer",
            f"{optimizer!r:.20} is not known. {nearest(str(optimizer), list(UPDATES))}",
        ),
        *((isinstance(pin, str), f"pins.{path}", f"is {pin!r}, and no text") for path, pin in (pins or {}).items()),  # pyright: ignore
    )
    question = ModuleQuestion(
        module=type(module).__name__, batch=batch, precision=precision, optimizer=optimizer,
        cluster=cluster if isinstance(cluster, Cluster) else load_cluster(str(cluster)), hints=hints, results=results,
    )  # fmt: skip
    captured = capture(module, inputs, hints, results)
    names = [*captured.exported.arguments]
    unknown = sorted({*(hints or ())} - {*names})
    require(*((False, f"hints.{name}", f"is no input. {nearest(name, names)}") for name in unknown))
    problem, traced, laid = _traced_problem(question, captured, sizes_of(mesh))
    places = places_of(captured, traced)
    allowed = pinned_cuts(traced.block, places, dict(laid.axes), pins or {})
    tied = {name: like for name, like in traced.tied.items() if allowed.get(name) == allowed.get(like)}
    problem = replace(problem, allowed=allowed, tied=tied, memory_limit_bytes=memory_bytes)
    solution = solve(problem)
    return ModuleSharding(
        captured=captured, traced=traced, mesh=laid, question=question, problem=problem, solution=solution,
        program=problem.table_setting(has_inputs=True).lowered(traced.block, solution.cuts),
    )  # fmt: skip


def sharding_of(
    plan: ModulePlan, module: torch.nn.Module, inputs: Inputs, results: Sequence[str] | None = None
) -> ModuleSharding:
    """Return what a file says of a module, which must be the one that was traced for it; edited lines are checked."""
    node = load_cluster(plan.cluster, ranks=math.prod(plan.axes.values()) if plan.cluster == "local" else None)
    nodes = math.prod(plan.axes.values()) // node.num_ranks
    question = ModuleQuestion(
        module=plan.module, batch=plan.batch, precision=plan.precision, optimizer=plan.optimizer,
        cluster=node if nodes == 1 else load_cluster(plan.cluster, nodes), hints=None, results=results,
    )  # fmt: skip
    captured = capture(module, inputs, results=results)
    problem, traced, mesh = _traced_problem(question, captured, plan.axes)
    same = block_hash(traced) == plan.fingerprint
    message = f"is that of another program than this {type(module).__name__} has for these inputs; shard it again"
    require((same, "fingerprint", message))
    with inside("strategies"):
        program = program_of(traced.block, plan.table, problem.table_setting(has_inputs=True))
    computes = (entry for entry in program.instructions if isinstance(entry, Compute))
    solution = OperatorSolution(
        cuts={entry.op.name: entry.cuts for entry in computes if entry.op.pass_ == "F"},
        cost_s=math.nan,  # by the price of the solver, which has not run
        gap=plan.gap,
        rests={name: tuple(over.split(".")) for name, over in plan.rests.items()},
    )
    return ModuleSharding(
        captured=captured, traced=traced, mesh=mesh, question=question, problem=problem, solution=solution,
        program=program,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleQuestion:
    """What a sharding was asked for, beside the mesh."""

    module: str
    cluster: Cluster
    batch: str
    precision: str
    optimizer: Optimizer
    hints: Mapping[str, Sequence[str]] | None
    results: Sequence[str] | None

    @property
    def calibration(self) -> Calibration:
        """The constants of the cluster."""
        return built_in(self.cluster.name, self.cluster.kernels, chip=self.cluster.chip.name)

    @property
    def kernels(self) -> Kernels:
        """The platform's table, of which no entry names an operation of a module.

        The name of an axis says nothing of its role, so nothing hides as the traffic of tensor parallelism does.
        """
        table = load_kernels(self.cluster.kernels)
        return replace(table, hides={part: share for part, share in table.hides.items() if part != "tp"})

    def platform(self, mesh: Mesh) -> Platform:
        """Return what the price of a module on a mesh rests on. Gradients are summed over all axes at once."""
        return Platform(kernels=self.kernels, ring=self.ring(mesh), split=lambda pending: (pending, ()))

    def ring(self, mesh: Mesh) -> Callable[[Sequence[str]], Ring]:
        """Return how to look up the group of ranks along some axes of a mesh."""
        names, calibration = [name for name, _ in mesh.axes], self.calibration

        @cache
        def ring(axes: frozenset[str]) -> Ring:
            return mesh_ring(self.cluster, mesh, tuple(sorted(axes, key=names.index)), calibration)

        return lambda axes: ring(frozenset(axes))


def _traced_problem(
    question: ModuleQuestion, captured: Captured, sizes: Mapping[str, int], *, is_first: bool = True
) -> tuple[OperatorProblem, TracedBlock, Mesh]:
    """Return a captured module as the problem of one block on a mesh of these axes."""
    require(*((False, "module", message) for message in captured.exported.own_gradients))
    mesh, precision = Mesh.named(question.cluster, sizes), Precision.named(question.precision)
    if captured.exported.call.autocast:
        precision = replace(precision, activations="bf16")
    traced = traced_block(captured.program, precision)
    ring, eager = question.ring(mesh), question.kernels.eager

    def seconds(collective: Collective, message_bytes: Number) -> Number:
        return ring(collective.atoms).busy_s(collective, message_bytes, eager=eager)

    problem = OperatorProblem(
        block=traced.block,
        sizes=traced.sizes,
        atoms=dict(mesh.axes),
        boundary=_boundary(captured, traced, mesh, question.batch, is_first=is_first),
        rates=rank_rates(question.cluster, precision, question.calibration, question.kernels),
        seconds=seconds,
        state_bytes_per_weight=sum(precision.state_bytes(UPDATES[question.optimizer].num_moments).values()),
        frozen=frozenset(name for name in captured.parameters if traced.block.tensors[name].role == "input"),
        at_rest=partial(resting, traced.dims, traced.sizes, dict(mesh.axes)),
        cuts_rest=True,
    )
    return problem, traced, mesh


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
        require((isinstance(mesh, Mapping), "mesh", f"{mesh!r} is no mesh. Write it like 'data=2,model=4'"))  # pyright: ignore
        sizes = dict(mesh)
    whole = all(isinstance(size, int) for size in sizes.values())  # pyright: ignore[reportUnnecessaryIsInstance]
    require((whole, "mesh", f"has sizes that are no whole numbers: {sizes}"))
    require((1 <= len(sizes) <= _MOST_AXES, "mesh", f"has {len(sizes)} axes; 1 to {_MOST_AXES} can be searched"))
    return sizes


def places_of(captured: Captured, traced: TracedBlock) -> Places:
    """Return the tensors that pins may name: parameters, and results of submodules."""
    parameters = {path: (name, traced.dims[name]) for name, path in captured.parameters.items()}
    return {**traced.modules, **parameters}


def _batch_dims(captured: Captured, traced: TracedBlock) -> set[str]:
    """Return the first dims of the inputs whose first dim is as long as that of the first one."""
    arguments = captured.exported.arguments
    batch = next((value.shape[0] for value in arguments.values() if isinstance(value, torch.Tensor) and value.dim()), 0)
    read = {node.name: name for name, node in captured.inputs.items()} | {name: name for name in traced.block.takes}
    places = [traced.dims[read[name]] for name in arguments if name in read]
    first = [positions[0] for positions in places if positions and positions[0]]
    return {dims[0] for dims in first if math.prod(traced.sizes[dim] for dim in dims) == batch}


def _boundary(captured: Captured, traced: TracedBlock, mesh: Mesh, batch: str, *, is_first: bool) -> Cuts:
    """Cut the first dims of inputs with a gradient, and of results, but not of buffers.

    Where some of these are the batch of the first input that has dims, it alone is cut.
    """
    sizes, axes = dict(mesh.axes), tuple(axis for axis in batch.split(".") if axis)
    require(
        *((axis in sizes, "batch", f"{axis!r} is no axis of the mesh. {nearest(axis, list(sizes))}") for axis in axes)
    )
    real = tuple(axis for axis in axes if sizes[axis] > 1)
    in_block = [result for result in captured.program.results if result.name in traced.results]
    returned = [result.name for result in in_block if not result.is_buffer]
    ends = [*(traced.dims[name] for name in traced.block.takes), *(traced.results[name][1] for name in returned)]
    first = {positions[0][0] for positions in ends if positions and positions[0]}
    first = first & _batch_dims(captured, traced) or first
    cuts: Cuts = dict.fromkeys(sorted(first), real) if real else {}

    def is_placeable(positions: Positions) -> bool:
        layout = Layout(dims=tuple((dim, cuts.get(dim, ())) for position in positions for dim in position))
        return placeable(layout, positions, traced.sizes, sizes).dims == layout.dims

    # A last batch may have rows that the axes do not divide: its results are whole then.
    unsayable = {dim for positions in ends if not is_placeable(positions) for dim in positions[0]}
    return {dim: over for dim, over in cuts.items() if is_first or dim not in unsayable}
