"""Which questions a sweep file stands for, and what names them."""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard.errors import InputError
from autoshard.plan.codec import dump
from autoshard.spec.files import shipped
from autoshard.spec.recipe import about, recipe_of
from autoshard.sweep.points import Sweep, load_sweep, points_of
from autoshard.sweep.questions import SweepQuestions
from tests.sweep.sweep_cases import TINY, points, tiny, written

SHIPPED = sorted(shipped("recipes").glob("sweeps/*.yaml"))


@cache
def plan_text(tp: int) -> str:
    return dump(autoshard.plan("tiny-llama", "local", fix={"tp": tp, "pp": 1, "mbs": 8}).plan)


def test_a_grid_is_every_combination_and_a_zip_goes_together():
    sweep = tiny(
        grid={"ranks": (1, 2)}, zip={"seq_len": (32, 64), "global_batch": (8, 4)}, list=({"model": "tiny-gpt"},)
    )
    found = [
        (
            one.recipe.question.model,
            one.recipe.question.seq_len,
            one.recipe.question.global_batch,
            one.recipe.question.ranks,
        )
        for one in points(sweep)
    ]
    assert found == [("tiny-gpt", 32, 8, 1), ("tiny-gpt", 32, 8, 2), ("tiny-gpt", 64, 4, 1), ("tiny-gpt", 64, 4, 2)]
    assert points(sweep)[0].name == "model=tiny-gpt seq_len=32 global_batch=8 ranks=1"


def test_dots_go_into_sections_and_null_takes_away_and_fix_is_pinned():
    grid = {
        "schedule.warm_up_steps": (3,),
        "fix.mbs": (2,),
        "fix.tp": (None, 1),
        "fix.sp": (False,),
        "seq_len": (None,),
    }
    base = {**TINY, "fix": "pp=1,mbs=1,tp=2,recompute=selective[norms,attend]", "schedule": {"shape": "cosine"}}
    one, other = points(tiny(mode="run", base=base, grid=grid))
    assert one.recipe.training.schedule.warm_up_steps == 3 and one.recipe.training.schedule.shape == "cosine"
    kept = "pp=1,recompute=selective[norms,attend],mbs=2"  # what the sweep says of a key goes before the recipe's own
    assert (one.recipe.question.fix, other.recipe.question.fix) == (f"{kept},sp=false", f"{kept},tp=1,sp=false")
    assert one.recipe.question.seq_len is None
    assert "schedule.warm_up_steps=3" in one.name


def test_numbers_may_be_written_as_on_the_command_line():
    entries = {"model": "tiny-llama", "nodes": "1k", "seq_len": "8k", "headroom": "5%", "global_batch": "4M"}
    recipe = recipe_of({**entries, "steps": "2k", "checkpoint": {"every_steps": "1k"}})
    assert (recipe.question.seq_len, recipe.question.headroom, recipe.nodes) == (8192, 0.05, 1000)
    assert recipe.question.global_batch == "4M", "whose tokens are counted with its length"
    assert (recipe.training.steps, recipe.training.checkpoint.every_steps) == (2000, 1000)
    with pytest.raises(InputError, match="seq_len: expected a whole number, found '8x'"):
        recipe_of({**entries, "seq_len": "8x"})


def test_a_point_is_named_by_its_whole_question(tmp_path: Path):
    (one,) = points(tiny(grid={}))
    same = tiny(grid={"global_batch": (16,), "ranks": (None,)})  # said otherwise
    assert points(same)[0].id == one.id
    config = tmp_path / "config.json"
    card = json.loads((shipped("models") / "tiny-llama.json").read_text(encoding="utf-8"))
    config.write_text(json.dumps(card))
    asked = tiny(base={**TINY, "model": str(config)}, grid={})
    (before,) = points(asked)
    config.write_text(json.dumps(card) + "\n")
    (after,) = points(asked)
    assert len({one.id, before.id, after.id}) == 3, "what a file holds is part of the question"


def test_what_is_trained_names_runs_and_not_plans():
    plans, runs = tiny(grid={"steps": (5, 6)}), tiny(mode="run", grid={"steps": (5, 6)})
    assert len(points(plans)) == 1 and len(points(runs)) == 2
    assert points(runs)[0].id != points(dataclasses.replace(runs, rehearse=2))[0].id


def test_the_frontier_is_the_best_plans_of_each_question():
    found = points(tiny(frontier=3))
    assert [one.choice for one in found] == [1, 2, 3, 1, 2, 3]
    assert len({one.id for one in found}) == 6 and found[2].name == "ranks=1 #3"


FAULTY: list[tuple[dict[str, Any], str]] = [
    ({"grid": {"modell": ["a"]}, "base": TINY}, "modell: unknown key. Did you mean model?"),
    ({"grid": {"nodes": []}, "base": TINY}, "grid.nodes: has no values"),
    ({"zip": {"nodes": [1, 2], "lnc": [1]}, "base": TINY}, "zip: lists of one length go together, not of 1 and 2"),
    ({"base": TINY, "rehearse": 2}, "rehearse: is of mode run. Write mode: run"),
    ({"base": TINY, "frontier": 0}, "frontier: must be 1 to 100, not 0"),
    ({"base": {**TINY, "module": "mine.py:make"}, "grid": {"nodes": [1]}}, "module: is the model. Leave out model"),
    ({"base": TINY, "gird": {}}, "gird: unknown key. Did you mean grid?"),
    ({"base": {"nodes": 1}}, "model: missing"),
    ({"recipe": "nowhere.yaml"}, "nowhere.yaml: there is no such file"),
    ({"base": TINY, "grid": {"nodes": list(range(1000)), "seq_len": list(range(1000))}}, "has at most 100000"),
    ({"base": TINY, "grid": {"schedule.shape": ["round"]}}, "schedule.shape: expected one of"),
    ({"base": TINY, "zip": {"nodes": [1, 2]}, "grid": {"nodes": [4]}}, "zip.nodes: sets the same as grid.nodes"),
    ({"base": TINY, "list": [{"ranks": 1}], "grid": {"ranks": [2]}}, "list.ranks: sets the same as grid.ranks"),
    ({"base": TINY, "list": [{"seed": 1}], "zip": {"seed": [2]}}, "list.seed: sets the same as zip.seed"),
    (
        {"base": TINY, "zip": {"schedule.shape": ["cosine"]}, "grid": {"schedule": [{"shape": "linear"}]}},
        "zip.schedule.shape: sets the same as grid.schedule",
    ),
    ({"base": TINY, "grid": {"fix": ["tp=1"], "fix.tp": [2]}}, "grid.fix: sets the same as grid.fix.tp"),
]


@pytest.mark.parametrize(("data", "says"), FAULTY)
def test_what_is_wrong_is_said_before_anything_is_done(data: dict[str, Any], says: str, tmp_path: Path):
    with pytest.raises(InputError) as caught:
        points_of(load_sweep(written(data, tmp_path)), tmp_path)
    assert says in str(caught.value)


def test_keys_of_several_axes_that_set_different_things_are_combined():
    grid = {"fix": ("tp=1", "tp=2"), "fix.pp": (1, 2), "schedule.shape": ("linear",)}
    found = points(tiny(mode="run", grid=grid, list=({"schedule.warm_up_steps": 1}, {"schedule.warm_up_steps": 2})))
    assert len({(one.recipe.question.fix, one.recipe.training.schedule.warm_up_steps) for one in found}) == 8


@pytest.mark.parametrize(
    ("sweep", "varies"),
    [
        ({"mode": "run", "grid": {"learning_rate": [0.1, 0.2]}}, True),
        ({"mode": "run", "zip": {"schedule.shape": ["linear"]}}, True),
        ({"mode": "run", "list": [{"ranks": 1}, {"seed": 3}]}, True),
        ({"mode": "run", "grid": {"ranks": [1, 2]}}, False),
        ({"mode": "plan", "grid": {"learning_rate": [0.1, 0.2]}}, False),
    ],
)
def test_a_sweep_of_training_is_one_whose_runs_are_trained_in_other_ways(sweep: dict[str, Any], varies: bool):
    assert tiny(**{"grid": {}, **sweep}).varies_training == varies


def test_all_faults_of_all_points_are_one_error():
    with pytest.raises(InputError) as caught:
        points(tiny(grid={"precision": ("bf17", "bf16", "fp31"), "engine": ("cuda", "torch")}))
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_sweeps_that_come_along_say_what_they_are_and_have_points(path: Path):
    sweep = load_sweep(path)
    assert about(path).endswith((".", "?"))
    found = points_of(sweep, path.parent)
    assert 3 <= len(found) <= 40
    assert sweep.mode == "plan" or all(one.recipe.question.cluster == "local" for one in found)


def test_a_plan_file_stands_in_the_place_of_a_question(tmp_path: Path):
    for tp, name in ((1, "one"), (2, "two")):
        (tmp_path / f"{name}.json").write_text(plan_text(tp), encoding="utf-8")
    sweep = Sweep(mode="run", base={"steps": 5}, list=({"plan": "one.json"}, {"plan": "two.json"}))
    found = points(sweep, tmp_path)
    assert [one.plan for one in found] == [tmp_path / "one.json", tmp_path / "two.json"]
    assert (found[0].recipe.training.steps, found[0].recipe.nodes, found[0].name) == (5, 1, "plan=one.json")
    (tmp_path / "one.json").write_bytes((tmp_path / "two.json").read_bytes())
    other, same = points(sweep, tmp_path)
    assert other.id != found[0].id and same.id == found[1].id, "a point is named by what its plan holds"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"plan": "none.json"}, "none.json"),
        ({"plan": "one.json", "seq_len": 64, "nodes": 2}, "plan: has answered its question. Leave out nodes, seq_len"),
        ({"plan": "one.json", "stepz": 3}, "plan: has answered its question. Leave out stepz"),
        ({"plan": "one.json", "steps": 0}, "steps: must be at least 1"),
    ],
)
def test_a_plan_file_takes_only_keys_of_training_beside_it(keys: dict[str, Any], says: str, tmp_path: Path):
    (tmp_path / "one.json").write_text(plan_text(2), encoding="utf-8")
    with pytest.raises(InputError, match=says):
        points_of(Sweep(list=(keys,)), tmp_path)


def test_a_value_that_only_some_points_refuse_is_no_mistake():
    lnc = {"cluster": ("trn1.32xlarge", "trn2.48xlarge"), "lnc": (None, 1)}
    SweepQuestions(tiny(base={"model": "llama3-8b"}, grid=lnc), Path()).refuse()
    with pytest.raises(InputError, match=r"^lnc: must be 1 or 2|^lnc: .*3"):
        SweepQuestions(tiny(base={"model": "llama3-8b"}, grid={**lnc, "lnc": (None, 3)}), Path()).refuse()
