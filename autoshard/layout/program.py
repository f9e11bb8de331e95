"""A block as its ranks execute it: local operations on shards, and collectives between them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.graph.op import Op, Pass
from autoshard.layout.layout import Collective, Cuts, Layout


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
    """Turns a replicated value into a sum pending over some atoms: the first rank keeps it, others hold zero."""

    atoms: tuple[str, ...]
    reads: Value
    writes: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Local addition of the gradients of several readers."""

    reads: tuple[Value, ...]
    writes: Value


Instruction = Given | Compute | Communicate | CountOnce | Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class PassInstructions:
    """The instructions of each pass, in order; a whole backward runs I, then W."""

    forward: tuple[Instruction, ...]
    inputs: tuple[Instruction, ...]  # I
    weights: tuple[Instruction, ...]  # W

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

    def by_pass(self, *handed_on: str) -> PassInstructions:
        """Split the instructions by pass: forward has those of pass F and those that they need, backward all others.

        ``handed_on`` names the tensors that forward makes for neighbouring blocks.
        """
        forward, backward = _needed(self.instructions, {self.results[name].name for name in handed_on}, "F")
        late = {name for entry in backward if pass_of(entry) == "W" for name in written_by(entry)}
        inputs, weights = _needed(backward, {value.name for value in self.results.values()} - late, "I")
        needed = {name for entry in inputs for name in read_by(entry)}
        assert not late & needed, "the gradient of a block's input waits for that of a weight"
        return PassInstructions(forward=forward, inputs=inputs, weights=weights)

    def waiting(self, handed_on: str) -> tuple[Value, ...]:
        """Return the values that W reads and does not make itself, each once."""
        return inputs_of(self.by_pass(handed_on).weights)

    def kept(self) -> tuple[Value, ...]:
        """Return the values that backward reads and does not make itself, each once."""
        return inputs_of([entry for entry in self.instructions if pass_of(entry) in ("I", "W")])


def inputs_of(entries: Sequence[Instruction]) -> tuple[Value, ...]:
    """Return the values that instructions read and do not make themselves, each once."""
    written = {name for entry in entries for name in written_by(entry)}
    return tuple(
        {value.name: value for entry in entries for value in values_read(entry) if value.name not in written}.values()
    )


def in_the_earliest_pass(instructions: Sequence[Instruction], gradients: Collection[str]) -> tuple[Instruction, ...]:
    """Move collectives to the first pass that reads what they make.

    A collective has the pass of the reader that asked for it first. Where that is the gradient of a weight (W), the
    gradient of an input (I), which is computed before, may read the same. ``gradients`` names values handed back by I.
    """
    needed, moved = set(gradients), list[Instruction]()
    for entry in reversed(instructions):
        entry_pass = pass_of(entry)
        is_needed = entry_pass != "F" and any(value.name in needed for value in values_written(entry))
        if isinstance(entry, Communicate) and entry_pass == "W" and is_needed:
            moved.append(replace(entry, pass_="I"))
        else:
            moved.append(entry)
        if entry_pass == "I" or is_needed:
            needed.update(read_by(entry))
    return tuple(reversed(moved))


def pass_of(entry: Instruction) -> Pass | None:
    """Return the pass of an instruction, if it has one."""
    match entry:
        case Compute(op=op):
            return op.pass_
        case Communicate(pass_=pass_):
            return pass_
        case _:
            return None


def written_by(entry: Instruction) -> tuple[str, ...]:
    """Return the names of the values that an instruction makes."""
    return tuple([value.name for value in values_written(entry)])


def values_written(entry: Instruction) -> tuple[Value, ...]:
    """Return the values that an instruction makes."""
    match entry:
        case Given(value=value):
            return (value,)
        case Compute(writes=writes):
            return writes
        case _:
            return (entry.writes,)


def read_by(entry: Instruction) -> tuple[str, ...]:
    """Return the names of the values that an instruction reads."""
    return tuple([value.name for value in values_read(entry)])


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
    instructions: Sequence[Instruction], names: Collection[str], pass_: Pass
) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """Split instructions in two: those of a pass, with the pass-less ones that they or ``names`` need; all others."""
    needed = set(names)
    chosen: list[Instruction] = []
    remaining: list[Instruction] = []
    for entry in reversed(instructions):
        entry_pass = pass_of(entry)
        is_chosen = entry_pass == pass_ or (
            entry_pass in (None, "F") and any(value.name in needed for value in values_written(entry))
        )
        if is_chosen:
            chosen.append(entry)
            needed.update(read_by(entry))
        else:
            remaining.append(entry)
    return tuple(reversed(chosen)), tuple(reversed(remaining))
