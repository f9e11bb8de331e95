"""What explain --why-not and plan --pareto print."""

import io
import json

import pytest
from rich.console import RenderableType

from autoshard.plan.candidate import Candidate
from autoshard.plan.explanation import Flip, WhyNot
from autoshard.plan.plan import Plan
from autoshard.report.frontier import frontier_report
from autoshard.report.structured import frontier_json, why_not_json
from autoshard.report.terminal import make_console
from autoshard.report.why_not import why_not_report
from autoshard.search.planner import plan_at
from tests.search.brute_force import ask


def printed(what: RenderableType) -> str:
    console = make_console()
    console.file = io.StringIO()
    console.print(what)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines()), default=0) <= 120
    return text


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    request = ask("llama3-8b", "trn1.32xlarge", 4)
    one, other = (plan_at(request, Candidate.parse(text)) for text in ("tp=8,dp=16", "tp=32,dp=4"))
    return one, other


FLIPS = (
    Flip(name="global batch", now=1024, then=128),
    Flip(name="memory of a rank", now=16 * 2**30, then=8 * 2**30),
    Flip(name="bandwidth of all links", now=1.0, then=2.5),
)


def found(other: Plan | None, **changes: object) -> WhyNot:
    values = {"asked": "tp=32", "other": other, "fits": True, "against": (), "flips": (), "unmoved": (), **changes}
    return WhyNot(**values)  # type: ignore[arg-type]


def test_another_layout_is_compared_and_what_would_turn_the_order_follows(plans: tuple[Plan, Plan]):
    text = printed(why_not_report(plans[0], found(plans[1], flips=FLIPS, unmoved=("sequence length",))))
    assert "the best with tp=32" in text and "b is" in text and "slower" in text
    for words in (" 0.125", "8.00 GiB", "250%", "no change up to 16 times turns the order: sequence length"):
        assert words in text
    data = json.loads(json.dumps(why_not_json(plans[0], found(plans[1], flips=FLIPS))))
    assert data["other"]["candidate"] == "tp=32,pp=1,dp=4"
    assert [flip["factor"] for flip in data["flips"]] == [0.125, 0.5, 2.5]


def test_what_is_refused_says_why(plans: tuple[Plan, Plan]):
    text = printed(why_not_report(plans[0], found(None, fits=False, against=("--fix tp=3: no",))))
    assert text.strip() == "refused --fix tp=3: no"
    assert why_not_json(plans[0], found(None, fits=False))["other"] is None
    text = printed(why_not_report(plans[0], found(plans[1], fits=False, against=("too large",))))
    assert "refused too large" in text and "the smallest with tp=32" in text


def test_the_plan_itself_is_recognised(plans: tuple[Plan, Plan]):
    assert "this is the plan" in printed(why_not_report(plans[0], found(plans[0])))


def test_a_frontier_has_a_line_per_plan(plans: tuple[Plan, Plan]):
    text = printed(frontier_report(plans, 0.0005, "complete"))
    assert text.count("tp=") == 2 and "cost a step" in text and "within 0.05%" in text
    assert "there may be more" not in " ".join(text.split())
    stopped = printed(frontier_report(plans, 0.0, "stopped after 3 s"))
    assert "stopped after 3 s: there may be more" in " ".join(stopped.split())
    local = plan_at(ask("tiny-llama"), Candidate.parse("tp=2,dp=2"))
    assert "node seconds" in printed(frontier_report([local], 0.0, "complete"))
    data = json.loads(json.dumps(frontier_json(plans, 0.1, "complete")))
    assert [row["nodes"] for row in data["plans"]] == [4, 4] and data["gap"] == 0.1
