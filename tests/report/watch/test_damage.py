"""Files of a run in which anything may stand: they are shown as far as they can be read, and nothing is a traceback."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from autoshard.cli import main
from autoshard.report.watch.page import progress_page
from autoshard.report.watch.structured import progress_json
from autoshard.report.watch.terminal import progress_report
from autoshard.spec.files import json_line
from tests.report.watch.made_runs import FROM, NOW, made_run, seen, steps_of

DEEP = "[" * 5000
# Values as a file may hold them, though no run has written them.
VALUES = (
    '"x"', "[1]", '{"a": 1}', "null", "true", "-1", "0", "1e999", "-1e999", "1" * 400, "1" * 5000, "NaN", '""',
    '"\\ud800"', "1e-320", "9007199254740993", DEEP, "[" * 900 + "]" * 900,
)  # fmt: skip
NOTES = (FROM, {"failed": "rank 1 failed", "at": NOW - 900}, {**FROM, "at": NOW - 800}, {"ended": "", "at": NOW})
FILES = ("metrics.jsonl", "attempts.jsonl", "training.json", "report.json")
ENDED = {
    "step_time_s": {"predicted": 0.5, "low": 0.4, "high": 0.6, "measured": 0.5},
    "ranks": [{"ranks": [0, 1], "memory_bytes": {"weights": {"predicted": 8, "measured": 8}}, "sent_bytes": {}}],
}


def ended_run(folder: Path) -> Path:
    made_run(folder, steps_of(5), NOTES)
    (folder / "report.json").write_text(json.dumps(ENDED), encoding="utf-8")
    return folder


def with_value(line: str, name: str, text: str) -> str:
    """A line with a text in the place of one of its values, which need not be JSON."""
    fields = json.loads(line)
    entries = (f"{json.dumps(key)}: {text if key == name else json.dumps(fields[key])}" for key in fields)
    return f"{{{', '.join(entries)}}}"


@pytest.mark.slow
@given(st.data())
def test_a_run_is_shown_whatever_stands_in_a_line(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = ended_run(Path(name))
        path = folder / data.draw(st.sampled_from(FILES))
        lines = path.read_text(encoding="utf-8").splitlines()
        place, text = data.draw(st.integers(0, len(lines) - 1)), data.draw(st.sampled_from(VALUES))
        key = data.draw(st.sampled_from(["", *json.loads(lines[place])]))
        lines[place] = with_value(lines[place], key, text) if key else text
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")
        now = seen(folder)
        assert progress_page(now, 2.5) and progress_report(now)
        assert json.dumps(progress_json(now))
        if path.name not in ("metrics.jsonl", "report.json"):
            return
        report = ["report", str(folder / "plan.json"), "--run", str(folder), "--out", str(folder / "page.html")]
        assert main(report) in (0, 2)


def test_lines_that_cannot_be_read_are_left_out_and_the_others_shown(tmp_path: Path) -> None:
    folder = ended_run(tmp_path)
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[2:2] = [DEEP, "[]", '{"step": 1e999}', with_value(lines[0], "learning_rate", '"fast"'), '{"st']
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    assert [number for number, _ in seen(folder).losses] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", FILES)
def test_a_nested_file_is_no_traceback(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ended_run(tmp_path / "run")
    (folder / name).write_text(DEEP + "\n", encoding="utf-8")
    assert main(["watch", str(folder), "--once", "--html", str(tmp_path / "page.html")]) in (0, 1)
    said = " ".join(capsys.readouterr().out.split())
    assert ("training.json: is nested too deeply" in said) == (name == "training.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (DEEP, "report.json: is nested too deeply"),
        ("[]", "report.json: expected an object"),
        ('{"ranks": [3]}', "report.json: ranks[0]: expected an object"),
        ('{"step_time_s": {"predicted": "x"}}', "report.json: step_time_s"),
    ],
)
def test_a_comparison_of_another_form_is_named(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ended_run(tmp_path)
    (folder / "report.json").write_text(text, encoding="utf-8")
    assert main(["report", str(folder / "plan.json"), "--run", str(folder), "--out", str(folder / "page.html")]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 5000, "1" * 5000, "{", "", b"\xff", b"{}\xff"])
def test_what_is_no_json_is_nothing(text: str | bytes) -> None:
    assert json_line(text) is None
