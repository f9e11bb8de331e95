"""Recipes: small files, strictly read."""

import json
from pathlib import Path

import pytest

from autoshard.errors import InputError
from autoshard.spec.recipe import Recipe, about, load_recipe


def test_a_recipe_is_read_from_yaml_and_from_json(tmp_path: Path):
    expected = Recipe(model="llama3-8b", nodes=4, fix="tp=8,pp=4")
    (tmp_path / "a.yaml").write_text("model: llama3-8b\nnodes: 4\nfix: tp=8,pp=4\n")
    (tmp_path / "a.json").write_text(json.dumps({"model": "llama3-8b", "nodes": 4, "fix": "tp=8,pp=4"}))
    assert load_recipe(tmp_path / "a.yaml") == load_recipe(tmp_path / "a.json") == expected


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("nodes: 2\n", ["model: missing"]),
        ("model: ''\ncluster: ' '\n", ["model: must name a card", "cluster: must name a cluster"]),
        ("model: x\nnodez: 2\nnodes: two\n", ["nodez: unknown key", "nodes: expected a whole number"]),
        ("model: x\nlearning-rate: 1\nlearning_rat: 1\n", ["learning-rate: unknown", "Did you mean learning_rate?"]),
        ("model: x\ntraining: {steps: 3}\n", ["training: unknown key"]),
        ("model: x\nschedule: {shap: cosine}\nsteps: 0\n", ["schedule.shap: unknown key. Did", "steps: must"]),
        ("model: x\nsteps: 1\nsteps: 2\n", ["the key 'steps' stands twice"]),
        ("model: x\nadamw: {eps: 1.0e-5, eps: 1}\n", ["the key 'eps' stands twice"]),
        ("model: x\noptimizer: lion\n", ["optimizer: expected one of adamw, sgd, found 'lion'"]),
        ("model: x\ndocuments: apart\n", ["documents: expected one of joined, separate, found 'apart'"]),
        ("model: x\nprecision: fp8\n", ["precision: expected one of bf16, bf16-sr, fp16, fp32, found 'fp8'"]),
        ("- model: x\n", ["expected an object, found a list"]),
        ("model: [x\n", ["is not YAML"]),
    ],
)
def test_every_fault_names_the_file(tmp_path: Path, text: str, faults: list[str]):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_recipe(path)
    assert len(caught.value.faults) == len(faults)
    for fault, words in zip(caught.value.faults, faults, strict=True):
        assert str(path) in str(fault)
        assert words in str(fault)


def test_a_recipe_says_of_itself_what_its_first_comment_says(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("# A model.\n# More.\nmodel: x\n")
    (tmp_path / "b.yaml").write_text("model: x  # no\n# A model.\n")
    assert (about(tmp_path / "a.yaml"), about(tmp_path / "b.yaml")) == ("A model.", "")


def test_a_missing_recipe_is_an_input_error(tmp_path: Path):
    with pytest.raises(InputError, match="No such file"):
        load_recipe(tmp_path / "none.yaml")
