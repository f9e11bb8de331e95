"""``--extend``: the whole example of docs/developers/extending.md, and what is refused without its file."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoshard.extensions import EXTENSIONS, user_function
from tests.conftest import Typed
from tests.runtime.cases import environment
from tests.sweep.sweep_cases import TINY, rows_in, written

PAGE = (
    Path(__file__)
    .parents[2]
    .joinpath("docs", "developers", "extending.md")
    .read_text(encoding="utf-8")
    .partition("## On the c")[2]
)
(EXAMPLE,) = re.findall(r"```python\n(\"\"\".*?)```", PAGE, re.DOTALL)
PLANNED, *OTHERS, RUN = re.findall(r"^autoshard (.*)$", PAGE, re.MULTILINE)[:4]
MINE = "--extend my_module.py"


@pytest.fixture(autouse=True)
def module(in_an_empty_folder: None) -> Iterator[Path]:
    path = Path("my_module.py")
    path.write_text(EXAMPLE, encoding="utf-8")
    yield path
    forget()


def forget() -> None:
    """Forget what was loaded, as a new process has."""
    EXTENSIONS.files.clear()
    EXTENSIONS.parts.clear()


@pytest.mark.slow
def test_the_example_of_the_page_is_planned_verified_and_explained(module: Path, typed: Typed):
    def apart(line: str) -> str:
        """Type a line in a process of its own: graphs that this one has built before do not know the file."""
        command = [sys.executable, "-m", "autoshard.cli", *shlex.split(line)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "not known here" not in done.stdout, done.stderr
        return done.stdout

    assert f"\nnext     autoshard verify plan.json --extend {module.resolve()}\n" in apart(PLANNED)
    for line in OTHERS:
        apart(line)
    plan = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    assert plan["schedule"]["builder"] == "eager" and "damp" in plan["strategies"]["layer"]
    assert plan["prediction"]["time_parts"]["cost.straggler"] == 0.2 and plan["provenance"]["extension.my_module.py"]
    assert "the plan was made with my_module.py (sha256" in typed("verify plan.json")[2]
    assert "lab-tp" in typed(f"list rules {MINE}")[1]
    forget()
    module.write_text(EXAMPLE.replace("0.2", "0.3"), encoding="utf-8")
    assert "is not the file that the plan was made with" in typed(f"explain plan.json {MINE}")[2]


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_and_the_processes_of_a_sweep_load_the_file(typed: Typed):
    refusal = typed(f"{PLANNED.partition('--fix')[0]} --at tp=4 {MINE}")
    assert refusal[0] == 1 and "our switch takes groups of 2" in refusal[1]
    sweep = written({"mode": "run", "base": {**TINY, "steps": 1, "ranks": 2, "fix": "pp=2,schedule=eager"}}, Path())
    for line in (PLANNED, RUN, f"sweep {sweep} --out out {MINE}", f"launch plan.json --scheduler slurm {MINE}"):
        typed.answer(line)
    (row,) = rows_in(Path("out"))
    assert (row["status"], row["schedule"]) == ("ran", "eager")
    assert Path("job/my_module.py").read_text() == EXAMPLE
    assert "extend: [my_module.py]" in Path("job/training.yaml").read_text()


ORDER = """
from autoshard.schedule.builders import Builder
def order(shape, position):
    return [{steps} for number in range(shape.num_micro_batches)]
mine = Builder(order=order, meaning="wrong")
"""
TAKEN = "from autoshard.schedule.builders import BUILDERS\ngpipe = BUILDERS['1f1b']"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1 / 0", "line 1: ZeroDivisionError: division by zero"),
        ("def broken(:", "line 1: SyntaxError"),
        (
            ORDER.format(steps='("F", 0, number)'),
            "line 5: order: rank 0 of 2 with 8 micro-batches: the backward",
        ),
        (
            ORDER.format(steps='("F", 0, 0)'),
            "line 5: order: rank 0 of 2 with 8 micro-batches: 8 forwards F of",
        ),
        (ORDER.format(steps="number"), "line 5: order: rank 0 of 2 with 8 micro-batches: 0 forwards F of"),
        (ORDER.format(steps="[1, 2]"), "line 5: TypeError: unhashable type: 'list'"),
        (TAKEN, "gpipe: this name is taken. Choose another"),
        (
            "from autoshard.plan.rules.rule import rule\n@rule('tpp', source='us')\ndef ours(c):\n    yield True",
            "line 2: rule ours: 'tpp' is no key of a plan. Did you mean ",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, says: str, module: Path, typed: Typed):
    module.write_text(text)
    assert f"autoshard: --extend my_module.py: {says}" in typed(f"list schedules {MINE}")[2]
    Path("options.json").write_text(json.dumps({"what": "models", "extend": "none.py"}))
    assert "--extend none.py: there is no such file" in typed("list --config options.json")[2]


RULE = """
from autoshard.plan.rules.rule import rule
@rule("tp", source="us")
def ours(c):
    yield {}
    yield "no"
"""
TERM = """
from autoshard.cost.terms import CostTerm
def seconds(c):
    return {}
term = CostTerm(name="wait", seconds=seconds, source="us")
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (RULE.format("c.absent <= 2"), "--extend my_module.py: line 5: AttributeError: 'Columns' object has no"),
        (TERM.format("1 / 0"), "--extend my_module.py: line 4: ZeroDivisionError: division by zero"),
        ("def mlp(b, model, x):\n    return b.nothing", "--extend my_module.py: line 2: AttributeError: "),
        ("def mlp(b, model, x):\n    return 5", "--extend mlp: must return what b.emit gives, the name of a value"),
        ("def mlp(x):\n    return x", "--extend mlp: is called with 3 arguments: too many positional arguments"),
        ("import sys\nsys.exit(0)", "--extend my_module.py: line 2: SystemExit: 0"),
    ],
)
def test_what_goes_wrong_in_a_function_of_a_file_is_said_with_its_line(
    text: str, says: str, module: Path, typed: Typed
):
    module.write_text(text)
    length = 4 * len(text)  # of no other test: graphs that this process has built do not know the file
    code, _, complaint = typed(f"plan tiny-llama --cluster local --seq-len {length} --at dp=4,mbs=8 {MINE}")
    assert code == 2 and says in complaint and complaint.count("\n") == 1


def test_a_file_that_was_rewritten_in_the_same_second_is_read_again(tmp_path: Path):
    path = tmp_path / "layers.py"
    for number in (2, 3):
        path.write_text(f"def layers():\n    return {number}\n", encoding="utf-8")
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert user_function(f"{path}:layers", "--module")() == number


def test_a_file_imports_those_beside_it_and_none_of_their_names_beside_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for number in (2, 3):
        folder = tmp_path / str(number)
        (folder / "parts_of_mine").mkdir(parents=True)
        (folder / "parts_of_mine" / "__init__.py").write_text("from parts_of_mine.inner import N\n", encoding="utf-8")
        (folder / "parts_of_mine" / "inner.py").write_text(f"N = {number}\n", encoding="utf-8")
        text = "def layers():\n    import parts_of_mine\n    return parts_of_mine.N\n"
        (folder / "mine.py").write_text(text, encoding="utf-8")
        assert user_function(f"{folder}/mine.py:layers", "--module")() == number
