"""The parts of a traced decoder: what comes before its list of layers, each layer, and what comes after."""

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.errors import InputError, require
from autoshard.modules.dims import Position, factors, size_of
from autoshard.modules.program import Traced, TracedProgram, TracedStep
from autoshard.modules.reach import steps_to

_NUMBERED = re.compile(r"(?:(.*?)\.)??(\d+)(?:\..*)?")


@dataclass(frozen=True, eq=False, kw_only=True)
class Segment:
    """Steps in order, with the hidden state that they take (the embedding takes none) and what they give."""

    name: str
    steps: tuple[TracedStep, ...]
    takes: Traced | None
    gives: Traced


@dataclass(frozen=True, eq=False, kw_only=True)
class Stack:
    """A decoder in parts; ``carried`` are batch, sequence and hidden size, as dims of what goes from part to part."""

    embed: Segment
    layers: tuple[Segment, ...]
    head: Segment
    carried: tuple[Position, Position, Position]


def stack_of(program: TracedProgram, logits: Traced) -> Stack:
    """Split a program into embedding, layers and head, or say why it is no stack of layers."""
    path, starts, end = _layers(program.steps)
    bounds = [0, *starts, end, len(program.steps)]
    free = _free_steps(program.steps)
    embed, *layers, head = (_with_free(program.steps[first:last], free) for first, last in itertools.pairwise(bounds))
    names = [f"{path}.{number}".removeprefix(".") for number in range(len(layers))]
    require(
        (
            end < len(program.steps),
            names[-1],
            "is followed by nothing; the list must hold layers only, and the head come after",
        )
    )
    hidden_states = [_taken(steps, name) for name, steps in zip(names, layers, strict=True)]
    handed_on = [*hidden_states[1:], _taken(head, "the head")]
    for name, before, value in zip(
        [*names, "the head"], [embed, *layers], [*hidden_states, handed_on[-1]], strict=True
    ):
        is_made = any(step.makes is value for step in before)
        require((is_made, name, f"reads {value.name}, which is not made right before it; only one tensor goes on"))
    shape = [factors(position) for position in hidden_states[0].positions]
    sizes = ", ".join(str(size_of(position)) for position in shape)
    message = f"takes a tensor of [{sizes}]; the hidden state of a decoder is [batch, sequence, hidden]"
    require((len(shape) == 3, names[0], message), (all(shape), names[0], f"{message}, and none may have size 1 here"))
    message = f"{message}, and no function of it may split or merge these"
    require((all(len(position) == 1 for position in shape), names[0], message))
    return Stack(
        embed=Segment(name="embed", steps=tuple(embed), takes=None, gives=hidden_states[0]),
        layers=tuple(
            Segment(name=name, steps=tuple(steps), takes=value, gives=state)
            for name, steps, value, state in zip(names, layers, hidden_states, handed_on, strict=True)
        ),
        head=Segment(name="head", steps=tuple(head), takes=handed_on[-1], gives=logits),
        carried=(shape[0], shape[1], shape[2]),
    )


def _layers(steps: Sequence[TracedStep]) -> tuple[str, list[int], int]:
    """Return the path of the list that most steps belong to, where each of its members starts, and where all end."""
    lists: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, step in enumerate(steps):
        match = _NUMBERED.fullmatch(step.path)
        if match:
            lists[match[1] or ""][int(match[2])].append(place)
    if not lists:
        raise InputError.of(
            "module", "has no list of layers (nn.ModuleList or nn.Sequential), so it is no stack of layers"
        )
    path, members = max(lists.items(), key=lambda pair: sum(map(len, pair[1].values())))
    starts = [min(places) for places in members.values()]
    ends = [max(places) for places in members.values()]
    is_disjoint = all(end < start for end, start in zip(ends, starts[1:], strict=False))
    in_order = list(members) == list(range(len(members))) and is_disjoint
    require((in_order, path or "module", "does not run its layers in order, each once"))
    return path, starts, max(place for places in members.values() for place in places) + 1


def _free_steps(steps: Sequence[TracedStep]) -> Mapping[Traced, TracedStep]:
    """Return the steps that depend on no weight, by what they make: a mask in the format of numbers, a constant."""
    free: dict[Traced, TracedStep] = {}
    for step in steps:
        if all(read.value.origin == "input" or read.value in free for read in step.reads):
            free[step.makes] = step
    return free


def _with_free(steps: Sequence[TracedStep], free: Mapping[Traced, TracedStep]) -> Sequence[TracedStep]:
    """Return the steps of a part with the free ones that it needs: each part makes these for itself."""
    computed = [step for step in steps if step.makes not in free]
    return steps_to([*free.values(), *computed], [step.makes for step in computed])


def _taken(steps: Sequence[TracedStep], name: str) -> Traced:
    """Return the only tensor of earlier parts that some steps read; those that depend on no weight do not count."""
    inner_values = {step.makes for step in steps}
    reads = [read.value for step in steps for read in step.reads]
    states = list(dict.fromkeys(value for value in reads if value.origin == "made" and value not in inner_values))
    names = ", ".join(value.name for value in states)
    message = "reads nothing that comes before; the list must hold layers only, and the embedding come before"
    require((bool(states), name, message))
    message = f"reads {len(states)} tensors of earlier parts ({names}); one goes on, so let layers join what they read"
    require((len(states) == 1, name, message))
    return states[0]
