"""Recipes, small files strictly read; number formats and workloads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.recipe import Pins, QuestionOptions, Recipe, about, load_recipe
from autoshard.spec.record import decode, encode
from autoshard.spec.workload import DTYPE_BYTES, PRECISIONS, Precision, Workload


def test_a_recipe_is_read_from_yaml_and_from_json(tmp_path: Path):
    expected = Recipe(question=QuestionOptions(model="llama3-8b", fix=Pins("tp=8,pp=4")), nodes=4)
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
        ("model: x\nsteps: 1\nsteps: 2\n", ["the key 'steps' appears twice"]),
        ("model: x\nadamw: {eps: 1.0e-5, eps: 1}\n", ["the key 'eps' appears twice"]),
        ("model: x\noptimizer: lion\n", ["optimizer: expected one of adamw, sgd, found 'lion'"]),
        ("model: x\ndocuments: apart\n", ["documents: expected one of joined, separate, found 'apart'"]),
        ("model: x\nprecision: fp8\n", ["precision: 'fp8' is not a precision. Known: bf16, bf16-sr, fp16, fp32"]),
        ("model: x\nprecision: bf16,gradient=bf16\n", ["precision.gradient: unknown key. Did you mean gradients?"]),
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
    with pytest.raises(InputError, match="there is no such file"):
        load_recipe(tmp_path / "none.yaml")


DTYPES = st.sampled_from(sorted(DTYPE_BYTES))
ANY_PRECISION = st.builds(
    Precision, weights=DTYPES, activations=DTYPES, gradients=DTYPES, masters=st.none() | DTYPES, moments=DTYPES,
    products=st.none() | DTYPES,
)  # fmt: skip


@given(ANY_PRECISION)
def test_every_precision_is_that_of_its_name(precision: Precision):
    assert Precision.named(precision.name) == precision
    assert precision.name in PRECISIONS or "=" in precision.name


@given(ANY_PRECISION)
def test_every_precision_survives_json(precision: Precision):
    assert decode(Precision, json.loads(json.dumps(encode(precision)))) == precision


@pytest.mark.parametrize("name", PRECISIONS)
def test_no_precision_by_name_multiplies_in_a_format_of_its_own(name: str):
    precision = Precision.named(name)
    assert precision.products is None and precision.name == name
    written = {key: value for key, value in encode(precision).items() if key != "products"}
    assert decode(Precision, written) == precision, "what was written before products had a format reads as without one"
    with pytest.raises(InputError, match=r"products: expected one of bf16, fp16, fp32, fp64, fp8, int64"):
        decode(Precision, {**encode(precision), "products": "fp4"})


def test_a_chip_without_the_format_of_products_says_so():
    with pytest.raises(InputError, match=r"has no fp8 matrix rate. Known: "):
        load_cluster("a100-80").rank_matrix_flops_per_s("fp8")
    assert load_cluster("h100-80").rank_matrix_flops_per_s("fp8") == 1979e12


@pytest.mark.parametrize(
    "changes", [{"seq_len": 0}, {"global_batch": 2**31}, {"clip_norm": 0.0}, {"expert_capacity": 0.0}]
)
def test_an_impossible_workload_is_refused(changes: dict[str, Any]):
    fields: dict[str, Any] = {"seq_len": 8, "global_batch": 1, "precision": Precision.named("bf16"), **changes}
    with pytest.raises(InputError, match=rf"^{next(iter(changes))}: must be"):
        Workload(**fields)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"router_balance_loss": -0.1}, "router_balance_loss: must be"),
        ({"router_balance_loss": 1e4}, "router_balance_loss: must be"),
        ({"router_z_loss": -1.0}, "router_z_loss: must be"),
        ({"router_balance_over": "sequence"}, "router_balance_over: is sequence, but router_balance_loss is 0"),
        ({"router_balance_over": "sequence", "router_z_loss": 0.1}, "so that nothing is balanced"),
    ],
)
def test_losses_of_routers_that_cannot_be_or_do_nothing_are_refused(changes: dict[str, Any], says: str):
    with pytest.raises(InputError, match=says):
        Workload(seq_len=8, global_batch=1, precision=Precision.named("bf16"), **changes)


def test_a_workload_without_losses_of_routers_is_written_as_before_there_were_any():
    work = Workload(seq_len=8, global_batch=1, precision=Precision.named("bf16"), router_balance_loss=0.01)
    assert encode(work)["router_balance_loss"] == 0.01 and decode(Workload, encode(work)) == work
    assert not [key for key in encode(replace(work, router_balance_loss=0.0)) if "router" in key]
