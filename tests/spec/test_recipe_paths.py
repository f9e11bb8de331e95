"""Paths in files lead from the folder of their file, and from where we are where nothing is there."""

import json
import shutil
from pathlib import Path

import pytest

from autoshard.errors import InputError
from autoshard.plan.codec import load
from autoshard.spec.files import seen_from
from autoshard.spec.model_catalogue import load_config, model_names
from autoshard.spec.recipe import entries_seen_from
from tests.conftest import Typed
from tests.sweep.sweep_cases import points, tiny

BASED = {"base": "h100-80", "chips_per_node": 4, "source": "the test"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = Path("sub")
    folder.mkdir()
    (folder / "card.json").write_text(json.dumps(load_config("tiny-llama")), encoding="utf-8")
    (folder / "cluster.json").write_text(json.dumps(BASED), encoding="utf-8")
    (folder / "code.py").write_text("def make(): ...\n", encoding="utf-8")
    return folder


def test_a_path_leads_from_the_file_that_states_it_and_else_from_here(folder: Path) -> None:
    shutil.copy(folder / "card.json", "card.json")
    Path("here.json").touch()
    names = ("card.json", "here.json", "code.py:make", "nowhere.json", str(Path("card.json").resolve()))
    here = ("sub/card.json", "here.json", "sub/code.py:make", "nowhere.json", names[-1])
    assert tuple(seen_from(name, folder) for name in names) == here


def test_names_of_catalogues_are_no_paths(folder: Path) -> None:
    for name in (model_names()[0], "h100"):
        (folder / name).mkdir()
    stated = {"model": model_names()[0], "cluster": "h100,cluster.json", "calibration": None, "seq_len": 64}
    assert entries_seen_from(stated, folder) == {**stated, "cluster": "h100,sub/cluster.json"}


def test_recipes_and_sweeps_follow_the_same_rule(folder: Path, typed: Typed) -> None:
    (folder / "recipe.yaml").write_text("model: card.json\ncluster: cluster.json\nseq_len: 64\n", encoding="utf-8")
    assert typed("plan --config sub/recipe.yaml --at tp=1,dp=4")[0] == 0
    plan = load(Path("plan.json"))
    assert (plan.model.name, plan.cluster.num_ranks) == ("card", 4)
    sweep = tiny(recipe="recipe.yaml", base={}, grid={"cluster": ("cluster.json", "local")})
    asked = [(point.entries["model"], point.entries["cluster"]) for point in points(sweep, folder)]
    assert asked == [("sub/card.json", "sub/cluster.json"), ("sub/card.json", "local")]
    ours = tiny(base={}, grid={"module": ("code.py:make",)})
    assert [point.module for point in points(ours, folder)] == ["sub/code.py:make"]
    with pytest.raises(InputError, match=r"cluster nowhere\.json|nowhere\.json: there is no such file"):
        points(tiny(grid={"plan": ("nowhere.json",)}, base={}), folder)
