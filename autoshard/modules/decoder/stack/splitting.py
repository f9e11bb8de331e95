"""The steps of a traced program by part: what comes before its lists of layers, each layer, and what comes after.

A stack may have several lists, as an encoder and a decoder have: what lies between two lists belongs to the last layer
of the first, but for what no layer has a part in, which the first part makes.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.errors import InputError, require
from autoshard.modules.decoder.stack.passing import STATE_DIMS, earlier, earlier_of_all, read_behind
from autoshard.modules.dims import factors, size_of
from autoshard.modules.program import Traced, TracedStep, name_of
from autoshard.modules.reach import steps_to

Parts = list[list[TracedStep]]
_NUMBERED = re.compile(r"(?:(.*?)\.)??(\d+)(?:\..*)?")
_WEIGHING = ("softmax", "_softmax", "scaled_dot_product_attention")  # what a further list of layers must do


@dataclass(frozen=True, kw_only=True)
class _ListOfLayers:
    """A list: its path, where its members start among the steps, and where the last one ends."""

    path: str
    starts: tuple[int, ...]
    end: int

    @property
    def names(self) -> list[str]:
        """The paths of its members."""
        return [f"{self.path}.{number}".removeprefix(".") for number in range(len(self.starts))]


def split_steps(steps: Sequence[TracedStep]) -> tuple[list[str], Parts]:
    """Return the names of the layers and of the head, and the steps of embedding, layers and head."""
    lists, free = _lists(steps), _free_steps(steps)
    bounds = [0, *(start for layers in lists for start in layers.starts), lists[-1].end, len(steps)]
    names = [name for layers in lists for name in layers.names]
    alone = "is followed by nothing; the list must hold layers only, and the head come after"
    require((lists[-1].end < len(steps), names[-1], alone))
    computed: Parts = [
        [step for step in steps[first:last] if step.makes not in free] for first, last in itertools.pairwise(bounds)
    ]
    parts = [_with_free(part, free) for part in _moved_on(names, _moved_back(computed, lists))]
    return [*names, "the head"], _with_small_weights(parts)


def ends_in_layers(steps: Sequence[TracedStep]) -> bool:
    """Say whether nothing follows the last list of layers."""
    return any(_NUMBERED.fullmatch(step.path) for step in steps) and _lists(steps)[-1].end == len(steps)


def has_several_lists(steps: Sequence[TracedStep]) -> bool:
    """Say whether a program has several lists of layers, as an encoder and a decoder have."""
    return any(_NUMBERED.fullmatch(step.path) for step in steps) and len(_lists(steps)) > 1


def _lists(steps: Sequence[TracedStep]) -> Sequence[_ListOfLayers]:
    """Return the list that most steps belong to, and those beside it that attend as well, in their order."""
    members: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, step in enumerate(steps):
        match = _NUMBERED.fullmatch(step.path)
        if match:
            members[match[1] or ""][int(match[2])].append(place)
    if not members:
        raise InputError.of(
            "module", "has no list of layers (nn.ModuleList or nn.Sequential), so it is no stack of layers"
        )
    first, *more = sorted(members, key=lambda path: -sum(map(len, members[path].values())))
    message = f"does not run its layers in order, each once{_first_late(members[first], steps)}"
    require((_in_order(members[first]), first or "module", message))
    lists = [_list_of(first, members[first], steps)]
    for path in more:
        layers = _list_of(path, members[path], steps)
        weighs = any(name_of(step) in _WEIGHING for step in steps[layers.starts[0] : layers.end])
        is_apart = all(layers.end <= begun.starts[0] or begun.end <= layers.starts[0] for begun in lists)
        lists += [layers] if weighs and is_apart and _in_order(members[path]) else []
    return sorted(lists, key=lambda layers: layers.starts)


def _list_of(path: str, members: Mapping[int, Sequence[int]], steps: Sequence[TracedStep]) -> _ListOfLayers:
    spans = [(min(places), max(places) + 1) for places in members.values()]
    return _ListOfLayers(path=path, starts=tuple(start for start, _ in spans), end=_end_of_last(steps, spans))


def _end_of_last(steps: Sequence[TracedStep], spans: Sequence[tuple[int, int]]) -> int:
    """Return where the last layer ends: with what follows each layer before, if that follows it too.

    So it is for sums with the input of a layer, where the module that has the list computes them.
    """
    (start, end), nexts = spans[-1], [start for start, _ in spans[1:]]
    tails = {
        tuple(name_of(steps[place]) for place in _following(steps, span, until))
        for span, until in zip(spans, nexts, strict=False)
    }
    tail = tails.pop() if len(tails) == 1 else ()
    places = [*itertools.islice(_following(steps, (start, end), len(steps)), len(tail))]
    is_alike = bool(tail) and tuple(name_of(steps[place]) for place in places) == tail
    is_alike = is_alike and places[-1] + 1 < len(steps)  # what follows the last layer is a head
    return places[-1] + 1 if is_alike else end


def _following(steps: Sequence[TracedStep], span: tuple[int, int], until: int) -> Iterator[int]:
    """Yield the places of steps behind a layer that are made of what the layer makes."""
    start, end = span
    made = {step.makes for step in steps[start:end]}
    for place in range(end, until):
        if any(read.value in made for read in steps[place].reads):
            made.add(steps[place].makes)
            yield place


def _in_order(members: Mapping[int, Sequence[int]]) -> bool:
    """Say whether the members of a list run one after the other, each once."""
    starts, ends = map(min, members.values()), map(max, members.values())
    is_disjoint = all(end < start for end, start in zip(ends, [*starts][1:], strict=False))
    return list(members) == list(range(len(members))) and is_disjoint


def _first_late(members: Mapping[int, Sequence[int]], steps: Sequence[TracedStep]) -> str:
    """Say which submodule of a member runs when the next has begun; nothing if members begin in another order."""
    for (_, places), (number, later) in itertools.pairwise(members.items()):
        if max(places) > min(later):
            return f": {steps[max(places)].path} runs when layer {number} has begun"
    return ""


def _moved_back(parts: Parts, lists: Sequence[_ListOfLayers]) -> Parts:
    """Return parts in which the first makes what lies between two lists, and no layer has a part in.

    So it is for the embedding of a decoder, whose table the head or the encoder may share.
    """
    moved, names = [list(part) for part in parts], tuple(f"{name}." for layers in lists for name in layers.names)
    steps = [step for part in parts for step in part]
    inside = {step.makes for step in steps if f"{step.path}.".startswith(names)}
    outside = {*_not_made_of(steps, inside)}
    for place in itertools.accumulate(len(layers.starts) for layers in lists[:-1]):
        of_layers = [step for step in moved[place] if step not in outside]
        used = {*steps_to(moved[place], [read.value for step in of_layers for read in step.reads])}
        back = [step for step in moved[place] if step in outside - used]
        moved[place] = [step for step in moved[place] if step not in back]
        moved[0] += back
    return moved


def _moved_on(names: Sequence[str], parts: Parts) -> Parts:
    """Return parts in which what lies between two layers, and is made of earlier parts alone, belongs to its reader.

    So a condition that is cast, or of which a row is taken, for each layer goes on as it is.
    """
    moved = [list(part) for part in parts]
    for number, name in reversed([*enumerate(names, 1)]):  # so that nothing is moved twice
        inside = {step.makes for step in moved[number] if f"{step.path}.".startswith(f"{name}.")}
        behind = _not_made_of(moved[number], inside)
        stays = (step for step in moved[number] if step not in behind)
        needed_here = {*steps_to(behind, [read.value for step in stays for read in step.reads])}
        behind = [step for step in behind if step not in needed_here]
        moved[number] = [step for step in moved[number] if step not in behind]
        moved[number + 1] = [*behind, *moved[number + 1]]
    beside = {*_beside(moved)}
    new = [value for value in earlier(moved[1]) if value not in beside]
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


def _beside(parts: Parts) -> tuple[Traced, ...]:
    """Return what the embedding makes for layers behind the first, or for the head."""
    results = {step.makes for step in parts[0]}
    reads = (value for steps in parts[2:] for value in earlier(steps))
    return tuple(dict.fromkeys(value for value in reads if value in results))


def _free_steps(steps: Sequence[TracedStep]) -> Mapping[Traced, TracedStep]:
    """Return the steps that depend on no weight, by what they make: a mask in the format of numbers, a constant."""
    free: dict[Traced, TracedStep] = {}
    for step in steps:
        if all(read.value.origin == "input" or read.value in free for read in step.reads):
            free[step.makes] = step
    return free


def _with_free(computed: Sequence[TracedStep], free: Mapping[Traced, TracedStep]) -> list[TracedStep]:
    """Return the steps of a part with the free ones that it needs: each part makes these for itself."""
    return [*steps_to([*free.values(), *computed], [step.makes for step in computed])]


def _with_small_weights(parts: Parts) -> Parts:
    """Return parts that make for themselves what is the same for all samples, if it is made of few weights.

    The weights go along in its place: those of a bias by position are fewer than its numbers.
    """
    steps = list(dict.fromkeys(step for part in parts for step in part))
    behind = sorted(read_behind(parts)[1], key=lambda value: len(value.positions) == STATE_DIMS)  # a loss may be last
    batch = {
        dim for value in behind[-1:] for dim in factors(dim for position in value.positions[:1] for dim in position)
    }
    small: dict[TracedStep, TracedStep] = {}  # how such values are made, in no layer
    for value in earlier_of_all(parts):
        numbers = [dim for dim in value.dims if dim not in batch]
        if len(value.positions) == STATE_DIMS and len(numbers) < len(value.dims):
            continue  # a state; all steps before it make it
        makers = steps_to(steps, [value])
        weights = {read.value for step in makers for read in step.reads if read.value.origin == "parameter"}
        multiplies = any(step.sort == "product" or step.products for step in makers)
        is_few = sum(size_of(weight.dims) for weight in weights) <= size_of(tuple(numbers))
        if is_few and not multiplies:
            small |= {step: replace(step, path="") for step in makers}
    again = [small[step] for step in steps if step in small]
    changed = [_making([step for step in part if step not in small], again) for part in parts]
    needed = read_behind(changed)[:-1]
    return [*([*steps_to(part, values)] for part, values in zip(changed, needed, strict=False)), changed[-1]]


def _making(part: Sequence[TracedStep], again: Sequence[TracedStep]) -> list[TracedStep]:
    """Return the steps of a part, with those of some others that it needs, right before it does."""
    steps, values = dict[TracedStep, None](), {step.makes for step in again}
    for step in part:
        steps |= dict.fromkeys(steps_to(again, [read.value for read in step.reads if read.value in values]))
        steps[step] = None
    return [*steps]
