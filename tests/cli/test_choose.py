"""``plan --choose`` and the plan file: which answer is written, and that nothing which a person wrote is lost."""

import json
import os
import re
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.plan.codec import is_as_written, load
from autoshard.plan.plan import SCHEMA

QUESTION = ("plan", "--model", "tiny-llama", "--cluster", "local", "--fix", "pp=2,mbs=8,recompute=none")
WIDER = (*QUESTION[:-1], "pp=2,recompute=none")  # with more layouts than are shown


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def candidate(path: str = "plan.json") -> str:
    return str(load(Path(path)).candidate)


@pytest.mark.slow
def test_the_answer_that_is_named_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WIDER, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    answers = {row["name"]: row for row in data["answers"]}
    assert data["written"] == "simple" and candidate() == answers["simple"]["candidate"]
    assert data["plan"]["candidate"] == candidate() and data["no_vendor"]
    assert [row["name"] for row in data["runners_up"]] == ["2", "3"]
    for name in ("fastest", "5"):
        assert main([*WIDER, "--choose", name, "--out", f"{name}.json"]) == 0
    assert candidate("fastest.json") == answers["fastest"]["candidate"]
    assert candidate("5.json") not in {row["candidate"] for row in answers.values()}, (
        "as many are searched as are named"
    )
    assert f"--choose {'|'.join(answers)}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("written", ["simple", "fastest", "2"])
def test_a_name_in_an_explanation_selects_the_same_layout(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (*QUESTION[:-2], "--precision", "bf16")
    assert main([*whole, "--choose", written, "--out", "a.json"]) == 0
    capsys.readouterr()
    assert main(["explain", "a.json", "--json"]) == 0
    rivals = {row["name"]: row["candidate"] for row in json.loads(capsys.readouterr().out)["runners_up"]}
    assert len(rivals) == 3 and "".join(rivals).isalnum()
    for name, layout in rivals.items():
        assert main([*whole, "--choose", name, "--out", "b.json"]) == 0
        assert candidate("b.json") == layout, f"{name} of explain is another of plan"


@pytest.mark.slow
def test_what_no_name_selects_has_a_letter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUESTION, "--json", "--choose", "fastest"]) == 0
    names = {row["candidate"]: row["name"] for row in json.loads(capsys.readouterr().out)["answers"]}
    assert main(["explain", "--json"]) == 0
    rivals = {row["name"]: row["candidate"] for row in json.loads(capsys.readouterr().out)["runners_up"]}
    assert "a" in rivals and all(name.isalpha() or names[layout] == name for name, layout in rivals.items())
    assert main(["explain"]) == 0
    assert "not among the layouts that this plan was chosen from; plan --at writes one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--choose", "best"),
            "--choose best: type fastest, smallest, simple, vendor, fsdp, other, or a number up to 100",
        ),
        (("--choose", "101"), "--choose 101: type"),
        (("--choose", "0"), "--choose 0: type"),
        (("--choose", "²"), "type fastest"),
        (("--choose", "vendor"), "There are fastest, simple, other, 2, 3"),
        (("--choose", "simple", "--objective", "memory"), "There are smallest, 2, 3"),
        (("--choose", "simple", "--pareto"), "--choose: has no effect beside --pareto, which shows a frontier"),
    ],
)
def test_what_cannot_be_chosen_is_one_message(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUESTION, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not Path("plan.json").exists()


@pytest.mark.slow
def test_a_plan_that_nobody_edited_is_replaced_and_the_last_line_says_which(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*QUESTION]) == 0
    before = Path("plan.json").read_bytes()
    capsys.readouterr()
    assert main([*QUESTION]) == 0, "the same plan again"
    assert capsys.readouterr().out.endswith("wrote plan.json\n")
    assert main([*QUESTION, "--choose", "3"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "wrote plan.json, which held the plan of tiny-llama on 1 x local"
    assert Path("plan.json").read_bytes() != before


EDITS = {
    "a number": lambda text: text.replace('"headroom": 0.1', '"headroom": 0.2'),
    "a layout": lambda text: text.replace("[batch/dp, ", "[batch, ", 1),
    "a space": lambda text: text.replace("{", "{ ", 1),
    "the end": lambda text: text.rstrip("\n"),
    "the hash": lambda text: re.sub(r'"of": "[0-9a-f]', '"of": "x', text),
    "half": lambda text: text[: len(text) // 2],
    "another object": lambda text: "{}",
    "a list": lambda text: "[1]",
    "the order of keys": lambda text: json.dumps(dict(reversed(json.loads(text).items())), indent=2) + "\n",
}


def test_no_edit_of_a_plan_file_leaves_it_as_it_was_written() -> None:
    assert main([*QUESTION[:5], "--at", "tp=1,pp=2,dp=2"]) == 0
    text = Path("plan.json").read_text(encoding="utf-8")
    edited = [edit(text) for edit in EDITS.values()]
    assert is_as_written(text) and text not in edited and not any(map(is_as_written, edited))


@pytest.mark.parametrize("edit", ["a number", "half", "a list"])
def test_what_somebody_has_edited_is_kept_and_that_is_said_before_the_search(
    edit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = (*QUESTION[:5], "--at", "tp=1,pp=2,dp=2")
    assert main([*at]) == 0
    text = Path("plan.json").read_text(encoding="utf-8")
    edited = EDITS[edit](text)
    assert edited != text
    Path("plan.json").write_text(edited, encoding="utf-8")
    with monkeypatch.context() as nothing:
        nothing.setattr("autoshard.commands.plan.searched", lambda *_: pytest.fail("a search has begun"))
        assert main([*QUESTION]) == 2
    error = capsys.readouterr().err
    assert error.startswith("autoshard: --out plan.json: holds ") and "Type --force" in error
    assert main([*at]) == 2 and "--force" in capsys.readouterr().err
    assert Path("plan.json").read_text(encoding="utf-8") == edited
    assert main([*at, "--force"]) == 0 and Path("plan.json").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("name", ["training.json", "training.yaml"])
def test_the_plan_of_a_run_or_a_job_is_kept(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    at = (*QUESTION[:5], "--at")
    assert main([*at, "tp=1,pp=2,dp=2"]) == 0
    Path(name).write_text("{}", encoding="utf-8")
    assert main([*at, "tp=1,pp=2,dp=2"]) == 0, "the same plan again"
    assert main([*at, "tp=2,pp=2,dp=1"]) == 2
    assert "in this folder, and is kept. Type --force" in capsys.readouterr().err
    assert candidate() == "tp=1,pp=2,dp=2"


@pytest.mark.slow
def test_the_plan_that_like_asks_about_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUESTION]) == 0
    like = ["plan", "--like", "plan.json", "--ranks", "2"]
    assert main(like) == 2
    assert "--out plan.json: is the plan that --like asks about" in capsys.readouterr().err
    assert main([*like, "--out", "left.json"]) == 0 and load(Path("plan.json")).cluster.num_ranks == 4


def test_a_plan_file_of_an_older_schema_is_as_written_too() -> None:
    folder = Path(__file__).parents[1] / "golden" / "plan"
    files = [path for path in sorted(folder.rglob("*.json")) if "prediction" in json.loads(path.read_text("utf-8"))]
    sealed = [path for path in files if is_as_written(path.read_text(encoding="utf-8"))]
    assert {json.loads(path.read_text("utf-8"))["schema"] for path in sealed} >= {SCHEMA - 1, SCHEMA}


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
