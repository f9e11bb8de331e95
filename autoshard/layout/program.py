"""A block lowered to what ranks really do: local operations on shards, and collectives between them."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.graph.op import Op, Pass
from autoshard.layout.collective import Collective
from autoshard.layout.layout import Cuts, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor as ranks hold it at some point of the program; ``tensor`` names it in the block."""

    name: str
    tensor: str
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value that is there before the block starts: weights, the batch, what a neighbouring block hands over."""

    value: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """A local operation; ``ring`` lists the hops of keys and values between the parts of a ring attention."""

    op: Op
    cuts: Cuts
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    ring: tuple[Collective, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicate:
    """One collective of a deliver (``entry``): ``reads`` becomes ``writes``."""

    entry: str
    pass_: Pass
    collective: Collective
    reads: Value
    writes: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class CountOnce:
    """A value that all ranks along some atoms have alike becomes a sum pending over them: the first keeps it."""

    atoms: tuple[str, ...]
    reads: Value
    writes: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Local addition of what several readers send back."""

    reads: tuple[Value, ...]
    writes: Value


Instruction = Given | Compute | Communicate | CountOnce | Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Instructions in an order that the data flow allows; ``results`` maps tensors that leave the block to values."""

    instructions: tuple[Instruction, ...]
    results: Mapping[str, Value]

    def collectives(self) -> tuple[Communicate, ...]:
        """Return all collectives of delivers, in order."""
        return tuple(entry for entry in self.instructions if isinstance(entry, Communicate))

    def kept(self) -> tuple[Value, ...]:
        """Return what forward makes and backward reads, to compute with it or to change it again; each value once."""
        read: dict[str, Value] = {}
        made_later: set[str] = set()
        for entry in self.instructions:
            if isinstance(entry, Compute) and entry.op.pass_ != "F":
                read |= {value.name: value for value in entry.reads}
                made_later |= {value.name for value in entry.writes}
            elif isinstance(entry, Communicate) and entry.pass_ != "F":
                read[entry.reads.name] = entry.reads
                made_later.add(entry.writes.name)
        return tuple(value for name, value in read.items() if name not in made_later)
