"""Several machines in one table, and nodes for a deadline or a budget."""

import json

import pytest

from tests.cli.conftest import Typed

ASKED = "plan llama3-8b --tokens 1T"


def days_of(typed: Typed, nodes: int) -> tuple[float, float]:
    """Days and dollars of a trillion tokens on so many nodes, by the plan alone."""
    data = json.loads(typed(f"plan llama3-8b --nodes {nodes} --force --json")[1])
    usd = data["dollars"]["usd_per_billion_tokens"]
    return 1e12 / data["plan"]["prediction"]["tokens_per_s"] / 86_400, usd * 1000


def test_machines_stand_side_by_side_fastest_first(typed: Typed) -> None:
    code, text, _ = typed(f"{ASKED} --cluster trn1,h100 --nodes 2")
    assert code == 0
    rows = [line.split()[0] for line in text.splitlines() if line.startswith(("trn1.32xlarge", "h100-80"))]
    data = json.loads(typed(f"{ASKED} --cluster trn1,h100 --nodes 2 --json")[1])["machines"]
    assert [row["cluster"] for row in data] == rows and len(rows) == 2
    steps = [row["prediction"]["step_time_s"] for row in data]
    assert steps == sorted(steps)
    alone = json.loads(typed("plan llama3-8b --cluster h100 --nodes 2 --global-batch 1024 --json")[1])["plan"]
    assert alone["prediction"]["step_time_s"] == next(row for row in data if row["cluster"] == "h100-80")["prediction"]["step_time_s"]  # fmt: skip  # noqa: E501


def test_a_machine_on_which_nothing_fits_says_why(typed: Typed) -> None:
    code, text, _ = typed("plan llama3.1-405b --cluster trn1,h100 --nodes 16")
    assert code == 0 and "no plan" in text and "trn1.32xlarge: no plan: none of the" in " ".join(text.split())


def test_a_search_that_is_stopped_is_not_said_to_find_that_nothing_fits(typed: Typed) -> None:
    _, text, _ = typed("plan llama3.1-405b --cluster trn1,h100 --nodes 64 --time-limit 1")
    assert "the search was not finished" in " ".join(text.split()) and "none of the" not in text


def test_json_is_one_object_also_where_nodes_are_found(typed: Typed) -> None:
    data = json.loads(typed(f"{ASKED} --deadline 60d --json --force")[1])
    assert data["plan"]["cluster"]["num_nodes"] > 1


def test_a_deadline_is_met_by_the_fewest_nodes(typed: Typed) -> None:
    code, text, _ = typed(f"{ASKED} --deadline 60d --force")
    assert code == 0
    nodes = int(text.split()[1])
    assert text.startswith(f"on {nodes} nodes: the fewest")
    assert days_of(typed, nodes)[0] <= 60 < days_of(typed, nodes // 2)[0]


def test_a_budget_pays_for_the_most_nodes(typed: Typed) -> None:
    code, text, _ = typed(f"{ASKED} --budget 260k --force")
    assert code == 0
    nodes = int(text.split()[1])
    assert days_of(typed, nodes)[1] <= 260_000 < days_of(typed, 2 * nodes)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan llama3-8b --deadline 30d", "--tokens: missing; --deadline and --budget need it"),
        (f"{ASKED} --deadline 30", "--deadline: '30' is not a time. Write it like 30d, 6w or 48h"),
        (f"{ASKED} --budget lots", "--budget: 'lots' is not a sum of dollars"),
        (f"{ASKED} --deadline 3d --nodes 4", "--nodes: is what --deadline and --budget find; leave it out"),
        (f"{ASKED} --budget 1M --cluster trn1,h100", "--deadline and --budget: are for one --cluster"),
        (f"{ASKED} --budget 10", "no plan: on no number of nodes"),
        ("plan llama3-8b --cluster trn1,trn1", "--cluster: trn1,trn1: name each cluster once"),
        ("plan llama3-8b --cluster trn1,trn9", "'trn9' is not a cluster"),
        ("plan llama3-8b --cluster trn1,h100 --pareto", "--cluster: stands without"),
    ],
)
def test_what_does_not_go_together_is_said(typed: Typed, words: str, message: str) -> None:
    code, _, complaint = typed(words)
    assert code in (1, 2) and message in complaint and "Traceback" not in complaint
