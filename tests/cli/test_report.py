"""``autoshard report``: the page is written, its figures are printed as JSON, and what cannot be drawn is refused."""

import json
import os
from pathlib import Path

import pytest

from tests.conftest import Typed

TINY = "--model tiny-llama --cluster local --ranks 2 --fix mbs=8"


def test_a_plan_becomes_one_file_and_its_figures_one_object(typed: Typed, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)) or True)
    assert typed(f"plan {TINY} --open")[0] == 0
    assert opened == [Path("plan.html").resolve().as_uri()] and "<!doctype html>" in Path("plan.html").read_text()
    assert typed("report plan.json --open") == (0, "wrote report.html\n", "")
    assert opened[1:] == [Path("report.html").resolve().as_uri()]
    assert Path("report.html").read_text() == Path("plan.html").read_text()
    code, out, _ = typed("report plan.json --json")
    data = json.loads(out)
    step_s = json.loads(Path("plan.json").read_text())["prediction"]["step_time_s"]
    assert code == 0 and data["plans"][0]["prediction"]["step_time_s"] == step_s and data["difference"] is None


def test_a_page_is_never_drawn_over_the_plan_nor_among_devices(typed: Typed):
    os.mkfifo("pipe")  # as little of a file as /dev/null, which a test that fails would spoil
    for out in ("pipe", "plan.html"):
        code, _, err = typed(f"plan {TINY} --open --out {out}")
        assert code == 2 and f"--out {out}: leaves no place beside it for the page of --open" in err
    assert [one.name for one in Path().iterdir()] == ["pipe"]


@pytest.mark.slow
def test_two_plans_and_a_run_stand_on_one_page(typed: Typed):
    for name in ("fastest", "2"):
        assert typed(f"plan {TINY} --choose {name} --out {name}.json")[0] == 0
    Path("run").mkdir()
    step = {"step": 1, "loss": 6.2, "norm": 1.0, "time_s": 0.5, "tokens": 100, "phase": "steady", "at": 1.0}
    Path("run/metrics.jsonl").write_text(f'{json.dumps(step)}\n{{"step": 2, "lo')
    assert typed("report fastest.json 2.json --run run --out both.html")[0] == 0
    page = Path("both.html").read_text()
    assert 'id="difference"' in page and 'id="run"' in page and "The run has not ended" in page


@pytest.mark.slow
def test_what_cannot_be_drawn_is_refused_in_one_line(typed: Typed):
    assert typed(f"plan {TINY}")[0] == 0
    Path("empty").mkdir()
    for line, complaint in {
        "report nothere.json": "nothere.json: there is no such file",
        "report gone.json": "gone.json: there is no such file",
        "report plan.json --run empty": "--run empty: has taken no step yet",
        "report plan.json --run gone": "--run gone: there is no such folder",
        "report plan.json --out empty": "--out empty: is a folder. Name a file in it",
        "report " + "plan.json " * 9: "PLANS: a page shows at most 8 plans, not 9",
    }.items():
        code, out, err = typed(line)
        assert (code, out) == (2, "") and complaint in err and err.count("\n") == 1, line
    plan = json.loads(Path("plan.json").read_text())
    search = json.loads(plan["provenance"]["search"])
    plan["provenance"]["search"] = json.dumps({**search, "answers": []})
    Path("odd.json").write_text(json.dumps(plan))
    assert "odd.json: provenance.search.answers: must hold" in typed("report odd.json")[2]
    Path("empty/metrics.jsonl").write_text("")
    assert "has taken no step yet" in typed("report plan.json --run empty")[2]


@pytest.mark.slow
def test_a_run_of_another_plan_is_no_measurement_of_this_one(typed: Typed):
    for name in ("fastest", "2"):
        assert typed(f"plan {TINY} --choose {name} --out {name}.json")[0] == 0
    Path("run").mkdir()
    step = {"step": 1, "loss": 6.2, "norm": 1.0, "time_s": 0.5, "tokens": 100, "phase": "steady", "at": 1.0}
    Path("run/metrics.jsonl").write_text(json.dumps(step) + "\n")
    Path("run/plan.json").write_bytes(Path("2.json").read_bytes())
    assert "--run run: is a run of another plan, run/plan.json" in typed.refusal("report fastest.json --run run")
    assert typed("report 2.json --run run")[0] == 0
    Path("plan.json").write_bytes(Path("fastest.json").read_bytes())
    assert typed("report plan.json run/plan.json")[0] == 0  # files of one name are told apart by their paths
    assert "run/plan.json against plan.json" in Path("report.html").read_text()


@pytest.mark.slow
def test_a_plan_that_was_edited_until_it_does_not_fit_is_drawn_and_says_so(typed: Typed):
    assert typed(f"plan {TINY}")[0] == 0
    assert typed("report plan.json")[0] == 0
    page = Path("report.html").read_text()
    assert "does not fit" not in page and "distance from the best" in page
    data = json.loads(Path("plan.json").read_text())
    Path("full.json").write_text(json.dumps({**data, "headroom": 0.99}))
    assert typed("report full.json")[0] == 0
    page = Path("report.html").read_text()
    assert "does not fit: " in page and "predicted again" in page and "distance from the best" not in page


def test_a_plan_that_cannot_run_is_not_drawn(typed: Typed):
    assert typed(f"plan {TINY}")[0] == 0
    data = json.loads(Path("plan.json").read_text())
    data["workload"]["global_batch"] = 7
    Path("odd.json").write_text(json.dumps(data))
    code, out, _ = typed("report odd.json")
    assert code == 1 and "7" in out and not Path("report.html").exists()
