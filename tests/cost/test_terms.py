"""Terms of a user's own: the same on one candidate and on columns; a plan carries a number and its source."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost.predict import predict, predicted
from autoshard.cost.terms import CostTerm, outer_point, term_entries, term_seconds
from autoshard.cost.trace import trace
from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.plan.codec import dump, load
from autoshard.plan.rules.columns import Columns
from tests.cost.cases import ask, plan_of

PER_RANK = CostTerm(name="per_rank", seconds=lambda c: 0.01 * c.dp * c.tp, source="this test")
TEXT = "tp=8,pp=4,dp=4"


def columns(text):
    question = ask()
    return Columns.of(Candidate.parse(text), question.model, question.cluster, question.workload, "nxd")


def plan_with(**said):
    plan = plan_of(ask(), TEXT)
    return replace(plan, provenance={**plan.provenance, **{f"cost.{name}": text for name, text in said.items()}})


def test_columns_give_what_single_candidates_give():
    rows = [columns("tp=8,pp=4,dp=4"), columns("tp=32,pp=2,dp=2"), columns("tp=8,pp=1,dp=16")]
    assert PER_RANK.of(Columns.stack(rows)).tolist() == [float(PER_RANK.of(row)) for row in rows]


def test_a_term_that_is_no_addition_or_has_no_name_or_source_is_refused():
    for seconds in (-1e-9, float("nan"), float("inf"), np.array([1.0, -2.0])):
        with pytest.raises(InputError, match=r"cost.per_rank: gives .* s; a term gives finite seconds of at least 0"):
            replace(PER_RANK, seconds=lambda c, seconds=seconds: seconds).of(columns(TEXT))
    for name, source, where in (("Per rank", "x", "name"), ("", "x", "name"), ("a", " ", "source")):
        with pytest.raises(InputError, match=f"^{where}: "):
            CostTerm(name=name, source=source, seconds=lambda c: 0.0)


def test_a_term_does_not_see_what_is_chosen_after_its_point():
    point = Candidate.parse("tp=8,pp=2,dp=8,zero=0,mbs=2,stages=20/12,recompute=full:3")
    assert str(outer_point(point)) == "tp=8,pp=2,dp=8,mbs=2,zero=0"


def test_what_a_plan_states_is_read_again():
    terms = (PER_RANK, CostTerm(name="stall", seconds=lambda c: 0.1 + 0.2, source="1 s, then less"))
    said = term_entries(terms, columns(TEXT))
    assert said["cost.stall"] == f"{0.1 + 0.2!r} s, 1 s, then less"
    assert term_seconds({"model": "x", **said}) == {"cost.per_rank": 0.32, "cost.stall": 0.1 + 0.2}


@pytest.mark.parametrize("text", ["", "fast", "1", "1 s", "-1 s, x", "nan s, x", "inf s, x", "x s, 1 s, y"])
def test_a_statement_that_is_none_is_refused_with_its_place(text):
    with pytest.raises(InputError, match=r"provenance.cost.mine: must be SECONDS s, SOURCE"):
        predict(plan_with(mine=text))


def test_stated_terms_are_parts_of_the_prediction_survive_the_file_and_end_the_traced_step():
    bare, plan = predicted(plan_with()), predicted(plan_with(stall="0.25 s, x", nothing="0 s, y"))
    assert bare.prediction and plan.prediction
    assert plan.prediction.time_parts == {**bare.prediction.time_parts, "cost.stall": 0.25}
    assert plan.prediction.step_time_s == pytest.approx(bare.prediction.step_time_s + 0.25, rel=1e-8)
    assert load(dump(plan)) == plan and predict(load(dump(plan))) == plan.prediction
    found = trace(plan)
    assert (found.phases[-1].part, set(found.phases[-1].seconds)) == ("cost.stall", {0.25})
    assert found.end_s - trace(plan_with()).end_s == pytest.approx(0.25)
