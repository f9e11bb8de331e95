"""Published logs become the rows that their sources mean, and a row is read again as the run that it was."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from autoshard.calibration.measured_run import run_of
from autoshard.calibration.rows import MeasuredRow
from autoshard.command_line.reading import read_options
from autoshard.commands.interchange.import_ import import_
from autoshard.errors import InputError
from autoshard.imports.imported import imported_run
from autoshard.imports.logs.log import TrainingLog
from autoshard.imports.logs.question import log_question
from autoshard.imports.logs.reading import holds_log, read_log
from autoshard.imports.logs.row import LoggedRun, logged_run
from autoshard.imports.question import ImportOptions
from autoshard.spec.record import encode
from tests.imports.logs.published import GPT_13B, LOGS, PublishedLog, arguments, megatron

READ = [log for log in LOGS if not log.refused]
REFUSED = [log for log in LOGS if log.refused]


def logged(case: PublishedLog, folder: Path, monkeypatch: pytest.MonkeyPatch) -> LoggedRun:
    """The row of a published log, with the options that its reader types."""
    monkeypatch.chdir(folder)
    Path(case.name).write_text(case.text, encoding="utf-8")
    for name, text in filter(all, (case.config, case.model)):
        Path(name).write_text(text, encoding="utf-8")
    model = ["--model", case.model[0]] if case.model[0] else []
    typed: dict[str, Any] = read_options("import", import_, [case.name, *shlex.split(case.options), *model])
    config = imported_run(case.config[0]) if case.config[0] else None
    log = read_log(Path(case.name))
    return logged_run(log, log_question(log, config, typed["question"], typed["nodes"]))


@pytest.mark.parametrize("case", READ, ids=lambda case: case.name)
def test_a_published_log_is_read_as_its_source_means_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: PublishedLog
) -> None:
    run = logged(case, tmp_path, monkeypatch)
    assert run.log.program == case.program and str(run.question.candidate) == case.candidate
    assert run.step.steps == case.steps and run.step.time_s == pytest.approx(case.time_s, rel=2e-3)
    assert run.row.peak_memory_gib == (case.memory_gib and pytest.approx(case.memory_gib))
    assert run.step.low_s <= run.step.time_s <= run.step.high_s


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_log_that_says_too_little_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: PublishedLog
) -> None:
    with pytest.raises(InputError) as caught:
        logged(case, tmp_path, monkeypatch)
    assert case.refused in str(caught.value) and "\n" not in str(caught.value)
    assert read_log(Path(case.name)).program == case.program


@pytest.mark.parametrize("case", READ, ids=lambda case: case.name)
def test_a_row_is_the_run_that_its_configuration_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: PublishedLog
) -> None:
    run = logged(case, tmp_path, monkeypatch)
    row = MeasuredRow.read({name: value for name, value in encode(run.row).items() if value is not None})
    again, request = run_of(row), run.question.request
    assert (again.cluster, again.workload, again.candidate) == (
        request.cluster, request.workload, run.question.candidate)  # fmt: skip
    sizes = ("num_layers", "hidden", "ffn", "num_heads", "num_kv_heads", "vocab", "num_experts")
    assert [getattr(again.model, name) for name in sizes] == [getattr(request.model, name) for name in sizes]
    assert again.kernels == (run.question.candidate.kernels or request.cluster.kernels)


layouts = st.fixed_dictionaries(
    {
        "tensor_model_parallel_size": st.sampled_from([1, 2, 4, 8]),
        "pipeline_model_parallel_size": st.sampled_from([1, 2, 4]),
        "context_parallel_size": st.sampled_from([1, 2]),
        "micro_batch_size": st.sampled_from([1, 2]),
        "sequence_parallel": st.booleans(),
        "use_distributed_optimizer": st.booleans(),
        "overlap_grad_reduce": st.booleans(),
        "transformer_impl": st.sampled_from(["transformer_engine", "local"]),
        "recompute_granularity": st.sampled_from([None, "full", "selective"]),
        "bf16": st.just(True),
        "fp16": st.just(False),
    }
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=layouts, dp=st.sampled_from([1, 2, 8]), cluster=st.sampled_from(["h100-80", "a100-80", "b200"]))
def test_any_layout_that_a_log_prints_comes_back(tmp_path: Path, values: dict[str, Any], dp: int, cluster: str) -> None:
    axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    ranks = dp
    for axis in axes:
        ranks *= values[axis]
    printed = {**GPT_13B, "checkpoint_activations": False, **values, "world_size": ranks, "global_batch_size": 64}
    path = tmp_path / "any.log"
    path.write_text(arguments(printed) + megatron([3000.0, *[2000.0] * 8], 64), encoding="utf-8")
    log = read_log(path)
    question = log_question(log, None, ImportOptions(cluster=cluster))
    run = logged_run(log, question).run
    assert (run.candidate, run.cluster, run.workload) == (
        question.candidate, question.request.cluster, question.request.workload)  # fmt: skip
    assert run.candidate.num_ranks == ranks and run.candidate.tp == values["tensor_model_parallel_size"]


def log_of(folder: Path, text: str, name: str = "a.log") -> TrainingLog:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_log(path)


def test_a_configuration_that_did_not_run_is_refused_with_the_key(tmp_path: Path) -> None:
    log = log_of(tmp_path, arguments(GPT_13B) + megatron([190000.0] * 8, 1024))
    script = tmp_path / "train.sh"
    line = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 40 --hidden-size 5120 --num-attention-heads 40 "
    script.write_text(line + "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --fp16\n", "utf-8")
    with pytest.raises(InputError, match=r"tp is 2 in the log, 4 in .*train\.sh; pp is 4 in the log, 2 in"):
        log_question(log, imported_run(str(script)), ImportOptions())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("zero1: true\ntensor_model_parallel_size: 2\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"is of Megatron-LM, .* of NxD Training\. Type the configuration that ran"):
        log_question(log, imported_run(str(recipe)), ImportOptions())


def test_nodes_that_nobody_names_are_asked_for(tmp_path: Path) -> None:
    case = next(case for case in LOGS if case.name == "titan-bf16.log")
    (tmp_path / "c.toml").write_text(case.config[1], encoding="utf-8")
    log = log_of(tmp_path, case.text)
    with pytest.raises(InputError, match="--nodes: missing"):
        log_question(log, imported_run(str(tmp_path / "c.toml")), ImportOptions())


def test_the_same_log_has_the_same_name_when_it_has_grown_or_moved(tmp_path: Path) -> None:
    text = arguments(GPT_13B) + megatron([190000.0] * 8, 1024)
    names: set[str] = set()
    for folder, more in ((tmp_path / "a", ""), (tmp_path / "b", megatron([190000.0] * 8, 1024, 9))):
        folder.mkdir()
        log = log_of(folder, text + more)
        names.add(logged_run(log, log_question(log, None, ImportOptions(cluster="a100-80"))).row.id)
    assert len(names) == 1


def test_configurations_are_no_logs(tmp_path: Path) -> None:
    for case in LOGS:
        for name, text in filter(all, (case.config, case.model)):
            path = tmp_path / name
            path.write_text(text, encoding="utf-8")
            assert not holds_log(path)
