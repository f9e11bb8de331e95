"""Every calibration that comes with autoshard says what it rests on, and where it is stretched."""

import json
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from autoshard.cost.calibration import CONSTANTS, EFFICIENCIES, SECONDS, built_in, load_calibration, uncalibrated
from autoshard.cost.predict import predict
from autoshard.cost.worth import carried
from autoshard.spec.cluster_catalogue import cluster_names, load_cluster
from tests.cost.cases import ask, plan_of

FILES = sorted((Path(str(resources.files("autoshard.cost"))) / "calibrations").glob("*.json"), key=lambda one: one.name)
STATED = {"name", "basis", "reach", "fit", "sources"}

# Clusters without measured runs of their own -> those that are built of like chips, the most alike first.
NEAR = {
    "trn1n.32xlarge": ("trn1.32xlarge",),
    "a100-40": ("a100-80", "a100-800g"),
    "p4d.24xlarge": ("a100-40", "a100-80", "a100-800g"),
    "p4de.24xlarge": ("a100-80", "a100-800g"),
    "p5.48xlarge": ("h100-80", "h100-96"),
    "h200": ("h100-80", "h100-96"),
    "p5en.48xlarge": ("h200", "h100-80", "h100-96"),
    "p6-b200.48xlarge": ("b200",),
}


def data_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def names(number: object) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_names_its_cluster_rows_and_date(path: Path):
    found = load_calibration(path)
    assert found.name == path.stem and found is not uncalibrated()
    assert found.fit and found.reach and found.reach.cluster == path.stem and path.stem in cluster_names()
    assert len(set(found.fit.rows)) == len(found.fit.rows) >= found.fit.num_layouts >= 2
    assert all(row.strip() for row in found.fit.rows)
    assert date.fromisoformat(found.fit.date).isoformat() == found.fit.date
    for said in (f"{len(found.fit.rows)} rows", path.stem, found.fit.date, f"{found.interval:.0%}"):
        assert said in found.basis, "the sentence of every plan"
    assert built_in(path.stem) == found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_numbers_are_rates_and_times_and_none_is_memory(path: Path):
    data = data_of(path)
    assert {key for key, value in data.items() if names(value)} == {*CONSTANTS, "interval"}
    assert data.keys() == {*CONSTANTS, "interval", *STATED}
    assert not [key for key in data if "bytes" in key or "gib" in key]
    assert data["sources"].keys() == {*CONSTANTS, "interval"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_few_constants_are_told_apart(path: Path):
    found, nominal = load_calibration(path), uncalibrated()
    rates = {getattr(found, name) for name in EFFICIENCIES}
    times = {name for name in SECONDS if getattr(found, name) != getattr(nominal, name)}
    compiled = path.stem.startswith("trn")
    assert len(rates) + len(times) <= (4 if compiled else 10)
    assert not (compiled and times), "a compiled graph is started once, whatever it does"
    assert found.fit and found.fit.tried, "how many there are was decided by what was left out"
    assert found.fit.left_out_mape <= min(found.fit.tried.values()) + 1e-3


@pytest.mark.parametrize("cluster", cluster_names())
def test_a_cluster_has_its_own_constants_or_says_whose_it_borrows(cluster: str):
    found, measured = built_in(cluster), {path.stem for path in FILES}
    near = [name for name in NEAR.get(cluster, ()) if name in measured]
    if cluster in measured:
        assert found.reach and found.reach.cluster == cluster
    elif not near:
        assert found is uncalibrated()
    else:
        assert found.reach and found.reach.cluster in near
    ranks = load_cluster(cluster).num_ranks
    plan = plan_of(ask("llama3-8b", cluster, 1), f"tp={ranks}")
    said = predict(plan, found).basis
    assert ("extrapolated to" in said and f" {cluster}," in said) == (cluster not in measured and bool(near))
    assert carried(found)["calibration.basis"] == found.basis
    if near:
        assert found.reach and f"rows of {found.reach.cluster}" in said
    else:
        assert (cluster in measured) != said.startswith("uncalibrated")


def test_some_cluster_is_measured_and_some_borrows():
    assert "trn1.32xlarge" in {path.stem for path in FILES}
    assert built_in("trn1n.32xlarge") == built_in("trn1.32xlarge")
