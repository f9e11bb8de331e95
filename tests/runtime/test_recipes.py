"""Recipes as a new user types them: the small ones train, the page of training runs, a night is survived."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from autoshard.cli import main
from autoshard.plan.codec import load
from autoshard.spec.recipe import load_recipe, recipe_files
from tests.runtime.cases import ROOT, environment, read_metrics
from tests.slower import rest_is_slow

SMALL = {path.stem: path for path in recipe_files() if path.stem.startswith("tiny-")}
FEW = ("--steps", "3")
FEWER = (*FEW, "--seq-len", "64", "--global-batch", "4")  # of a run whose weights are all that is wanted

# What makes a recipe the twin of its kind, as keys of its plan.
SHAPES = {"tiny-mixtral": ("ep", 2), "tiny-long-context": ("cp", 2)}


@pytest.fixture
def beside_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which one types what the recipes say, as in a clone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(next(iter(SMALL.values())).parent)
    return tmp_path


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", rest_is_slow(sorted(SMALL, key=lambda name: (name != "tiny-text", name != "tiny-mixtral", name)), 0)
)
def test_a_small_recipe_trains(name: str, beside_the_recipes: Path):
    for words in to_prepare(SMALL[name]):
        assert main([*words, *(FEWER if words[0] == "run" else ())]) == 0
    assert main(["run", f"recipes/{name}.yaml", *FEW]) == 0
    folder = beside_the_recipes / "runs" / name
    losses = [step["loss"] for step in read_metrics(folder / "metrics.jsonl")]
    assert len(losses) == 3 and np.isfinite(losses).all()
    plan, recipe = load(folder / "plan.json"), load_recipe(SMALL[name])
    assert plan.workload.documents == (recipe.question.documents or "joined")
    axis, size = SHAPES.get(name, ("pp", plan.mesh.size("pp")))
    assert plan.mesh.size(axis) == size


def to_prepare(path: Path) -> list[list[str]]:
    """Return the commands that a recipe asks for in its comment."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    return [shlex.split(line.partition("autoshard ")[2]) for line in lines if line.startswith("# First: autoshard ")]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_recipe_is_rehearsed_without_its_data_and_its_weights(beside_the_recipes: Path):
    sft = "recipes/llama3-8b-sft-a100-1.yaml"
    assert main(["run", sft, "--rehearse", "2", "--fix", "tp=2,pp=1", "--steps", "1", "--out", "tried"]) == 0
    assert load(beside_the_recipes / "tried" / "plan.json").model.name == "llama3-8b (shrunk)"


PAGE = ROOT / "docs" / "guides" / "training.md"


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.thorough
@pytest.mark.ranks
def test_every_command_of_the_page_runs_and_the_small_text_is_known_by_heart(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    assert len(commands()) >= 6
    for line in commands():
        _, *words = shlex.split(line)
        done = subprocess.run(
            [sys.executable, "-m", "autoshard.cli", *words],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr}"
    losses = curve(tmp_path / "runs" / "tiny-text")
    assert losses[1] > 6 and np.mean([losses[step] for step in range(291, 301)]) < 0.2


def curve(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}
