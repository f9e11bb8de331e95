"""The plan's table of a block: a Strategy line per operation, read off a program, checked, and turned into a program.

An edited line either changes the collectives that are executed, where they still lead from the layout before to the
layout after, or is refused with the line that would be right.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from autoshard.errors import Fault, Faults, InputError, nearest, require
from autoshard.graph.block import Block
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Op, Pass
from autoshard.layout.layout import Collective, Cuts, Layout, own_axes, show_atoms, whole_axes
from autoshard.layout.legal import cut_operations, faults as cut_faults
from autoshard.layout.lower import lower
from autoshard.layout.program import Communicate, Compute, Given, Instruction, Program, Value, pass_of, read_by
from autoshard.layout.redistribute import Price, Sizes, normal_layout, single_changes

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
        inputs_text, arrow, outputs_text = layouts.partition(" -> ")
        if not arrow or not outputs_text:
            raise InputError.of("", f"{text!r} is not a strategy. Write it like {_EXAMPLE!r}")
        sections = {name: content for name, _, content in (part.partition(" ") for part in parts)}
        unknown = sorted(sections.keys() - {"ring", "F", "I", "save", "W"})
        if unknown or len(sections) < len(parts):
            raise InputError.of("", f"{text!r} has parts {unknown or 'twice'}; known: ring, F, I, save, W, each once")
        saved = [name for name in sections.get("save", "").split(", ") if name]
        if saved != [side for side in get_args(Kept) if side in saved]:
            raise InputError.of("", f"'save {sections['save']}' is none of 'save in', 'save out', 'save in, out'")
        atoms, _, hop = sections.get("ring", "").partition(", ")
        ring = Collective.parse(hop) if "ring" in sections else None
        if ring and show_atoms(ring.atoms) != atoms:
            right = f"write 'ring {show_atoms(ring.atoms)}, {ring}'"
            raise InputError.of("", f"a ring over {atoms} does not travel by {ring}; {right}")
        return cls(
            inputs=_parse_layouts(inputs_text),
            outputs=_parse_layouts(outputs_text),
            ring=ring,
            forward=_parse_chains(sections.get("F", "")),
            backward=_parse_chains(sections.get("I", "")),
            saved=cast(tuple[Kept, ...], tuple(saved)),
            weights=_parse_chains(sections.get("W", "")),
        )

    @property
    def lists(self) -> Mapping[Pass, tuple[Chain, ...]]:
        """The chains of each pass."""
        return {"F": self.forward, "I": self.backward, "W": self.weights}

    def mapped(self, layout: Callable[[Layout], Layout], chain: Callable[[Chain], Chain]) -> "Strategy":
        """Return the Strategy with other layouts and chains; a chain that becomes empty is left out."""
        forward, backward, weights = (
            tuple(new for old in chains if (new := chain(old))) for chains in self.lists.values()
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
    """Read a Strategy per forward operation off a lowered program, then those of tensors at the ends of the block."""
    changes = collective_chains(program)
    computes = {entry.op.name: entry for entry in program.instructions if isinstance(entry, Compute)}
    first_values: dict[str, Value] = {}  # tensor -> its value before any change of layout
    for entry in program.instructions:
        values = (entry.value,) if isinstance(entry, Given) else entry.writes if isinstance(entry, Compute) else ()
        first_values |= {value.tensor: value for value in values}
    later = (entry for entry in program.instructions if pass_of(entry) in ("I", "W"))
    read = {name for entry in later for name in read_by(entry)}
    by_entry: dict[str, Strategy] = {}
    for op in block.select("micro_batch", "F"):
        if isinstance(op.kind, Deliver):
            by_entry[op.name] = _delivered(op.kind, first_values[op.inputs[0]], changes.get(op.name, {}), read)
        else:
            by_entry[op.name] = _computed(block, computes[op.name], computes.values())
    for entry, lists in changes.items():  # a block's result or input changes where the block ends or begins
        if entry not in by_entry:
            first = next(chain for chains in lists.values() for chain in chains)
            ends = Strategy(inputs=(first[0].reads.layout,), outputs=(first[-1].writes.layout,))
            by_entry[entry] = _with_lists(ends, lists)
    return by_entry


Lists = Mapping[Pass, Sequence[Sequence[Communicate]]]


def collective_chains(program: Program) -> Mapping[str, Lists]:
    """Return per entry and pass the chains of collectives, in order."""
    entries: dict[str, dict[Pass, list[list[Communicate]]]] = defaultdict(lambda: {name: [] for name in get_args(Pass)})
    for change in program.collectives():
        chains = entries[change.entry][change.pass_]
        if chains and chains[-1][-1].writes.name == change.reads.name:
            chains[-1].append(change)
        else:
            chains.append([change])
    return entries


def _delivered(kind: Deliver, root: Value, lists: Lists, read: Collection[str]) -> Strategy:
    """Return the Strategy of a deliver; the deliver saves the values that backward reads or changes again."""
    ends = [chain[-1].writes for chain in lists.get("F", ())]
    outputs = [value.layout.named(kind.renamed(tuple(dim for dim, _ in value.layout.dims))) for value in ends or [root]]
    saved: tuple[Kept, ...] = ("in",) if root.name in read else ()
    if any(value.name in read for value in ends):
        saved = (*saved, "out")
    return _with_lists(Strategy(inputs=(root.layout,), outputs=tuple(outputs), saved=saved), lists)


def _computed(block: Block, compute: Compute, computes: Iterable[Compute]) -> Strategy:
    names = [block.tensors[name].dims for name in compute.op.inputs]  # keys are made along seq, and read along kv_seq
    rings = [entry.ring for entry in computes if entry.op.source == compute.op.name and entry.op.pass_ == "I"]
    hops = [replace(ring[0], repeat=len(ring)) for ring in (compute.ring, *rings) if ring]  # all alike
    return Strategy(
        inputs=tuple(value.layout.named(dims) for value, dims in zip(compute.reads, names, strict=True)),
        outputs=tuple(value.layout for value in compute.writes),
        ring=hops[0] if compute.ring else None,
        backward=tuple((hop,) for hop in hops[1 if compute.ring else 0 :]),
    )


def _with_lists(strategy: Strategy, lists: Lists) -> Strategy:
    chains = {
        name: tuple(tuple(change.collective for change in chain) for chain in pass_chains)
        for name, pass_chains in lists.items()
    }
    return replace(strategy, forward=chains.get("F", ()), backward=chains.get("I", ()), weights=chains.get("W", ()))


def _show(parts: Iterable[object]) -> str:
    return ", ".join(str(part) for part in parts)


def _show_chains(chains: Iterable[Chain]) -> str:
    return "; ".join(_show(chain) for chain in chains)


def _parse_layouts(text: str) -> tuple[Layout, ...]:
    layout_texts = _LAYOUT.findall(text)
    if ", ".join(layout_texts) != text:
        raise InputError.of("", f"{text!r} is not a list of layouts. Write it like '[batch/dp, seq], [seq/tp] +cp'")
    return tuple(Layout.parse(part) for part in layout_texts)


def _parse_chains(text: str) -> tuple[Chain, ...]:
    return tuple(tuple(Collective.parse(part) for part in chain.split(", ")) for chain in text.split("; ") if chain)


Table = Mapping[str, str]  # entry -> line


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSetting:
    """The context of a table: mesh, price of changes, boundary, and whether the platform keeps gathered inputs."""

    atoms: Sizes
    price: Price
    boundary: Cuts
    keeps_gathered: bool
    has_inputs: bool = False  # whether every rank has the inputs whole

    def lowered(self, block: Block, cuts: Mapping[str, Cuts]) -> Program:
        """Lower a block with these cuts; atoms of size 1 cut nothing."""
        real = {name: self._real(cut) for name, cut in cuts.items()}
        boundary = self._real(self.boundary)
        return lower(
            block, real, self.atoms, self.price, boundary=boundary, keeps_gathered=self.keeps_gathered,
            has_inputs=self.has_inputs,
        )  # fmt: skip

    def _real(self, cuts: Cuts) -> Cuts:
        return {dim: tuple(atom for atom in cut if self.atoms.get(atom, 1) > 1) for dim, cut in cuts.items()}


def strategy_lines(by_entry: Mapping[str, Strategy], atoms: Sizes) -> Table:
    """Write Strategies as lines; an axis of which one atom is of size 1 is named whole."""
    return {name: str(_with_whole_axes(entry, atoms)) for name, entry in by_entry.items()}


def program_of(block: Block, table: Table, setting: TableSetting) -> Program:
    """Turn a table into the program that it lists, or raise one InputError with every line that cannot be executed."""
    lines = _parsed(block, table, setting.atoms)
    cuts = {op.name: _cuts_of(op, lines[op.name]) for op in cut_operations(block)}
    illegal = cut_faults(block, cuts, tuple(setting.atoms))
    if illegal:
        raise InputError(illegal)
    program = setting.lowered(block, cuts)
    derived, atoms = strategies(program, block), setting.atoms
    real = {name: _normal(line, atoms) for name, line in lines.items()}
    absent, known_names = strategy_lines(derived, atoms), list(derived)
    wrong = [
        *(
            Fault(where=name, message=f"no operation of this name. {nearest(name, known_names)}")
            for name in lines.keys() - derived
        ),
        *(Fault(where=name, message=f"has no line; it would be: {absent[name]}") for name in derived.keys() - lines),
        *_changed_layouts(real, derived, atoms),
    ]
    if wrong:
        raise InputError(wrong)
    for name in sorted(derived):
        try:
            program = _with_line(program, name, real[name], derived[name], atoms)
        except InputError as error:
            wrong.append(Fault(where=name, message=f"{error}; write: {absent[name]}"))
    if wrong:
        raise InputError(wrong)
    return program


def table_for_sizes(table: Table, atoms: Sizes) -> Table:
    """Return a table for a mesh of other sizes: only the hops of rings are counted anew."""
    return {name: _fitted_line(text, atoms) if "permute" in text else text for name, text in table.items()}


def _fitted_line(text: str, atoms: Sizes) -> str:
    line = Strategy.parse(text)
    if line.ring is None:
        return text
    count = math.prod(atoms.get(atom, 1) for atom in line.ring.atoms)
    if count == 1:
        return str(replace(line, ring=None, backward=()))
    longer = count - 1 - line.ring.repeat  # gradients travel one hop further than what is computed (again)
    backward = tuple(tuple(replace(hop, repeat=hop.repeat + longer) for hop in chain) for chain in line.backward)
    return str(replace(line, ring=replace(line.ring, repeat=count - 1), backward=backward))


def _parsed(block: Block, table: Table, atoms: Sizes) -> Mapping[str, Strategy]:
    faults, lines = Faults(), dict[str, Strategy]()
    for name, text in table.items():
        with faults.of(name):
            lines[name] = _with_own_axes(Strategy.parse(text), atoms)
    absent = [op.name for op in cut_operations(block) if op.name not in table]
    faults += [Fault(where=name, message="this operation has no line") for name in absent]
    faults.refuse()
    return lines


def _cuts_of(op: Op, line: Strategy) -> Cuts:
    """Read the cuts of an operation off the layouts of its inputs and outputs; these may lack tied dims."""
    cuts: dict[str, tuple[str, ...]] = {}
    for layout in (*line.inputs, *line.outputs):
        for dim, atoms in layout.dims:
            cuts[dim] = cuts.get(dim) or atoms
    for dim, source_dims in op.kind.tied_dims():
        cuts[dim] = cuts.get(dim) or tuple(atom for source_dim in source_dims for atom in cuts.get(source_dim, ()))
    return {dim: atoms for dim, atoms in cuts.items() if atoms}


def _changed_layouts(lines: Mapping[str, Strategy], derived: Mapping[str, Strategy], atoms: Sizes) -> Iterator[Fault]:
    """Yield a fault per line whose layouts, or counts of chains, do not follow from the lines of its neighbours."""
    for name in sorted(lines.keys() & derived.keys()):
        line, right = lines[name], _normal(derived[name], atoms)
        same = all(getattr(line, part) == getattr(right, part) for part in ("inputs", "outputs", "ring", "saved"))
        if not same or [*map(len, line.lists.values())] != [*map(len, right.lists.values())]:
            yield Fault(
                where=name, message=f"does not fit its neighbours; write: {_with_whole_axes(derived[name], atoms)}"
            )


def _with_line(program: Program, name: str, line: Strategy, right: Strategy, atoms: Sizes) -> Program:
    """Execute the listed collectives of a line where they differ from the derived ones."""
    for pass_, chains in line.lists.items():
        for number, (chain, old) in enumerate(zip(chains, right.lists[pass_], strict=True)):
            if _real(chain, atoms) == _real(old, atoms):
                continue
            if right.ring:
                raise InputError.of("", "the hops of a ring follow from its cut and cannot be chosen")
            program = _replaced(program, collective_chains(program)[name][pass_][number], chain, atoms)
    return program


def _replaced(program: Program, old: Sequence[Communicate], chain: Chain, atoms: Sizes) -> Program:
    """Put other collectives in the place of a chain; they must lead from the same layout to the same layout."""
    value, goal = old[0].reads, old[-1].writes
    new_changes: list[Instruction] = []
    for number, collective in enumerate(chain):
        changes = single_changes(normal_layout(value.layout, atoms), set(atoms))
        target = _real((collective,), atoms)
        change = next((change for change in changes if _real((change.collective,), atoms) == target), None)
        if target and change is None:
            raise InputError.of("", f"{collective} cannot follow {value.layout}")
        name = goal.name if number == len(chain) - 1 else f"{goal.name}.{number}"
        after = replace(goal, name=name, layout=change.after if change else value.layout)
        new_changes.append(replace(old[0], collective=collective, reads=value, writes=after))
        value = after
    if normal_layout(value.layout, atoms) != normal_layout(goal.layout, atoms):
        raise InputError.of("", f"{', '.join(map(str, chain))} ends in {value.layout}, not in {goal.layout}")
    first = program.instructions.index(old[0])
    remaining = [entry for entry in program.instructions if entry not in old]
    return replace(program, instructions=(*remaining[:first], *new_changes, *remaining[first:]))


def _real(chain: Chain, atoms: Sizes) -> Chain:
    """Leave out atoms of size 1, and collectives over nothing else; a sum may name its atoms in any order."""
    real_chain: list[Collective] = []
    for collective in chain:
        real = tuple(atom for atom in collective.atoms if atoms.get(atom, 1) > 1)
        if real:
            ordered = tuple(sorted(real)) if collective.kind.startswith("all_reduce") else real
            real_chain.append(replace(collective, atoms=ordered))
    return tuple(real_chain)


def _normal(line: Strategy, atoms: Sizes) -> Strategy:
    """Leave out atoms of size 1, which cut nothing and among which nothing is sent."""
    return line.mapped(lambda layout: normal_layout(layout, atoms), lambda chain: _real(chain, atoms))


def _with_own_axes(line: Strategy, atoms: Sizes) -> Strategy:
    """Name axes as the mesh does, which may have some of them whole."""
    if not atoms.keys() & {"dp", "tp"}:
        return line

    def layout(original: Layout) -> Layout:
        dims = tuple((dim, own_axes(cut, atoms)) for dim, cut in original.dims)
        return Layout(dims=dims, sums=own_axes(original.sums, atoms), maxima=own_axes(original.maxima, atoms))

    return line.mapped(layout, lambda chain: tuple(replace(hop, atoms=own_axes(hop.atoms, atoms)) for hop in chain))


def _with_whole_axes(line: Strategy, atoms: Sizes) -> Strategy:
    """Name an axis whole where its other atom is of size 1."""

    def layout(original: Layout) -> Layout:
        dims = tuple((dim, whole_axes(cut, atoms)) for dim, cut in original.dims)
        return Layout(dims=dims, sums=whole_axes(original.sums, atoms), maxima=whole_axes(original.maxima, atoms))

    return line.mapped(layout, lambda chain: tuple(replace(hop, atoms=whole_axes(hop.atoms, atoms)) for hop in chain))
