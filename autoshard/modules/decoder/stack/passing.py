"""What goes from part to part of a stack: a hidden state, and all else that later parts read."""

from collections.abc import Mapping, Sequence

from autoshard.errors import require
from autoshard.modules.dims import size_of
from autoshard.modules.program import Traced, TracedStep

STATE_DIMS = 3  # batch, sequence, hidden size
Steps = Sequence[TracedStep]
_REMEDY = (
    "The list must hold layers only, and the embedding come before; let that require a gradient, or train by a loop of "
    "your own with autoshard.shard"
)


def earlier(steps: Steps) -> tuple[Traced, ...]:
    """Return what steps read of earlier parts; what depends on no weight does not count."""
    inner_values = {step.makes for step in steps}
    reads = (read.value for step in steps for read in step.reads)
    return tuple(dict.fromkeys(value for value in reads if value.origin == "made" and value not in inner_values))


def earlier_of_all(parts: Sequence[Steps]) -> tuple[Traced, ...]:
    """Return what parts read of earlier ones."""
    return tuple(dict.fromkeys(value for part in parts[1:] for value in earlier(part)))


def read_behind(parts: Sequence[Steps]) -> list[list[Traced]]:
    """Return what each part makes for later ones, in the order in which it does."""
    read, behind = set[Traced](), list[list[Traced]]()
    for part in reversed(parts):
        behind.append([step.makes for step in part if step.makes in read])
        read |= {*earlier(part)}
    return behind[::-1]


def hidden_states(names: Sequence[str], parts: Sequence[Steps]) -> list[Traced]:
    """Return what each layer, and the head, takes: of what it reads, that which is most like what it hands on.

    ``names`` are those of the layers and of the head. What no later part reads goes first, and then what is made last.
    """
    reads_of, makes_for_later, states = [earlier(part) for part in parts], read_behind(parts), list[Traced]()
    for number, name in enumerate(names, 1):
        reads, nothing = reads_of[number], "reads nothing of a trained weight that comes before"
        require((bool(reads), name, f"{nothing}. {_REMEDY}"))
        later = {value for values in reads_of[number + 1 :] for value in values}
        handed_on = makes_for_later[number][-1:]
        lost = "makes nothing that comes after it reads, so that it is no layer of a stack"
        require((bool(handed_on) or number == len(names), name, lost))

        def rank(value: Traced, later: set[Traced] = later, like: Sequence[Traced] = handed_on) -> tuple[int, ...]:
            is_alike = any(value.dims == state.dims for state in like)
            is_state = len(value.positions) == STATE_DIMS and all(value.positions)
            return is_alike, is_state, value not in later, value.number

        states.append(max(reads, key=rank))
    return states


def weights_in_common(parts: Sequence[Steps]) -> tuple[Traced, ...]:
    """Return the weights that a layer and another part read, if they may go along as values of the first part.

    These are no larger than a hidden state, and no matrices of products, of which each layer has its own.
    """
    readers: dict[Traced, set[int]] = {}
    for number, part in enumerate(parts):
        for step in part:
            for read in step.reads:
                if read.value.origin == "parameter":
                    readers.setdefault(read.value, set()).add(number)
    ends, steps = {0, len(parts) - 1}, (step for part in parts for step in part)
    multiplied = {read.value for step in steps if step.sort == "product" for read in step.reads}
    shared = (value for value, numbers in readers.items() if len(numbers) > 1 and not numbers <= ends)
    most = max((size_of(value.dims[1:]) for value in read_behind(parts)[0]), default=0)
    return tuple(value for value in shared if value not in multiplied and size_of(value.dims) <= most)


def live_values(
    parts: Sequence[Steps], states: Sequence[Traced], results: Sequence[Traced], weights: Sequence[Traced]
) -> Sequence[tuple[Traced, ...]]:
    """Return what arrives at each layer and at the head: all that it or a later part reads.

    What a layer gives has the place of what it takes, so that equal layers find all in equal places; for this, what
    the last layer reads goes on to the head. ``states`` are what layers and head take, ``results`` what layers give.
    ``weights`` that several parts read come of the first.
    """
    last = {value: number for number, part in enumerate(parts) for value in _read_of_others(part, weights)}
    last |= {
        value: len(parts) - 1 for value, number in last.items() if number == len(parts) - 2 and value not in states
    }
    live = [_with_new(states[:1], parts[0], [*weights], last)]
    for number, (state, result) in enumerate(zip(states, results, strict=False), 1):
        stays = [result if value is state and last[value] == number else value for value in live[-1]]
        live.append(_with_new([value for value in stays if last[value] > number], parts[number], [], last))
    return [tuple(values) for values in live]


def _read_of_others(part: Steps, weights: Sequence[Traced]) -> tuple[Traced, ...]:
    reads = {read.value for step in part for read in step.reads}
    return (*earlier(part), *(value for value in weights if value in reads))


def _with_new(
    values: Sequence[Traced], part: Steps, weights: Sequence[Traced], last: Mapping[Traced, int]
) -> list[Traced]:
    """Return values with those behind them that a part adds: what it makes, or weights."""
    return list(dict.fromkeys((*values, *weights, *(step.makes for step in part if step.makes in last))))
