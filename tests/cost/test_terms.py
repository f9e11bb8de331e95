"""Terms of a user's own: the same on one candidate and on columns; a plan carries a number and its source."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost.predict import predict, predicted
from autoshard.cost.terms import CostTerm, term_entries, term_seconds
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


def plan_with(**terms):
    plan = plan_of(ask(), TEXT)
    return replace(plan, provenance={**plan.provenance, **{f"cost.{name}": text for name, text in terms.items()}})


def test_columns_give_what_single_candidates_give_and_a_plan_states_it():
    rows = [columns("tp=8,pp=4,dp=4"), columns("tp=32,pp=2,dp=2"), columns("tp=8,pp=1,dp=16")]
    assert PER_RANK.of(Columns.stack(rows)).tolist() == [float(PER_RANK.of(row)) for row in rows]
    stall = CostTerm(name="stall", seconds=lambda c: 0.1 + 0.2, source="1 s, then less")
    entries = term_entries((PER_RANK, stall), columns(TEXT))
    assert entries["cost.stall"] == f"{0.1 + 0.2!r} s, 1 s, then less"
    assert term_seconds({"model": "x", **entries}) == {"cost.per_rank": 0.32, "cost.stall": 0.1 + 0.2}


def test_a_term_that_is_no_addition_or_has_no_name_or_source_is_refused():
    for seconds in (-1e-9, float("nan"), float("inf"), np.array([1.0, -2.0])):
        with pytest.raises(InputError, match=r"cost.per_rank: gives .* s; a term gives finite seconds of at least 0"):
            replace(PER_RANK, seconds=lambda c, seconds=seconds: seconds).of(columns(TEXT))
    for name, source, where in (("Per rank", "x", "name"), ("", "x", "name"), ("a", " ", "source")):
        with pytest.raises(InputError, match=f"^{where}: "):
            CostTerm(name=name, source=source, seconds=lambda c: 0.0)


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
