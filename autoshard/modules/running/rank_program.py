"""A sharded module on one rank: its program, forward and backward, on this rank's parts of parameters and inputs."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement  # pyright: ignore[reportMissingTypeStubs]

from autoshard.blocks.problem import weights_of
from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.kernels import Rotations
from autoshard.engine.torch.steps import RankContext, kernel_for
from autoshard.engine.torch.world import World
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.layout.layout import Layout
from autoshard.layout.program import (
    Communicate,
    Compute,
    Given,
    Instruction,
    PassInstructions,
    Value,
    read_by,
    values_written,
    written_by,
)
from autoshard.layout.redistribute import redistribute
from autoshard.modules.region import Positions, Region, RegionGradient, Tape
from autoshard.modules.repeats import layer_of
from autoshard.modules.running.placing import placements, resting
from autoshard.modules.running.steps import Passes, RankStep, dropping
from autoshard.modules.shard import ModuleSharding
from autoshard.run.activity import RankActivity
from autoshard.run.placement import MeshRank


@dataclass(frozen=True, slots=True, kw_only=True)
class RestingWeight:
    """A parameter: how it rests, how it comes to the layout in which the program takes it, and its gradient back.

    ``made`` is the gradient as the program makes it; frozen parameters have none.
    """

    name: str
    path: str
    positions: Positions
    rest: Layout
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]  # of the part that rests on this rank, along dims
    local_shape: tuple[int, ...]  # and as torch sees it
    taken: Mapping[str, tuple[Communicate, ...]]  # by value of the program
    made: Value | None
    reduced: tuple[Communicate, ...]

    @property
    def start(self) -> str:
        """The value of the part that rests on this rank."""
        return f"{self.name} at rest"

    @property
    def gradient(self) -> str:
        """The value of the gradient of that part."""
        return f"{self.name} at rest, gradient"


class RankProgram:
    """The program of a sharded module on one rank of a mesh."""

    def __init__(
        self,
        sharding: ModuleSharding,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        compiles: bool = False,
        world: World | None = None,  # of a program of the same module, whose groups serve this one too
    ) -> None:
        block = sharding.traced.block
        self.sharding, self.block, self.program = sharding, block, sharding.program
        self.atoms = dict(sharding.mesh.axes)
        given = [one.value for one in self.program.instructions if isinstance(one, Given)]
        self.given = {value.tensor: [one for one in given if one.tensor == value.tensor] for value in given}
        computes = (entry for entry in self.program.instructions if isinstance(entry, Compute))
        # What adds gradients to those of micro-batches before: here autograd does that.
        self._sums = {one.op.name: one for one in computes if isinstance(one.op.kind, Accumulate)}
        self.place = MeshRank(mesh=sharding.mesh, rank=rank, sizes=sharding.traced.sizes)
        self.weights = {one.name: one for one in self._weights()}
        self._uses = {value: one for one in self.weights.values() for value in one.taken}
        chains = [
            *(one.taken[value] for value, one in self._uses.items()),
            *(one.reduced for one in self.weights.values()),
        ]
        changes = [change for chain in chains for change in chain]
        groups = {change.collective.atoms for change in (*self.program.collectives(), *changes)}
        ends = [self.program.results[name].layout for name in block.gives]
        groups |= {atoms for layout in ends for atoms in (layout.sums, layout.maxima)}
        self.context = RankContext(
            world=World.build(sharding.mesh, groups, None, RankActivity(), world and world.groups),
            mesh_rank=self.place,
            formats=Formats(exact=dtype == torch.float64, device=device),
            positions=torch.empty(0),
            rotations=Rotations(),
        )
        kinds = [op.kind for op in block.ops if isinstance(op.kind, RegionGradient)]
        # What torch keeps of the user's own functions no compiler sees: these run again instead.
        self._taped = {one.region.name: one for one in kinds if not (compiles and one.region.is_own)}
        self._layers = {name: layer_of(path) for name, path in sharding.traced.paths.items()}
        self._split()

    def _split(self) -> None:
        """Prepare the forward pass, with what backward needs and without, and the backward pass."""
        parts, block, tensors = self.program.by_pass(*self.block.gives), self.block, self.block.tensors
        made = {name for entry in parts.forward for name in self._written(entry)} | {
            one.value.name for one in parts.forward if isinstance(one, Given)
        }
        results = tuple(self.program.results[name].name for name in block.gives)
        kept = {name for entry in parts.backward for name in self._reads(entry)} & made - self._uses.keys()
        back = [self.program.results[block.given_back(name)].name for name in block.takes]
        gradients = (*back, *(one.gradient for one in self.weights.values() if one.made))
        self.trained = Passes(
            forward=tuple(dropping(self._steps(parts.forward, taped=True), {*results, *kept})),
            results=results, kept=frozenset(kept), gradients=gradients,
            seeds={f"d.{name}": one for name, one in zip(block.gives, results, strict=True) if f"d.{name}" in tensors},
            backward=tuple(dropping(self._steps(_soon(parts), taped=True), gradients)),
        )  # fmt: skip
        self.alone = Passes(forward=tuple(dropping(self._steps(parts.forward, taped=False), results)), results=results)

    def _weights(self) -> Iterator[RestingWeight]:
        sharding, sizes = self.sharding, self.sharding.traced.sizes
        rests = {
            weight: rest
            for name, rest in sharding.solution.rests.items()
            for weight in weights_of(sharding.problem, self.block.op(name))
        }
        sums = {entry.reads[0].tensor: entry.reads[1] for entry in self._sums.values()}
        for name, path in sharding.captured.parameters.items():
            layout, positions = self.given[name][0].layout, sharding.traced.dims[name]
            rest = resting(sharding.traced.dims, sizes, self.atoms, name, layout, rests.get(name, ()))
            made = sums.get(f"{name}.grad")
            reduced = _ordered(made.layout, rest) if made else rest
            yield RestingWeight(
                name=name, path=path, positions=positions, rest=rest, made=made,
                placements=placements(rest, positions, sizes, self.atoms),
                shape=self.place.shape(rest), local_shape=tuple(local_shape(self.place, rest, positions)),
                taken={
                    value.name: self._changes(f"{name} at rest", value.name, rest, value.layout)
                    for value in self.given[name]
                },
                reduced=self._changes(f"{name}, gradient as made", f"{name} at rest, gradient", reduced, rest),
            )  # fmt: skip

    def _changes(self, start: str, name: str, before: Layout, after: Layout) -> tuple[Communicate, ...]:
        """Return the collectives between two layouts of a value; the last one writes ``name``."""
        path = redistribute(before, after, self.atoms, self.sharding.problem.price("bf16"))
        names = [start, *(f"{name}, {len(path) - number} before" for number in range(1, len(path))), name]
        return tuple(
            Communicate(
                entry=name,
                pass_="F",
                collective=change.collective,
                reads=Value(name=names[number], tensor=name, layout=change.before),
                writes=Value(name=names[number + 1], tensor=name, layout=change.after),
            )
            for number, change in enumerate(path)
        )

    def _reads(self, entry: Instruction) -> tuple[str, ...]:
        """Return what an instruction reads; the gradient of a region reads what torch has kept of it."""
        kind = entry.op.kind if isinstance(entry, Compute) else None
        if isinstance(kind, RegionGradient) and kind.region.name in self._taped:
            return read_by(entry)[0], _tape(kind)
        return read_by(entry)[1:] if isinstance(kind, Accumulate) else read_by(entry)

    def _written(self, entry: Instruction) -> tuple[str, ...]:
        kind = self._taped.get(entry.op.name) if isinstance(entry, Compute) else None
        return (*written_by(entry), *([_tape(kind)] if kind else []))

    def _steps(self, entries: Sequence[Instruction], *, taped: bool) -> Iterator[RankStep]:
        """Prepare instructions; a weight is put together before its first reader, and its gradient goes to its rest."""
        ready, made, layer = set[str](), {one.made.name: one for one in self.weights.values() if one.made}, ""
        for entry in entries:
            if isinstance(entry, Compute):
                layer = self._layers.get(entry.op.source, layer)
            for step in self._with_weights(entry, ready, made, taped=taped):
                yield replace(step, layer=layer)

    def _with_weights(
        self, entry: Instruction, ready: set[str], made: Mapping[str, RestingWeight], *, taped: bool
    ) -> Iterator[RankStep]:
        for name in () if isinstance(entry, Given) else self._reads(entry):
            if name in self._uses and name not in ready:
                ready.add(name)
                weight = self._uses[name]
                if not weight.taken[name]:
                    yield RankStep(run=_as_it_rests, reads=(weight.start,), writes=(name,))
                yield from (self._step(change, taped=False) for change in weight.taken[name])
        adds = isinstance(entry, Compute) and entry.op.name in self._sums
        if not adds and not isinstance(entry, Given):
            yield self._step(entry, taped=taped)
        for name in written_by(entry):
            if name in made:
                yield from self._reduced(made[name])

    def _step(self, entry: Instruction, *, taped: bool) -> RankStep:
        kind = entry.op.kind if isinstance(entry, Compute) else None
        if isinstance(kind, RegionGradient) and kind.region.name in self._taped and isinstance(entry, Compute):
            return RankStep(run=self._gradients(entry, kind), reads=self._reads(entry), writes=written_by(entry))
        gradient = self._taped.get(entry.op.name) if taped and isinstance(entry, Compute) else None
        if gradient and isinstance(entry, Compute):
            sizes = self.context.sizes(entry)

            def run(*tensors: torch.Tensor) -> Sequence[Any]:
                tape = Tape.of(gradient, tensors, sizes)
                return tape.result.detach(), tape

            return RankStep(run=run, reads=read_by(entry), writes=self._written(entry))
        kernel = kernel_for(self.context, self.block, entry, ())
        assert kernel, f"{entry} is not given"
        return RankStep(run=kernel, reads=read_by(entry), writes=written_by(entry), made=self._made(entry))

    def _gradients(self, entry: Compute, kind: RegionGradient) -> Callable[..., Sequence[torch.Tensor]]:
        dims = self.block.tensors[entry.op.inputs[0]].dims
        return lambda upstream, tape: tape.gradients(kind.laid_out(upstream, dims))

    def _made(self, entry: Instruction) -> Callable[..., Sequence[torch.Tensor]] | None:
        """Return a function that makes what an instruction makes, without its numbers, if no compiler may see it."""
        shapes = [self.place.shape(value.layout) for value in values_written(entry)]
        if isinstance(entry, Communicate):
            return lambda given: (given.new_empty(shapes[0]),)
        kind = entry.op.kind if isinstance(entry, Compute) else None
        if isinstance(kind, Region) and kind.is_own:
            return lambda *given: (torch.empty(shapes[0], dtype=kind.format, device=self.context.formats.device),)
        if isinstance(kind, RegionGradient) and kind.region.is_own:
            needed = kind.needed
            return lambda _, *given: [given[at].new_empty(shape) for at, shape in zip(needed, shapes, strict=True)]
        return None

    def _reduced(self, weight: RestingWeight) -> Iterator[RankStep]:
        """Yield the steps from a gradient as it is computed to the layout in which its parameter rests."""
        assert weight.made, "a frozen parameter has no gradient"
        now = [dim for dim, _ in weight.made.layout.dims]
        order = [now.index(dim) for dim, _ in weight.rest.dims]
        first = weight.reduced[0].reads.name if weight.reduced else weight.gradient
        yield RankStep(run=lambda one: (one.permute(order),), reads=(weight.made.name,), writes=(first,))
        yield from (self._step(change, taped=False) for change in weight.reduced)


def local_shape(place: MeshRank, layout: Layout, positions: Positions) -> list[int]:
    """Return the shape of a rank's part of a tensor as torch sees it."""
    sizes = dict(zip((dim for dim, _ in layout.dims), place.shape(layout), strict=True))
    return [math.prod(sizes[dim] for dim in position) for position in positions]


def _soon(parts: PassInstructions) -> Sequence[Instruction]:
    """Return the backward pass with each gradient of a weight as soon as it can be, so that less is kept for it."""
    at = {name: number for number, entry in enumerate(parts.inputs) for name in written_by(entry)}
    placed = [*enumerate(parts.inputs)]
    for entry in parts.weights:
        number = max((at.get(name, 0) for name in read_by(entry)), default=0)
        at |= dict.fromkeys(written_by(entry), number)
        placed.append((number, entry))
    return [entry for _, entry in sorted(placed, key=lambda one: one[0])]


def _ordered(layout: Layout, like: Layout) -> Layout:
    cuts = dict(layout.dims)
    return Layout(dims=tuple((dim, cuts[dim]) for dim, _ in like.dims), sums=layout.sums, maxima=layout.maxima)


def _as_it_rests(part: torch.Tensor) -> Sequence[torch.Tensor]:
    return (part,)


def _tape(kind: RegionGradient) -> str:
    return f"{kind.region.name}, as torch keeps it"
