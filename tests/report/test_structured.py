"""Plans and reasons for programs: what is encoded can be decoded again."""

import json

from autoshard.cost.predict import predicted
from autoshard.plan.codec import load
from autoshard.plan.explanation import Alternatives, Certificate, Explanation
from autoshard.plan.plan import Prediction
from autoshard.plan.rules.rule import Rejection
from autoshard.report.structured import explanation_json, found_json, made_json, rejection_json
from autoshard.search.planner import search
from autoshard.spec.record import decode, encode
from tests.plan.cases import ask as question, plan_of
from tests.search.brute_force import ask
from tests.tabled import tabled


def test_a_search_as_data_holds_the_plan_the_runners_up_and_what_was_looked_at():
    found = search(ask("tiny-llama"), num_plans=3)
    data = json.loads(json.dumps(found_json(found.plans, found.certificate)))
    best, *others = found.plans
    assert next(iter(data["plan"])) == "candidate" and data["plan"].pop("candidate") == str(best.candidate)
    assert load(json.dumps(data["plan"])) == best
    assert [row["candidate"] for row in data["runners_up"]] == [str(other.candidate) for other in others]
    assert data["dollars"] is None and all(row["dollars"] is None for row in data["runners_up"])  # no price is known
    assert [decode(Prediction, row["prediction"]) for row in data["runners_up"]] == [one.prediction for one in others]
    assert data["certificate"]["num_legal"] == found.certificate.num_legal


def test_a_rejection_keeps_its_rule_and_source():
    rejection = Rejection(rule_id="r", message="m", source="s")
    assert rejection_json(rejection) == {"rule": "r", "message": "m", "source": "s"}


def test_dollars_stand_beside_every_plan():
    plan = predicted(tabled(plan_of(question(), "tp=32,pp=8")))
    dollars = encode(plan.dollars)
    assert dollars["price_date"] == "2026-06-25"
    best = found_json([plan, plan], Certificate())
    assert best["dollars"] == best["runners_up"][0]["dollars"] == made_json(plan, ())["dollars"] == dollars
    assert made_json(None, ()) == {"rejections": [], "plan": None, "dollars": None}
    nothing = Explanation(candidate=str(plan.candidate), blocks=(), rules={}, basis="none")
    beside = Alternatives(others=(plan,), unlimited_s=1.0)
    data = explanation_json(plan, nothing, beside)
    assert data.items() >= {**encode(nothing), "dollars": dollars, "unlimited_s": 1.0}.items()
    assert [row["candidate"] for row in data["runners_up"]] == [str(plan.candidate)]
