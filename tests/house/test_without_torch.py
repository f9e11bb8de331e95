"""The planner lives without torch, einops, wandb and transformers: absent or installed, it never loads them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slower import rest_is_slow

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "einops", "torch_xla", "torch_neuronx", "neuronx_distributed", "wandb", "transformers")

# Python imports a module of this name when it starts: from then on the heavy packages are not installed.
ABSENT = f"""
import sys

class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent)
"""

# Runs the command line as `python -m autoshard.cli` does, then prints which heavy packages it has loaded.
RUN = f"""
import runpy, sys
try:
    runpy.run_module("autoshard.cli", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, f"exit code {{end.code}}"
print("loaded:", sorted(set({HEAVY!r}) & set(sys.modules)))
"""

PLAN = ("plan", "--model", "llama3-8b", "--cluster", "trn1.32xlarge", "--fix", "tp=8,pp=4,mbs=1")
LAUNCH = ("launch", str(ROOT / "recipes" / "tiny-text.yaml"), "--scheduler", "slurm")
SWEEP = ("sweep", "sweep.yaml", "--jobs", "1")
QUESTION = "base: {model: tiny-llama, cluster: local, fix: 'tp=1,pp=1,mbs=8'}\n"


def python(code: str, *arguments: str, cwd: Path, first: Path | None = None) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join(str(folder) for folder in (first, ROOT) if folder is not None)
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def absent(tmp_path: Path) -> Path:
    folder = tmp_path / "absent"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(ABSENT, encoding="utf-8")
    return folder


def test_a_heavy_package_is_really_absent(absent: Path, tmp_path: Path) -> None:
    done = python("import torch", cwd=tmp_path, first=absent)
    assert done.returncode == 1 and "No module named 'torch'" in done.stderr


@pytest.mark.parametrize(
    "command", rest_is_slow([(("list", "models"),), (PLAN,), (LAUNCH,), (SWEEP,)], 1, 3), ids=lambda command: command[0]
)
def test_commands_work_where_torch_is_absent(command: tuple[str, ...], absent: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(QUESTION, encoding="utf-8")
    done = python(RUN, *command, cwd=tmp_path, first=absent)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.json").is_file() == ("plan" in command)


def test_a_plan_loads_no_torch_where_it_is_installed(tmp_path: Path) -> None:
    done = python(RUN, *PLAN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"
