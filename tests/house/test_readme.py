"""The first screen of the README runs."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST_SCREEN_LINES = 30

# What a test cannot repeat: it fetches the repository, or enters it.
PREPARATION = ("git", "cd")


def typed_commands() -> list[str]:
    """The commands in the shell blocks of the first screen, without prompts and comments."""
    text = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:FIRST_SCREEN_LINES])
    blocks = re.findall(r"^```(?:bash|console|sh|shell)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"^\$ |\s+#.*$", "", line).strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(("make ", "autoshard ", *PREPARATION))]


def recipe(target: str) -> str:
    """The last line that make would run for a target."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--dry-run", target]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_the_two_commands_come_first() -> None:
    assert [line for line in typed_commands() if line.startswith("make ")][:2] == ["make plan", "make test"]


def test_make_test_runs_the_tests() -> None:
    assert "-m pytest" in recipe("test")


def test_what_the_first_screen_types_works(tmp_path: Path) -> None:
    typed = [recipe("plan") if line == "make plan" else line for line in typed_commands()]
    plans = [shlex.split(line)[1:] for line in typed if Path(line.split()[0]).name == "autoshard"]
    assert plans
    for arguments in plans:
        command = [sys.executable, "-m", "autoshard.cli", *arguments]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"


def test_the_line_of_a_table_that_is_shown_stands_in_the_plan(tmp_path: Path) -> None:
    shown = re.search(r'^"(\w+)": "(.*)"$', (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert shown
    command = [sys.executable, "-m", "autoshard.cli", "plan", "--model", "llama3-70b", "--nodes", "16"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=True)
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert plan["strategies"]["layer"][shown[1]] == shown[2]
