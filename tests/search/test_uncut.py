"""Bounds of layouts whose blocks are not cut stay below the prices of their cut blocks, in time and in memory."""

import numpy as np
import pytest

from autoshard.blocks.cutting import Terms
from autoshard.plan.candidate import Candidate, even_stages
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Ints
from autoshard.search.ask.planner import search
from autoshard.search.bound.bounds import least_of_any
from autoshard.search.bound.mesh_kinds import MeshKinds
from autoshard.search.bound.uncut import uncut_seconds
from autoshard.search.fill.stage_filling import Goal, fill_stages
from autoshard.search.fill.stage_options import StageChoices
from tests.search.brute_force import ask, time_s
from tests.search.test_least_recompute import CASES, lowerings
from tests.slower import rest_is_slow

SURE = 1 + 1e-9


@pytest.mark.parametrize("case", rest_is_slow(CASES, 0, 2))
def test_no_cut_block_takes_or_holds_less_than_its_bound(case):
    pricer, parts = lowerings(case)
    for part in parts:
        space, atoms = part.space, {atom: column[part.numbers] for atom, column in pricer.meshes.atoms.items()}
        sp = bool((space.rows["tp"] > 1).any())
        terms = Terms(engine=space.engine, sequence_parallel=sp, cp_kind=space.base.cp_kind)

        meshes = atoms, lambda over, numbers=part.numbers: pricer.meshes.ring(over, numbers)

        def uncut(capacity, num_ranks=space.rows["pp"], terms=terms, space=space, meshes=meshes):
            rows = {**space.rows, "pp": np.broadcast_to(num_ranks, len(space.rows["pp"]))}
            return uncut_seconds(pricer.question, terms, rows, meshes, capacity)

        bound, least_s = uncut(np.inf), least_of_any(part.at_least, [Candidate()], np.inf)
        assert (bound <= np.maximum(least_s, fullest_s(pricer.question, part)) * SURE).all() and (bound > 0).all()
        for num_ranks in (1, pricer.question.model.num_layers):
            held = least_peak(pricer.with_recompute([part])[0], num_ranks)
            for number, size in enumerate(held.tolist()):
                assert np.isfinite(uncut(size, num_ranks)[number]), "what fits is not left out"
        assert np.isinf(uncut(1e6)).all(), "and what cannot fit is"


def fullest_s(question, part):
    """The seconds of the rank with most layers in all micro-batches, if all are as fast as the fastest."""
    rows = part.space.rows
    layers = -(-question.model.num_layers // rows["pp"])
    layer_s = np.min([layer.pass_s.min(axis=0) for layer in part.layers], axis=0)
    return question.workload.global_batch // (rows["mbs"] * rows["dp"]) * layers * layer_s


def least_peak(priced, num_ranks):
    """The bytes of the fullest rank of layouts with even stages, under the recompute that holds least."""
    schedule = Schedule(builder="1f1b", num_ranks=num_ranks, num_micro_batches=1)
    blocks = priced.pipeline_blocks(slice(None), schedule, Candidate(zero=3))
    choices = StageChoices(
        kinds=priced.kinds,
        allowed=np.ones((len(priced.kinds), len(priced.numbers)), dtype=bool),
        num_layers=(num_layers := priced.question.model.num_layers),
        stages=even_stages(num_layers, num_ranks),
        recompute=None,
    )
    goal = Goal(objective="memory", capacity=np.inf)
    return fill_stages(blocks, choices, goal, (0.0, np.inf), np.zeros(len(priced.numbers))).bound


@pytest.mark.slow
def test_a_search_that_leaves_layouts_uncut_has_the_plan_and_the_points_of_one_that_cuts_all(
    monkeypatch: pytest.MonkeyPatch,
):
    request = ask("mixtral-8x7b", "h100-80", 4, global_batch=64, pins="mbs=1")
    num_uncut = list[int]()
    near = MeshKinds._near

    def noted(self: MeshKinds, terms: Terms, layouts: Ints, *rest: object) -> Ints:
        chosen = near(self, terms, layouts, *rest)  # pyright: ignore[reportArgumentType]
        num_uncut.append(len(layouts) - len(chosen))
        return chosen

    monkeypatch.setattr(MeshKinds, "_near", noted)
    answer = search(request)
    monkeypatch.setattr(MeshKinds, "_near", lambda self, terms, layouts, *rest: layouts)
    whole = search(request)
    assert sum(num_uncut) > 0, "some are not cut"
    assert time_s(answer.plans[0]) == pytest.approx(time_s(whole.plans[0]), rel=1e-3)
    counts = answer.certificate
    parts = (counts.num_too_large, counts.num_bounded, counts.num_solved, counts.num_open, counts.num_left)
    assert sum(parts) == counts.num_legal == whole.certificate.num_legal
    assert counts.gap <= whole.certificate.gap + 5e-3 and counts.num_tables < whole.certificate.num_tables
