"""``python -m benchmarks on_gpu`` without a GPU: every part ends, and one that fails leaves the others."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import torch

import benchmarks
from autoshard.calibration.calibrate import timed_rows
from autoshard.calibration.contribution import contribution
from autoshard.calibration.rows import measured_rows
from autoshard.cost.predict import predict
from autoshard.run.reports import RunReport, TimedStep
from autoshard.search.bound.request import Request, plan_at
from benchmarks import on_gpu
from benchmarks.__main__ import main
from benchmarks.gpu import constants, fast, right, rows, subjects, why
from benchmarks.gpu.device import Item, device_of, measured, result, world_of_one
from benchmarks.gpu.plain import ExpertLayer
from benchmarks.guarded import Setting
from benchmarks.result import Result
from tests.slower import rest_is_slow

PARTS = ("right", "fast", "why", "constants", "rows", "links")
DRY = Setting(folder=Path(), dry=True, machine=None)


def dry(parts: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert main(["on_gpu", "--dry-run", "--json", "--parts", parts, "--out", str(folder)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("part", rest_is_slow(sorted(PARTS), 0))
@pytest.mark.ranks
def test_a_dry_run_of_each_part_ends_and_says_what_it_would_measure(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *found, last = dry(part, tmp_path, capsys)
    assert found and all(row.get("would_measure") for row in found)
    assert list(last)[:5] == ["name", "value", "unit", "bar", "holds"] and last["name"] == "on_gpu"
    assert last["holds"] and last["device"] == "none: a dry run"
    timed = [row for row in found if not str(row["name"]).startswith("right")]
    assert all(row["value"] == 0.0 and "(dry run)" in str(row["unit"]) for row in timed)


def test_every_part_is_tried_here() -> None:
    assert tuple(part.name for part in on_gpu.parts(DRY)) == PARTS


def test_a_measurement_that_fails_leaves_the_others_of_its_part() -> None:
    def fails() -> Iterator[Result]:
        yield result("half", 1.0, "s")
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with ...")

    items = [
        Item(name="whole", what="", measure=fails),
        Item(name="next", what="", measure=lambda: [result("next", 2.0, "s")]),
    ]
    found = list(measured(items, device_of(DRY), 10))
    assert [one.name for one in found] == ["half", "whole", "next"]
    assert found[1].extras["failed"] == "RuntimeError: CUDA error: an illegal memory access"


def test_a_measurement_without_time_is_left_out_by_name() -> None:
    real = replace(device_of(DRY), dry=False)
    (found,) = measured([Item(name="late", what="", measure=lambda: [result("late", 1.0, "s")])], real, -1)
    assert found.extras["failed"] == "left out: the -1 s of its part were over"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--dry-run", "--parts", "rigth"], "--parts: there is no part 'rigth' here. Did you mean right?"),
        (["--dry-run", "--machine", "trn1"], "--machine: 'trn1' is no machine with GPUs"),
        ([], "sees no GPU here. --dry-run goes through every part without one"),
    ],
)
def test_what_is_wrong_is_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not words and torch.cuda.device_count():
        pytest.skip("there is a GPU here")
    assert main(["on_gpu", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_all_benchmarks_skip_it_and_say_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks.SUITES["on_gpu"] == "benchmarks.on_gpu:SUITE"
    monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", {})
    monkeypatch.setattr("benchmarks.__main__.SUITES", {"on_gpu": "benchmarks.on_gpu:SUITE"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["all"]) == 0
    assert "on_gpu was skipped: on_gpu: torch" in capsys.readouterr().err


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half of a weight's gradient is missing, of one weight of all."""
    case, gradients = right.CASES["grouped_queries"], right.gradients

    def wrong(plan, drawn, batches, formats, mode):
        found = dict(gradients(plan, drawn, batches, formats, mode))
        if mode == "generated":
            name = next(one for one in found if "up" in one)
            found[name] = torch.cat([found[name][:48] * 0, found[name][48:]])
        return found

    device = device_of(DRY)
    with world_of_one(device):
        (good,) = right.compared(case, "bf16", device, "good")
        monkeypatch.setattr(right, "gradients", wrong)
        (bad,) = right.compared(case, "bf16", device, "bad")
    assert good.holds and good.extras["same_bits"] and good.value < (good.bar or 0)
    assert not bad.holds and not bad.extras["same_bits"] and "generated" in str(bad.extras["worst"])


def test_attention_without_a_kernel_says_so_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing():
        raise RuntimeError("no kernel of this name\nat all")

    kernels = (constants.AttentionChoice(name="none", chosen=missing), constants.ATTENTION[0])
    monkeypatch.setattr(constants, "ATTENTION", kernels)
    monkeypatch.setattr(constants, "nullcontext", kernels[0].chosen)
    (found,) = constants.attention_rates(1024, device_of(DRY))
    assert found.extras["none_missing"] == "no kernel of this name" and found.extras["fastest"] == "none"


@pytest.mark.thorough
def test_a_subject_that_finds_no_memory_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    device, ours = device_of(DRY), fast.ours

    def full(plan, mode, device):
        if mode == "generated":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.91 GiB.\nGPU 0 has ...")
        return ours(plan, mode, device)

    monkeypatch.setattr(fast, "ours", full)
    with world_of_one(device):
        found = {
            one.name: one for one in fast.compared("fast", "llama3-8b", ("plain", "compiled", "generated"), device)
        }
    assert set(found) == {"fast", "fast_plain", "fast_compiled", "fast_generated"}
    assert str(found["fast_generated"].extras["failed"]).endswith("Tried to allocate 3.91 GiB.")
    assert found["fast"].value > 0 and found["fast_compiled"].extras["kernels_per_layer"]


@pytest.mark.slow
def test_a_parked_subject_has_no_memory_and_steps_when_it_is_there_again() -> None:
    device = device_of(DRY)
    with world_of_one(device):
        plan = subjects.fitting("mixtral-8x7b", device, 1)
        for one in (subjects.ours(plan, "generated", device), subjects.plain(plan, device)):
            for _ in range(2):
                assert not any(tensor.untyped_storage().nbytes() for tensor in (*one.numbers(), *one.zeros()))
                with one.there(device):
                    one.step()
                    assert all(bool(tensor.isfinite().all()) for tensor in one.numbers())


def test_plain_experts_give_what_each_token_gets_from_its_own() -> None:
    device = device_of(DRY)
    model = subjects.model_of("mixtral-8x7b", subjects.Sizes(layers=1), device)
    torch.manual_seed(0)
    layer, x = ExpertLayer(model).bfloat16(), torch.randn(2, 8, model.hidden).bfloat16()
    with torch.no_grad():
        found = layer.mlp(x)
        weights, experts = layer.router(x).float().softmax(-1).topk(model.experts_per_token)
        weights /= weights.sum(-1, keepdim=True)
        expected = torch.zeros_like(x, dtype=torch.float32)
        for place in torch.cartesian_prod(torch.arange(2), torch.arange(8)).tolist():
            for weight, expert in zip(weights[*place], experts[*place].tolist(), strict=True):
                one = x[*place].float()
                gate, up = (one @ matrix[expert].float() for matrix in (layer.gates, layer.ups))
                expected[*place] += weight * (torch.nn.functional.silu(gate) * up @ layer.downs[expert].float())
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.02 * float(expected.abs().max()))


@pytest.mark.slow
def test_differences_cover_all_that_is_predicted_and_products_are_marked_alone() -> None:
    device = device_of(DRY)
    with world_of_one(device):
        plan = subjects.fitting("llama3-8b", device, most_layers=2)
        literal, compiled = (why.profile_of(plan, mode, device) for mode in ("literal", "compiled"))
        found = {one.name: one for one in why.differences(plan, literal, compiled)}
    assert plan.prediction
    parts = plan.prediction.time_parts
    assert sum(one.predicted_s for one in found.values()) == pytest.approx(parts["compute"] + parts["update"], rel=1e-3)
    products = [name for name in found if ": " in name and "all but" not in name]
    assert len(products) == 14 and {"layer, F: attend", "layer, I: up", "layer, W: down"} < set(products)
    assert all(found[name].measured_s > 0 for name in products), "each is found in the profile"
    assert all(found[f"{kind}, {one}"].measured_s > 0 for kind in ("embed", "head") for one in "FB")


@pytest.mark.slow
def test_rows_of_a_gpu_are_read_as_the_runs_that_they_are(tmp_path: Path) -> None:
    real = replace(device_of(DRY), dry=False, folder=tmp_path)
    plans = [one.plan(real) for one in (*rows.ALONE[::2], *rows.together(4)[::2])]
    steps = tuple(
        TimedStep(number=n, loss=1.0, norm=1.0, time_s=n / 10, num_tokens=8, memory_bytes=n * 2**30)
        for n in range(1, 9)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "run_plan", lambda plan, device: RunReport(steps=steps, ranks=()))
        for number, plan in enumerate(plans):
            (found,) = rows.row_measured(f"row_{number}", plan, real, {"gpu": "NVIDIA H100"})
            assert found.value == pytest.approx(0.55) and found.extras["peak_gib"] == 8.0
    read = timed_rows(tmp_path / "measured.jsonl", "h100-80")
    assert not read.rows.left_out and len(read.runs) == len(plans)
    for plan, (row, run) in zip(plans, read.runs, strict=True):
        assert row.kernels == "torch_engine_gpu" and "torch" in (row.framework_version or "")
        assert (run.candidate.dp, run.candidate.mbs, run.workload.seq_len) == (
            plan.candidate.dp,
            plan.micro_batch,
            plan.workload.seq_len,
        )
        assert run.model.num_layers == plan.model.num_layers and run.cluster.chips_per_node == plan.mesh.num_ranks
        predicted = predict(
            plan_at(
                Request(model=run.model, cluster=run.cluster, workload=run.workload, engines=("torch",)),
                run.candidate,
                even_refused=True,
            )
        )
        assert plan.prediction and predicted.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=1e-3)
    given = contribution(tmp_path, {"gpu": "NVIDIA H100 80GB HBM3"}).rows
    assert len(given) == len(plans) and all(row.kernels == "torch_engine_gpu" for row in given)
    schema = json.loads((files("autoshard") / "calibration" / "row.schema.json").read_text("utf-8"))
    for line in (tmp_path / "measured.jsonl").read_text("utf-8").splitlines():
        jsonschema.validate(json.loads(line), schema)


@pytest.mark.ranks
def test_rows_of_a_dry_run_are_of_a_rehearsal_on_the_host(tmp_path: Path) -> None:
    dry_device = replace(device_of(DRY), folder=tmp_path)
    plan = rows.ALONE[4].plan(dry_device)
    list(rows.row_measured("row", plan, dry_device, {}))
    (row,) = measured_rows(tmp_path / "measured.jsonl").rows.values()
    assert (row.kind, row.platform, row.kernels) == ("rehearsal", "local", None)


def a_toaster():
    """The cluster file of a machine whose chip no catalogue has."""
    chip = {"name": "toaster", "memory_bytes": 24 * 2**30, "matrix_flops_per_s": {"bf16": 50e12}}
    node = {"base": "h100-80", "source": "for this test", "name": "toaster-24", "chips_per_node": 2}
    return {**node, "links": ["nvlink-4"], "chip": chip, "price_usd_per_node_hour": None}


def test_gpus_are_those_of_the_cluster_file_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("benchmarks.gpu.device.cluster_here", a_toaster)
    found = device_of(Setting(folder=tmp_path, dry=False, machine=None))
    assert (found.type, found.name, found.count, found.peak()) == ("cuda", "toaster", 2, 50e12)
    assert found.node(2).num_ranks == 2 and found.node().rank_memory_bytes <= 24 * 2**30
    small = subjects.fitting("llama3-8b", found)
    assert small.cluster.name == "toaster-24" and small.model.vocab == 32_000 and small.prediction
    assert small.prediction.peak_bytes < 24 * 2**30
    said = on_gpu.opening(
        Setting(folder=tmp_path, dry=False, machine=None),
        on_gpu.parts(Setting(folder=tmp_path, dry=False, machine=None)),
    )
    assert said.startswith("6 parts on 2 x toaster") and said.endswith("about 12.5 minutes")


def test_the_last_line_names_what_failed_and_what_missed_its_bar() -> None:
    rows = [
        {"name": "right_dense_bf16", "value": 0.2, "bar": 0.1, "holds": False},
        {"name": "fast_llama", "value": 1.04, "bar": 1.0, "holds": True},
        {"name": "why_llama", "failed": "no memory"},
    ]
    found = on_gpu.closing(DRY, rows)
    assert (found.value, found.holds) == (1.04, False)
    assert (found.extras["failed"], found.extras["missed"]) == ("why_llama", "right_dense_bf16")
