"""Functions of parts of a captured module: plain Python of torch's calls, compiled if the module is to be."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import torch

from autoshard.engine.torch.compiled import Piece, compiler_of
from autoshard.engine.torch.recording import Operation
from autoshard.engine.torch.writing import Step, Variables, piece, statements

_FEWEST = 2  # operations that a compiler can make something of


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFunction:
    """A part of a pass as a function of a list of tensors, which it empties; the tensors that it reads and makes."""

    run: Piece
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionWriter:
    """Writes functions of operations, equal ones once, and compiles them if it ``compiles``."""

    device: torch.device
    compiles: bool = False
    functions: dict[object, Piece] = field(default_factory=dict[object, Piece])

    def function(self, operations: Sequence[Operation], read_later: Sequence[torch.Tensor]) -> PartFunction:
        """Return a function of some operations that makes those tensors which are read later."""
        variables, all_reads = Variables(), [read for operation in operations for read in operation.reads]
        results = {id(result) for operation in operations for result in operation.results}
        sources = {variables.of(read): read for read in all_reads if id(read) not in results}
        once = {tensor for tensor, count in Counter(map(id, all_reads)).items() if count == 1} - {*map(id, read_later)}
        step = Step(comment="", statements=tuple(statements(operations, variables, once)))
        writes = {variables.of(tensor): tensor for tensor in read_later}
        text, names, call = piece("part", [step], {*writes})
        reads, casts = tuple(sources[name] for name in names), torch.is_autocast_enabled(self.device.type)
        key = text, repr([(read.shape, read.stride(), read.dtype) for read in reads]), casts
        if key not in self.functions:
            run = self._compiled(text, operations, reads)
            self.functions[key] = self._as_traced(run) if casts else run
        written = tuple(writes[name] for name in call.statements[-1].writes)
        return PartFunction(run=self.functions[key], reads=reads, writes=written)

    def _compiled(self, text: str, operations: Sequence[Operation], examples: Sequence[torch.Tensor]) -> Piece:
        space: dict[str, Any] = {
            "torch": torch, "aten": torch.ops.aten, "device": self.device, "inf": inf, "nan": nan
        }  # fmt: skip
        exec(compile(text, "a part of the module", "exec"), space)
        run: Piece = space["part"]
        run.__name__ = "a part of the module"  # in warnings
        computes = sum(not operation.is_view for operation in operations) >= _FEWEST
        return compiler_of(self.device)(run, examples) if self.compiles and computes else run

    def _as_traced(self, run: Piece) -> Piece:
        """Run a function without casts: those of autocast are among its operations."""
        device = self.device.type

        def without_casts(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            with torch.autocast(device, enabled=False):
                return run(tensors)

        return without_casts
