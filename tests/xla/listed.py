"""What the table of a plan says that a rank sends in a step."""

from collections.abc import Iterator, Sequence
from typing import Any

from autoshard.graph.block import Block
from autoshard.layout.layout import local_sizes
from autoshard.layout.program import Communicate, Program
from autoshard.plan.lowering import split_pending
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_blocks, plan_programs, step_graph_of, table_name, table_setting
from autoshard.spec.workload import DTYPE_BYTES
from tests.xla.sent import Groups, Sent

SCALAR_BYTES = 4  # loss and norm are in FP32


class Listed:
    """The table of a plan, read for one rank."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.atoms, self.programs, self.blocks = table_setting(plan).atoms, plan_programs(plan), plan_blocks(plan)
        self.sizes = step_graph_of(plan).sizes(plan.micro_batch * plan.mesh.size("dp"))
        self.place = plan.mesh.group_of(rank, "pp").index(rank)
        self.last = plan.mesh.size("pp") - 1

    def passes(self) -> list[Sent]:
        """Return what the passes of a step send, in order, but for what goes from stage to stage."""
        found: list[Sent] = []
        for action in self.plan.schedule.action_lists()[self.place]:
            names = self._names(self.plan.stages[action.stage])
            for name in names if action.kind == "F" else reversed(names):
                changes = self.programs[name].collectives()
                wanted = [one for one in changes if (one.pass_ == "F") == (action.kind == "F")]
                found += [self._sent(self.blocks[name], one) for one in wanted if one.collective.kind != "slice"]
        return found

    def sends(self) -> list[Sent]:
        """Return what goes from stage to stage: NxD lets two ranks gather what each has, of which one has zeros."""
        found: list[Sent] = []
        for number, stage in enumerate(self.plan.stages):
            if stage.rank == self.place:
                ways = [*[-1] * (number > 0), *[0] * (stage is not self.plan.stages[-1])]
                both = 2 * self.plan.schedule.num_micro_batches  # forward and backward
                found += [self._hidden(way) for way in ways for _ in range(both)]
        return found

    def step(self) -> list[Sent]:
        """Return what a step sends when all passes are done: loss, gradients, norm, weights."""
        return [*self._loss(), *self._gradients(), *self._norm(), *self._weights()]

    def _names(self, stage: Any) -> list[str]:
        first, last = stage is self.plan.stages[0], stage is self.plan.stages[-1]
        layers = [table_name("layer", stage.recompute.of_layer(index)) for index in range(stage.num_layers)]
        return [*["embed"] * first, *layers, *["head"] * last]

    def _sent(self, block: Block, change: Communicate) -> Sent:
        tensor, kind = block.tensors[change.reads.tensor], change.collective.kind
        sides = [local_sizes(self.sizes, dict(one.layout.dims), self.atoms) for one in (change.reads, change.writes)]
        count = max(tensor.num_elements(side) for side in sides)
        size = count * DTYPE_BYTES[tensor.dtype]
        return Sent(kind=kind, size_bytes=size, groups=self._groups(change.collective.atoms))

    def _loss(self) -> Iterator[Sent]:
        """The sum over replicas that the table leaves pending; ranks of a pipeline get it from the last stage."""
        for axis in ("dp", "cp") if self.place == self.last else ():
            yield from self._scalar(axis)
        yield from self._scalar("pp")

    def _norm(self) -> Iterator[Sent]:
        for axis in ("tp", "pp", "dp") if self.plan.zero else ("tp", "pp"):
            yield from self._scalar(axis)

    def _scalar(self, axis: str) -> Iterator[Sent]:
        groups = self._groups((axis,))
        if len(groups[0]) > 1:
            yield Sent(kind="all_reduce", size_bytes=SCALAR_BYTES, groups=groups)

    def _gradients(self) -> Iterator[Sent]:
        """Sums that the table leaves pending: over tp weight by weight, over replicas all of a rank together."""
        for atoms, size in self._pending(1):
            yield Sent(kind="all_reduce", size_bytes=size, groups=self._groups(atoms))
        yield from self._replicas("reduce_scatter" if self.plan.zero else "all_reduce", "gradients")

    def _weights(self) -> Iterator[Sent]:
        if self.plan.zero:
            yield from self._replicas("all_gather", "weights")

    def _replicas(self, kind: str, what: str) -> Iterator[Sent]:
        found, width = list(self._pending(0)), DTYPE_BYTES[getattr(self.plan.workload.precision, what)]
        whole = {atoms for atoms, _ in found}
        assert len(whole) < 2, f"weights with other replicas than others: {whole}"
        gradients = DTYPE_BYTES[self.plan.workload.precision.gradients]
        for atoms in whole:
            size = sum(size for _, size in found) * width // gradients
            yield Sent(kind=kind, size_bytes=size, groups=self._groups(atoms))

    def _pending(self, part: int) -> Iterator[tuple[tuple[str, ...], int]]:
        """Yield for every weight of this rank the atoms that its gradient's sum awaits, and its bytes."""
        for stage in (one for one in self.plan.stages if one.rank == self.place):
            for name in self._names(stage):
                yield from self._pending_in(self.blocks[name], self.programs[name], part)

    def _pending_in(self, block: Block, program: Program, part: int) -> Iterator[tuple[tuple[str, ...], int]]:
        width = DTYPE_BYTES[self.plan.workload.precision.gradients]
        for tensor in block.parameters:
            layout = program.results[f"{tensor.name}.sum"].layout
            atoms = tuple(atom for atom in split_pending(layout.sums)[part] if self.atoms[atom] > 1)
            if atoms:
                yield atoms, width * tensor.num_elements(local_sizes(self.sizes, dict(layout.dims), self.atoms))

    def _hidden(self, way: int) -> Sent:
        """Return what two ranks gather where the hidden state goes to or from a neighbour."""
        block = self.blocks["layer"]
        layout, tensor = self.programs["layer"].results[block.gives[0]].layout, block.tensors[block.gives[0]]
        count = tensor.num_elements(local_sizes(self.sizes, dict(layout.dims), self.atoms))
        return Sent(kind="all_gather", size_bytes=2 * count * DTYPE_BYTES[tensor.dtype], groups=self._pairs(way))

    def _groups(self, atoms: Sequence[str]) -> Groups:
        return tuple(sorted(self.plan.mesh.groups(tuple(atoms))))

    def _pairs(self, way: int) -> Groups:
        """Return who talks to whom while this rank talks to its neighbour; NxD counts stages round and round."""
        rows = self.plan.mesh.groups("pp")
        starts = range((self.place + way) % 2, self.last + 1, 2)
        return tuple(sorted((row[at], row[(at + 1) % len(row)]) for row in rows for at in starts))
