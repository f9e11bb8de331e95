"""Every recipe for a cluster has a plan that fits, and the vendor's recipes have one of ours each."""

from functools import cache

import pytest

from autoshard.plan.verify import verify
from autoshard.search.api import request_of
from autoshard.search.planner import search
from autoshard.spec.recipe import Recipe, about, load_recipe, recipe_files
from benchmarks.aws_recipes import AwsRecipe, load_aws_recipes
from tests.slower import rest_is_slow

RECIPES = {path.stem: path for path in recipe_files()}
TINY = [name for name in RECIPES if name.startswith("tiny-")]
PAID = [name for name in RECIPES if name not in TINY]
PRE_TRAINING = [one for one in load_aws_recipes() if one.work == "pretraining"]


@cache
def recipe(name: str) -> Recipe:
    return load_recipe(RECIPES[name])


@pytest.mark.parametrize("name", rest_is_slow(PAID))  # small ones are planned where they are trained, in tests/runtime
def test_the_recipe_has_a_plan_that_fits_and_a_certificate(name: str):
    found = search(request_of(recipe(name)))
    (plan,) = found.plans
    assert verify(plan) == ()
    assert plan.prediction and plan.prediction.peak_bytes <= plan.cluster.rank_memory_bytes
    assert not found.certificate.stopped
    assert 0 <= found.certificate.gap <= 0.005


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_says_what_it_is_and_its_steps_are_more_than_its_warm_up(name: str):
    assert about(RECIPES[name]).endswith(".")
    training = recipe(name).training
    assert training.steps > training.schedule.warm_up_steps
    assert training.schedule.shape != "constant"
    assert training.checkpoint.keep_last == 3


@pytest.mark.parametrize("name", PAID)
def test_the_name_says_model_and_nodes_and_whoever_pays_trains_on_tokens_of_their_own(name: str):
    one, text = recipe(name), RECIPES[name].read_text(encoding="utf-8")
    assert name.startswith(one.model.removesuffix("-untied")) and name.endswith(f"-{one.nodes}")
    assert one.training.data.sets
    assert all(f"--out {tokens}" in text or f" to {tokens}" in text for tokens in one.training.data.sets)


@pytest.mark.parametrize("theirs", PRE_TRAINING, ids=[one.name for one in PRE_TRAINING])
def test_each_of_the_vendors_recipes_has_one_of_ours(theirs: AwsRecipe):
    ours = [recipe(name) for name in PAID]
    same = [one for one in ours if (one.model, one.cluster, one.nodes, one.lnc) == key(theirs)]
    assert same
    assert any(one.seq_len == theirs.seq_len or one.fix == f"cp={theirs.cp}" for one in same)


def key(theirs: AwsRecipe) -> tuple[str, str, int, int | None]:
    return theirs.model, theirs.cluster, theirs.nodes, theirs.lnc


def test_every_kind_of_work_has_a_small_twin():
    kinds = {kind(recipe(name)) for name in PAID}
    assert kinds == {kind(recipe(name)) for name in TINY}
    assert {recipe(name).cluster for name in TINY} == {"local"}


def kind(one: Recipe) -> str:
    if one.training.data.loss_on == "answers":
        return "sft"
    if one.fix and one.fix.startswith("cp="):
        return "long context"
    if one.training.init_weights:
        return "continual"
    return "gpt" if "gpt" in one.model else "mixture" if "mixtral" in one.model else "dense"
