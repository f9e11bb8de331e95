"""Which rows of experts ranks send each other, read off tables, against whole tensors on virtual ranks."""

import numpy as np
import pytest

from autoshard.engine.programs import programs_of
from autoshard.engine.routing import Exchange, Routing, moves_rows, row_order
from autoshard.layout.program import Communicate
from autoshard.run.placement import MeshRank
from tests.ranks.cases import MIXTRAL, llama, plan_of
from tests.ranks.test_experts import LAYOUTS
from tests.slower import each_third_is_fast


def ordered(rows: list[tuple[int, int]], counts: np.ndarray, lying: np.ndarray, wanted: np.ndarray):
    moves = row_order(counts, lying, wanted)
    if moves is None:
        return rows
    return [rows[at] for at in np.repeat(*moves) + np.arange(moves[1].sum())]


def rows_of(cells: np.ndarray, counts: np.ndarray) -> list[tuple[int, int]]:
    """The rows of cells: each by its cell and its number there."""
    return [(int(cell), number) for cell in cells for number in range(counts[cell])]


@pytest.mark.parametrize("case", each_third_is_fast(LAYOUTS))
def test_what_a_rank_sends_another_receives_and_all_arrive_in_order(case):
    text, pins = LAYOUTS[case]
    plan = plan_of(text, llama(**MIXTRAL), pins)
    programs, generator = programs_of(plan, packs=True), np.random.default_rng(0)
    program = next(parts.program for name, parts in programs.stages[0].items() if name.startswith("layer"))
    places = [MeshRank(mesh=plan.mesh, rank=rank, sizes=programs.graph.sizes) for rank in range(plan.mesh.num_ranks)]
    routings = [routing for place in places if (routing := Routing.of(place, program))]
    sizes = routings[0].place.sizes
    counts = generator.integers(0, 3, sizes["experts"] * sizes["slots"])
    for entry in (one for one in program.collectives() if moves_rows(one) and one.collective.kind != "slice"):
        for group in plan.mesh.groups(entry.collective.atoms):
            held(entry, [routings[rank].exchange(entry, group) for rank in group], counts)


def held(entry: Communicate, exchanges: list[Exchange], counts: np.ndarray) -> None:
    """Send by what each says, and look at what arrives."""
    sent: list[list[list[tuple[int, int]]]] = []
    for one in exchanges:
        flat = ordered(rows_of(one.before, counts), counts, one.before, np.concatenate(one.sent))
        ends = np.cumsum([counts[cells].sum() for cells in one.sent])
        sent.append([flat[start:stop] for start, stop in zip((0, *ends), ends, strict=False)])
    for number, one in enumerate(exchanges):
        arrived = [parts[number] for parts in sent]
        assert arrived == [rows_of(cells, counts) for cells in one.received]
        if one.joined == "rows":
            flat = [row for part in arrived for row in part]
            flat = ordered(flat, counts, np.concatenate(one.received), one.after)
            assert flat == rows_of(one.after, counts)
        else:  # the same rows from each, to be summed, or with other parts of their numbers
            assert all(part == rows_of(one.after, counts) for part in arrived)
            assert (entry.collective.kind == "reduce_scatter") == (one.joined == "sum")
