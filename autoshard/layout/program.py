"""A block lowered to what ranks really do: local operations on shards, and collectives between them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
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
class PassInstructions:
    """What the passes of a program run, each in order; a whole backward runs both of its halves."""

    forward: tuple[Instruction, ...]
    inputs: tuple[Instruction, ...]  # I
    weights: tuple[Instruction, ...]  # W

    @classmethod
    def of(cls, instructions: Sequence[Instruction], handed_on: Value, results: Iterable[Value]) -> "PassInstructions":
        """Part instructions: forward is what pass F does and what it needs, all else waits for the gradient."""
        forward, backward = _needed(instructions, {handed_on.name}, "F")
        late = {name for entry in backward if pass_of(entry) == "W" for name in written_by(entry)}
        wanted = {value.name for value in results} - late
        inputs, weights = _needed(backward, wanted, "I")
        needed = {name for entry in inputs for name in read_by(entry)}
        assert not late & needed, "the gradient of a block's input waits for that of a weight"
        return cls(forward=forward, inputs=inputs, weights=weights)

    @property
    def backward(self) -> tuple[Instruction, ...]:
        """I, then W."""
        return (*self.inputs, *self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Instructions in an order that the data flow allows; ``results`` maps tensors that leave the block to values."""

    instructions: tuple[Instruction, ...]
    results: Mapping[str, Value]

    def collectives(self) -> tuple[Communicate, ...]:
        """Return all collectives of delivers, in order."""
        return tuple(entry for entry in self.instructions if isinstance(entry, Communicate))

    def by_pass(self, handed_on: str) -> PassInstructions:
        """Part the instructions by pass; ``handed_on`` names what the forward pass makes for the next block."""
        return PassInstructions.of(self.instructions, self.results[handed_on], self.results.values())

    def waiting(self, handed_on: str) -> tuple[Value, ...]:
        """Return what I leaves for W to read but what is there anyway, such as weights; each value once."""
        late = self.by_pass(handed_on).weights
        made = {name for entry in late for name in written_by(entry)}
        return tuple(
            {value.name: value for entry in late for value in values_read(entry) if value.name not in made}.values()
        )

    def kept(self) -> tuple[Value, ...]:
        """Return what forward makes and backward reads, to compute with it or to change it again; each value once."""
        later = [entry for entry in self.instructions if pass_of(entry) in ("I", "W")]
        made = {name for entry in later for name in written_by(entry)}
        return tuple({one.name: one for entry in later for one in values_read(entry) if one.name not in made}.values())


def pass_of(entry: Instruction) -> Pass | None:
    """Return the pass that an instruction says it belongs to, if it says so."""
    match entry:
        case Compute(op=op):
            return op.pass_
        case Communicate(pass_=pass_):
            return pass_
        case _:
            return None


def written_by(entry: Instruction) -> tuple[str, ...]:
    """Return the names of the values that an instruction makes."""
    match entry:
        case Given(value=value):
            return (value.name,)
        case Compute(writes=writes):
            return tuple(value.name for value in writes)
        case _:
            return (entry.writes.name,)


def read_by(entry: Instruction) -> tuple[str, ...]:
    """Return the names of the values that an instruction reads."""
    return tuple(value.name for value in values_read(entry))


def values_read(entry: Instruction) -> tuple[Value, ...]:
    """Return the values that an instruction reads."""
    match entry:
        case Given():
            return ()
        case Communicate(reads=reads) | CountOnce(reads=reads):
            return (reads,)
        case _:
            return entry.reads


def _needed(
    instructions: Sequence[Instruction], wanted: Collection[str], pass_: Pass
) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """Part instructions: those of a pass and those without one that they or somebody else need; and all others."""
    needed = set(wanted)
    mine: list[Instruction] = []
    others: list[Instruction] = []
    for entry in reversed(instructions):
        own = pass_of(entry)
        if own == pass_ or (needed.intersection(written_by(entry)) and own in (None, "F")):
            mine.append(entry)
            needed.update(read_by(entry))
        else:
            others.append(entry)
    return tuple(reversed(mine)), tuple(reversed(others))
