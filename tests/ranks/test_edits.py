"""Every line of every table that can be edited by hand: other collectives run, with the same results.

One line of each kind of block is edited at a time, and what ``verify`` then asks for is pasted. Blocks are handed on in
one layout whatever is inside them, so that edits of several kinds do not meet.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import pytest

from autoshard.errors import InputError
from autoshard.layout.layout import Collective, Layout, whole_axes
from autoshard.layout.legal import cut_operations
from autoshard.layout.table import Chain, Strategy, Table, program_of
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_blocks, table_setting
from tests.ranks.cases import MIXTRAL, Calls, StepShare, Task, compare, engine_of, llama, plan_of, share_of
from tests.ranks.spawn import on_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

CASES = {
    "dense": ("tp=2,pp=1,dp=1,recompute=full:1", llama()),
    "experts": ("tp=1,pp=1,dp=2,ep=2,recompute=full:1", llama(**MIXTRAL)),
}
NUM_EDITS = {"dense": [2, 20, 14, 20], "experts": [1, 21, 12, 21]}  # lines of embed, layer, head, layer in full
MOST_PASTES = 4


def whole_tables(plan: Plan) -> Mapping[str, Table]:
    """Every block with all its lines, those of recomputed layers that are as in others among them."""
    tables = plan.strategies
    return {name: {**tables[block.kind], **tables.get(name, {})} for name, block in plan_blocks(plan).items()}


# -- what may be written instead of a line ---------------------------------------------------------


def other_chains(line: Strategy) -> Iterator[Strategy]:
    """Yield lines that lead to the same layouts by other collectives, or seem to."""
    for part in ("forward", "backward", "weights"):
        chains: tuple[Chain, ...] = getattr(line, part)
        for number, chain in enumerate(chains):
            for other in other_ways(chain, dims_of(line)):
                yield replace(line, **{part: (*chains[:number], other, *chains[number + 1 :])})


def other_cuts(line: Strategy, axis: tuple[str, ...]) -> Iterator[Strategy]:
    """Yield lines in which an axis cuts another dim, or none; nothing is said of sums and collectives."""
    for target in (*dims_of(line), None):
        yield replace(
            line,
            inputs=tuple(moved(layout, axis, target) for layout in line.inputs),
            outputs=tuple(moved(layout, axis, target) for layout in line.outputs),
        )


def dims_of(line: Strategy) -> tuple[str, ...]:
    return tuple(dict.fromkeys(dim for layout in (*line.inputs, *line.outputs) for dim, _ in layout.dims))


def other_ways(chain: Chain, dims: Sequence[str]) -> Iterator[Chain]:
    """Yield chains in which one collective is replaced by two that may do the same."""
    for number, one in enumerate(chain):
        for pair in pairs_for(one, dims):
            yield (*chain[:number], *pair, *chain[number + 1 :])


def pairs_for(one: Collective, dims: Sequence[str]) -> Iterator[tuple[Collective, Collective]]:
    plain = Collective(kind="slice", dim=None, atoms=one.atoms)
    for dim in dims:
        gather, cut = (replace(plain, kind=kind, dim=dim) for kind in ("all_gather", "slice"))
        match one.kind:
            case "reduce_scatter":
                yield replace(plain, kind="all_reduce"), replace(cut, dim=one.dim)
            case "all_reduce":
                yield replace(plain, kind="reduce_scatter", dim=dim), gather
            case "all_gather":
                yield replace(one, kind="all_to_all", to_dim=dim), gather
            case "all_to_all":
                yield replace(gather, dim=one.dim), replace(cut, dim=one.to_dim)
            case "slice":
                yield cut, replace(plain, kind="all_to_all", dim=dim, to_dim=one.dim)
            case _:
                return


def moved(layout: Layout, axis: tuple[str, ...], target: str | None) -> Layout:
    """Let an axis cut another dim, or none."""
    rest = [(dim, tuple(atom for atom in cut if atom not in axis)) for dim, cut in layout.dims]
    return replace(layout, dims=tuple((dim, (*cut, *axis) if dim == target else cut) for dim, cut in rest))


# -- what follows from an edit -----------------------------------------------------------------------


def pasted(plan: Plan, name: str, table: Table) -> Table | None:
    """Paste the lines that are asked for until a block's table can be executed; None if it never can."""
    block, setting, now = plan_blocks(plan)[name], table_setting(plan), dict(table)
    for _ in range(MOST_PASTES):
        try:
            program_of(block, now, setting)
        except InputError as error:
            for fault in error.faults:
                asked = re.search("(?:write|would be): (.*)", fault.message)
                if asked:
                    now[fault.where] = asked[1]
                elif now.pop(fault.where) == table.get(fault.where):
                    return None
        else:
            return now
    return None


def axis_of(plan: Plan) -> tuple[str, ...]:
    """Return the atoms of the one axis along which ranks differ."""
    return whole_axes([atom for atom, size in plan.mesh.axes if size > 1], dict(plan.mesh.axes))


def edited(plan: Plan, name: str, table: Table, entry: str) -> Table | None:
    """Return the table with one line written otherwise, so that other collectives run; None if no other is legal."""
    line, before = Strategy.parse(table[entry]), sent_by(table)
    cut = entry in {op.name for op in cut_operations(plan_blocks(plan)[name])}
    for other in (*other_chains(line), *(other_cuts(line, axis_of(plan)) if cut else ())):
        found = pasted(plan, name, {**table, entry: str(other)})
        if found and found[entry] != table[entry] and sent_by(found) != before:
            return found
    return None


def sent_by(table: Table) -> Counter[str]:
    """Count the collectives that stand in a table."""
    lines = [Strategy.parse(line) for line in table.values()]
    chains = [chain for line in lines for chain in (*line.forward, *line.backward, *line.weights)]
    return Counter(str(one) for chain in chains for one in chain if one.kind != "slice")


# -- the edits run -------------------------------------------------------------------------------------


def run_all(task: Task, plans: Sequence[Plan]) -> list[tuple[StepShare, Counter[str]]]:
    """What every rank runs: the same step as each of the plans says; and the calls that it makes."""
    found: list[tuple[StepShare, Counter[str]]] = []
    for plan in plans:
        engine = engine_of(replace(task, plan=plan))
        with Calls() as calls:
            found.append((share_of(engine, task), calls.counted))
    return found


@pytest.mark.parametrize("case", CASES)
def test_an_edited_line_changes_what_is_sent_and_no_result(case):
    plan = plan_of(*CASES[case])
    tables = whole_tables(plan)
    columns = [
        [found for entry in table if (found := edited(plan, name, table, entry))] for name, table in tables.items()
    ]
    assert [len(column) for column in columns] == NUM_EDITS[case]
    rows = [dict(zip(tables, row, strict=True)) for row in zip_longest(*columns)]
    plans = [plan, *(replace(plan, strategies={name: row[name] or tables[name] for name in tables}) for row in rows)]
    task = Task.of(plan)
    expected, answers = task.reference(), on_ranks(2, run_all, task, plans)
    for ran in zip(*answers, strict=True):
        compare(expected, [share for share, _ in ran])
    for (_, usual), *others in answers:
        assert all(calls != usual for _, calls in others)
