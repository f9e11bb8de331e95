"""The plan's table of a block: one Strategy line per operation, read, checked, and turned back into a program.

An edited line either changes the collectives that are executed, where they still lead from the layout before to the
layout after, or is refused with the line that would be right.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.errors import Fault, InputError, nearest
from autoshard.graph.block import Block
from autoshard.graph.op import Op
from autoshard.layout.layout import Collective, Cuts, Layout, whole_axes
from autoshard.layout.legal import cut_operations, faults as cut_faults
from autoshard.layout.lower import lower
from autoshard.layout.program import Communicate, Instruction, Program
from autoshard.layout.redistribute import Price, Sizes, normal_layout, single_changes
from autoshard.layout.strategy import Chain, Strategy, collective_chains, strategies

Table = Mapping[str, str]  # entry -> line


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSetting:
    """The context of a table: mesh, price of changes, boundary, and whether the platform keeps gathered inputs."""

    atoms: Sizes
    price: Price
    boundary: Cuts
    keeps_gathered: bool

    def lowered(self, block: Block, cuts: Mapping[str, Cuts]) -> Program:
        """Lower a block with these cuts; atoms of size 1 cut nothing."""
        real = {name: self._real(cut) for name, cut in cuts.items()}
        boundary = self._real(self.boundary)
        return lower(block, real, self.atoms, self.price, boundary=boundary, keeps_gathered=self.keeps_gathered)

    def _real(self, cuts: Cuts) -> Cuts:
        return {dim: tuple(atom for atom in cut if self.atoms.get(atom, 1) > 1) for dim, cut in cuts.items()}


def written(found: Mapping[str, Strategy], atoms: Sizes) -> Table:
    """Write Strategies as lines; an axis of which one atom is of size 1 is named whole."""
    return {name: str(_shown(entry, atoms)) for name, entry in found.items()}


def program_of(block: Block, table: Table, setting: TableSetting) -> Program:
    """Turn a table into the program that it lists, or raise one InputError with every line that cannot be executed."""
    lines = _parsed(block, table)
    cuts = {op.name: _cuts_of(op, lines[op.name]) for op in cut_operations(block)}
    illegal = cut_faults(block, cuts, tuple(setting.atoms))
    if illegal:
        raise InputError(illegal)
    program = setting.lowered(block, cuts)
    derived, atoms = strategies(program, block), setting.atoms
    real = {name: _normal(line, atoms) for name, line in lines.items()}
    absent, known = written(derived, atoms), list(derived)
    wrong = [
        *(
            Fault(where=name, message=f"no operation of this name. {nearest(name, known)}")
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


def fitted(table: Table, atoms: Sizes) -> Table:
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


def _parsed(block: Block, table: Table) -> Mapping[str, Strategy]:
    found: list[Fault] = []
    lines: dict[str, Strategy] = {}
    for name, text in table.items():
        try:
            lines[name] = Strategy.parse(text)
        except InputError as error:
            found.extend(error.under(name).faults)
    absent = [op.name for op in cut_operations(block) if op.name not in table]
    found += [Fault(where=name, message="this operation has no line") for name in absent]
    if found:
        raise InputError(found)
    return lines


def _cuts_of(op: Op, line: Strategy) -> Cuts:
    """Read the cuts of an operation off the layouts of what it reads and makes; tied dims may stand in none of them."""
    cuts: dict[str, tuple[str, ...]] = {}
    for layout in (*line.inputs, *line.outputs):
        for dim, atoms in layout.dims:
            cuts[dim] = cuts.get(dim) or atoms
    for dim, others in op.kind.tied_dims():
        cuts[dim] = cuts.get(dim) or tuple(atom for other in others for atom in cuts.get(other, ()))
    return {dim: atoms for dim, atoms in cuts.items() if atoms}


def _changed_layouts(lines: Mapping[str, Strategy], derived: Mapping[str, Strategy], atoms: Sizes) -> Iterator[Fault]:
    """Yield the lines whose layouts, or counts of chains, do not follow from what their neighbours state."""
    for name in sorted(lines.keys() & derived.keys()):
        line, right = lines[name], _normal(derived[name], atoms)
        same = all(getattr(line, part) == getattr(right, part) for part in ("inputs", "outputs", "ring", "saved"))
        if not same or [*map(len, line.lists.values())] != [*map(len, right.lists.values())]:
            yield Fault(where=name, message=f"does not fit its neighbours; write: {_shown(derived[name], atoms)}")


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
    made: list[Instruction] = []
    for number, collective in enumerate(chain):
        changes = single_changes(normal_layout(value.layout, atoms), set(atoms))
        wanted = _real((collective,), atoms)
        change = next((change for change in changes if _real((change.collective,), atoms) == wanted), None)
        if wanted and change is None:
            raise InputError.of("", f"{collective} cannot follow {value.layout}")
        name = goal.name if number == len(chain) - 1 else f"{goal.name}.{number}"
        after = replace(goal, name=name, layout=change.after if change else value.layout)
        made.append(replace(old[0], collective=collective, reads=value, writes=after))
        value = after
    if normal_layout(value.layout, atoms) != normal_layout(goal.layout, atoms):
        raise InputError.of("", f"{', '.join(map(str, chain))} ends in {value.layout}, not in {goal.layout}")
    first = program.instructions.index(old[0])
    kept = [entry for entry in program.instructions if entry not in old]
    return replace(program, instructions=(*kept[:first], *made, *kept[first:]))


def _real(chain: Chain, atoms: Sizes) -> Chain:
    """Leave out atoms of size 1, and collectives over nothing else; a sum may name its atoms in any order."""
    found: list[Collective] = []
    for collective in chain:
        real = tuple(atom for atom in collective.atoms if atoms.get(atom, 1) > 1)
        if real:
            ordered = tuple(sorted(real)) if collective.kind.startswith("all_reduce") else real
            found.append(replace(collective, atoms=ordered))
    return tuple(found)


def _normal(line: Strategy, atoms: Sizes) -> Strategy:
    """Leave out atoms of size 1, which cut nothing and among which nothing is sent."""
    return line.mapped(lambda layout: normal_layout(layout, atoms), lambda chain: _real(chain, atoms))


def _shown(line: Strategy, atoms: Sizes) -> Strategy:
    """Name axes whole."""

    def layout(one: Layout) -> Layout:
        dims = tuple((dim, whole_axes(cut, atoms)) for dim, cut in one.dims)
        return Layout(dims=dims, sums=whole_axes(one.sums, atoms), maxima=whole_axes(one.maxima, atoms))

    return line.mapped(layout, lambda chain: tuple(replace(one, atoms=whole_axes(one.atoms, atoms)) for one in chain))
