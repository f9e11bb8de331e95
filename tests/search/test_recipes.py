"""Every recipe that comes with autoshard has a plan that fits."""

from pathlib import Path

import pytest

from autoshard.plan.verify import verify
from autoshard.search.api import request_of
from autoshard.search.planner import search
from autoshard.spec.recipe import load_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_the_recipe_has_a_plan(path: Path):
    (plan,) = search(request_of(load_recipe(path))).plans
    assert verify(plan) == ()
    assert plan.prediction
    assert plan.prediction.peak_bytes <= plan.cluster.rank_memory_bytes
