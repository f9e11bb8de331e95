"""Every recipe has a plan that fits; what AWS ships is legal and has one of ours, or the reason why not stands here."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest

from autoshard.plan.build import num_kv_replicas
from autoshard.plan.verify import verify
from autoshard.search.ask.api import request_of
from autoshard.search.ask.planner import search
from autoshard.search.bound.request import plan_at, rejections_of
from autoshard.spec.recipe import Recipe, about, load_recipe, recipe_files
from benchmarks.aws_recipes import AwsRecipe, load_aws_recipes
from tests.slower import each_third_is_fast, rest_is_slow

RECIPES = {path.stem: path for path in recipe_files()}
TINY = [name for name in RECIPES if name.startswith("tiny-")]
PAID = [name for name in RECIPES if name not in TINY]
AWS = load_aws_recipes()
PRE_TRAINING = [one for one in AWS if one.work == "pretraining"]


@cache
def recipe(name: str) -> Recipe:
    return load_recipe(RECIPES[name])


@pytest.mark.parametrize("name", rest_is_slow(PAID))  # small ones are planned where they are trained, in tests/runtime
def test_the_recipe_has_a_plan_that_fits_and_a_certificate(name: str):
    found = search(request_of(recipe(name).question, recipe(name).nodes))
    (plan,) = found.plans
    assert verify(plan) == ()
    assert plan.prediction and plan.prediction.peak_bytes <= plan.cluster.rank_memory_bytes
    assert not found.certificate.stopped
    assert 0 <= found.certificate.gap <= 0.15  # most are below 0.02; 32k tokens are at 0.13 (docs/understand/proven.md)


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
    assert name.startswith(str(one.question.model).removesuffix("-untied")) and name.endswith(f"-{one.nodes}")
    assert one.training.data.sets
    assert all(f"--out {tokens}" in text or f" to {tokens}" in text for tokens in one.training.data.sets)


@pytest.mark.parametrize("theirs", PRE_TRAINING, ids=[one.name for one in PRE_TRAINING])
def test_each_of_the_vendors_recipes_has_one_of_ours(theirs: AwsRecipe):
    ours = [recipe(name) for name in PAID]
    asked = [(one.question, one.nodes) for one in ours]
    same = [one for one, nodes in asked if (one.model, one.cluster, nodes, one.lnc) == key(theirs)]
    assert same
    assert any(one.seq_len == theirs.seq_len or one.fix == f"cp={theirs.cp}" for one in same)


def key(theirs: AwsRecipe) -> tuple[str, str, int, int | None]:
    return theirs.model, theirs.cluster, theirs.nodes, theirs.lnc


def test_every_kind_of_work_has_a_small_twin():
    kinds = {kind(recipe(name)) for name in PAID}
    assert kinds == {kind(recipe(name)) for name in TINY}
    assert {recipe(name).question.cluster for name in TINY} == {"local"}


def kind(one: Recipe) -> str:
    if one.training.data.loss_on == "answers":
        return "sft"
    question = one.question
    if question.fix and question.fix.startswith("cp="):
        return "long context"
    if one.training.init_weights:
        return "continual"
    model = str(question.model)
    return "gpt" if "gpt" in model else "mixture" if "mixtral" in model else "dense"


# recipe -> the Rules that refuse its layout, and why they stay as they are
DISCREPANCIES: Mapping[str, tuple[set[str], str]] = {
    "megatron_llama_70b_config.yaml": (
        {"trn1-dp"},
        "tp 8 and pp 16 on the 256 ranks of 8 nodes leave dp 2. With a pipeline, megatron_init.py:131-155 of the same "
        "repository asks for dp 1 or dp*tp of at least 32. Release 2.26 ships that check, but calls the copy in "
        "lightning_modules/model/megatron_init.py, which has none. The check is the vendor's only statement about "
        "these groups, and no published run says that it is wrong, so that the Rule follows it and names the recipe.",
    ),
}

every_recipe = pytest.mark.parametrize("recipe", AWS, ids=[recipe.name for recipe in AWS])
# Those for preferences and with adapters have another step than the one that is modelled; their layouts are judged too.
every_modelled = pytest.mark.parametrize(
    "recipe",
    each_third_is_fast(recipe for recipe in AWS if recipe.work in ("pretraining", "sft")),
    ids=lambda recipe: recipe.name,
)


def test_there_are_all_of_them_and_each_says_where_it_is_from():
    names = [recipe.name for recipe in AWS]
    assert len(names) == len(set(names)) == 22  # files in examples/conf of release 2.26
    assert all(recipe.source.endswith(f"/examples/conf/{recipe.name}") for recipe in AWS)


@every_recipe
def test_the_layout_is_legal_and_holds_the_kv_heads_as_often_as_the_recipe_says(recipe: AwsRecipe):
    found = rejections_of(recipe.request(), recipe.candidate(), "nxd")
    rules, why = DISCREPANCIES.get(recipe.name, (set[str](), ""))
    assert {rejection.rule_id for rejection in found} == rules, (why, *map(str, found))
    assert all(recipe.name in rejection.source for rejection in found), "a Rule names the recipe that breaks it"
    assert recipe.kv_replicator in (None, num_kv_replicas(recipe.spec(), recipe.tp))


@every_modelled
def test_the_plan_fits_and_twice_the_micro_batch_fits_but_for_three(recipe: AwsRecipe):
    # Each of these files writes "limited by TRN memory" beside its micro-batch of 1. By our model three are: two
    # sequences fill 104% of a rank (megatron_llama_7B and its SFT) or 110% (megatron_mistral), else 35% to 93%.
    # The comment is the same in models of 4 and of 126 layers, and no published run says what a NeuronCore held, so
    # the model is not bent to it.
    limited = {"megatron_llama2_7B_SFT_config.yaml", "megatron_llama_7B_config.yaml", "megatron_mistral_config.yaml"}
    assert share_of_memory(recipe) <= 1
    assert (share_of_memory(replace(recipe, micro_batch=2)) > 1) == (recipe.name in limited)


def share_of_memory(recipe: AwsRecipe) -> float:
    plan = plan_at(recipe.request(), recipe.candidate(), even_refused=True)
    assert plan.prediction
    return plan.prediction.peak_bytes / plan.cluster.rank_memory_bytes
