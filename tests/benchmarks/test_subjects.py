"""Benchmarks measure what they say: their subjects on small sizes, and the processes that they start."""

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from autoshard.cost.predict import predict
from autoshard.engine.programs import graph_of
from autoshard.engine.torch import execution as rows
from autoshard.errors import RunFailed
from autoshard.plan.candidate import Candidate
from autoshard.run.reports import WARM_UP
from autoshard.runtime.data.indexed import OpenFiles, faults_inside, read_index
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import Tracking
from benchmarks import (
    checkpoint_bandwidth,
    estimate_batch,
    load_weights,
    loading,
    local_prediction,
    metrics_cost,
    plain_llama,
    plan_all,
    planning,
    runtime_vs_plain,
    sharded_vs_plain,
    tokenize_speed,
)
from benchmarks.plain_llama import PlainLlama
from tests.slower import rest_is_slow

CARDS = [("tiny-llama", "local"), ("llama2-70b", "h100-80")]  # the second is too large for a node
TOO_LARGE = ["--model", "llama3-8b", "--fix", "tp=8,pp=1,cp=1,mbs=1,sp=true,zero=1,schedule=1f1b,recompute=none"]


@pytest.mark.thorough
def test_answers_are_told_from_complaints_and_every_remedy_is_tried() -> None:
    asked = [("--model", model, "--cluster", cluster, "--nodes", "1") for model, cluster in CARDS]
    found, useless = plan_all.measured(asked)
    assert [bool(one.complaint) for one in found] == [False, True] and found[1].remedies and not useless


def test_a_batch_that_is_off_is_found() -> None:
    question, space, cutting = estimate_batch.case("llama3-8b", "h100-80", 1, 16)
    found = estimate_batch.evaluate(question, space, cutting)
    assert estimate_batch.furthest(question, space, cutting, found, 4) <= estimate_batch.SAME
    wrong = replace(found, time_s=found.time_s * (1 + 1e-6))
    assert estimate_batch.furthest(question, space, cutting, wrong, 4) == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.slow
def test_a_machine_may_be_faster_than_declared() -> None:
    cases = [local_prediction.SEEN[number] for number in (1, 5, 10)]
    plans = {local_prediction.name_of(case): case[1].plan(case[0]) for case in cases}
    times = {name: 0.4 * predict(plan).step_time_s for name, plan in plans.items()}
    calibration = local_prediction.fitted(plans, times)
    for name, time_s in times.items():
        assert abs(local_prediction.predicted_run(name, plans[name], calibration, time_s).error) < 0.05
    assert calibration.matrix_efficiency > 1 and calibration.fit and len(calibration.fit.rows) == 3
    assert {shape for _, shape in local_prediction.SEEN}.isdisjoint(shape for _, shape in local_prediction.NEW)


@pytest.mark.parametrize("case", [*local_prediction.SEEN, *local_prediction.NEW], ids=local_prediction.name_of)
def test_every_layout_that_is_run_and_predicted_is_legal(case: local_prediction.Case):
    text, shape = case
    assert shape.plan(text).candidate == Candidate.parse(text)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_plan_is_run_as_by_the_command() -> None:
    text, shape = local_prediction.SEEN[10]
    report = local_prediction.run_plan(shape.plan(text), 3)
    assert len(report.steps) == 3 and len(report.ranks) == 2
    assert local_prediction.fastest_s([report]) == report.steps[WARM_UP].time_s > 0


def test_every_step_after_the_first_is_timed() -> None:
    found = metrics_cost.step_times(Tracking(tensorboard=True), metrics_cost.WARM_UP + 5)
    assert len(found.passed_ms) == 5 and found.cpu_ms > 0


@pytest.mark.slow
@pytest.mark.ranks
def test_what_two_ranks_hold_is_saved_and_loaded() -> None:
    model = load_model("tiny-llama")
    found = checkpoint_bandwidth.measured(checkpoint_bandwidth.plan_of(model, 16), 1)
    assert found.state_bytes == pytest.approx(12 * model.num_parameters, rel=0.01)
    assert all(second > 0 for one in found.rounds for second in (one.copy_s, one.save_s, one.load_s, one.beside_s))


@pytest.mark.slow
@pytest.mark.ranks
def test_eight_ranks_load_the_same_bits_in_all_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_weights, "STORAGE_BYTES_PER_S", 1e9)
    model = load_weights.shape()
    first = load_weights.written(tmp_path / "hf", model)
    ways = load_weights.measured(load_weights.plan_of("tp=8", model), first, tmp_path / "tp")
    assert ways["each"].times == pytest.approx(8, rel=0.01)
    assert {round(ways[way].times, 2) for way in ("hf", "own", "shared")} == {1.0}


def test_sparse_files_are_a_whole_set_that_takes_no_room(tmp_path: Path) -> None:
    loading.write_sparse(tmp_path, 3, 60_000, 100)
    for number in range(3):
        index = read_index(tmp_path / str(number))
        assert index.num_tokens == 60_000 and not list(faults_inside(index, OpenFiles(), 10))
    assert (tmp_path / "1.bin").stat().st_blocks == 0
    open_s, start_s = loading.start_s(tmp_path, 1000)
    assert 0 < open_s < start_s


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_step_waits_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "STEPS", 3)
    found = loading.loader_wait()
    assert 0 <= found.value < 0.5 and found.extras["steps"] == 3


def test_both_tokenize_the_same_text(tmp_path: Path) -> None:
    texts = tokenize_speed.write_text(tmp_path / "text.jsonl", 50_000)
    tokenize_speed.write_tokenizer(tmp_path / "tokenizer.json", texts)
    assert sum(map(len, texts)) >= 50_000 and np.mean([len(text) for text in texts]) > 1000
    assert tokenize_speed._library_s(tmp_path, texts) > 0 and tokenize_speed._ours_s(tmp_path) > 0


def test_the_plain_model_has_our_weights_and_its_stages_make_the_whole() -> None:
    torch.manual_seed(0)
    shape = runtime_vs_plain.shape()
    whole, parts = PlainLlama(shape, 8), [PlainLlama(shape, 8, layers) for layers in (range(2), range(2, 4))]
    count = sum(one.numel() for one in whole.parameters())
    assert count == graph_of(runtime_vs_plain.plan_of("tp=1,pp=1,dp=1")).num_parameters() == shape.num_parameters
    state = whole.state_dict()
    parts[0].load_state_dict({name: state[name] for name in parts[0].state_dict()})
    later = {name: name.replace("layers.1", "layers.3").replace("layers.0", "layers.2") for name in
             parts[1].state_dict()}  # fmt: skip
    parts[1].load_state_dict({name: state[other] for name, other in later.items()})
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(parts[1](parts[0](tokens)), whole(tokens))


@pytest.mark.ranks
@pytest.mark.parametrize("name", rest_is_slow(runtime_vs_plain.CASES, 0, 1))
def test_every_case_of_the_runtime_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiler, which takes minutes."""
    monkeypatch.setattr(runtime_vs_plain, "MODES", {"generated": plain_llama.as_it_is})
    for found in runtime_vs_plain.compared(runtime_vs_plain.CASES[name], pairs=2).values():
        assert len(found.ratios) == 2 and found.interval[0] <= found.median <= found.interval[1]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", sharded_vs_plain.CASES)
def test_a_module_learns_the_same_sharded_and_by_hand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer, without the compiler; both hold weights, moments and gradients, so that no peak may be below them.

    What ranks are forked with and free while they are measured counts for nothing.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):  # whose memory is counted when it is freed
        garbage: list[Any] = [torch.zeros(2**25)]
    garbage.append(garbage)
    del garbage
    made = sharded_vs_plain._made  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(sharded_vs_plain, "_made", lambda *words: (made(*words), gc.collect())[0])
    shape = replace(runtime_vs_plain.shape(), num_layers=1, vocab=2048)
    monkeypatch.setattr(sharded_vs_plain, "shape", lambda: shape)
    monkeypatch.setattr(sharded_vs_plain, "WARM_UP", 1)
    measured = sharded_vs_plain.measured(sharded_vs_plain.CASES[name], pairs=2, modes={"generated": False})
    losses, peaks = measured.losses["generated"], measured.peak_bytes
    assert losses.ours == pytest.approx(losses.by_hand, abs=sharded_vs_plain.SAME_LOSS) and losses.ours < 7.6
    ranks = 4 if name == "tp_fsdp2" else 1  # that share the weights by hand
    assert min(peaks.by_hand, peaks.ours) > 4 * 4 * shape.num_parameters / ranks
    assert {*measured.ratios} == {"generated_wall", "generated_cpu"}


@pytest.mark.slow
def test_kernels_are_counted_without_a_gpu_and_the_case_with_the_most_left_is_judged() -> None:
    from benchmarks import kernel_counts

    before, after = kernel_counts.counts(kernel_counts.plan_of("tiny-llama", "tp=2,pp=1,dp=1"))
    assert 0 < after.kernels < before.kernels and 0 < after.elementwise_bytes < before.elementwise_bytes
    whole, few = (kernel_counts.Count(kernels=one, elementwise_bytes=one) for one in (100, 10))
    for kernels, moved, holds in ((25, 40, True), (26, 40, False), (25, 41, False)):
        left = kernel_counts.Count(kernels=kernels, elementwise_bytes=moved)
        result = kernel_counts.judge({"few": (whole, few), "more": (whole, left)}, {})
        assert result.holds is holds and result.value == kernels / 100


@pytest.mark.parametrize("text", ["tp=1,pp=1,dp=1", "tp=2,pp=1,dp=1"])
def test_a_head_never_holds_fp32_logits_of_a_whole_micro_batch(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside BF16 logits and their gradient it holds a few rows in FP32; all rows at a time would be found."""
    from benchmarks import kernel_counts

    plan = kernel_counts.plan_of("tiny-llama", text)
    logits = plan.workload.seq_len * plan.model.vocab // plan.mesh.size("tp")
    monkeypatch.setattr(rows, "_DEVICE_NUMBERS", logits // 4)
    few = kernel_counts.of_head(plan)
    assert few.largest_fp32 == logits // 4 and 4 * logits < few.peak_bytes < 9 * logits
    monkeypatch.setattr(rows, "_DEVICE_NUMBERS", logits)
    whole = kernel_counts.of_head(plan)
    assert whole.largest_fp32 == logits and whole.peak_bytes > 16 * logits


@pytest.mark.slow
def test_a_search_is_a_process_whose_certificate_is_read() -> None:
    questions = {"small": [*TOO_LARGE, "--seq-len", "2048"], "none": TOO_LARGE}
    rounds = planning.rounds_of(questions, 1)
    summary = planning.Summary.of(rounds, "small")
    assert summary.last.certificate and summary.last.counts["num_points"] == 1
    assert summary.last.gap <= 0.001 and summary.cpu_s > 0
    nothing_fits = rounds[0].planned["none"]
    assert nothing_fits.certificate is None and nothing_fits.gap == 0.0 and not nothing_fits.counts
    with pytest.raises(RunFailed, match="exit code 2"):
        planning.rounds_of({"wrong": ["--model", "no-such-model"]}, 1)


def test_a_crash_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "autoshard").write_text("raise ValueError('broken')", encoding="utf-8")
    with pytest.raises(RunFailed, match=r"exit code 1:[\s\S]*broken"):
        planning.planned_with([], tmp_path, {"PYTHONPATH": ":".join(sys.path)})
