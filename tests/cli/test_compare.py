"""``autoshard compare`` as a user, or a CI, types it: words, exit codes, and what becomes of edited files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard.plan.codec import dump
from tests.conftest import Typed


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """A good plan for this machine, and a slower one."""
    pins = {"a.json": "tp=1,pp=1,mbs=8", "b.json": "tp=2,pp=1,recompute=full,mbs=8"}
    return {name: dump(autoshard.plan("tiny-llama", "local", fix=text).plan) for name, text in pins.items()}


@pytest.fixture(autouse=True)
def written(in_an_empty_folder: None, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        Path(name).write_text(text)


def edit(change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(Path("a.json").read_text())
    change(data)
    Path("b.json").write_text(json.dumps(data))


@pytest.mark.slow
def test_two_plans_are_compared_and_slower_than_allowed_fails(typed: Typed):
    code, out, err = typed("compare a.json b.json")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 120
    for words in (
        " slower (",
        "The plans differ in",
        "Time of a step",
        "Memory of the fullest",
        "predictions uncalibrated",
    ):
        assert words in out
    assert " faster (" in typed("compare b.json a.json --fail-if-slower 0%")[1]
    assert "nothing differs" in typed("compare a.json a.json")[1]
    code, out, err = typed("compare a.json b.json --fail-if-slower '0.5 %'")
    assert code == 1 and "What is predicted" in out
    assert "b.json is predicted" in err and "--fail-if-slower allows" in err
    assert json.loads(typed.answer("compare a.json b.json --json --fail-if-slower '100000%'"))["slower_by"] > 0


@pytest.mark.parametrize("bound", ["2", "inf%", "1e3%", "two percent", "-2%"])
def test_what_is_no_percentage_is_refused(bound: str, typed: Typed):
    code, out, err = typed(f"compare a.json b.json --fail-if-slower='{bound}'")
    why = "must not be negative" if bound == "-2%" else f"'{bound}' is not a percentage"
    assert (code, out, err) == (2, "", f"autoshard: --fail-if-slower: {why}. Write it like 2%\n")


def test_every_fault_is_named_at_once(typed: Typed):
    edit(lambda data: data["provenance"].update({"calibration.constants": "x=1"}))
    assert "autoshard: b.json: provenance.calibration.constants: must be" in typed("compare a.json b.json")[2]
    Path("b.json").write_text("{")
    code, out, err = typed("compare no.json b.json --fail-if-slower 2")
    assert (code, out, len(err.splitlines())) == (2, "", 3)
    assert "no.json: there is no such file" in err and "b.json: is not JSON" in err
    assert typed("compare a.json")[2] == "autoshard: B: missing. For example: autoshard compare plan.json edited.json\n"


def test_an_edited_plan_is_predicted_again(typed: Typed):
    edit(lambda data: data["workload"].update(seq_len=128))
    code, out, _ = typed("compare a.json b.json")
    words = " ".join(out.split())
    assert code == 0 and "note: b.json: prediction: the plan was edited" in words
    assert "the plans answer different questions: workload differs" in words and "Time per million tokens" in words
    assert json.loads(typed("compare a.json b.json --json")[1])["remarks"][0].startswith("b.json: prediction")


def test_a_plan_that_may_not_run_is_refused_and_one_that_does_not_fit_is_compared(typed: Typed):
    edit(lambda data: data.update(micro_batch=3))
    code, out, err = typed("compare a.json b.json")
    assert (code, err) == (1, "")
    assert out.startswith("b.json cannot run, so it is not compared:\nrefused ") and "a.json" not in out
    code, out, err = typed("compare b.json a.json --json")
    reasons = json.loads(out)["rejections"]
    assert (code, err, reasons["b"]) == (1, "", []) and reasons["a"][0]["rule"] == "batch"
    edit(lambda data: data["cluster"]["chip"].update(memory_bytes=4 * 2**20))
    assert "b does not fit in memory" in typed.answer("compare a.json b.json")
