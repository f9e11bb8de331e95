"""``--extend``: the whole example of docs/extending.md, and what is refused without its file."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.extensions import EXTENSIONS
from tests.runtime.cases import environment
from tests.sweep.sweep_cases import TINY, rows_in, written

PAGE = (
    (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8").partition("## On the command")[2]
)
(EXAMPLE,) = re.findall(r"```python\n(\"\"\".*?)```", PAGE, re.DOTALL)
LINES = re.findall(r"^autoshard (.*)$", PAGE, re.MULTILINE)
MINE = ["--extend", "my_module.py"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    path = Path("my_module.py")
    path.write_text(EXAMPLE, encoding="utf-8")
    yield path
    EXTENSIONS.files.clear()
    EXTENSIONS.parts.clear()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 2
    return capsys.readouterr().err


def typed(*words: str) -> "subprocess.CompletedProcess[str]":
    """A command in a process of its own: graphs that this one has built before do not know the file."""
    return subprocess.run(
        [sys.executable, "-m", "autoshard.cli", *words], env=environment(), capture_output=True, text=True, check=False
    )


def test_the_example_of_the_page_is_planned_verified_and_explained(module: Path):
    for line in LINES[:3]:
        done = typed(*shlex.split(line))
        assert done.returncode == 0 and "not known here" not in done.stdout, done.stderr
        if line == LINES[0]:
            assert f"\nnext: autoshard verify plan.json --extend {module.resolve()}\n" in done.stdout
    plan = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    assert plan["schedule"]["builder"] == "eager" and "damp" in plan["strategies"]["layer"]
    assert plan["prediction"]["time_parts"]["cost.straggler"] == 0.2 and plan["provenance"]["extension.my_module.py"]
    assert "lab-tp" in typed("list", "rules", *MINE).stdout
    refusal = typed(*shlex.split(LINES[0].partition("--fix")[0]), "--at", "tp=4", *MINE)
    assert refusal.returncode == 1 and "our switch takes groups of 2" in refusal.stdout
    assert "the plan was made with my_module.py (sha256" in typed("verify", "plan.json").stderr
    module.write_text(EXAMPLE.replace("0.2", "0.3"), encoding="utf-8")
    assert "is not the file that the plan was made with" in typed("explain", "plan.json", *MINE).stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_and_the_processes_of_a_sweep_load_the_file(module: Path, capsys: pytest.CaptureFixture[str]):
    for line in (LINES[0], LINES[3]):
        assert main(shlex.split(line)) == 0, capsys.readouterr().err
    sweep = written({"mode": "run", "base": {**TINY, "steps": 1, "ranks": 2, "fix": "pp=2,schedule=eager"}}, Path())
    assert main(["sweep", str(sweep), "--out", "out", *MINE]) == 0
    (row,) = rows_in(Path("out"))
    assert (row["status"], row["schedule"]) == ("ran", "eager")
    assert main(["launch", "plan.json", "--scheduler", "slurm", "--out", "job", *MINE]) == 0
    assert (
        Path("job/my_module.py").read_text() == EXAMPLE
        and "extend: [my_module.py]" in Path("job/training.yaml").read_text()
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1 / 0", "line 1: ZeroDivisionError: division by zero"),
        ("def broken(:", "line 1: SyntaxError"),
        (
            "from autoshard.schedule.builders import BUILDERS\ngpipe = BUILDERS['1f1b']",
            "gpipe: this name is taken. Choose another",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, says: str, module: Path, capsys: pytest.CaptureFixture[str]):
    module.write_text(text)
    assert f"autoshard: --extend my_module.py: {says}" in refused(capsys, "list", "schedules", *MINE)
    Path("options.json").write_text(json.dumps({"what": "models", "extend": "none.py"}))
    assert "--extend none.py: cannot be read" in refused(capsys, "list", "--config", "options.json")
