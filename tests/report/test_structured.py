"""Plans and reasons for programs, and lists of names: what is encoded can be decoded, and lists are complete."""

import json
import re
from pathlib import Path

import pytest

from autoshard.blocks.explain import Explanation
from autoshard.cost.predict import predicted
from autoshard.plan.codec import load
from autoshard.plan.explanation import Alternatives, Answer, Certificate
from autoshard.plan.plan import Prediction
from autoshard.plan.rules.check import all_rules
from autoshard.plan.rules.rule import Rejection
from autoshard.report.listing import entries, listing_text
from autoshard.report.structured import answers_json, candidate_json, explanation_json, rejection_json
from autoshard.schedule.builders import builders
from autoshard.search.ask.answers import answers_of
from autoshard.search.ask.planner import search
from autoshard.spec.cluster_catalogue import cluster_names
from autoshard.spec.files import shipped
from autoshard.spec.kernels import kernels_names, library_names
from autoshard.spec.model_catalogue import model_names
from autoshard.spec.recipe import recipe_files
from autoshard.spec.record import decode, encode
from tests.plan.cases import ask as question, plan_of
from tests.search.brute_force import ask
from tests.tabled import tabled


def test_a_search_as_data_holds_the_plan_the_runners_up_and_what_was_looked_at():
    request = ask("tiny-llama")
    found = search(request, num_plans=3, simple_within=0.02)
    result = answers_of(request, found, "2")
    data = json.loads(json.dumps(answers_json(result.named("fastest"), result.answers, found.certificate, "none")))
    assert [row["name"] for row in data["answers"]] == ["fastest", "simple", "2", "3"]
    assert (data["written"], data["no_vendor"]) == ("fastest", "none")
    assert [row["slower"] for row in data["answers"]] == [answer.slower for answer in result.answers]
    best, *others = found.plans
    assert next(iter(data["plan"])) == "candidate" and data["plan"].pop("candidate") == str(best.candidate)
    assert load(json.dumps(data["plan"])) == result.named("fastest").plan
    assert [row["candidate"] for row in data["runners_up"]] == [str(other.candidate) for other in others]
    assert data["dollars"] is None and all(row["dollars"] is None for row in data["runners_up"])  # no price is known
    assert [decode(Prediction, row["prediction"]) for row in data["runners_up"]] == [one.prediction for one in others]
    assert data["certificate"]["num_legal"] == found.certificate.num_legal
    rejection = Rejection(rule_id="r", message="m", source="s")
    assert rejection_json(rejection) == {"rule": "r", "message": "m", "source": "s"}


def test_dollars_stand_beside_every_plan():
    plan = predicted(tabled(plan_of(question(), "tp=32,pp=8")))
    dollars = encode(plan.dollars)
    assert dollars["price_date"] == "2026-06-25"
    answers = [Answer(name=name, plan=plan, why="", slower=0.0) for name in ("fastest", "2")]
    best = answers_json(answers[0], answers, Certificate())
    assert best["dollars"] == best["runners_up"][0]["dollars"] == candidate_json(plan, ())["dollars"] == dollars
    assert candidate_json(None, ()) == {"rejections": [], "plan": None, "dollars": None, "total": None}
    nothing = Explanation(candidate=str(plan.candidate), blocks=(), rules={}, basis="none")
    data = explanation_json(plan, nothing, Alternatives(rivals={"2": plan}, unlimited_s=1.0))
    assert data.items() >= {**encode(nothing), "dollars": dollars, "unlimited_s": 1.0}.items()
    assert [(row["name"], row["candidate"]) for row in data["runners_up"]] == [("2", str(plan.candidate))]


NAMES = {
    "models": model_names(),
    "recipes": tuple(path.stem for path in recipe_files()),
    "sweeps": tuple(path.stem for path in sorted(shipped("recipes").glob("sweeps/*.yaml"))),
    "clusters": cluster_names(),
    "engines": ("nxd", "torch"),
    "schedules": tuple(builders()),
    "kernels": (*kernels_names(), *(f"te+{library}" for library in library_names())),
    "rules": tuple(rule.id for rule in all_rules()),
}


@pytest.mark.parametrize("what", NAMES)
def test_a_list_is_complete_and_a_rectangle(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    rows = entries(what)
    assert [row["name"] for row in rows] == list(NAMES[what])
    assert len({tuple(row) for row in rows}) == 1 and all(value != "" for row in rows for value in row.values())
    lines = listing_text(rows).splitlines()
    for heading in re.split(" {2,}", lines[0])[1:]:
        column = lines[0].index(f"  {heading}") + 2
        assert len(lines) == len(rows) + 1 and all(line[column - 2 : column] == "  " for line in lines)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("what", ["models", "clusters"])
def test_a_list_of_numbers_fits_a_narrow_terminal(what: str, width: int):
    lines = listing_text(entries(what), width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("name")


def test_lists_show_numbers_prices_with_their_date_and_recipes_as_one_types_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(recipe_files()[0].parents[1])
    models, clusters, recipes = (
        {row["name"]: row for row in entries(one)} for one in ("models", "clusters", "recipes")
    )
    mixtral = models["mixtral-8x7b"]
    assert (mixtral["heads"], mixtral["kv_heads"], mixtral["experts"]) == (32, 8, 8)
    assert "  46.70 G  " in listing_text([mixtral]) and models["gpt2-xl"]["experts"] is None
    assert (clusters["trn2.48xlarge"]["ranks_per_node"], clusters["trn2.48xlarge"]["lnc"]) == (64, 2)
    assert list(clusters["trn1.32xlarge"].values())[-2:] == [21.5, "2026-06-25"]
    assert listing_text([clusters["trn1.32xlarge"]]).rstrip().endswith("  2026-06-25")
    recipe = recipes["llama3-70b-trn1-16"]
    assert (recipe["model"], recipe["cluster"], recipe["nodes"]) == ("llama3-70b", "trn1.32xlarge", 16)
    assert recipe["file"] == "recipes/llama3-70b-trn1-16.yaml"
