"""This rank's parts of what a call hands to the program: inputs, buffers, random numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.engine.torch.execution import RankStep, Values, run_steps
from autoshard.layout.program import Value
from autoshard.modules.export import ExportedModule
from autoshard.modules.nodes import Node
from autoshard.modules.region import Positions
from autoshard.modules.rewriting.randomness import RandomInput
from autoshard.modules.running.capturing import PassCapture
from autoshard.modules.running.functions import FunctionWriter
from autoshard.modules.running.passes import Passes
from autoshard.run.placement import MeshRank, dims_of

# Of a mask or positions that are kept between calls. A larger one takes longer to compute with than to make again.
_MOST_KEPT_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPart:
    """How a rank's part of an input is cut out of the whole tensor. It is prepared once, since every call asks."""

    value: str
    sizes: tuple[int, ...]  # of the whole, along dims
    order: tuple[int, ...]  # of dims in the program
    bounds: tuple[tuple[int, int], ...]  # along dims in that order
    cuts: tuple[tuple[int, int, int], ...]  # axes of which the part has not all: axis, start, length
    draw: RandomInput | None

    @classmethod
    def of(
        cls, value: Value, positions: Positions, sizes: Mapping[str, int], place: MeshRank, draw: RandomInput | None
    ) -> "InputPart":
        """Prepare the part that a value of the program has of an input; ``draw`` is that of random numbers."""
        dims, program_dims = [dim for position in positions for dim in position], dims_of(value.layout)
        bounds = tuple(place.bounds(value.layout))
        return cls(
            value=value.name,
            sizes=tuple(sizes[dim] for dim in dims),
            order=tuple(dims.index(dim) for dim in program_dims),
            bounds=bounds,
            cuts=tuple(
                (axis, start, stop - start)
                for axis, (dim, (start, stop)) in enumerate(zip(program_dims, bounds, strict=True))
                if (start, stop) != (0, sizes[dim])
            ),
            draw=draw,
        )

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor; of random numbers ``tensor`` is their key."""
        if self.draw is not None:
            bounds = [self.bounds[self.order.index(axis)] for axis in range(len(self.order))]
            return self.draw.part(tensor, self.sizes, bounds).permute(self.order)
        part = tensor.reshape(self.sizes)
        part = part if self.order == (*range(len(self.order)),) else part.permute(self.order)
        for axis, start, length in self.cuts:
            part = part.narrow(axis, start, length)
        return part


class FixedInputs:
    """Inputs of the program that nothing of a call changes, such as masks and positions: they are computed once."""

    def __init__(self, exported: ExportedModule, inputs: Mapping[str, Node]) -> None:
        varying = exported.varying()
        self.names = frozenset(
            name for name, node in inputs.items() if node not in varying and _num_bytes(node) <= _MOST_KEPT_BYTES
        )
        self._order, self._count = sorted(self.names), sum(node.op == "placeholder" for node in exported.nodes)
        self._part = exported.part([inputs[name] for name in self._order])
        self._kept: list[
            tuple[str, torch.Tensor, int]
        ] = []  # with versions, since users may change what they are given

    def values(self, parts: Mapping[str, Sequence[InputPart]]) -> Values:
        """Return this rank's parts of them, by value of the program."""
        is_changed = any(tensor._version != version for _, tensor, version in self._kept)
        if self.names and (is_changed or not self._kept):
            with torch.inference_mode(False), torch.no_grad():
                wholes = self._part(*[None] * self._count)
                values = [
                    (part.value, part.cut(whole))
                    for name, whole in zip(self._order, wholes, strict=True)
                    for part in parts[name]
                ]
            self._kept = [(name, tensor, tensor._version) for name, tensor in values]
        return {name: tensor for name, tensor, _ in self._kept}


class VaryingInputs:
    """What plain operations make of arguments and buffers before the program takes it, and results outside of it."""

    def __init__(self, exported: ExportedModule, nodes: Mapping[str, Node], writer: FunctionWriter | None) -> None:
        self._exported, self._writer = exported, writer
        self._passed_on = {name for name, node in nodes.items() if node.op == "placeholder"}
        self._order = tuple(name for name in nodes if name not in self._passed_on)
        self._part = exported.part([nodes[name] for name in self._order])
        # By the names of the whole graph: torch renames some in a part of it.
        names = [node.name for node in exported.nodes if node.op == "placeholder"]
        copies = [node for node in self._part.graph.nodes if node.op == "placeholder"]
        self._is_read = {name: bool(node.users) for name, node in zip(names, copies, strict=True)}
        self._steps: tuple[RankStep, ...] = ()

    def values(
        self, arguments: Mapping[str, Any], buffers: Mapping[str, torch.Tensor], key: torch.Tensor | None
    ) -> dict[str, Any]:
        """Return the values of the nodes by name."""
        handed = self._exported.placeholders(self._part, arguments, buffers, key)
        by_name = dict(zip(self._is_read, handed, strict=True))
        values: Values = {name: by_name[name] for name, is_read in self._is_read.items() if is_read}
        with torch.no_grad():
            if not self._steps:
                self._steps = self._prepared(values)
            run_steps(self._steps, values)
        return values | {name: by_name[name] for name in self._passed_on}

    def _prepared(self, values: Values) -> tuple[RankStep, ...]:
        """Return the steps that compute the nodes: a function of torch's calls, as the passes have them."""
        used = (*values,)

        def run(*read: Any) -> Sequence[Any]:
            by_name = dict(zip(used, read, strict=True))
            return self._part(*[by_name.get(name) for name in self._is_read])

        step = RankStep(run=run, reads=used, writes=self._order)
        passes = Passes(forward=(step,), results=self._order)
        if self._writer and self._order and all(isinstance(value, torch.Tensor) for value in values.values()):
            passes = PassCapture(writer=self._writer).captured(passes, values)
        return passes.forward


def _num_bytes(node: Node) -> int:
    return int(node.meta["val"].untyped_storage().nbytes())
