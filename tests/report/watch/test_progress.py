"""What is said of a run, by folders that were made by hand for every state."""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.errors import InputError
from autoshard.report.sheet import Node
from autoshard.report.watch.content import read_run
from autoshard.report.watch.drifts import drifts_of
from autoshard.report.watch.progress import RunProgress
from autoshard.report.watch.sheets import headline_sheet
from autoshard.report.watch.structured import progress_json
from autoshard.runtime.folder import holds_files
from autoshard.spec.record import encode
from autoshard.spec.training import Checkpointing, Evaluating, Training
from tests.report.watch.made_runs import FAR, FROM, NOW, STEP_S, at_work, made_run, plan_of_two, seen, steps_of, touch


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, as a run does."""
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def seen_at_work(folder: Path) -> RunProgress:
    """What is said of a folder while a run holds it."""
    with held(folder):
        return seen(folder)


def test_a_folder_that_is_no_run_is_refused_with_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    made_run(tmp_path / "runs" / "one", steps_of(3))
    for path, words in (
        ("other", "holds no run: none of its files is plan.json"),
        ("runs", f"It holds the runs {tmp_path / 'runs' / 'one'}"),
        ("runs/ome", "there is no such folder. Did you mean one?"),
        ("other/notes.txt", "is a file"),
    ):
        with pytest.raises(InputError) as error:
            read_run(tmp_path / path)
        assert words in str(error.value)


@pytest.mark.parametrize("name", [".lock", "positions", "logs", ".training.json.12345.partial"])
def test_a_folder_has_not_begun_while_it_holds_only_what_precedes_the_plan(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert seen(tmp_path).state == "not begun"
    assert not holds_files(tmp_path)


def test_an_empty_folder_and_one_that_is_being_prepared_have_not_begun(tmp_path: Path) -> None:
    assert seen(tmp_path).state == "not begun" and not seen(tmp_path).is_bad
    made_run(tmp_path, notes=())
    with held(tmp_path):
        touch(tmp_path / ".lock", NOW - 5)
        now = seen(tmp_path)
    assert (now.state, now.reason, now.step, now.num_steps) == ("starting", "no step has ended yet", 0, 100)
    (tmp_path / "plan.json").write_text('{"schema": ')  # while it is written
    now = seen_at_work(tmp_path)
    assert now.state == "starting" and now.model is None and "is not JSON" in now.remarks[0]


def test_a_run_under_way(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(40))
    kept = tmp_path / "checkpoints" / "step-00000030"
    kept.mkdir(parents=True)
    (kept / "rank-00000.safetensors").write_bytes(bytes(1000))
    (tmp_path / "checkpoints" / "step-00000035").mkdir()  # without an index
    (tmp_path / "checkpoints" / "step-00000040.partial").mkdir()
    (kept / "index.json").write_bytes(bytes(24))
    touch(kept / "index.json", NOW - 8)
    now = seen_at_work(tmp_path)
    assert (now.state, now.step, now.num_steps, now.is_bad) == ("running", 40, 100, False)
    assert now.left_s == pytest.approx(60 * STEP_S) and now.idle_s == pytest.approx(0.3)
    assert now.losses[0] == (1, 3.99) and now.losses[-1] == (40, 3.6) and len(now.losses) == 40
    assert now.pace and (now.pace.step_time_s, now.pace.ratio, now.pace.inside) == (STEP_S, 1.0, True)
    assert now.pace.tokens_per_s == now.pace.predicted_tokens_per_s == 128.0
    assert now.memory and now.memory.measured_bytes == 2**20 and now.memory.of_process
    assert now.checkpoint and (now.checkpoint.step, now.checkpoint.num_bytes) == (30, 1024)
    assert now.checkpoint.age_s == pytest.approx(8) and now.saving == 40
    assert now.starts == (0,) and now.drifts == now.remarks == now.behind == ()
    assert json.loads(json.dumps(progress_json(now)))["pace"]["inside"] is True


def test_steps_without_an_answer_have_no_loss_and_are_no_drift(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(40, loss=lambda n: None if n % 5 == 0 else 3.0))
    now = seen_at_work(tmp_path)
    assert now.drifts == () and now.step == 40 and now.losses[38:] == ((39, 3.0), (40, None))
    assert now.last and now.last.step.loss is None and now.last.step.finite
    figures = Node(progress_json(now))
    (loss,) = [fact for fact in headline_sheet(now, figures).facts if fact.name == "loss"]
    assert loss.value == "none"


def test_a_plan_about_another_machine_is_compared_with_nothing(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(40, mfu=None, time_s=9.0))
    now = seen_at_work(tmp_path)
    assert now.pace and now.pace.predicted_s is None and now.pace.ratio is None and now.drifts == ()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"time_s": lambda n: STEP_S if n < 30 else 0.7}, "outside the predicted 400.0 ms to 600.0 ms"),
        ({"time_s": lambda n: 0.42 if n < 30 else 0.55}, "31% more than the 420.0 ms of its first ones"),
        ({"loss": lambda n: 3.0 if n < 45 else 6.0}, "the loss jumped to 6.0000, from a median of 3.0000"),
        ({"loss": lambda n: float("nan") if n == 50 else 3.0}, "step 50: loss nan, gradient norm 1"),
        ({"norm": lambda n: float("inf") if n == 49 else 3.0}, "step 49: loss 3.51, gradient norm inf"),
        ({"updated": lambda n: n % 10 > 0}, "2 of the last 20 updates were skipped"),
    ],
)
def test_a_run_that_drifts(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    made_run(tmp_path, steps_of(50, **changes))
    now = seen_at_work(tmp_path)
    assert now.state == "running" and not now.is_bad
    assert any(says in one for one in now.drifts), now.drifts
    assert len(now.losses) == 50
    json.dumps(progress_json(now), allow_nan=False)


def test_a_noisy_loss_that_falls_is_no_drift(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(60, loss=lambda n: 8.0 / n**0.3 + 0.05 * (n * 7919 % 13 - 6) / 6))
    with held(tmp_path):
        assert seen(tmp_path).drifts == ()


def test_the_drift_of_a_start_is_about_its_own_steps(tmp_path: Path) -> None:
    """The steps before were of another plan, which was faster."""
    again = {"from": 50, "at": NOW - 0.3 - 49.5 * STEP_S}
    made_run(tmp_path, steps_of(100, time_s=lambda n: 0.1 if n <= 50 else STEP_S), notes=(FROM, again), num_steps=200)
    now = seen_at_work(tmp_path)
    assert now.starts == (0, 50) and now.drifts == ()


def test_a_checkpoint_that_is_missed(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(300), keeping=Checkpointing(every_steps=50), num_steps=500)
    with held(tmp_path):
        (said,) = seen(tmp_path).drifts
    assert said == "no checkpoint for 300 steps (149.50 s), though one every 50 steps is asked for"
    made_run(tmp_path, steps_of(300), keeping=Checkpointing(every_steps=50, to="s3://bucket/run"), num_steps=500)
    now = seen_at_work(tmp_path)
    assert now.drifts == () and now.checkpoints_elsewhere == "s3://bucket/run"


def test_a_run_that_hangs_names_the_rank_and_what_the_others_wait_for(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(40, age_s=11))
    at_work(tmp_path, 0, 41, "B0.1", "all_reduce over dp")
    at_work(tmp_path, 1, 41, "F0.0")
    at_work(tmp_path, 2, 0, "")  # in no step
    with held(tmp_path):
        now = seen(tmp_path)
        assert seen(tmp_path, NOW - 2).state == "running", "four of its steps, and at least 10 s"
    assert (now.state, now.is_bad) == ("hangs", True)
    assert now.reason == "no step has ended for 11.00 s, and its steps take 500.0 ms"
    behind, other = now.behind
    assert re.fullmatch(
        rf"rank 1 \(pipeline rank 0, process {os.getpid()} on \S+, there for .*s\) in step 41, F0.0: computes", behind
    )
    assert other == "rank 0 in step 41, B0.1: waits for all_reduce over dp"


def test_slow_steps_may_take_their_time(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(40, age_s=30, time_s=10.0))
    with held(tmp_path):
        assert seen(tmp_path).state == "running" and seen(tmp_path, NOW + 20).state == "hangs"


def judged_run(folder: Path, *records: Sequence[Mapping[str, Any]], every_steps: int) -> Path:
    """A run of 100 steps that evaluates 24 batches now and then."""
    made_run(folder, *records)
    judging = Evaluating(sets={"a": 1.0}, every_steps=every_steps, samples=24 * plan_of_two().workload.global_batch)
    (folder / "training.json").write_text(json.dumps(encode(Training(steps=100, eval=judging))), encoding="utf-8")
    return folder / "evaluations.jsonl"


def test_an_evaluation_may_take_as_long_as_the_last_one_and_as_steps_for_its_batches(tmp_path: Path) -> None:
    evaluations = judged_run(tmp_path, steps_of(40, age_s=30), every_steps=40)
    with held(tmp_path):
        now = seen(tmp_path)
        assert (now.state, now.reason, now.is_bad) == ("running", "step 40 is evaluated", False)
        hung = seen(tmp_path, NOW + 25)
        assert (hung.state, hung.reason) == ("hangs", "no step has ended for 55.00 s, while step 40 is evaluated")
        evaluations.write_text('{"step": 20, "time_s": 20.0, "loss": 1.0}\n{"step": 4', encoding="utf-8")
        assert seen(tmp_path, NOW + 25).state == "running" and seen(tmp_path, NOW + 55).state == "hangs"
        evaluations.write_text('{"step": 20, "time_s": 20.0}\n{"step": 40, "time_s": 20.0}\n', encoding="utf-8")
        assert seen(tmp_path).state == "hangs", "it has ended, and the next step has not"


def test_the_last_evaluation_is_no_save_and_a_start_may_begin_with_one(tmp_path: Path) -> None:
    judged_run(tmp_path / "last", steps_of(100, age_s=40), every_steps=30)
    notes = FROM, {"from": 60, "at": NOW - 700}
    evaluations = judged_run(tmp_path / "begun", steps_of(60, age_s=2000), notes, every_steps=30)
    evaluations.write_text('{"step": 30, "time_s": 300.0}\n', encoding="utf-8")
    for name, state, reason in (("last", "running", "step 100"), ("begun", "starting", "step 60")):
        with held(tmp_path / name):
            now = seen(tmp_path / name)
        assert (now.state, now.reason) == (state, f"{reason} is evaluated")


def test_a_run_of_another_machine_is_judged_by_the_times_of_its_files(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(40, age_s=30), host=FAR)
    at_work(tmp_path, 0, 41, "F0.0", host=FAR)
    now = seen(tmp_path)
    assert now.state == "running" and "it runs on node-7" in now.remarks[0], "a shared folder may show what is old"
    late = seen(tmp_path, NOW + 100)
    assert (late.state, late.is_bad) == ("silent", True)
    assert late.reason.endswith("it hangs or was killed; process 4711 on node-7 cannot be looked at from here")
    assert late.behind == (f"rank 0 (pipeline rank 0, process {os.getpid()} on node-7) in step 41, F0.0: computes",)


@pytest.mark.parametrize("skew_s", [-20.0, 20.0])
def test_clocks_may_differ(tmp_path: Path, skew_s: float) -> None:
    """The machine that runs it writes its own time into lines, and the one that keeps the file gives it another."""
    records = steps_of(40, age_s=0.3 - skew_s)
    made_run(tmp_path, records, notes=({"from": 0, "at": NOW - 1000 + skew_s},), host=FAR)
    touch(tmp_path / "metrics.jsonl", NOW - 0.3)
    now = seen(tmp_path)
    assert now.state == "running" and now.left_s == pytest.approx(60 * STEP_S)
    assert any("ahead of the one here" in one for one in now.remarks) == (skew_s > 0)


def test_a_killed_run_leaves_half_a_line(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(40))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss": 3.')
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"fro')
    now = seen(tmp_path)
    assert (now.state, now.step, now.is_bad) == ("killed", 40, True)
    assert now.reason.startswith("process 4711 on ") and "ended without a word" in now.reason


@pytest.mark.parametrize("host", ["", FAR])
def test_what_a_run_notes_of_its_end_is_known_everywhere(tmp_path: Path, host: str) -> None:
    for records, end, state, reason in (
        (steps_of(100), {"ended": ""}, "ended", ""),
        (steps_of(40), {"ended": "SIGTERM"}, "stopped", "by SIGTERM, before its last step"),
        (
            steps_of(40),
            {"failed": "rank 1 died\nof this"},
            "failed",
            "rank 1 died\nof this",
        ),
    ):
        made_run(tmp_path, records, notes=(FROM, {**end, "at": NOW - 0.1}), host=host)
        now = seen(tmp_path, NOW + 9999)
        assert (now.state, now.reason, now.is_bad, now.is_over) == (state, reason, state == "failed", True)


def test_a_run_that_starts_again_after_failures(tmp_path: Path) -> None:
    failed = [{"from": 0, "at": NOW - 900}, {"failed": "rank 1 died", "at": NOW - 60}]
    made_run(tmp_path, steps_of(40, age_s=61), notes=failed)
    now = seen_at_work(tmp_path)
    assert (now.state, now.reason) == ("starting", "again, after: rank 1 died")
    made_run(tmp_path, steps_of(42), notes=[*failed, {"from": 40, "at": NOW - 2}])
    now = seen_at_work(tmp_path)
    assert (now.state, now.starts, now.failures) == ("running", (0, 40), ("rank 1 died",))


def test_a_hang_that_ended_the_ranks_of_a_launcher(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(40, age_s=60))
    (tmp_path / "hang-rank-1.txt").write_text("no rank has moved for 24 s (limit 24 s). rank 1 computes\n")
    touch(tmp_path / "hang-rank-1.txt", NOW - 30)
    now = seen(tmp_path)
    assert now.state == "failed" and now.reason.startswith("no rank has moved for 24 s")


def test_the_last_state_is_saved(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(100, age_s=40))
    with held(tmp_path):
        assert (seen(tmp_path).state, seen(tmp_path).is_bad) == ("saving", False)


def test_a_long_run_is_read_in_parts(tmp_path: Path) -> None:
    records = steps_of(9000)
    made_run(tmp_path, records, num_steps=10_000)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9001, ')
    with held(tmp_path):
        found, now = read_run(tmp_path), seen(tmp_path)
    assert (now.state, now.step, now.drifts) == ("running", 9000, ())
    assert len(found.steps) < 1500 and found.steps[0].step.number == 1
    assert [one.step.number for one in found.steps[-500:]] == list(range(8501, 9001))
    losses = dict(now.losses)
    assert 200 < len(losses) <= 300 and losses[9000] == records[-1]["loss"]
    assert all(loss == 4.0 - 0.01 * step for step, loss in losses.items())


def test_more_memory_than_a_device_may_fill_is_a_drift(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(10, memory_bytes=2**50))
    plan = plan_of_two()
    assert drifts_of(read_run(tmp_path).steps, plan, None, None) == (), "on a host it is all of the process"
    elsewhere = replace(plan, cluster=replace(plan.cluster, name="devices"))
    assert "rank 0 holds 1.00 PiB, more than the" in drifts_of(read_run(tmp_path).steps, elsewhere, None, None)[0]
