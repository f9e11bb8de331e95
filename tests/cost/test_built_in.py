"""Every calibration that comes with autoshard says what it rests on, and where it is stretched."""

import json
from datetime import date
from importlib import resources
from pathlib import Path

import pytest

from autoshard.cost.calibration import CONSTANTS, EFFICIENCIES, SECONDS, built_in, load_calibration, uncalibrated
from autoshard.cost.predict import predict
from autoshard.spec.cluster_catalogue import cluster_names, load_cluster
from tests.cost.cases import ask, plan_of

FILES = sorted((Path(str(resources.files("autoshard.cost"))) / "calibrations").glob("*.json"), key=lambda one: one.name)
STATED = {"name", "basis", "reach", "fit", "sources"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_names_its_cluster_rows_and_date_and_holds_rates_and_times_only(path: Path):
    found = load_calibration(path)
    assert found.name == path.stem and found is not uncalibrated()
    assert found.fit and found.reach and found.reach.cluster == path.stem and path.stem in cluster_names()
    assert len(set(found.fit.rows)) == len(found.fit.rows) >= found.fit.num_layouts >= 2
    assert all(row.strip() for row in found.fit.rows)
    year, month, day = (*map(int, found.fit.date.split("-")), 1, 1)[:3]  # publishers may leave out the day
    assert date(year, month, day).isoformat().startswith(found.fit.date) and year > 2020
    for words in (f"{len(found.fit.rows)} rows", path.stem, found.fit.date, f"{found.interval:.0%}"):
        assert words in found.basis, "the sentence of every plan"
    assert built_in(path.stem) == found
    data = json.loads(path.read_text("utf-8"))
    assert data.keys() == {*CONSTANTS, "interval", *STATED}, "no memory: that is data of the kernels"
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
    found = built_in(cluster)
    basis = predict(plan_of(ask("llama3-8b", cluster, 1), f"tp={load_cluster(cluster).num_ranks}"), found).basis
    if found is uncalibrated():
        assert basis == found.basis and basis.startswith("uncalibrated")
        return
    assert found.reach
    if cluster in {path.stem for path in FILES}:
        assert found.reach.cluster == cluster and f"extrapolated to {cluster}" not in basis
    else:
        assert f"extrapolated to {cluster}" in basis and f"rows of {found.reach.cluster}" in basis
