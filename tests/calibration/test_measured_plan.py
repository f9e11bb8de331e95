"""Rows of plans that were run here: read back as the same question, so that plan, run, calibrate, plan is a circle."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.calibration.measured import MeasuredRow, read_row
from autoshard.calibration.measured_plan import Occasion, row_of
from autoshard.calibration.measured_run import MeasuredRun, run_of
from autoshard.cli import main
from autoshard.errors import InputError
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.plan.shrink import shrink
from autoshard.search.api import Search, plan as planned
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.record import encode
from tests.runtime.cases import tiny_plan

LAYOUTS = (
    "tp=2,pp=1,dp=1",
    "tp=1,pp=2,dp=1,mbs=2,schedule=zb_h1",
    "tp=1,pp=2,dp=1,stages=1/3,recompute=full/selective[act]",
    "tp=2,pp=1,dp=1,sp=false,zero=0,kernels=torch_cuda",
    "tp=4,pp=1,dp=2,place=7-0",
)


def row(plan: Plan, step_time_s: float = 0.5, name: str = "a run") -> MeasuredRow:
    ran = Occasion(name=name, step_time_s=step_time_s, date="2026-07-30", versions="autoshard 0.1.0")
    return read_row(json.loads(json.dumps(encode(row_of(plan, ran)))))


def read(one: MeasuredRow) -> MeasuredRun:
    found = run_of(one)
    assert isinstance(found, MeasuredRun)
    return found


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_row_is_read_as_the_plan_that_ran(text: str) -> None:
    plan = tiny_plan(text)
    run = read(row(plan))
    assert run.candidate == plan.candidate
    assert (run.model, run.cluster, run.workload) == (plan.model, plan.cluster, plan.workload)
    assert dict(run.assumed) == {"arch": "the model card tiny-llama"}


@pytest.mark.parametrize(
    ("cluster", "text"),
    [("h100-80", "tp=8,pp=2,dp=1"), ("trn1.32xlarge", "tp=8,pp=2,dp=4"), ("trn2.48xlarge", "tp=16,pp=4,dp=2,lnc=2")],
)
def test_a_row_of_the_plan_s_own_machine_is_read_as_what_ran_there(cluster: str, text: str) -> None:
    plan = planned("llama3-8b", load_cluster(cluster, 2), search=Search(pins=text))
    ran = Occasion(name="a run", step_time_s=0.5, date="2026-07-30", versions="autoshard 0.1.0", platform=cluster)
    found = row_of(plan, ran)
    assert found.framework == f"autoshard, {plan.engine} engine"
    run = read(read_row(json.loads(json.dumps(encode(found)))))
    assert (run.candidate, run.cluster) == (plan.candidate, plan.cluster)


def test_the_optimizer_travels() -> None:
    plan = tiny_plan("tp=1,pp=1,dp=2")
    other = replace(plan, workload=replace(plan.workload, optimizer="sgd"))
    assert read(row(other)).workload == other.workload
    assert read(replace(row(plan), optimizer=None)).workload == plan.workload


def test_separate_documents_travel() -> None:
    plan = tiny_plan("tp=1,pp=1,dp=2")
    other = replace(plan, workload=replace(plan.workload, documents="separate"))
    assert read(row(other)).workload == other.workload
    assert row(plan).documents is None, "rows of joined documents are as they were"
    assert row(other).measured_again != row(plan).measured_again


def test_a_model_without_a_card_travels_as_its_numbers() -> None:
    plan = tiny_plan("tp=1,pp=1,dp=1")
    other = replace(plan, model=replace(plan.model, num_layers=3))
    assert read(row(other)).model.num_parameters == other.model.num_parameters


def test_what_belongs_to_another_platform_is_left_out() -> None:
    small = shrink(planned("llama3-8b", "trn1.32xlarge")).plan
    small = replace(
        small, stages=tuple(replace(stage, recompute=Recompute.parse("selective[LlamaMLP]")) for stage in small.stages)
    )
    run = read(row(small))
    assert run.cluster.name == "local" and run.candidate.kernels is None
    (recompute,) = run.candidate.recompute
    assert "LlamaMLP" not in recompute.ops and "up" in recompute.ops


def test_columns_may_not_say_something_else() -> None:
    one = replace(row(tiny_plan(LAYOUTS[0])), tp=1, dp=2)
    with pytest.raises(InputError) as caught:
        run_of(one)
    assert [str(fault) for fault in caught.value.faults] == [
        "tp: is 1, but candidate says 2", "dp: is 2, but candidate says 1"
    ]  # fmt: skip
    with pytest.raises(InputError, match="candidate: uses 2 ranks, but 1 x local has 4"):
        run_of(replace(row(tiny_plan(LAYOUTS[0])), chips=4))
    with pytest.raises(InputError, match=r"candidate\.zz=1: unknown key"):
        run_of(replace(row(tiny_plan(LAYOUTS[0])), candidate="tp=2,pp=1,dp=1,zz=1"))


def test_plan_run_calibrate_plan_is_a_circle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows: list[str] = []
    for number, text in enumerate(LAYOUTS[:3]):
        plan = tiny_plan(text)
        assert plan.prediction
        slower = row(plan, step_time_s=3 * plan.prediction.step_time_s, name=f"run {number}")
        rows.append(json.dumps({name: value for name, value in encode(slower).items() if value is not None}))
    Path("rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert main(["validate", "rows.jsonl"]) == 0
    assert main(["calibrate", "rows.jsonl", "--cluster", "local", "--out", "mine.json"]) == 0
    asked = ["plan", "--model", "tiny-llama", "--cluster", "local", "--ranks", "2", "--calibration", "mine.json"]
    capsys.readouterr()
    assert main(asked) == 0
    assert "calibrated on 3 rows of local (3 layouts, newest 2026-07-30)" in " ".join(capsys.readouterr().out.split())
