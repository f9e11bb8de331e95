"""One block on one rank: its program executed literally, forward and backward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.engine.place import Place, dims_of
from autoshard.engine.programs import BlockProgram
from autoshard.engine.torch.collectives import communicate
from autoshard.engine.torch.ring import attend_around
from autoshard.engine.torch.world import World
from autoshard.graph.op import Array
from autoshard.layout.local import evaluate_local
from autoshard.layout.program import Communicate, Compute, CountOnce, Given, Instruction, Sum, Value
from autoshard.schedule.action import ActionKind

Arrays = Mapping[str, Array]
Values = dict[str, Array]  # what a rank holds while a program runs, by the values' names


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Executes a block's program on one rank, with its local operations computed by numpy."""

    world: World
    place: Place
    parts: BlockProgram

    def forward(self, given: Arrays) -> tuple[Array, Values]:
        """Run the forward pass from this rank's shards; return what is handed on, and all values for backward."""
        values: Values = {}
        self._execute(self.parts.forward, given, values)
        return values[self.parts.program.results[self.parts.handed_on].name], values

    def backward(self, kind: ActionKind, given: Arrays, values: Values) -> Arrays:
        """Run the backward pass (B) or a half of it (I, W); return what it makes.

        That is by tensor sums of gradients, and what is handed back.
        """
        self._execute(self.parts.part(kind), given, values)
        return {tensor: values[value.name] for tensor, value in self.parts.made(kind).items()}

    def _execute(self, instructions: Sequence[Instruction], given: Arrays, values: Values) -> None:
        for entry in instructions:
            match entry:
                case Given(value=value):
                    self._keep(values, value, given[value.tensor])
                case Compute(writes=writes):
                    for value, array in zip(writes, self._compute(entry, values), strict=True):
                        self._keep(values, value, array)
                case Communicate(reads=reads, writes=writes):
                    array = communicate(self.world, self.place, entry, values[reads.name])
                    self._keep(values, writes, array)
                case CountOnce(atoms=atoms, reads=reads, writes=writes):
                    array = values[reads.name]
                    self._keep(values, writes, array if self.place.is_first(atoms) else np.zeros_like(array))
                case Sum(reads=reads, writes=writes):
                    self._keep(values, writes, _added(reads, values, writes))

    def _keep(self, values: Values, value: Value, array: Array) -> None:
        """Remember a value, which must be the block that its layout promises."""
        expected = self.place.shape(value.layout)
        assert array.shape == expected, f"{value.name} is {array.shape} on rank {self.place.rank}, not {expected}"
        values[value.name] = array

    def _compute(self, compute: Compute, values: Values) -> tuple[Array, ...]:
        held = {dim: self.place.dim_bounds(dim, atoms) for dim, atoms in compute.cuts.items() if atoms}

        def evaluate(arrays: Sequence[Array]) -> tuple[Array, ...]:
            return evaluate_local(self.parts.block, compute, self.place.sizes, held, arrays)

        arrays = [values[value.name] for value in compute.reads]
        if compute.ring:
            return attend_around(self.world, self.place, compute, arrays, evaluate)
        return evaluate(arrays)


def _added(reads: Sequence[Value], values: Values, writes: Value) -> Array:
    target = dims_of(writes.layout)
    parts = [values[value.name].transpose([dims_of(value.layout).index(dim) for dim in target]) for value in reads]
    return np.asarray(sum(parts))
