"""``autoshard advise``: from rows to runs, from their rows to less regret, and what is said of wrong input."""

import json
import re
from pathlib import Path

import pytest

from autoshard.calibration.rows import Occasion, row_of
from autoshard.plan.codec import load
from autoshard.spec.record import encode
from autoshard.units import format_seconds
from tests.conftest import Typed

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
TINY = "--model tiny-llama --cluster local --fix mbs=8"
TRN1 = f"advise {DATA / 'trainium.jsonl'} --model llama3-8b --fix mbs=1,tp=8"
LARGE = "--model llama3-70b --nodes 16 --fix tp=8,cp=8,mbs=1"  # no node has 64 ranks
TRUE = {"tp=1": 1.3, "tp=2": 1.0, "tp=4": 1.2}  # times what is predicted: tp=2 is better than it looks


def measured(plan: Path, rows: Path, name: str, factor: float | None = None) -> None:
    """Write the row of a run that took what is true of its layout."""
    found = load(plan)
    assert found.prediction
    factor = factor or TRUE[str(found.candidate).split(",", maxsplit=1)[0]]
    seconds = found.prediction.step_time_s * factor
    row = row_of(found, Occasion(name=name, step_time_s=seconds, date="2026-01-02", versions="0"))
    rows.mkdir(parents=True, exist_ok=True)
    (rows / f"{name}.jsonl").write_text(json.dumps(encode(row)) + "\n", encoding="utf-8")


@pytest.mark.slow
def test_rows_of_what_was_advised_lead_to_the_layout_that_is_faster_in_truth(typed: Typed) -> None:
    """What is expected may become worse: these rows contradict the cost model, which explains no layout by itself."""
    assert typed(f"plan {TINY}")[0] == 0
    measured(Path("plan.json"), Path("rows"), "first")
    before = typed.answer(f"advise rows {TINY} --budget 4 --out adv --json")
    first = json.loads(before)
    assert first["num_rows"] == 1 and 2 <= len(first["runs"]) <= 4
    said = typed(f"advise rows {TINY} --budget 4 --out adv")[1]
    assert f"expected regret: {first['regret']['share']:.2%} of a step" in " ".join(said.split())
    assert all(f"{run['regret_after']['share']:.2%}" in said and run["candidate"] in said for run in first["runs"])
    for run in first["runs"]:
        assert f"  {format_seconds(10 * run['predicted_s'])}  " in said
    sweep, calibrate, again = said.splitlines()[-3:]
    assert sweep == "autoshard sweep adv/sweep.yaml --out adv"

    for number, run in enumerate(first["runs"], 1):
        assert str(load(Path(f"adv/advised-{number}.json")).candidate) == run["candidate"]
        measured(Path(f"adv/advised-{number}.json"), Path("adv/runs"), str(number))
    assert typed(calibrate.removeprefix("autoshard "))[0] == 0
    assert again.startswith("autoshard advise adv/runs ") and "--calibration adv/calibration.json" in again
    once, after = (json.loads(typed(f"{again.removeprefix('autoshard ')} --out adv --json")[1]) for _ in range(2))
    assert once == after, "the folder that is read is written again"
    assert after["num_rows"] == 1 + len(first["runs"])
    true_s = {one["candidate"]: one["predicted_s"] * TRUE[one["candidate"].split(",")[0]] for one in first["options"]}
    fastest_s = min(true_s.values())
    assert true_s[after["choice"]] == fastest_s < 0.9 * true_s[first["choice"]]


@pytest.mark.thorough
@pytest.mark.ranks
def test_the_circle_closes_with_real_runs(typed: Typed) -> None:
    """On a busy machine times may be such that no constants describe them: then `calibrate` says so, as it should."""
    small = f"{TINY} --seq-len 64 --global-batch 32"
    assert typed(f"plan {small}")[0] == 0
    assert typed("run plan.json --steps 6 --checkpoint.to none")[0] == 0
    *_, sweep, calibrate, again = typed(f"advise runs {small} --budget 3 --out adv")[1].splitlines()
    count = len(list(Path("adv").glob("advised-*.json")))
    assert typed(sweep.removeprefix("autoshard "))[0] == 0 and 1 <= count <= 3
    code, _, err = typed(calibrate.removeprefix("autoshard "))
    told = "too few" in err or "the cost model does not describe them" in err
    assert code == 0 or (code == 2 and told)
    line = again.replace("--calibration adv/calibration.json", "") if code else again
    found = json.loads(typed(f"{line.removeprefix('autoshard ')} --json")[1])
    assert found["num_rows"] == 1 + count and 0 <= found["regret"]["share"] < 1


@pytest.mark.slow
def test_dollars_are_said_for_the_whole_training(typed: Typed) -> None:
    found = json.loads(typed(f"{TRN1} --nodes 2 --budget 1 --tokens 2T --json")[1])
    regret = found["regret"]
    assert regret["usd"] == pytest.approx(2000 * regret["usd_per_billion_tokens"]) and regret["usd"] > 0
    assert all(run["nodes"] == 1 and run["usd"] > 0 for run in found["runs"])
    said = " ".join(typed(f"{TRN1} --nodes 2 --budget 1 --tokens 2T")[1].split())
    assert re.search(r"\$[\d.,]+ per billion tokens, \$[\d,]+ in all", said)


@pytest.mark.slow
def test_runs_on_several_nodes_are_jobs(typed: Typed) -> None:
    question = "--model llama3-70b --nodes 16 --fix tp=32,cp=2,mbs=1"  # no node has 64 ranks
    said = typed(f"advise {DATA / 'trainium.jsonl'} {question} --run-nodes 4 --budget 1 --out adv")[1]
    assert "autoshard launch adv/advised-1.json --out adv/advised-1 --run-folder adv/runs/advised-1 --steps 10" in said


@pytest.mark.slow
def test_one_plan_leaves_nothing_to_choose(typed: Typed) -> None:
    code, out, err = typed(f"{TRN1},pp=1,cp=1,zero=1")
    assert (code, err) == (0, "") and "There is nothing to choose" in out and "0.00% of a step" in out


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (f"{TRN1} --budget 0", 2, "--budget: must be at least 1, not 0"),
        (f"{TRN1} --run-nodes 0", 2, "--run-nodes: must be at least 1, not 0"),
        (f"{TRN1} --tokens many", 2, "--tokens: 'many' is not a number of tokens"),
        (f"{TRN1} --out here", 2, "--out here: is a file. Name a folder"),
        (f"advise {DATA / 'trainium.jsonl'}", 2, "--model: missing"),
        (f"advise {DATA / 'trainium.jsonl'} {TINY}", 2, "holds no row of local with a step_time_s"),
        (f"advise none.jsonl {TINY}", 2, "none.jsonl: "),
        (f"advise {DATA / 'sweeps' / 'fms_fsdp.jsonl'} --cluster h100-80 {LARGE}", 1, "Allow more with --run-nodes"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_clear_line(line: str, code: int, words: str, typed: Typed) -> None:
    Path("here").write_text("", encoding="utf-8")
    found, out, err = typed(line)
    assert (found, out) == (code, "") and words in err and "Traceback" not in err
