"""Several machines in one table, and nodes for a deadline or a budget."""

import json
from pathlib import Path

import pytest

from autoshard.plan.codec import load
from tests.conftest import Typed
from tests.slower import rest_is_slow

ASKED = "plan llama3-8b --tokens 1T"
FEW = "--fix pp=1,cp=1,mbs=1"  # layouts, so that a search takes no time; what is held here does not depend on them


def days_of(typed: Typed, nodes: int) -> tuple[float, float]:
    """Days and dollars of a trillion tokens on so many nodes, by the plan alone."""
    data = json.loads(typed(f"plan llama3-8b --nodes {nodes} {FEW} --force --json")[1])
    usd = data["dollars"]["usd_per_billion_tokens"]
    return 1e12 / data["plan"]["prediction"]["tokens_per_s"] / 86_400, usd * 1000


@pytest.mark.slow
def test_machines_stand_side_by_side_fastest_first(typed: Typed) -> None:
    text = typed.answer(f"{ASKED} --cluster trn1,h100 --nodes 2 {FEW}")
    rows = [line.split()[0] for line in text.splitlines() if line.startswith(("trn1.32xlarge", "h100-80"))]
    data = json.loads(typed(f"{ASKED} --cluster trn1,h100 --nodes 2 {FEW} --json")[1])["machines"]
    assert [row["cluster"] for row in data] == rows and len(rows) == 2
    steps = [row["prediction"]["step_time_s"] for row in data]
    assert steps == sorted(steps)
    alone = json.loads(typed(f"plan llama3-8b --cluster h100 --nodes 2 --global-batch 1024 {FEW} --json")[1])["plan"]
    assert alone["prediction"]["step_time_s"] == next(row for row in data if row["cluster"] == "h100-80")["prediction"]["step_time_s"]  # fmt: skip  # noqa: E501


@pytest.mark.slow
def test_a_machine_on_which_nothing_fits_says_why(typed: Typed) -> None:
    code, text, _ = typed(f"plan llama3.2-3b --cluster local,trn1 {FEW}")
    words = " ".join(text.split())
    assert code == 0 and "no plan" in text and "local: no plan: none of the" in words
    assert "that a headroom of 0.1 leaves of 4.00 GiB" in words
    miss = typed(f"plan llama3-70b --cluster b200 {FEW}")[2]  # whose allocator may fill the headroom
    assert "178.35 GiB that there are" in " ".join(miss.split())


def test_a_search_that_is_stopped_is_not_said_to_find_that_nothing_fits(typed: Typed) -> None:
    _, text, _ = typed("plan llama3.1-405b --cluster trn1,h100 --nodes 64 --time-limit 1")
    assert "the search was not finished" in " ".join(text.split()) and "none of the" not in text


def test_nodes_for_a_deadline_on_which_a_search_is_stopped_are_not_said_to_be_too_few(typed: Typed) -> None:
    code, _, complaint = typed("plan llama3.1-405b --cluster h100 --tokens 1T --deadline 30d --time-limit 1")
    assert code == 1 and "the search on " in complaint and "was not finished" in complaint
    assert "on no number of nodes" not in complaint


@pytest.mark.slow
def test_the_plan_of_the_fastest_machine_is_written_where_it_is_asked_for(typed: Typed) -> None:
    code, text, _ = typed(f"plan llama3-8b --cluster trn1,h100 --nodes 2 {FEW} --out both.json")
    assert code == 0 and text.endswith("wrote the fastest, both.json\n")
    rows = [line.split()[0] for line in text.splitlines() if line.startswith(("trn1.32xlarge", "h100-80"))]
    assert load(Path("both.json")).cluster.name == rows[0]
    code, _, complaint = typed(f"plan llama3-8b --cluster trn1,h100 --nodes 2 {FEW} --out nothere/both.json")
    assert code == 2 and "there is no folder nothere" in complaint


@pytest.mark.parametrize(("price", "node_usd"), rest_is_slow([("'$2.5/GPU'", 20.0), ("2.5/chip", 20.0), ("20", 20.0)]))
def test_dollars_are_at_the_price_of_the_user(price: str, node_usd: float, typed: Typed) -> None:
    code, text, _ = typed(f"plan llama3-8b --cluster h100 {FEW} --price {price}")
    assert code == 0 and f"your price, ${node_usd:.2f} a node hour" in " ".join(text.split())
    dollars = load(Path("plan.json")).dollars
    assert dollars and dollars.price_usd_per_node_hour == node_usd and dollars.price_date is None


@pytest.mark.slow
def test_each_machine_has_its_own_price(typed: Typed) -> None:
    data = json.loads(typed(f"plan llama3-8b --cluster trn1,h100 --nodes 2 {FEW} --price 10,20 --json")[1])["machines"]
    assert {row["cluster"]: row["dollars"]["price_usd_per_node_hour"] for row in data} == {
        "trn1.32xlarge": 10.0,
        "h100-80": 20.0,
    }


@pytest.mark.slow
def test_a_comparison_and_a_sweep_take_the_price_of_the_user(typed: Typed) -> None:
    typed("plan tiny-llama --cluster local --out a.json")
    typed("plan tiny-llama --cluster local --fix tp=2 --out b.json")
    assert "dollars per step" not in typed("compare a.json b.json")[1]
    assert "dollars per step" in typed("compare a.json b.json --price 3")[1]
    Path("one.yaml").write_text("base: {model: tiny-llama, cluster: local}\ngrid: {fix.tp: [1, 2]}\n")
    assert "$ / 1e9 tokens" in typed("sweep one.yaml --price 3 --jobs 1")[1]
    assert "--price: is for points that start here" in typed("sweep one.yaml --price 3 --scheduler slurm")[2]


@pytest.mark.slow
def test_json_is_one_object_also_where_nodes_are_found(typed: Typed) -> None:
    data = json.loads(typed(f"{ASKED} --deadline 60d {FEW} --json --force")[1])
    assert data["plan"]["cluster"]["num_nodes"] > 1


@pytest.mark.slow
def test_a_deadline_is_met_by_the_fewest_nodes(typed: Typed) -> None:
    text = typed.answer(f"{ASKED} --deadline 60d {FEW} --force")
    nodes = int(text.split()[1])
    assert text.startswith(f"on {nodes} nodes: the fewest")
    assert days_of(typed, nodes)[0] <= 60 < days_of(typed, nodes // 2)[0]


@pytest.mark.slow
def test_sizes_that_the_question_leaves_open_are_said_where_nodes_or_machines_are_found(typed: Typed) -> None:
    for asked in ("--cluster h100 --tokens 1B --deadline 300d", "--cluster trn1,h100"):
        code, text, _ = typed(f"plan llama3.2-1b --fix pp=1,cp=1,zero=1 {asked} --force")
        assert code == 0 and "assumed length" in " ".join(text.split()), asked


@pytest.mark.thorough
def test_a_budget_pays_for_the_most_nodes(typed: Typed) -> None:
    budget = int(days_of(typed, 8)[1]) + 1
    text = typed.answer(f"{ASKED} --budget {budget} {FEW} --force")
    nodes = int(text.split()[1])
    assert nodes >= 8 and days_of(typed, nodes)[1] <= budget < days_of(typed, 2 * nodes)[1]


TINY = "plan tiny-llama --cluster h100 --global-batch 64 --tokens 100B --price 20 --fix pp=1,cp=1,mbs=1 --force"


@pytest.mark.slow
def test_a_budget_takes_no_nodes_on_which_a_step_takes_longer(typed: Typed) -> None:
    data = json.loads(typed(f"{TINY} --budget 20k --json")[1])
    nodes, why, usd = data["size"]["nodes"], data["size"]["why"], data["total"]["usd"]
    assert nodes == 8 and why.startswith("the fastest that the budget pays") and "more nodes take longer" in why
    plain = TINY.replace("--tokens 100B", "")
    other = json.loads(typed(f"{plain} --nodes {2 * nodes} --json")[1])["plan"]["prediction"]["step_time_s"]
    assert data["plan"]["prediction"]["step_time_s"] <= other
    tight = json.loads(typed(f"{TINY} --budget {int(usd) + 1} --json")[1])
    assert "at the slow end of the interval, above the budget" in tight["size"]["why"]


@pytest.mark.slow
def test_nodes_are_counted_for_the_answer_that_is_written(typed: Typed) -> None:
    question = f"{TINY.replace('--fix pp=1,cp=1,mbs=1', '')} --choose fsdp"
    cost = json.loads(typed(f"{question} --nodes 1 --json")[1])["total"]["usd"]
    assert "the cheapest number that was tried" in typed(f"{question} --budget {int(cost)}")[2]
    code, _, complaint = typed(f"{TINY} --deadline 90d --choose vendor")
    assert code == 2 and "--choose vendor: there is no such answer" in complaint


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan llama3-8b --deadline 30d", "--tokens: missing; --deadline and --budget need it"),
        (f"{ASKED} --deadline 30", "--deadline: '30' is not a time. Write it like 30d, 6w or 48h"),
        (f"{ASKED} --deadline 0d", "--deadline: '0d' is not a time. Write it like 30d, 6w or 48h"),
        (f"{ASKED} --budget lots", "--budget: 'lots' is not a sum of dollars"),
        (f"{ASKED} --budget 0k", "--budget: '0k' is not a sum of dollars"),
        (
            f"{ASKED} --deadline 3d --nodes 4",
            "--nodes: has no effect beside --deadline, which finds the number of nodes",
        ),
        (f"{ASKED} --budget 1M --cluster trn1,h100", "--budget: has no effect beside --cluster of several"),
        pytest.param(
            f"{ASKED} --budget 10 {FEW}",
            "on 8 nodes, the cheapest number that was tried. Type a larger --budget",
            marks=pytest.mark.slow,
        ),
        ("plan llama3-8b --cluster trn1,trn1", "--cluster: trn1,trn1: name each cluster once"),
        ("plan llama3-8b --cluster trn1,trn9", "'trn9' is not a cluster"),
        ("plan llama3-8b --cluster trn1,h100 --pareto", "--pareto: has no effect beside --cluster of several"),
        ("plan llama3-8b --cluster trn1,h100 --top 5", "--top: has no effect beside --cluster of several"),
        ("plan llama3-8b --cluster trn1,h100 --choose simple", "--choose: has no effect beside --cluster of several"),
        ("plan llama3-8b --cluster trn1,h100 -v", "--verbose: has no effect beside --cluster of several"),
        ("plan llama3-8b --pareto --tokens 1T", "--tokens: has no effect beside --pareto"),
        ("plan llama3-8b --at tp=8 --prove", "--prove: has no effect beside --at"),
        ("plan llama3-8b --price much", "--price: 'much' is not a price. Write the dollars of a node hour, like 21.5"),
        ("plan llama3-8b --cluster trn1,h100 --price 9", "--price: type one price for each cluster"),
        ("plan llama3-8b --price 9,10", "--price: one cluster has one price"),
    ],
)
def test_what_does_not_go_together_is_said(typed: Typed, words: str, message: str) -> None:
    code, _, complaint = typed(words)
    assert code in (1, 2) and message in complaint and "Traceback" not in complaint


def test_json_says_what_all_tokens_take_and_why_so_many_nodes(typed: Typed) -> None:
    layout = "--at tp=8,dp=4,recompute=full"
    told = json.loads(typed(f"{ASKED} {layout} --json")[1])
    total = told["total"]
    assert total["tokens"] == 1e12 and total["usd"] == 1000 * told["dollars"]["usd_per_billion_tokens"]
    assert total["time_s"] * told["plan"]["prediction"]["tokens_per_s"] == pytest.approx(1e12)
    text = typed(f"{ASKED} {layout} --force")[1]
    times = told["plan"]["prediction"]["high_s"] / told["plan"]["prediction"]["step_time_s"]
    likely, slow = (f"{by * total['time_s'] / 86_400:,.1f} days and ${by * total['usd']:,.0f}" for by in (1, times))
    assert times > 1 and f"1 trillion tokens take {likely}; up to {slow}" in text
    assert json.loads(typed(f"plan llama3-8b {layout} --json --force")[1])["total"] is None
    sized = json.loads(typed(f"{ASKED} --fix tp=8,pp=1,cp=1,mbs=1,recompute=full --deadline 90d --force --json")[1])
    assert sized["size"]["nodes"] == 8 and "the fewest nodes" in sized["size"]["why"]
    assert sized["total"]["time_s"] < 90 * 86_400


def test_nodes_for_a_deadline_say_whether_the_slow_end_of_the_prediction_meets_it(typed: Typed) -> None:
    layout = "--fix tp=8,pp=1,cp=1,mbs=1,recompute=full"
    predicted = json.loads(typed(f"{ASKED} {layout} --nodes 8 --json --force")[1])["plan"]["prediction"]
    likely, slow = (1e12 * predicted[key] / 1024 / 8192 / 86_400 for key in ("step_time_s", "high_s"))
    why = {}
    for days in (int((likely + slow) / 2), int(slow) + 1):
        size = json.loads(typed(f"{ASKED} {layout} --deadline {days}d --json --force")[1])["size"]
        assert size["nodes"] == 8 and f"that meet {days}d: {likely:.1f} days; {slow:.1f} days at the" in size["why"]
        why[days] = size["why"]
    assert [words.endswith("interval, too late") for words in why.values()] == [True, False]
