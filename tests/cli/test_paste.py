"""What is printed can be typed: candidates, advice, next commands; and the same question has the same bytes."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from autoshard.plan.codec import load
from autoshard.plan.plan import SEARCH, Plan
from tests.conftest import Typed
from tests.slower import rest_is_slow

QUESTIONS = [
    "--model tiny-llama --cluster local --fix pp=2,mbs=8,stages=1/3,recompute=full:1/selective[norms],place=3/2/1/0",
    "--model tiny-llama --cluster local --fix schedule=interleaved,vp=2,pp=2,zero=3",
    "--model llama3-70b --nodes 16",
    "--model llama3-8b --cluster trn2.48xlarge --engine any",
    "--model mixtral-8x7b --cluster h100-80 --nodes 2",
]


def plan_in(path: str = "plan.json") -> Plan:
    """The plan of a file, without what its search says of other plans: --at does not search, and --top changes it."""
    plan = load(Path(path))
    return replace(plan, provenance={key: text for key, text in plan.provenance.items() if key != SEARCH})


def without(question: str, *options: str) -> str:
    """Leave options out of a question: one that is typed twice is refused."""
    for name in options:
        question = re.sub(rf"{name} \S+", "", question)
    return question


@pytest.mark.parametrize("question", rest_is_slow(QUESTIONS, 0, 2))
def test_every_plan_that_is_shown_can_be_pasted_back(question: str, typed: Typed):
    shown = json.loads(typed(f"plan {question} --json")[1])
    original = plan_in()
    assert typed(f"plan {question} --out again.json")[0] == 0
    assert Path("again.json").read_bytes() == Path("plan.json").read_bytes(), "the same question has the same bytes"
    assert typed(f"plan {question} --out again.json --top 1")[0] == 0
    assert plan_in("again.json") == original
    candidate = shlex.quote(shown["plan"]["candidate"])
    for pinned in ("--at", *(["--fix"] if "any" not in question else [])):
        assert typed(f"plan {without(question, '--fix')} {pinned} {candidate}")[0] == 0
        assert plan_in() == original
    for other in shown["runners_up"]:
        text = typed(f"plan {without(question, '--fix')} --json --at {shlex.quote(other['candidate'])}")[1]
        again = json.loads(text)["plan"]["prediction"]
        assert {**again, "of": ""} == {**other["prediction"], "of": ""}  # only the plan in the file has its table


def test_a_long_candidate_can_be_pasted_from_a_narrow_terminal(typed: Typed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "60")
    recomputes = "/".join(["selective[norms]", "full:1", "selective[activation,norms]", "none"] * 2)
    card = json.loads((Path(__file__).parents[2] / "models" / "tiny-llama.json").read_text())
    Path("tall.json").write_text(json.dumps({**card, "num_hidden_layers": 8}))
    question, out = "--model tall.json --cluster local --ranks 8", Path("plan" * 20)
    text = re.sub(
        r"\x1b\[[0-9;]*m", "", typed(f"plan {question} --fix pp=8,mbs=1,recompute={recomputes} --out {out}")[1]
    )
    original = plan_in(str(out))
    match = re.search(r"^layout +(\S+)$", text, re.MULTILINE)
    assert match and len(match[1]) > 120 and f"next     autoshard verify {out}\n" in text
    assert typed(f"plan {question} --at {shlex.quote(match[1])}")[0] == 0
    assert plan_in() == original


ADVISED = [
    "--model llama3-8b --fix pp=2,mbs=1",
    "--model llama3-70b",
    "--model llama3.1-405b",
    "--model llama3-8b --seq-len 1048576",
    "--model llama3-8b --seq-len 1000",
    "--model llama3-8b --fix tp=8,pp=4,vp=2,schedule=interleaved,mbs=16,recompute=none",
    "--model llama3-8b --cluster a100-40 --fix tp=1,pp=1,zero=1",
    "--model llama3-70b --nodes 1000",
    "--model gpt2-xl --cluster trn2.48xlarge",
]


@pytest.mark.parametrize("question", rest_is_slow(ADVISED, 0, 2))
def test_following_the_advice_gives_a_plan(question: str, typed: Typed):
    code, _, text = typed(f"plan {question}")
    tries = re.findall(r"^  try (.*)$", text, re.MULTILINE)
    assert code == 1 and tries
    for advice in tries:
        options, _, _ = advice.partition(", so without")
        changed = without(question, *re.findall(r"--[a-z-]+", options))
        assert typed(f"plan {changed} {options if options.startswith('--') else ''}")[0] == 0
        Path("plan.json").unlink()


def test_a_plain_c_locale_gets_ascii(typed: Typed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LC_ALL", "C")
    for name in ("PYTHONIOENCODING", "PYTHONUTF8"):
        monkeypatch.delenv(name, raising=False)
    text = typed("plan --model tiny-llama --cluster local --top 1 --fix tp=2,mbs=8 -v")[1]
    assert text.isascii() and "\n-----" in text and "#" in text
