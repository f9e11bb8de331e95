"""The layer as autoshard traces and lowers it, and what its ranks send."""

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from autoshard.blocks.choices import op_cuts
from autoshard.blocks.operators import solve
from autoshard.layout.layout import Cuts, Layout, local_sizes
from autoshard.layout.legal import cut_operations, faults
from autoshard.layout.lower import lower
from autoshard.layout.redistribute import Price, bytes_price
from autoshard.modules.blocks import TracedBlock, traced_block
from autoshard.modules.capture import Captured, capture
from autoshard.modules.proof import ModuleRun
from autoshard.modules.shard import shard_module
from autoshard.spec.cluster import Cluster
from autoshard.spec.mesh import Mesh
from autoshard.spec.workload import Precision
from tests.gspmd.cases import INPUTS, PARAMETERS, Case, Cut
from tests.gspmd.layer import Layer
from tests.gspmd.sent import Sent


@dataclass(frozen=True, kw_only=True)
class TracedLayer:
    """A layer with its inputs, as captured and as a block."""

    module: Layer
    inputs: Mapping[str, torch.Tensor]
    captured: Captured
    block: TracedBlock

    @classmethod
    def of(cls, sizes: Mapping[str, int], device: str = "cpu") -> "TracedLayer":
        """Make the layer with the same numbers every time; on the meta device it has none."""
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            module = Layer(*(sizes[axis] for axis in "hkgdf")).double()
            shapes = {name: [sizes[axis] for axis in text.split()] for name, text in INPUTS.items()}
            inputs = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
            inputs["mask"] = torch.triu(torch.full_like(inputs["mask"], -1e9), 1)
            inputs["x"].requires_grad_()
        captured = capture(module, tuple(inputs.values()))
        block = traced_block(captured.program, Precision.named("bf16"))
        return cls(module=module, inputs=inputs, captured=captured, block=block)

    @property
    def names(self) -> Mapping[str, str]:
        """The names that tracing gave to axes, found by where these stand in tensors."""
        names = {path: name for name, path in self.captured.parameters.items()}
        tensors = {**INPUTS, **{names[path]: text for path, text in PARAMETERS.items()}}
        found: dict[str, str] = {}
        for tensor, text in tensors.items():
            for word, position in zip(text.split(), self.block.dims[tensor], strict=True):
                found |= dict(zip(word, position, strict=False))  # rotary halves the head dim, which stands last
        return found

    def dims(self, cut: Cut) -> Cuts:
        """Return cuts of axes under their names."""
        return {self.names[axis]: atoms for axis, atoms in cut.items()}

    def boundary(self, case: Case) -> Cuts:
        """Return the cuts at both ends of the layer."""
        return self.dims(case.cuts.get("between", {}))

    def cuts(self, case: Case) -> Mapping[str, Cuts]:
        """Return the cut of every operation; one that only gives a tensor other names is cut as its maker is."""
        block, found = self.block.block, dict[str, Cuts]()
        modules = {tensor: path for path, (tensor, _) in self.block.modules.items()}
        for op in cut_operations(block):
            path = next((modules[name] for name in op.outputs if name in modules), "")
            cut = self.dims(case.cut(path)) if path else found[block.op(op.inputs[0]).inputs[0]]
            found[op.name] = {
                dim: atoms for dim, atoms in cut.items() if path or dim in block.tensors[op.outputs[0]].dims
            }
        wrong = faults(block, found, tuple(case.mesh))
        assert not wrong, wrong
        return found


def random_case(layer: TracedLayer, mesh: Mapping[str, int], chosen: random.Random) -> Case:
    """Return a case with a random legal cut of every operation, into equal parts; the head dim is never cut."""
    sizes = {name: layer.block.sizes[name] for name in layer.names.values()}
    axes = {name: axis for axis, name in layer.names.items() if axis != "d"}
    cuts: dict[str, Cut] = {"between": chosen.choice([{}, {"b": tuple(mesh)[:1]}])}

    def is_even(cut: Cuts) -> bool:
        return all(
            name in axes and sizes[name] % math.prod(mesh[atom] for atom in atoms) == 0 for name, atoms in cut.items()
        )

    for path, (tensor, _) in layer.block.modules.items():
        op = next(op for op in cut_operations(layer.block.block) if tensor in op.outputs)
        legal = [
            {name: atoms for name, atoms in cut.items() if atoms} for cut in op_cuts(layer.block.block, op, tuple(mesh))
        ]
        cut = chosen.choice([one for one in legal if is_even(one)])
        cuts[path] = {axes[name]: atoms for name, atoms in cut.items()}
    return Case(mesh=mesh, cuts=cuts)


def largest_error(case: Case, layer: TracedLayer) -> float:
    """Run a case on virtual ranks; return how far the result or any gradient is from the plain module's."""
    run = ModuleRun(layer.module, list(layer.inputs.values()), layer.captured, layer.block)
    mesh, between = Mesh.virtual(**case.mesh), layer.boundary(case)
    program = lower(
        layer.block.block, layer.cuts(case), case.mesh, price_of(case), boundary=between, keeps_gathered=True
    )
    found = run.compare(program, mesh)
    assert len(found) == 2 + len(PARAMETERS)  # the result, and gradients of x and of all weights
    return max(one.error for one in found)


def sent_in(case: Case, layer: TracedLayer) -> Counter[Sent]:
    """Return what ranks send in a forward and backward pass, all parts of weights' gradients summed at its end."""
    mesh = Mesh.virtual(**case.mesh)
    return sent_by_cuts(layer.block, layer.cuts(case), mesh, layer.boundary(case), price_of(case))


def sent_in_solution(case: Case, layer: TracedLayer, cluster: Cluster) -> Counter[Sent]:
    """Return what ranks of one node send under the cuts that the solver finds fastest, between the same ends.

    Weights rest as they are used, because those of a case do.
    """
    mesh, boundary = Mesh.virtual(**case.mesh), layer.boundary(case)
    found = shard_module(layer.module, list(layer.inputs.values()), cluster, case.mesh)
    problem = replace(found.problem, boundary=boundary, cuts_rest=False, state_bytes_per_weight=0.0)
    solution = solve(problem)
    assert solution.gap == 0.0
    return sent_by_cuts(found.traced, solution.cuts, mesh, boundary, price_of(case))


def price_of(case: Case) -> Price:
    """Return the price of changes by which both sides are lowered: bytes."""
    return bytes_price(1.0, case.mesh)


def sent_by_cuts(
    traced: TracedBlock, cuts: Mapping[str, Cuts], mesh: Mesh, boundary: Cuts, price: Price
) -> Counter[Sent]:
    """Return what ranks send under any cuts."""
    atoms, block = dict(mesh.axes), traced.block
    program = lower(block, cuts, atoms, price, boundary=boundary, keeps_gathered=True)

    def elements(layout: Layout) -> int:
        sizes = {dim: traced.sizes[dim] for dim, _ in layout.dims}
        return math.prod(local_sizes(sizes, layout.cuts, atoms).values())

    def over(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(atom for atom, size in mesh.axes if atom in names and size > 1)

    found: Counter[Sent] = Counter()
    for change in program.collectives():
        if change.collective.kind != "slice":  # which sends nothing
            largest = max(elements(change.reads.layout), elements(change.writes.layout))
            found[Sent(kind=change.collective.kind, elements=largest, over=over(change.collective.atoms))] += 1
    for weight in block.parameters:
        gradient = program.results[f"{weight.name}.sum"].layout
        if over(gradient.sums):
            found[Sent(kind="all_reduce", elements=elements(gradient), over=over(gradient.sums))] += 1
    return found
