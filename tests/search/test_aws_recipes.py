"""What AWS ships for neuronx-distributed is legal and fits, or the reason why our Rules differ stands here."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autoshard.plan.build import num_kv_replicas
from autoshard.search.request import plan_at, rejections_of
from benchmarks.aws_recipes import AwsRecipe, load_aws_recipes

RECIPES = load_aws_recipes()

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

# recipe -> why its step is not the one that is modelled; its layout is judged all the same
OTHER_STEPS: Mapping[str, str] = {
    "hf_llama3_8B_DPO_config.yaml": "two answers of each prompt are one forward pass of twice the batch, and the loss "
    "compares them with log-probabilities of a reference model that were computed before",
    "hf_llama3_8B_ORPO_config.yaml": "two answers of each prompt are one forward pass of twice the batch, and the loss "
    "compares their odds",
    "hf_llama3_8B_SFT_lora_config.yaml": "LoRA of rank 16 on qkv_proj: the weights of the model have neither gradients "
    "nor optimizer state, and the adapters are products of their own",
}

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.name for recipe in RECIPES])
every_modelled = pytest.mark.parametrize(
    "recipe", [recipe for recipe in RECIPES if recipe.name not in OTHER_STEPS], ids=lambda recipe: recipe.name
)


def test_there_are_all_of_them_and_each_says_where_it_is_from():
    names = [recipe.name for recipe in RECIPES]
    assert len(names) == len(set(names)) == 22  # files in examples/conf of release 2.26
    assert all(recipe.source.endswith(f"/examples/conf/{recipe.name}") for recipe in RECIPES)


@every_recipe
def test_the_layout_is_legal(recipe: AwsRecipe):
    found = rejections_of(recipe.request(), recipe.candidate(), "nxd")
    rules, why = DISCREPANCIES.get(recipe.name, (set[str](), ""))
    assert {rejection.rule_id for rejection in found} == rules, (why, *map(str, found))
    assert all(recipe.name in rejection.source for rejection in found), "a Rule names the recipe that breaks it"


@every_recipe
def test_the_kv_heads_are_held_as_often_as_the_recipe_says(recipe: AwsRecipe):
    if recipe.kv_replicator is not None:
        assert num_kv_replicas(recipe.spec(), recipe.tp) == recipe.kv_replicator


@every_modelled
def test_the_plan_fits(recipe: AwsRecipe):
    assert share_of_memory(recipe) <= 1


@every_modelled
def test_twice_the_micro_batch_would_fit_although_the_recipe_calls_memory_its_limit(recipe: AwsRecipe):
    # Each of these files writes "limited by TRN memory" beside its micro-batch of 1. By our model none is: 2 sequences
    # fill 24% (hf_llama_7B) to 98% (megatron_mistral) of a rank. The comment is the same in models of 4 and of 126
    # layers, and no published run says what a NeuronCore held, so that the model is not bent to it.
    assert share_of_memory(replace(recipe, micro_batch=2)) <= 1


def share_of_memory(recipe: AwsRecipe) -> float:
    plan = plan_at(recipe.request(), recipe.candidate())
    assert plan.prediction
    return plan.prediction.peak_bytes / plan.cluster.rank_memory_bytes


def test_every_exception_is_about_a_recipe():
    assert DISCREPANCIES.keys() <= {recipe.name for recipe in RECIPES}
    assert OTHER_STEPS.keys() == {recipe.name for recipe in RECIPES if recipe.work not in ("pretraining", "sft")}
