"""One line per operation: the layouts of its inputs and outputs, and the collectives of its entry, in order."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from autoshard.errors import InputError, require
from autoshard.graph.block import Block
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Pass
from autoshard.layout.layout import Collective, Layout, show_atoms
from autoshard.layout.program import Communicate, Compute, Given, Program, Value, pass_of, read_by

Chain = tuple[Collective, ...]
Kept = Literal["in", "out"]
_LAYOUT = re.compile(r"\[[^\]]*\](?: \+[\w.]+)?(?: \^[\w.]+)?")
_EXAMPLE = "[batch/dp, seq/tp, hidden] -> [batch/dp, seq, hidden] | F all_gather seq/tp | I reduce_scatter seq/tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How one operation is sharded: layouts in and out, and its Collectives per pass.

    Each list holds chains: a chain's collectives follow one another on one value. A deliver has one chain in
    ``forward`` for each layout in which it hands on what it changes. ``saved`` says what is kept for backward: what it
    takes, what it gives, or both. ``ring`` is what keys and values do inside an attention.

    >>> text = "[seq/tp, hidden] -> [seq, hidden] | F all_gather seq/tp | I reduce_scatter seq/tp | save in"
    >>> Strategy.parse(text).backward
    ((Collective(kind='reduce_scatter', dim='seq', atoms=('kv', 'rep'), repeat=1, to_dim=None),),)
    >>> str(Strategy.parse(text)) == text
    True
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    ring: Collective | None = None
    forward: tuple[Chain, ...] = ()
    backward: tuple[Chain, ...] = ()
    saved: tuple[Kept, ...] = ()
    weights: tuple[Chain, ...] = ()

    def __post_init__(self) -> None:
        """Refuse chains without collectives, and a ring of anything but permutes."""
        moves = self.ring is None or self.ring.kind == "permute"
        require(
            (bool(self.outputs), "strategy", "an operation makes something"),
            (
                all((*self.forward, *self.backward, *self.weights)),
                "strategy",
                "a list holds a chain without collectives",
            ),
            (moves, "strategy", f"a ring passes blocks on by permute, not {self.ring}"),
        )

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """Read the text form."""
        layouts, *parts = text.split(" | ")
        taken, arrow, given = layouts.partition(" -> ")
        if not arrow or not given:
            raise InputError.of("", f"{text!r} is not a strategy. Write it like {_EXAMPLE!r}")
        found = {name: content for name, _, content in (part.partition(" ") for part in parts)}
        unknown = sorted(found.keys() - {"ring", "F", "I", "save", "W"})
        if unknown or len(found) < len(parts):
            raise InputError.of("", f"{text!r} has parts {unknown or 'twice'}; known: ring, F, I, save, W, each once")
        saved = [name for name in found.get("save", "").split(", ") if name]
        if saved != [kept for kept in get_args(Kept) if kept in saved]:
            raise InputError.of("", f"'save {found['save']}' is none of 'save in', 'save out', 'save in, out'")
        atoms, _, hop = found.get("ring", "").partition(", ")
        ring = Collective.parse(hop) if "ring" in found else None
        if ring and show_atoms(ring.atoms) != atoms:
            right = f"write 'ring {show_atoms(ring.atoms)}, {ring}'"
            raise InputError.of("", f"a ring over {atoms} does not travel by {ring}; {right}")
        return cls(
            inputs=_parse_layouts(taken),
            outputs=_parse_layouts(given),
            ring=ring,
            forward=_parse_chains(found.get("F", "")),
            backward=_parse_chains(found.get("I", "")),
            saved=cast(tuple[Kept, ...], tuple(saved)),
            weights=_parse_chains(found.get("W", "")),
        )

    @property
    def lists(self) -> Mapping[Pass, tuple[Chain, ...]]:
        """The chains of each pass."""
        return {"F": self.forward, "I": self.backward, "W": self.weights}

    def mapped(self, layout: Callable[[Layout], Layout], chain: Callable[[Chain], Chain]) -> "Strategy":
        """Return the same with other layouts and chains; a chain that becomes empty is left out."""
        forward, backward, weights = (
            tuple(real for one in chains if (real := chain(one))) for chains in self.lists.values()
        )
        return replace(
            self,
            inputs=tuple(map(layout, self.inputs)),
            outputs=tuple(map(layout, self.outputs)),
            ring=next(iter(chain((self.ring,))), None) if self.ring else None,
            forward=forward,
            backward=backward,
            weights=weights,
        )

    def __str__(self) -> str:
        """Print the text form."""
        parts = (
            f"{_show(self.inputs)} -> {_show(self.outputs)}",
            f"ring {show_atoms(self.ring.atoms)}, {self.ring}" if self.ring else "",
            f"F {_show_chains(self.forward)}" if self.forward else "",
            f"I {_show_chains(self.backward)}" if self.backward else "",
            f"save {_show(self.saved)}" if self.saved else "",
            f"W {_show_chains(self.weights)}" if self.weights else "",
        )
        return " | ".join(part for part in parts if part)


def strategies(program: Program, block: Block) -> Mapping[str, Strategy]:
    """Read one Strategy per forward operation off a lowered program, then those of what enters and leaves the block."""
    changes = collective_chains(program)
    computes = {entry.op.name: entry for entry in program.instructions if isinstance(entry, Compute)}
    made: dict[str, Value] = {}  # every tensor as it was given or computed, before any change
    for entry in program.instructions:
        values = (entry.value,) if isinstance(entry, Given) else entry.writes if isinstance(entry, Compute) else ()
        made |= {value.tensor: value for value in values}
    later = (entry for entry in program.instructions if pass_of(entry) in ("I", "W"))
    read = {name for entry in later for name in read_by(entry)}
    found: dict[str, Strategy] = {}
    for op in block.select("micro_batch", "F"):
        if isinstance(op.kind, Deliver):
            found[op.name] = _delivered(op.kind, made[op.inputs[0]], changes.get(op.name, {}), read)
        else:
            found[op.name] = _computed(block, computes[op.name], computes.values())
    for entry, lists in changes.items():  # a change where a block begins or ends: of its result, or of an input
        if entry not in found:
            first = next(chain for chains in lists.values() for chain in chains)
            ends = Strategy(inputs=(first[0].reads.layout,), outputs=(first[-1].writes.layout,))
            found[entry] = _with_lists(ends, lists)
    return found


Lists = Mapping[Pass, Sequence[Sequence[Communicate]]]


def collective_chains(program: Program) -> Mapping[str, Lists]:
    """Return per entry and pass the chains of collectives, in order."""
    found: dict[str, dict[Pass, list[list[Communicate]]]] = defaultdict(lambda: {name: [] for name in get_args(Pass)})
    for change in program.collectives():
        chains = found[change.entry][change.pass_]
        if chains and chains[-1][-1].writes.name == change.reads.name:
            chains[-1].append(change)
        else:
            chains.append([change])
    return found


def _delivered(kind: Deliver, made: Value, lists: Lists, read: Collection[str]) -> Strategy:
    """Return the Strategy of a deliver; it keeps those of its values that backward reads or changes again."""
    ends = [chain[-1].writes for chain in lists.get("F", ())]
    outputs = [value.layout.named(kind.renamed(tuple(dim for dim, _ in value.layout.dims))) for value in ends or [made]]
    saved: tuple[Kept, ...] = ("in",) if made.name in read else ()
    if any(value.name in read for value in ends):
        saved = (*saved, "out")
    return _with_lists(Strategy(inputs=(made.layout,), outputs=tuple(outputs), saved=saved), lists)


def _computed(block: Block, compute: Compute, others: Iterable[Compute]) -> Strategy:
    names = [block.tensors[name].dims for name in compute.op.inputs]  # keys are made along seq, and read along kv_seq
    rings = [entry.ring for entry in others if entry.op.source == compute.op.name and entry.op.pass_ == "I"]
    hops = [replace(ring[0], repeat=len(ring)) for ring in (compute.ring, *rings) if ring]  # all alike
    return Strategy(
        inputs=tuple(value.layout.named(dims) for value, dims in zip(compute.reads, names, strict=True)),
        outputs=tuple(value.layout for value in compute.writes),
        ring=hops[0] if compute.ring else None,
        backward=tuple((hop,) for hop in hops[1 if compute.ring else 0 :]),
    )


def _with_lists(strategy: Strategy, lists: Lists) -> Strategy:
    chains = {
        name: tuple(tuple(change.collective for change in chain) for chain in found) for name, found in lists.items()
    }
    return replace(strategy, forward=chains.get("F", ()), backward=chains.get("I", ()), weights=chains.get("W", ()))


def _show(parts: Iterable[object]) -> str:
    return ", ".join(str(part) for part in parts)


def _show_chains(chains: Iterable[Chain]) -> str:
    return "; ".join(_show(chain) for chain in chains)


def _parse_layouts(text: str) -> tuple[Layout, ...]:
    found = _LAYOUT.findall(text)
    if ", ".join(found) != text:
        raise InputError.of("", f"{text!r} is not a list of layouts. Write it like '[batch/dp, seq], [seq/tp] +cp'")
    return tuple(Layout.parse(part) for part in found)


def _parse_chains(text: str) -> tuple[Chain, ...]:
    return tuple(tuple(Collective.parse(part) for part in chain.split(", ")) for chain in text.split("; ") if chain)
