"""Lists of names: complete, and each name is one that the commands take."""

from pathlib import Path

import pytest

from autoshard.plan.rules.check import all_rules
from autoshard.report.listing import entries, listing_text
from autoshard.schedule.builders import BUILDERS
from autoshard.spec.cluster_catalogue import cluster_names, load_cluster
from autoshard.spec.kernels import kernels_names
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.recipe import recipe_files

NAMES = {
    "models": model_names(),
    "recipes": tuple(str(path) for path in recipe_files()),
    "clusters": cluster_names(),
    "engines": ("nxd", "torch"),
    "schedules": tuple(BUILDERS),
    "kernels": kernels_names(),
    "rules": tuple(rule.id for rule in all_rules()),
}


@pytest.mark.parametrize("what", NAMES)
def test_a_list_is_complete_and_a_rectangle(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    rows = entries(what)
    assert [row["name"] for row in rows] == list(NAMES[what])
    assert len({tuple(row) for row in rows}) == 1
    assert all(value for row in rows for value in row.values())
    lines = listing_text(rows).splitlines()
    assert len(lines) == len(rows) + 1
    for key in list(rows[0])[1:]:
        column = lines[0].index(key)
        assert all(line[column - 2 : column] == "  " for line in lines)


def test_models_and_clusters_show_their_numbers_and_prices_stand_with_their_date():
    models = {row["name"]: row for row in entries("models")}
    card = load_model("mixtral-8x7b")
    assert models["mixtral-8x7b"]["parameters"] == "46.70 G"
    assert models["mixtral-8x7b"]["heads"] == f"{card.num_heads}/{card.num_kv_heads}"
    assert (models["mixtral-8x7b"]["experts"], models["gpt2-xl"]["experts"]) == ("8", "-")
    clusters = {row["name"]: row for row in entries("clusters")}
    assert clusters["trn2.48xlarge"]["ranks a node"] == "64 (lnc 2)"
    assert clusters["a100-80"]["memory a rank"] == "80.00 GiB"
    for row in clusters.values():
        cluster = load_cluster(row["name"])
        price = cluster.price_usd_per_node_hour
        assert list(row.values())[-2:] == [f"{price:.2f}" if price else "-", cluster.price_date or "-"]


def test_recipes_are_named_as_one_types_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(recipe_files()[0].parents[1])
    (row,) = (row for row in entries("recipes") if row["name"] == "recipes/llama3-70b-trn1-16.yaml")
    assert (row["model"], row["cluster"], row["nodes"]) == ("llama3-70b", "trn1.32xlarge", "16")
    assert row["about"].startswith("Llama 3 70B from scratch")
