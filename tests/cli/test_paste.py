"""What is printed can be typed: candidates, advice, next commands; and the same question has the same bytes."""

import json
import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from autoshard.cli import main

QUESTIONS = [
    *(
        pytest.param(question, marks=pytest.mark.slow)
        for question in (
            "--model llama3-70b --nodes 16",
            "--model llama3-8b --cluster trn2.48xlarge --engine any",
            "--model mixtral-8x7b --cluster h100-80 --nodes 2",
        )
    ),
    "--model tiny-llama --cluster local --fix pp=2,stages=1/3,recompute=full:1/selective[norms],place=3/2/1/0",
    "--model tiny-llama --cluster local --fix schedule=interleaved,vp=2,pp=2,zero=3",
]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answer(line: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert main(shlex.split(line)) == code
    out, err = capsys.readouterr()
    return err if code else out


def without_fix(question: str) -> str:
    return re.sub(r"--fix \S+", "", question)


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_plan_that_is_shown_can_be_pasted_back(question: str, capsys: pytest.CaptureFixture[str]):
    shown = json.loads(answer(f"plan {question} --json", capsys))
    original = Path("plan.json").read_bytes()
    answer(f"plan {question} --out again.json --top 1", capsys)
    assert Path("again.json").read_bytes() == original, "the same question has the same bytes"
    answer(f"plan {without_fix(question)} --at {shlex.quote(shown['plan']['candidate'])}", capsys)
    assert Path("plan.json").read_bytes() == original
    for other in shown["runners_up"]:
        text = answer(f"plan {without_fix(question)} --json --at {shlex.quote(other['candidate'])}", capsys)
        again = json.loads(text)["plan"]["prediction"]
        assert {**again, "of": ""} == {**other["prediction"], "of": ""}  # only the plan in the file has its table
    if "any" not in question:
        answer(f"plan {without_fix(question)} --fix {shlex.quote(shown['plan']['candidate'])}", capsys)
        assert Path("plan.json").read_bytes() == original


def test_a_candidate_can_be_pasted_from_the_table_even_where_it_is_broken_over_lines(
    capsys: pytest.CaptureFixture[str],
):
    recomputes = "/".join(["selective[norms]", "full:1", "selective[activation,norms]", "none"] * 2)
    question = "--model tiny-llama --cluster local --ranks 8"
    path = Path("tall.json")
    card = json.loads((Path(__file__).parents[2] / "models" / "tiny-llama.json").read_text())
    path.write_text(json.dumps({**card, "num_hidden_layers": 8}))
    question = question.replace("tiny-llama", str(path))
    text = answer(f"plan {question} --fix pp=8,recompute={recomputes}", capsys)
    original = Path("plan.json").read_bytes()
    match = re.search(r"^plan (.*?)^step ", text, re.MULTILINE | re.DOTALL)
    assert match
    assert "\n" in match[1].strip()
    assert max(map(len, text.splitlines())) <= 120
    answer(f"plan {question} --at {shlex.quote(match[1])}", capsys)
    assert Path("plan.json").read_bytes() == original


def test_the_next_command_is_one_line_on_a_terminal_of_60_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "60")
    out = tmp_path / ("plan" * 15)
    text = answer(f"plan --model tiny-llama --cluster local --top 1 --out {out}", capsys)
    *report, written, command = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert max(map(len, report)) <= 60 and (written, command) == (f"wrote {out}", f"next: autoshard verify {out}")


@pytest.mark.parametrize(
    "question",
    [
        "--model llama3-8b --fix pp=2",
        *(
            pytest.param(question, marks=pytest.mark.slow)
            for question in (
                "--model llama3-70b",
                "--model llama3.1-405b",
                "--model llama2-7b --cluster local",
                "--model tiny-llama --cluster local --seq-len 2147483647",
                "--model llama3-8b --seq-len 1048576",
                "--model llama3-8b --seq-len 1000",
                "--model llama3-8b --fix tp=8,pp=4,vp=2,schedule=interleaved,mbs=16,recompute=none",
                "--model llama3-8b --cluster a100-40 --fix tp=1,pp=1,zero=1",
                "--model llama3-70b --nodes 1000",
                "--model gpt2-xl --cluster trn2.48xlarge",
            )
        ),
    ],
)
def test_following_the_advice_gives_a_plan(question: str, capsys: pytest.CaptureFixture[str]):
    text = answer(f"plan {question}", capsys, code=1)
    tries = re.findall(r"^  try (.*)$", text, re.MULTILINE)
    assert tries
    for advice in tries:
        options, _, _ = advice.partition(", so without")
        changed = without_fix(question) if "--fix" in options else question
        answer(f"plan {changed} {options if options.startswith('--') else ''}", capsys)
        assert Path("plan.json").exists()
        Path("plan.json").unlink()
