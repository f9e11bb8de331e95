"""``plan --choose`` and the plan file: which answer is written, and that no other plan is lost."""

import json
import os
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.plan.codec import load

QUESTION = ("plan", "--model", "tiny-llama", "--cluster", "local", "--fix", "pp=2,recompute=none")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def candidate(path: str = "plan.json") -> str:
    return str(load(Path(path)).candidate)


def test_the_answer_that_is_named_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUESTION, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    answers = {row["name"]: row for row in data["answers"]}
    assert data["written"] == "simple" and candidate() == answers["simple"]["candidate"]
    assert data["plan"]["candidate"] == candidate() and data["no_vendor"]
    assert [row["name"] for row in data["runners_up"]] == ["2", "3"]
    for name in ("fastest", "5"):
        assert main([*QUESTION, "--choose", name, "--out", f"{name}.json"]) == 0
    assert candidate("fastest.json") == answers["fastest"]["candidate"]
    assert candidate("5.json") not in {row["candidate"] for row in answers.values()}, (
        "as many are searched as are named"
    )
    assert f"--choose {'|'.join(answers)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--choose", "best"), "--choose best: type fastest, smallest, simple, vendor, or a number up to 100"),
        (("--choose", "101"), "--choose 101: type"),
        (("--choose", "0"), "--choose 0: type"),
        (("--choose", "²"), "type fastest"),
        (("--choose", "vendor"), "There are fastest, simple, 2, 3"),
        (("--choose", "smallest"), "There are fastest, simple, 2, 3"),
        (("--choose", "simple", "--objective", "memory"), "There are smallest, 2, 3"),
        (("--choose", "simple", "--pareto"), "--choose: is for the answers of one search"),
    ],
)
def test_what_cannot_be_chosen_is_one_message(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUESTION, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not Path("plan.json").exists()


def test_another_plan_is_kept_the_answer_is_shown_and_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUESTION]) == 0
    before = Path("plan.json").read_bytes()
    assert main([*QUESTION]) == 0, "the same plan again"
    capsys.readouterr()
    assert main([*QUESTION, "--choose", "3"]) == 2
    said = capsys.readouterr()
    assert "pp=2" in said.out and "wrote" not in said.out
    assert "--out plan.json" in said.err and "--force" in said.err
    assert Path("plan.json").read_bytes() == before
    assert main([*QUESTION, "--choose", "3", "--force"]) == 0
    assert Path("plan.json").read_bytes() != before


def test_a_file_that_is_no_plan_is_kept_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    Path("notes.txt").write_bytes(b"\xff mine")
    at = (*QUESTION[:5], "--at", "tp=1,pp=2,dp=2", "--out", "notes.txt")
    assert main(at) == 2 and "--force" in capsys.readouterr().err
    assert Path("notes.txt").read_bytes() == b"\xff mine"
    assert main([*at, "--force"]) == 0 and candidate("notes.txt") == "tp=1,pp=2,dp=2"


def test_what_holds_nothing_is_written_to() -> None:
    Path("empty.json").touch()
    at = (*QUESTION[:5], "--at", "tp=1,pp=2,dp=2", "--out")
    assert main([*at, "empty.json"]) == 0 and candidate("empty.json") == "tp=1,pp=2,dp=2"
    assert main([*at, os.devnull]) == 0


def test_exactly_one_layout_is_written_before_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(answer: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("autoshard.commands.plan.print_answer", broken)
    main([*QUESTION[:5], "--at", "tp=1,pp=2,dp=2"])
    assert candidate() == "tp=1,pp=2,dp=2"
