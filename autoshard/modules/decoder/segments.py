"""The parts of a traced decoder: what comes before its list of layers, each layer, and what comes after."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as tree

from autoshard.errors import InputError, require
from autoshard.modules.dims import Position, factors, size_of, unify
from autoshard.modules.local import registered
from autoshard.modules.program import Traced, TracedProgram, TracedStep
from autoshard.modules.reach import steps_to

_JOINING = "joined_tokens"
_STATE_DIMS = 3  # batch, sequence, hidden size
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
    """A decoder in parts; ``carried`` are batch, sequence and hidden size, as dims of what goes from part to part.

    What the embedding makes for other readers than the first layer goes along ``beside`` that.
    """

    embed: Segment
    layers: tuple[Segment, ...]
    head: Segment
    carried: tuple[Position, Position, Position]
    beside: tuple[Traced, ...]


def stack_of(program: TracedProgram, logits: Traced) -> Stack:
    """Split a program into embedding, layers and head, or say why it is no stack of layers."""
    names, (embed, *layers, head) = _split(program.steps)
    *hidden_states, last = states = _hidden_states(names, [embed, *layers, head])
    shape = _shape(states[0], names[0])
    message = f"{_takes(shape, names[0])}, and no function of it may split or merge these"
    require((all(len(position) == 1 for position in shape), names[0], message))
    return Stack(
        embed=Segment(name="embed", steps=tuple(embed), takes=None, gives=hidden_states[0]),
        layers=tuple(
            Segment(name=name, steps=tuple(steps), takes=value, gives=state)
            for name, steps, value, state in zip(names, layers, hidden_states, states[1:], strict=False)
        ),
        head=Segment(name="head", steps=tuple(head), takes=last, gives=logits),
        carried=(shape[0], shape[1], shape[2]),
        beside=_beside([embed, *layers, head]),
    )


def with_inputs_beside(stack: Stack) -> Stack:
    """Return a stack whose layers and head read what goes along as if a batch brought it, as plans have it."""
    copies = {value: replace(value, origin="input") for value in stack.beside}

    def part(segment: Segment) -> Segment:
        return replace(segment, steps=tuple(_reading(step, copies) for step in segment.steps))

    return replace(stack, layers=tuple(map(part, stack.layers)), head=part(stack.head)) if copies else stack


def _reading(step: TracedStep, copies: Mapping[Traced, Traced]) -> TracedStep:
    """Return a step that reads copies of some values; the step itself if it reads none of these."""
    reads = tuple(replace(read, value=copies.get(read.value, read.value)) for read in step.reads)
    return replace(step, reads=reads) if any(read.value in copies for read in step.reads) else step


def merged_layers(program: TracedProgram) -> tuple[str, ...]:
    """Return the layers' names if their sequence is a product of dims, as the rows and columns of an image are."""
    names, parts = _split(program.steps)
    batch, sequence, hidden = _shape(_hidden_states(names, parts)[0], names[0])
    is_merged = len(sequence) > 1 and len(batch) == len(hidden) == 1
    return tuple(names[:-1]) if is_merged else ()


@contextmanager
def with_joined_tokens(module: torch.nn.Module, names: Sequence[str], *, between: bool) -> Iterator[None]:
    """Let the sequence be one dim for layers of these names, or ``between`` every two, while a module is traced."""
    into, out_of = (names, names) if between else ((names[0],), (names[-1],))

    def before(_: Any, arguments: Any, keywords: Any) -> Any:
        return _with_joined((arguments, keywords))

    def after(_: Any, __: Any, result: Any) -> Any:
        return _with_joined(result)

    handles = [module.get_submodule(name).register_forward_pre_hook(before, with_kwargs=True) for name in into]
    handles += [module.get_submodule(name).register_forward_hook(after) for name in out_of]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def joined_outside(program: TracedProgram) -> TracedProgram:
    """Return a program in which no layer joins tokens: hooks of a layer do, and are no part of it."""

    def outside(step: TracedStep) -> TracedStep:
        function = getattr(step.function, "keywords", {}).get("function")
        return replace(step, path="") if getattr(function, "_opname", "") == _JOINING else step

    return replace(program, steps=tuple(map(outside, program.steps)))


def unify_tokens(program: TracedProgram) -> None:
    """Let the sequences that go from layer to layer be one dim."""
    first, *states = _hidden_states(*_split(program.steps))
    for state in states:
        unify(state.positions[1], first.positions[1])


def _with_joined(values: Any) -> Any:
    """Join the tokens of the first tensor that can be a hidden state."""
    flat, layout = tree.tree_flatten(values)
    places = [
        place
        for place, value in enumerate(flat)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == _STATE_DIMS
    ]
    for place in places[:1]:
        text = f"batch _ hidden -> batch {flat[place].shape[1]} hidden"
        (flat[place],) = _joining()([flat[place]], text)
    return tree.tree_unflatten(flat, layout)


@cache
def _joining() -> Any:
    """Return the operation that gives a hidden state as it is: whoever reads the result sees one dim of tokens."""
    return registered(torch.clone, "module", _JOINING)


def _split(steps: Sequence[TracedStep]) -> tuple[list[str], list[Sequence[TracedStep]]]:
    """Return the names of the layers and of the head, and the steps of embedding, layers and head."""
    path, starts, end = _layers(steps)
    bounds, free = [0, *starts, end, len(steps)], _free_steps(steps)
    names = [f"{path}.{number}".removeprefix(".") for number in range(len(starts))]
    computed = [
        [step for step in steps[first:last] if step.makes not in free] for first, last in itertools.pairwise(bounds)
    ]
    parts = [_with_free(part, free) for part in _moved_on(names, computed)]
    alone = "is followed by nothing; the list must hold layers only, and the head come after"
    require((end < len(steps), names[-1], alone))
    return [*names, "the head"], parts


def _moved_on(names: Sequence[str], parts: Sequence[Sequence[TracedStep]]) -> list[list[TracedStep]]:
    """Return parts in which what lies between two layers, and is made of earlier parts alone, belongs to its reader.

    So a condition that is cast, or of which a row is taken, for each layer goes on as it is.
    """
    moved = [list(part) for part in parts]
    for number, name in reversed([*enumerate(names, 1)]):  # so that nothing is moved twice
        inside = {step.makes for step in moved[number] if f"{step.path}.".startswith(f"{name}.")}
        behind = _not_made_of(moved[number], inside)
        moved[number] = [step for step in moved[number] if step not in behind]
        moved[number + 1] = [*behind, *moved[number + 1]]
    beside = {*_beside(moved)}
    new = [value for value in _earlier(moved[1]) if value not in beside]
    if len(new) > 1:
        first = [step for step in moved[0] if step.makes in new and all(read.value in beside for read in step.reads)]
        moved[:2] = [step for step in moved[0] if step not in first], [*first, *moved[1]]
    return moved


def _not_made_of(steps: Sequence[TracedStep], values: set[Traced]) -> list[TracedStep]:
    """Return the steps that make nothing of some values."""
    following, independent = {*values}, list[TracedStep]()
    for step in steps:
        if step.makes in following or any(read.value in following for read in step.reads):
            following.add(step.makes)
        else:
            independent.append(step)
    return independent


def _hidden_states(names: Sequence[str], parts: Sequence[Sequence[TracedStep]]) -> list[Traced]:
    """Return what each layer, and the head, takes of the part before it."""
    beside, states = {*_beside(parts)}, list[Traced]()
    for number, (name, steps) in enumerate(zip(names, parts[1:], strict=True)):
        before = {step.makes for step in parts[number]}
        reads = _earlier(steps)
        new = [value for value in reads if value not in beside]
        if not new and number == 0:  # the first layer reads what all others read too
            new = [value for value in reads if len(value.positions) == _STATE_DIMS][:1]
        nothing = "reads nothing that comes before; the list must hold layers only, and the embedding come before"
        require((bool(reads), name, nothing))
        listed, remedy = ", ".join(value.name for value in new), "one goes on, so let layers join what they read"
        several = f"reads {len(new)} tensors of earlier parts ({listed}); {remedy}"
        lost = "reads nothing that is made right before it, so that it is no layer of a stack"
        require((bool(new), name, lost), (len(new) < 2, name, several))
        aside = f"reads {new[0].name}, which is not made right before it; only one tensor goes on"
        require((new[0] in before, name, aside))
        states += new
    return states


def _beside(parts: Sequence[Sequence[TracedStep]]) -> tuple[Traced, ...]:
    """Return what the embedding makes for layers behind the first, or for the head."""
    results = {step.makes for step in parts[0]}
    reads = (value for steps in parts[2:] for value in _earlier(steps))
    return tuple(dict.fromkeys(value for value in reads if value in results))


def _shape(state: Traced, name: str) -> list[Position]:
    """Return the dims of a hidden state: of batch, sequence, and hidden size."""
    shape = [factors(position) for position in state.positions]
    message = _takes(shape, name)
    require((len(shape) == _STATE_DIMS, name, message), (all(shape), name, f"{message}, and none may have size 1 here"))
    return shape


def _takes(shape: Sequence[Position], name: str) -> str:
    sizes = ", ".join(str(size_of(position)) for position in shape)
    return f"takes a tensor of [{sizes}]; the hidden state of a stack is [batch, sequence, hidden]"


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


def _with_free(computed: Sequence[TracedStep], free: Mapping[Traced, TracedStep]) -> Sequence[TracedStep]:
    """Return the steps of a part with the free ones that it needs: each part makes these for itself."""
    return steps_to([*free.values(), *computed], [step.makes for step in computed])


def _earlier(steps: Sequence[TracedStep]) -> tuple[Traced, ...]:
    """Return what steps read of earlier parts; what depends on no weight does not count."""
    inner_values = {step.makes for step in steps}
    reads = (read.value for step in steps for read in step.reads)
    return tuple(dict.fromkeys(value for value in reads if value.origin == "made" and value not in inner_values))
