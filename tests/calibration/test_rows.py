"""Rows are read strictly, all that is wrong is told with line and column; a plan's row is read back as the plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from autoshard.calibration.measured_run import run_of
from autoshard.calibration.rows import MeasuredRow, Occasion, measured_rows, row_of
from autoshard.cli import main
from autoshard.errors import InputError
from autoshard.plan.plan import Plan
from autoshard.plan.proof import shrink
from autoshard.plan.recompute import Recompute
from autoshard.search.ask.api import plan as planned
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.record import encode
from tests.calibration.measured_cases import DATA, SMALL, written
from tests.json_schema import json_schema
from tests.kit import local_plan
from tests.runtime.cases import tiny_plan

ROOT = Path(__file__).parents[2]
LAYOUTS = (
    "tp=2,pp=1,dp=1",
    "tp=1,pp=2,dp=1,mbs=2,schedule=zb_h1",
    "tp=1,pp=2,dp=1,stages=1/3,recompute=full/selective[act]",
    "tp=2,pp=1,dp=1,sp=false,zero=0,kernels=torch_engine_gpu",
    "tp=4,pp=1,dp=2,place=7-0",
)


def faults(path: Path) -> list[str]:
    """What is left out of a file, or the error where nothing is left."""
    try:
        found = measured_rows(path).left_out_lines
    except InputError as error:
        found = error.faults
    return [str(fault).removeprefix(str(path)) for fault in found if "holds no measured row" not in fault.message]


def test_the_rows_of_this_repository_are_read_and_name_their_source():
    found = measured_rows(DATA)
    assert not found.num_unread and {where.partition(" ")[0] for where in found.left_out} == {str(DATA / "short.jsonl")}
    assert all(row.source and row.source["repo"] and row.step_time_s for row in found.rows.values())
    assert {*found.sets.values()} == {path.stem for path in DATA.glob("*.jsonl")}


def test_the_schema_has_every_field_with_its_meaning_and_the_rows_here_satisfy_it(request: pytest.FixtureRequest):
    path = ROOT / "autoshard" / "calibration" / "row.schema.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    meanings = {
        name: stated.get("description", "") for name, stated in written["$defs"]["MeasuredRow"]["properties"].items()
    }
    whole = {**json_schema(MeasuredRow), "title": "measured row of autoshard"}
    properties = whole["$defs"]["MeasuredRow"]["properties"]
    for name, stated in properties.items():
        properties[name] = {"description": meanings.get(name, ""), **stated}
    text = json.dumps(whole, indent=2) + "\n"
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "run pytest --update-golden and read the difference"
    assert [name for name, meaning in meanings.items() if not meaning] == [], "write what they say into the schema"
    schema = jsonschema.Draft202012Validator(json.loads(text))
    for line in (line for file in DATA.glob("*.jsonl") for line in file.read_text("utf-8").splitlines()):
        schema.validate(json.loads(line))


def test_a_row_needs_little_and_null_is_absent():
    row = MeasuredRow.read({"id": "a", "platform": "trn1", "seq_len": 8, "global_batch_seqs": 8, "chips": 16.0})
    assert (row.chips, row.nodes, row.tp, row.step_time_s, row.arch) == (16, None, None, None, None)
    nothing = {name: None for name in MeasuredRow.__dataclass_fields__ if name not in SMALL or name == "dp"}
    without = {name: value for name, value in SMALL.items() if name != "dp"}
    assert MeasuredRow.read({**SMALL, **nothing}) == MeasuredRow.read(without)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": ""}, "id: must not be empty"),
        ({"tp": 0}, "tp: must be at least 1, or null, not 0"),
        ({"tp": 1.5}, "tp: expected a whole number, found 1.5"),
        ({"step_time_s": -1.0}, "step_time_s: must be positive, or null, not -1.0"),
        ({"step_time": 1.0}, "step_time: unknown key. Did you mean step_time_s?"),
        ({"arch": []}, "arch: expected an object, found a list"),
        ({"nodes": None, "chips": None}, "nodes: missing; say nodes, chips or both"),
    ],
)
def test_one_wrong_column_is_one_line(change: dict[str, Any], says: str, tmp_path: Path):
    assert faults(written(tmp_path, SMALL, {**SMALL, "id": "b", **change})) == [f" line 2: {says}"]


def test_every_fault_of_every_line_comes_at_once_and_that_of_neighbours_only_once(tmp_path: Path):
    path = written(tmp_path, {**SMALL, "tp": 0, "pp": 0}, "", SMALL, SMALL, [], {"loss": 2.5}, {"loss": 2.5})
    assert faults(path) == [
        " line 1: tp: must be at least 1, or null, not 0; pp: must be at least 1, or null, not 0",
        f" line 4: id: small stands in {path} line 3 already",
        " line 5: expected an object, found a list",
        " lines 6 to 7: is no measured row, which has an id and a platform",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", " line 1: is not JSON: Expecting property name"),
        ('{"id": "a", "kind": "walk"}', " line 1: kind: "),
        ("", ": holds no rows; write one JSON object per line"),
    ],
)
def test_what_is_no_row_is_one_line(text: str, says: str, tmp_path: Path):
    assert faults(written(tmp_path, text))[0].startswith(says)


def row(plan: Plan, **changes: Any) -> MeasuredRow:
    ran = Occasion(**{"name": "a run", "step_time_s": 0.5, "date": "2026-07-30", "versions": "a", **changes})
    return MeasuredRow.read(json.loads(json.dumps(encode(row_of(plan, ran)))))


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_row_is_read_as_the_plan_that_ran(text: str) -> None:
    plan = tiny_plan(text)
    run = run_of(row(plan))
    assert run.candidate == plan.candidate
    assert (run.model, run.cluster, run.workload) == (plan.model, plan.cluster, plan.workload)
    assert dict(run.assumed) == {"arch": "the model card tiny-llama"}


def test_a_row_names_what_ran_where_a_plan_is_priced_for_another_program() -> None:
    plan = tiny_plan("tp=2,pp=1,dp=1,recompute=selective[core_attn],kernels=te")
    found = run_of(row(plan)).candidate
    assert found.kernels is None and found.recompute[0].ops == ("attend",)


@pytest.mark.parametrize(
    ("cluster", "text"), [("h100-80", "tp=8,pp=2,dp=1"), ("trn2.48xlarge", "tp=16,pp=4,dp=2,lnc=2")]
)
def test_a_row_of_the_plan_s_own_machine_is_read_as_what_ran_there(cluster: str, text: str) -> None:
    plan = planned("llama3-8b", load_cluster(cluster, 2), fix=f"{text},mbs=1,recompute=full,schedule=1f1b").plan
    found = row(plan, platform=cluster)
    assert found.framework == f"autoshard, {plan.engine} engine"
    run = run_of(found)
    assert (run.candidate, run.cluster) == (plan.candidate, plan.cluster)


@pytest.mark.parametrize(("fold", "columns"), [("tp", (4, 1)), ("none", (2, 2))])
def test_a_row_of_a_mixture_counts_all_ranks_that_share_experts_out(fold: str, columns: tuple[int, int]) -> None:
    plan = local_plan(f"tp=2,pp=1,dp=2,ep=2,fold={fold}", load_model("tiny-mixtral"), seq_len=64, global_batch=4)
    found = row(plan)
    assert (found.ep, found.etp) == columns and run_of(found).candidate.fold == fold
    assert run_of(replace(found, candidate=None)).candidate.fold == fold, "columns say it as well"


def test_optimizer_documents_and_a_model_without_a_card_travel() -> None:
    plan = tiny_plan("tp=1,pp=1,dp=2")
    balanced = {"router_balance_loss": 0.01, "router_balance_over": "sequence", "router_z_loss": 0.001}
    for change in ({"optimizer": "sgd"}, {"documents": "separate"}, balanced, {"router_z_loss": 0.001}):
        other = replace(plan, workload=replace(plan.workload, **change))
        assert run_of(row(other)).workload == other.workload
    assert row(plan).documents is None, "rows of joined documents are as they were"
    other = replace(plan, model=replace(plan.model, num_layers=3))
    assert run_of(row(other)).model.num_parameters == other.model.num_parameters


def test_what_belongs_to_another_platform_is_left_out() -> None:
    small = shrink(planned("llama3-8b", "trn1.32xlarge", fix="tp=8,pp=1,mbs=1").plan)[0]
    drop = Recompute.parse("selective[LlamaMLP]")
    run = run_of(row(replace(small, stages=tuple(replace(stage, recompute=drop) for stage in small.stages))))
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


@pytest.mark.slow
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
    assert main(["calibrate", "rows.jsonl", "--cluster", "local", "--out", "mine.json"]) == 0
    asked = ["plan", "--model", "tiny-llama", "--cluster", "local", "--ranks", "2", "--calibration", "mine.json"]
    asked += ["--seq-len", "16", "--global-batch", "4"]
    capsys.readouterr()
    assert main(asked) == 0
    assert "calibrated on 3 rows of local (3 layouts, newest 2026-07-30)" in " ".join(capsys.readouterr().out.split())
    Path("mine.json").unlink()  # the plan carries what it needs
    assert main(["verify", "plan.json"]) == 0
    notes = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "note:" in line]
    assert notes in ([], ["prediction.mfu:"]), "it may be faster than each of the three rows"


def test_a_folder_may_hold_files_of_rows_and_runs(tmp_path: Path) -> None:
    first, second, third = ({**SMALL, "id": name} for name in ("a", "b", "c"))
    (tmp_path / "given.jsonl").write_text(json.dumps(first), encoding="utf-8")
    for name, own in (("one", second), ("two", third)):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "plan.json").write_text("{}", encoding="utf-8")
        (tmp_path / name / "measured.jsonl").write_text(json.dumps(own), encoding="utf-8")
    assert [one.id for one in measured_rows(tmp_path).rows.values()] == ["a", "b", "c"]
    (tmp_path / "two" / "measured.jsonl").unlink()
    found = measured_rows(tmp_path)
    assert [one.id for one in found.rows.values()] == ["a", "b"] and list(found.left_out) == [str(tmp_path / "two")]
