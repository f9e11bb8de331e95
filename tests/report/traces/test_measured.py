"""What a run measured stands in the trace of its plan, in processes of its own."""

import gzip
import json

import pytest

from autoshard.errors import InputError
from autoshard.plan.codec import dump
from autoshard.report.traces.measured import measured_steps
from autoshard.report.traces.predicted import trace_text
from autoshard.run.folder import METRICS, PLAN, profile_path
from tests.report.traces.test_predicted import case, lane_names, lanes_of


def profile_of(host, passes):
    """What torch's profiler writes of a rank: its passes among other events; times in microseconds."""
    others = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 7, "ts": 5.0, "dur": 1.0},
              {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}}]  # fmt: skip
    named = [{"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": dur}
             for name, ts, dur in passes]  # fmt: skip
    return {"host_name": host, "traceEvents": [*others, *named]}


def write_profile(folder, step, rank, data):
    path = profile_path(folder, step, rank)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    return path


@pytest.fixture
def run(tmp_path):
    plan = case("gpipe")[0]  # tp 2 x pipeline 4
    (tmp_path / PLAN).write_text(dump(plan), encoding="utf-8")
    steps = [
        {"step": n, "loss": 6.0 - n, "norm": 1.0, "time_s": 1.0 + n, "tokens": 10, "tokens_per_s": 1.0, "phase": phase,
         "memory_bytes": 5, "mfu": 0.1, "learning_rate": 0.1, "updated": True, "waited_s": 0.0, "at": 1.0 * n}
        for n, phase in ((1, "warm-up"), (2, "steady"), (3, "steady"), (4, "steady"))
    ]  # fmt: skip
    (tmp_path / METRICS).write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")
    first = {number: plan.mesh.ranks_of({"pp": number})[0] for number in range(4)}
    for number, rank in first.items():
        start = 1e12 + 100.0 * number
        host = "a" if number < 2 else "b"
        passes = [(f"B{number}.0", start + 70.0, 40.0), (f"F{number}.0", start, 30.0)]
        write_profile(tmp_path, 3, rank, profile_of(host, passes))
    return tmp_path, plan


def test_passes_of_a_recorded_step_stand_beside_the_predicted_ones(run):
    folder, plan = run
    measured = measured_steps(folder, plan)
    assert measured.figures["step_time_s"] == 4.0 and measured.num_steps == 4
    starts = {key: [(action.name, round(action.start_s * 1e6)) for action in passes]
              for key, passes in measured.passes.items()}  # fmt: skip
    # Clocks of one host are compared, those of two are not.
    assert starts == {
        (0, 3): [("F0.0", 0), ("B0.0", 70)], (1, 3): [("F1.0", 100), ("B1.0", 170)],
        (2, 3): [("F2.0", 0), ("B2.0", 70)], (3, 3): [("F3.0", 100), ("B3.0", 170)],
    }  # fmt: skip
    events = json.loads(trace_text(plan, case("gpipe")[1], measured=measured))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    said = [name for name in names.values() if name.startswith("measured")]
    assert said[0].startswith(f"measured: {folder}") and said[1:] == [
        f"measured: pipeline rank {number} (rank {rank})" for number, rank in enumerate(measured.ranks)
    ]
    lanes = {names[pid]: slices for (pid, _), slices in lanes_of(events).items() if names[pid] in said}
    (median,) = lanes[said[0]]
    assert median["dur"] == pytest.approx(4e6, abs=1e-2) and median["cat"] == "measured step"
    drawn = lanes["measured: pipeline rank 1 (rank 2)"]
    assert [(event["name"], event["ts"], event["dur"]) for event in drawn] == [
        ("F1.0", pytest.approx(100, abs=1e-2), pytest.approx(30, abs=1e-2)),
        ("B1.0", pytest.approx(170, abs=1e-2), pytest.approx(40, abs=1e-2)),
    ]
    assert "step 3" in lane_names(events).values()


def test_a_run_that_recorded_nothing_has_its_median_step_alone(run):
    folder, plan = run
    for path in (folder / "profile").iterdir():
        path.unlink()
    measured = measured_steps(folder, plan)
    assert not measured.passes
    events = json.loads(trace_text(plan, case("gpipe")[1], measured=measured))["traceEvents"]
    assert [event["name"] for event in events if event.get("cat", "").startswith("measured")] == ["step"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "is no trace of torch's profiler .*Remove it"), ("{", "is not JSON"), ("[]", "is no trace"),
     ('{"a": 1}', "is no trace")],
    ids=["bytes", "broken", "list", "object"],
)  # fmt: skip
def test_a_trace_that_cannot_be_read_is_named(run, content, words):
    folder, plan = run
    path = profile_path(folder, 3, 0)
    path.write_bytes(b"no gzip" if content is None else gzip.compress(content.encode()))
    with pytest.raises(InputError, match=rf"step-3-rank-0\.json\.gz: {words}"):
        measured_steps(folder, plan)


def test_a_run_of_another_plan_is_refused(run):
    with pytest.raises(InputError, match="is a run of another plan"):
        measured_steps(run[0], case("1f1b")[0])
