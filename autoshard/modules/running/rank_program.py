"""A sharded module on one rank: its program, forward and backward, on this rank's parts of parameters and inputs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoshard.blocks.problem import weights_of
from autoshard.engine.programs import early
from autoshard.engine.torch.execution import RankStep, StepFunction, dropping
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
    Value,
    read_by,
    values_written,
    written_by,
)
from autoshard.layout.redistribute import redistribute
from autoshard.modules.region import Positions, Region, RegionGradient, Tape
from autoshard.modules.repeats import layer_of
from autoshard.modules.running.passes import Passes
from autoshard.modules.running.placing import placements, resting
from autoshard.modules.running.weights import GradientBucket, RestingWeight, gradient_buckets
from autoshard.modules.shard import ModuleSharding
from autoshard.run.activity import RankActivity
from autoshard.run.placement import MeshRank


class RankProgram:
    """The program of a sharded module on one rank of a mesh."""

    def __init__(
        self,
        sharding: ModuleSharding,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        world: World | None = None,  # of a program of the same module, whose groups serve this one too
    ) -> None:
        block = sharding.traced.block
        self.sharding, self.block, self.program = sharding, block, sharding.program
        self.atoms = dict(sharding.mesh.axes)
        self.inputs: dict[str, list[Value]] = {}  # by tensor
        for entry in self.program.instructions:
            if isinstance(entry, Given):
                self.inputs.setdefault(entry.value.tensor, []).append(entry.value)
        computes = (entry for entry in self.program.instructions if isinstance(entry, Compute))
        # Operations that add gradients to those of earlier micro-batches: here autograd does that.
        self._sums = {entry.op.name: entry for entry in computes if isinstance(entry.op.kind, Accumulate)}
        self.place = MeshRank(mesh=sharding.mesh, rank=rank, sizes=sharding.traced.sizes)
        self.weights = {weight.name: weight for weight in self._weights()}
        self._uses = {value: weight for weight in self.weights.values() for value in weight.gathers}
        chains = [
            *(weight.gathers[value] for value, weight in self._uses.items()),
            *(weight.reduced for weight in self.weights.values()),
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
        self._bucket_of: dict[str, GradientBucket] = {}
        self._taped = {kind.region.name: kind for kind in kinds}
        self._users_reads: dict[str, list[torch.dtype]] = {}  # formats of what users' regions read
        self._layers = {name: layer_of(path) for name, path in sharding.traced.paths.items()}
        self._split()

    def _split(self) -> None:
        """Prepare the forward pass, with what backward needs and without, and the backward pass."""
        parts, block, tensors = self.program.by_pass(*self.block.gives), self.block, self.block.tensors
        forward = {name for entry in parts.forward for name in self._written(entry)} | {
            entry.value.name for entry in parts.forward if isinstance(entry, Given)
        }
        results = tuple(self.program.results[name].name for name in block.gives)
        saved = {name for entry in parts.backward for name in self._reads(entry)} & forward - self._uses.keys()
        back = [self.program.results[block.given_back(name)].name for name in block.takes]
        gradients = (*back, *(weight.gradient for weight in self.weights.values() if weight.computed))
        backward = early(parts.backward, {id(entry) for entry in parts.weights})
        makers = {weight.computed.name: weight for weight in self.weights.values() if weight.computed}
        computed = [makers[name] for entry in backward for name in written_by(entry) if name in makers]
        buckets = tuple(gradient_buckets(computed, self.context.world, self.place, self.context.formats))
        self._bucket_of = {weight.name: bucket for bucket in buckets for weight in bucket.weights}
        arriving = [bucket.arrive() for bucket in buckets]
        self.trained = Passes(
            forward=tuple(dropping(self._steps(parts.forward, taped=True), {*results, *saved})),
            results=results, saved=frozenset(saved), gradients=gradients,
            seeds={
                f"d.{name}": end for name, end in zip(block.gives, results, strict=True) if f"d.{name}" in tensors
            },
            backward=tuple(dropping([*self._steps(backward, taped=True), *arriving], gradients)),
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
            layout, positions = self.inputs[name][0].layout, sharding.traced.dims[name]
            rest = resting(sharding.traced.dims, sizes, self.atoms, name, layout, rests.get(name, ()))
            gradient = sums.get(f"{name}.grad")
            reduced = _ordered(gradient.layout, rest) if gradient else rest
            yield RestingWeight(
                name=name, path=path, positions=positions, rest=rest, computed=gradient,
                dtype=self.block.tensors[name].dtype, placements=placements(rest, positions, sizes, self.atoms),
                shape=self.place.shape(rest), local_shape=tuple(local_shape(self.place, rest, positions)),
                gathers={
                    value.name: self._changes(f"{name} at rest", value.name, rest, value.layout)
                    for value in self.inputs[name]
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
        if isinstance(kind, RegionGradient):
            return read_by(entry)[0], _tape(kind)
        return read_by(entry)[1:] if isinstance(kind, Accumulate) else read_by(entry)

    def _written(self, entry: Instruction) -> tuple[str, ...]:
        kind = self._taped.get(entry.op.name) if isinstance(entry, Compute) else None
        return (*written_by(entry), *([_tape(kind)] if kind else []))

    def _steps(self, entries: Sequence[Instruction], *, taped: bool) -> Iterator[RankStep]:
        """Prepare instructions; a weight is put together before its first reader, and its gradient goes to its rest."""
        gradients = {weight.computed.name: weight for weight in self.weights.values() if weight.computed}
        ready, layer = set[str](), ""
        for entry in entries:
            if isinstance(entry, Compute):
                layer = self._layers.get(entry.op.source, layer)
            for step in self._with_weights(entry, ready, gradients, taped=taped):
                yield replace(step, layer=layer)

    def _with_weights(
        self, entry: Instruction, ready: set[str], gradients: Mapping[str, RestingWeight], *, taped: bool
    ) -> Iterator[RankStep]:
        """Yield the steps of an instruction, of weights that it reads first, and of gradients that it computes."""
        for name in () if isinstance(entry, Given) else self._reads(entry):
            if name in self._uses and name not in ready:
                weight = self._uses[name]
                if weight.start not in ready:
                    yield weight.opened()
                ready |= {weight.start, name}
                if not weight.gathers[name]:
                    yield RankStep(run=_as_it_rests, reads=(weight.start,), writes=(name,))
                yield from (self._step(change, taped=False) for change in weight.gathers[name])
        adds = isinstance(entry, Compute) and entry.op.name in self._sums
        if not adds and not isinstance(entry, Given):
            yield self._step(entry, taped=taped)
        for name in written_by(entry):
            if name in gradients:
                yield from self._reduced(gradients[name])

    def _step(self, entry: Instruction, *, taped: bool) -> RankStep:
        kind = entry.op.kind if isinstance(entry, Compute) else None
        gradient = self._taped.get(entry.op.name) if taped and isinstance(entry, Compute) else None
        writes = written_by(entry)
        if isinstance(kind, RegionGradient) and isinstance(entry, Compute):
            run = self._gradients(entry, kind)
        elif gradient and isinstance(entry, Compute):
            run, writes = self._recorded(entry, gradient), self._written(entry)
        else:
            run = kernel_for(self.context, self.block, entry, ())
        assert run, f"{entry} is not given"
        return RankStep(run=run, reads=self._reads(entry), writes=writes, stand_in=self._stand_in(entry, taped=taped))

    def _recorded(self, entry: Compute, kind: RegionGradient) -> StepFunction:
        """Return a region with what torch keeps of it for its gradients."""
        sizes, device = self.context.sizes(entry), self.context.formats.device

        def run(*tensors: torch.Tensor) -> Sequence[Any]:
            tape = Tape.of(kind, tensors, sizes, device)
            return tape.result.detach(), tape

        return run

    def _gradients(self, entry: Compute, kind: RegionGradient) -> StepFunction:
        dims = self.block.tensors[entry.op.inputs[0]].dims
        return lambda upstream, tape: tape.gradients(kind.laid_out(upstream, dims))

    def _stand_in(self, entry: Instruction, *, taped: bool) -> StepFunction | None:
        """Return a function whose results look like those of an instruction that no graph of operations may see.

        A tape looks like a tensor without numbers.
        """
        shapes = [self.place.shape(value.layout) for value in values_written(entry)]
        if isinstance(entry, Communicate):
            return lambda part: (part.new_empty(shapes[0]),)
        kind = entry.op.kind if isinstance(entry, Compute) else None
        if isinstance(kind, Region) and kind.is_own:
            device, reads = self.context.formats.device, self._users_reads
            gradient = self._taped.get(kind.name) if taped else None

            def result(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
                reads[kind.name] = [tensors[number].dtype for number in gradient.needed] if gradient else []
                tapes = [torch.empty(0, device=device)] if gradient else []
                return [torch.empty(shapes[0], dtype=kind.format, device=device), *tapes]

            return result
        if isinstance(kind, RegionGradient) and kind.region.is_own:
            reads, name = self._users_reads, kind.region.name
            return lambda upstream, _: [
                upstream.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, reads[name], strict=True)
            ]
        return None

    def _reduced(self, weight: RestingWeight) -> Iterator[RankStep]:
        """Yield the steps from a gradient as it is computed to the layout in which its parameter rests."""
        yield weight.laid_out()
        bucket = self._bucket_of.get(weight.name)
        if bucket is None:
            yield from (self._step(change, taped=False) for change in weight.reduced)
            yield weight.folded()
        elif bucket.weights[-1] is weight:
            yield bucket.begin(self.context.world)


def local_shape(place: MeshRank, layout: Layout, positions: Positions) -> list[int]:
    """Return the shape of a rank's part of a tensor as torch sees it."""
    sizes = dict(zip((dim for dim, _ in layout.dims), place.shape(layout), strict=True))
    return [math.prod(sizes[dim] for dim in position) for position in positions]


def _ordered(layout: Layout, like: Layout) -> Layout:
    cuts = dict(layout.dims)
    return Layout(dims=tuple((dim, cuts[dim]) for dim, _ in like.dims), sums=layout.sums, maxima=layout.maxima)


def _as_it_rests(part: torch.Tensor) -> Sequence[torch.Tensor]:
    return (part,)


def _tape(kind: RegionGradient) -> str:
    return f"{kind.region.name}, as torch keeps it"
