"""Every calibration that comes with autoshard says what it rests on, and where it is stretched."""

import json
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from autoshard.cost.calibration import (
    CONSTANTS,
    EFFICIENCIES,
    SECONDS,
    Calibration,
    built_in,
    load_calibration,
    uncalibrated,
)
from autoshard.cost.predict import predict
from autoshard.cost.provenance import calibration_entries
from autoshard.spec.cluster_catalogue import cluster_names, load_cluster
from tests.cost.cases import ask, plan_of

FILES = sorted((Path(str(resources.files("autoshard.cost"))) / "calibrations").glob("*.json"), key=lambda one: one.name)
STATED = {"name", "basis", "reach", "fit", "sources"}

# Clusters without measured runs of their own -> the family of chips that they belong to.
NEAR = {
    "trn1n.32xlarge": "trn1", "trn2.48xlarge": "trn1", "trn2u.48xlarge": "trn1", "a100-40": "a100",
    "p4d.24xlarge": "a100", "p4de.24xlarge": "a100", "p5.48xlarge": "h100", "h200": "h100", "p5en.48xlarge": "h100",
    "p6-b200.48xlarge": "b200",
}  # fmt: skip


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
    year, month, day = (*map(int, found.fit.date.split("-")), 1, 1)[:3]  # publishers may leave out the day
    assert date(year, month, day).isoformat().startswith(found.fit.date) and year > 2020
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
    said = basis_on(cluster, found)
    assert calibration_entries(found)["calibration.basis"] == found.basis
    if cluster in measured:
        assert found.reach and found.reach.cluster == cluster
        assert f"extrapolated to {cluster}" not in said
    elif found is uncalibrated():
        assert cluster not in NEAR and said == found.basis and said.startswith("uncalibrated")
    else:
        assert found.reach and found.reach.cluster in measured
        assert found.reach.cluster.startswith(NEAR.get(cluster, cluster.partition("-")[0]))
        assert f"extrapolated to {cluster}" in said and f"rows of {found.reach.cluster}" in said


def basis_on(cluster: str, calibration: Calibration) -> str:
    """What a plan of one node says that its seconds rest on."""
    ranks = load_cluster(cluster).num_ranks
    return predict(plan_of(ask("llama3-8b", cluster, 1), f"tp={ranks}"), calibration).basis


def test_what_is_borrowed_has_twice_the_interval():
    own, borrowed = built_in("trn1.32xlarge"), built_in("trn1n.32xlarge")
    assert own == borrowed
    widths = []
    for cluster in ("trn1.32xlarge", "trn1n.32xlarge"):
        made = predict(plan_of(ask("llama3-8b", cluster, 1), "tp=32"), own)
        widths.append(made.high_s / made.step_time_s - 1)
    assert widths[1] == pytest.approx(2 * widths[0])
