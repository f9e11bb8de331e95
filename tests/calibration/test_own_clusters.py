"""Rows of a cluster of one's own: read with the file that lies beside them, or that `calibrate` is given."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.calibration.calibrate import fit, samples_in
from autoshard.calibration.measured_run import run_of
from autoshard.calibration.rows import OF_A_CLUSTER, OF_A_RUN, MeasuredRow, Occasion, measured_rows, row_of
from autoshard.calibration.validate import validate
from autoshard.cost.predict import predict
from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_node_type
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.record import encode
from autoshard.spec.workload import Precision, Workload

OWN: dict[str, Any] = {
    "base": "h100-80", "source": "for this test", "name": "toaster-24", "chips_per_node": 2, "links": ["nvlink-4"],
    "chip": {"name": "toaster", "memory_bytes": 24 * 2**30, "matrix_flops_per_s": {"bf16": 50e12}},
    "price_usd_per_node_hour": None,
}  # fmt: skip
LAYOUTS = ("tp=1,pp=1,dp=1", "tp=1,pp=1,dp=1,mbs=2,recompute=full", "tp=2,pp=1,dp=1", "tp=1,pp=1,dp=2,mbs=4")
SLOWER = 1.5  # than predicted


def plan_of(text: str, folder: Path) -> Plan:
    candidate, node = Candidate.parse(text), load_node_type(str(folder / "own.json"))
    cluster = replace(node.cluster(node.variants[0], 1), chips_per_node=candidate.num_ranks, placements=())
    model = replace(load_model("llama3-8b"), name="four layers", num_layers=4, vocab=32_000)
    workload = Workload(seq_len=2048, global_batch=8, precision=Precision.named("bf16"))
    request = Request(model=model, cluster=cluster, workload=workload, engines=("torch",))
    return plan_at(request, candidate, even_refused=True)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A folder with rows of four runs, and the cluster's file elsewhere."""
    (tmp_path / "own.json").write_text(json.dumps(OWN), encoding="utf-8")
    folder, lines = tmp_path / "rows", list[str]()
    folder.mkdir()
    for number, text in enumerate(LAYOUTS):
        plan = plan_of(text, tmp_path)
        assert plan.prediction
        ran = Occasion(
            name=f"run {number}", step_time_s=SLOWER * plan.prediction.step_time_s, date="2026-11-24",
            versions="autoshard 0.1.0", platform="toaster-24",
        )  # fmt: skip
        stated = {name: value for name, value in encode(row_of(plan, ran)).items() if value is not None}
        lines.append(json.dumps(stated))
    (folder / OF_A_RUN).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.slow
def test_the_file_that_calibrate_is_given_is_that_of_the_rows(rows: Path) -> None:
    samples = samples_in(rows, str(rows.parent / "own.json"))
    assert len(samples.samples) == len(LAYOUTS) and not samples.left_out
    assert {one.run.cluster.chip.name for one in samples.samples} == {"toaster"}
    fitted = fit(samples, "mine")
    for text in LAYOUTS:
        plan = plan_of(text, rows.parent)
        assert plan.prediction
        found = predict(plan, fitted).step_time_s
        assert found == pytest.approx(SLOWER * plan.prediction.step_time_s, rel=0.1)


def test_a_file_beside_rows_is_read_with_them(rows: Path) -> None:
    with pytest.raises(InputError, match="toaster-24"):
        validate(rows)
    (rows / OF_A_CLUSTER).write_text(json.dumps(OWN), encoding="utf-8")
    (found,) = validate(rows).sets
    assert found.step_time and found.step_time.count == len(LAYOUTS)
    assert found.step_time.worst == pytest.approx(1 / SLOWER - 1, rel=1e-3)


def test_a_file_beside_rows_of_other_clusters_changes_nothing(rows: Path) -> None:
    (rows / OF_A_CLUSTER).write_text(json.dumps({**OWN, "name": "h100-80"}), encoding="utf-8")
    row = replace(next(iter(measured_rows(rows).rows.values())), platform="h100-80")
    own = load_node_type(str(rows / OF_A_CLUSTER))
    assert own.name == "h100-80" and run_of(row, own) == run_of(row)
    (rows / OF_A_CLUSTER).write_text("no cluster", encoding="utf-8")
    assert len(measured_rows(rows).rows) == len(LAYOUTS)


def test_more_chips_than_the_node_has_are_refused(rows: Path) -> None:
    row: MeasuredRow = next(iter(measured_rows(rows).rows.values()))
    with pytest.raises(InputError, match="3 chips on 1 node; a node of toaster-24 has 2"):
        run_of(replace(row, chips=3, candidate=None, dp=3), load_node_type(str(rows.parent / "own.json")))
