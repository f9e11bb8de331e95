"""A term of the user's own is part of what the search minimises, of its bounds and of its certificate."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from autoshard.cost.terms import CostTerm
from autoshard.errors import InputError
from autoshard.search.planner import search
from autoshard.search.request import Request, plan_at
from autoshard.search.stage_filling import Effort
from tests.search.brute_force import ask
from tests.slower import rest_is_slow

TERMS = {
    "the same everywhere": lambda c: 100.0,
    "sizes": lambda c: 0.2 * np.log2(c.dp * c.cp),
    "schedule and ZeRO": lambda c: 0.3 * (c.schedule != "gpipe") + 0.1 * (c.zero != 0) + 0.05 * (c.pp < 2),
    "chunks and counts": lambda c: 1.0 / c.vp + 0.01 * c.num_micro_batches + 0.2 * (c.pp == 1),
    "order and sequence": lambda c: 0.5 * (c.cp_order != "zigzag") + 0.2 * c.sp + 0.2 * (c.tp < 2),
}


def with_terms(request: Request, *terms: CostTerm) -> Request:
    return replace(request, terms=terms)


def term(name: str, seconds: object) -> CostTerm:
    return CostTerm(name=name, seconds=seconds, source="this test")  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "pins"), rest_is_slow(product(reversed(TERMS), ("pp=2,mbs=1", ""))))
def test_pruning_loses_nothing_and_plans_predict_what_the_search_found(kind: str, pins: str):
    asked = with_terms(ask("tiny-llama", global_batch=8, pins=pins), term("mine", TERMS[kind]))
    found = search(asked, num_plans=3)
    every = search(replace(asked, effort=Effort(exhaustive=True)), num_plans=3)
    times = [plan.prediction.step_time_s for plan in found.plans if plan.prediction]
    assert times == pytest.approx([plan.prediction.step_time_s for plan in every.plans if plan.prediction], rel=1e-8)
    assert found.certificate.value == pytest.approx(times[0], rel=1e-8)
    assert found.certificate.gap < 1e-8
    assert plan_at(asked, found.plans[0].candidate).prediction == found.plans[0].prediction


def test_a_term_that_is_the_same_everywhere_changes_no_choice_and_no_effort():
    usual = ask("llama3-8b", "trn1.32xlarge", pins="tp=8,mbs=1")
    one, other = search(usual), search(with_terms(usual, term("stall", lambda c: 1000.0)))
    assert one.plans[0].candidate == other.plans[0].candidate
    assert one.certificate.num_bounded == other.certificate.num_bounded


def test_two_terms_of_one_name_are_refused():
    stall = term("stall", lambda c: 1.0)
    with pytest.raises(InputError, match="terms: two of the name stall; each needs its own"):
        with_terms(ask("tiny-llama"), stall, term("other", lambda c: 0.0), stall)
