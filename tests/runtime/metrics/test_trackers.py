"""Trackers: what their own readers find, and that none of them can end or delay a run."""

import json
import math
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from autoshard.errors import InputError
from autoshard.run.reports import TimedStep
from autoshard.runtime.metrics.log import MetricsLog, record_of
from autoshard.runtime.metrics.shown import ShownSteps
from autoshard.runtime.metrics.trackers import _FLUSH, _FLUSH_S, OnTensorBoard, Trackers, trackers_of
from autoshard.spec.training import Tracking
from tests.runtime.cases import PATIENCE_S, wait_until
from tests.runtime.metrics.offline import records, wandb_environment

SCRIPT = Path(__file__).with_name("start_on_wandb.py")


class Kept:
    """A tracker that keeps what it hears, and fails or waits where it is told to."""

    def __init__(self, name: str = "kept", fails_in: str = "", waits_for: threading.Event | None = None) -> None:
        self.name, self.key, self._fails_in, self._waits_for = name, name, fails_in, waits_for
        self.heard: list[Any] = []
        self.threads: set[int] = set()

    def _hear(self, method: str, what: Any) -> None:
        self.threads.add(threading.get_ident())
        if method == self._fails_in:
            raise ConnectionError("no route to it")
        if method == "finish" and self._waits_for:
            self._waits_for.wait()
        self.heard.append(what)

    def start(self, config: Mapping[str, Any]) -> Sequence[str]:
        self._hear("start", config)
        return [f"{self.name} began"]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._hear("log", (step, dict(values)))

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        self._hear("finish", (dict(summary), failed))


def fed(*trackers: Kept, within_s: float = PATIENCE_S) -> list[tuple[str, str]]:
    both = Trackers(trackers, {"a": 1})
    for step in range(1, 4):
        both.log(step, {"loss": 1 / step})
    both.finish({"b": 2}, failed=False, within_s=within_s)
    return sorted(both.notes())


def test_all_is_told_in_order_from_another_thread() -> None:
    tracker = Kept()
    Trackers([tracker], {}).finish({}, failed=True, within_s=1.0)
    assert not tracker.heard, "a run without steps starts none"
    assert fed(tracker) == [("note", "kept began")]
    assert tracker.heard == [{"a": 1}, (1, {"loss": 1.0}), (2, {"loss": 0.5}), (3, {"loss": 1 / 3}), ({"b": 2}, False)]
    assert len(tracker.threads) == 1 and threading.get_ident() not in tracker.threads


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_told_of_once_and_the_others_go_on(method: str) -> None:
    broken, sound = Kept("broken", fails_in=method), Kept("sound")
    (warning,) = [text for kind, text in fed(broken, sound) if kind == "warning"]
    assert warning == "broken failed, and gets nothing more of this run, which goes on: ConnectionError: no route to it"
    assert len(sound.heard) == 5


def test_a_tracker_that_hangs_is_left_alone() -> None:
    forever = threading.Event()
    said = fed(Kept("slow", waits_for=forever), within_s=0.1)
    forever.set()
    assert ("warning", "slow was not done 0.1 s after the run, and is left alone") in said


def test_a_missing_package_is_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError) as caught:
        trackers_of(
            Tracking(wandb="p", tensorboard=True), tmp_path, shown=ShownSteps(tmp_path, 0), run_id="a", files={}
        )
    assert str(caught.value).splitlines() == [
        f"track.{name}: {name} is not installed here. Type: pip install 'autoshard[{name}]'"
        for name in ("wandb", "tensorboard")
    ]
    assert not list(tmp_path.iterdir())


def test_tensorboard_reads_every_step_of_a_run_that_was_continued_twice(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for offset, (first, last) in enumerate(((1, 30), (21, 35), (31, 40))):
        trackers = Trackers([OnTensorBoard(folder=tmp_path, num_done=first - 1)], {"seed": 7})
        for step in range(first, last + 1):
            trackers.log(step, {"loss": 1 / step + offset, "neuron/core_use": 0.5})
        trackers.finish({"ratio": 1.25}, failed=False, within_s=PATIENCE_S)
        assert [kind for kind, _ in trackers.notes()] == ["note"]
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    losses = found.Scalars("loss")
    assert [event.step for event in losses] == list(range(1, 41))
    offsets = [0.0] * 20 + [1.0] * 10 + [2.0] * 10
    wanted = [1 / step + offset for step, offset in zip(range(1, 41), offsets, strict=True)]
    assert [event.value for event in losses] == pytest.approx(wanted)
    assert len(found.Scalars("neuron/core_use")) == 40
    (summary,) = found.Tensors("summary/text_summary")[-1:]
    assert json.loads(summary.tensor_proto.string_val[0]) == {"failed": False, "ratio": 1.25}
    assert found.PluginTagToContent("text").keys() == {
        "configuration/text_summary",
        "summary/text_summary",
    }


def logged(folder: Path, numbers: range) -> None:
    """Let the file of steps of a run have these."""
    log = MetricsLog(folder / "metrics.jsonl", numbers.start - 1)
    for number in numbers:
        loss = float("nan") if number == 4 else 1 / number
        step = TimedStep(number=number, loss=loss, norm=1.0, time_s=0.5, num_tokens=64)
        log.append(record_of(step, at=float(number)))
    log.close()


def continued(folder: Path, num_done: int, numbers: range, *, ends: bool = True) -> list[int]:
    """The steps that a tracker hears of in a start, which a kill may end."""
    tracker = Kept()
    trackers = Trackers([tracker], {}, ShownSteps(folder, num_done))
    for number in numbers:
        trackers.log(number, {"loss": 1 / number})
    wait_until(lambda: len(tracker.heard) > len(numbers), "it has heard of all steps")
    if ends:
        trackers.finish({}, failed=False, within_s=PATIENCE_S)
    return [one[0] for one in tracker.heard[1:] if type(one[0]) is int]


def test_steps_that_a_tracker_may_lack_are_shown_after_the_next_start(tmp_path: Path) -> None:
    logged(tmp_path, range(1, 26))
    assert continued(tmp_path, 0, range(1, 26), ends=False) == [*range(1, 26)]
    logged(tmp_path, range(21, 31))
    assert continued(tmp_path, 20, range(21, 31)) == [*range(1, 31)], "what a kill may have taken"
    logged(tmp_path, range(26, 36))
    assert continued(tmp_path, 25, range(26, 36)) == [*range(26, 36)], "all others were shown"
    (tmp_path / "tracked.json").write_text("[" * 5000)
    assert continued(tmp_path, 35, range(36, 37)) == [*range(1, 37)]


def test_a_loss_that_was_no_number_is_shown_as_it_was(tmp_path: Path) -> None:
    logged(tmp_path, range(1, 6))
    (loss,) = [fields["loss"] for number, fields in ShownSteps(tmp_path, 5).missing("a") if number == 4]
    assert math.isnan(loss)


def test_what_was_handed_a_while_ago_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("autoshard.runtime.metrics.shown.time.monotonic", lambda: now_s)
    logged(tmp_path, range(1, 41))
    shown = ShownSteps(tmp_path, 0)
    for step in range(1, 41):
        now_s += 1.0
        shown.hand("a", step)
    later = ShownSteps(tmp_path, 40)
    assert later.until("a") == 20 and [step for step, _ in later.missing("a")] == [*range(21, 41)]
    assert ShownSteps(tmp_path, 10).until("a") == 10 and not list(ShownSteps(tmp_path, 10).missing("a"))
    assert later.until("b") == 0, "a tracker, or a run of one, that has shown nothing"
    shown.end("a")
    assert ShownSteps(tmp_path, 40).until("a") == 40


def test_tensorboard_of_a_killed_run_has_every_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def steps() -> list[int]:
        if not any(tmp_path.glob("tensorboard/*")):
            return []
        found = EventAccumulator(str(tmp_path / "tensorboard"))
        found.Reload()
        return [event.step for event in found.Scalars("loss")] if "loss" in found.Tags()["scalars"] else []

    for num_done, numbers in ((0, range(1, 26)), (20, range(21, 31))):
        logged(tmp_path, numbers)
        shown = ShownSteps(tmp_path, num_done)
        tracker = OnTensorBoard(folder=tmp_path, num_done=shown.until(OnTensorBoard.key))
        trackers = Trackers([tracker], {}, shown)
        for number in numbers:
            trackers.log(number, {"loss": 1 / number})
        wait_until(lambda last=numbers[-1]: steps()[-1:] == [last], "it has shown all")
    assert steps() == [*range(1, 31)]


def on_wandb(folder: Path, *words: str, code: int = 0, **more: str) -> tuple[str, list[list[dict[str, Any]]]]:
    """Start runs on W&B; return what was printed, and what W&B's reader finds in the file of each start."""
    command = [sys.executable, str(SCRIPT), str(folder / "run"), *words]
    env = wandb_environment(folder, **more)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    wait_until(lambda: not services_of(folder), "the service of W&B has ended, also of a killed run")
    files = sorted(folder.glob("run/wandb/offline-run-*/run-*.wandb"))
    kept = (f"kept offline. To send it, type: wandb sync {file.parent}" for file in files)
    assert code or any(words in done.stdout for words in kept)
    return done.stdout + done.stderr, [records(file, folder) for file in files]


def history(found: list[dict[str, Any]]) -> dict[int, Any]:
    return {one["history"]["item"]["_step"]: one["history"]["item"]["loss"] for one in found if "history" in one}


@pytest.mark.slow
def test_wandb_without_a_key_keeps_a_run_that_is_continued_under_one_id(tmp_path: Path) -> None:
    _, (found, later) = on_wandb(tmp_path, "1-12,11-20")
    (run,), (again,) = ([record["run"] for record in part if "run" in record] for part in (found, later))
    assert run["run_id"] == again["run_id"] == "0a1b2c3d"
    assert run["project"] == "tested" and run["display_name"] == "run" and run["resume"]
    config = run["config"]["update"]
    assert config["plan"]["model"]["name"] == "tiny-llama" and config["training"]["steps"] == 20
    assert history(found) == {step: "NaN" if step == 4 else 1 / step for step in range(1, 13)}
    assert list(history(later)) == list(range(11, 21))
    summary: dict[str, Any] = {}
    for record in later:
        summary |= record["summary"]["update"] if "summary" in record else {}
    assert summary["step_time_s/measured"] == 0.25 and summary["step_time_s/ratio"] > 0
    assert summary["sent_bytes/tp/measured"] == 7 and summary["memory_bytes/weights/predicted"] > 0
    artifacts = [record["artifact"] for record in found if "artifact" in record]
    assert {one["type"] for one in artifacts} == {"plan", "predicted_trace"}
    names = {Path(part["local_path"]).name for one in artifacts for part in one["manifest"]["contents"]}
    assert names == {"plan.json", "predicted_trace.json"}
    assert json.loads((tmp_path / "run" / "predicted_trace.json").read_text())["traceEvents"]


UNREACHED = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"WANDB_API_KEY": "short"}, "note: Weights & Biases: WANDB_API_KEY invalid"),
        (UNREACHED, "http://127.0.0.1:9 cannot be reached: [Errno 111]"),
    ],
)
def test_wandb_with_a_wrong_key_or_server_keeps_the_run_offline(settings: dict[str, Any], says: str, tmp_path: Path):
    said, (found,) = on_wandb(tmp_path, "1-3", **settings)
    assert says in said and "short" not in said
    assert history(found)[3] == 1 / 3


@pytest.mark.slow
def test_wandb_of_a_run_that_was_killed_early_gets_its_steps_after_the_next_start(tmp_path: Path) -> None:
    on_wandb(tmp_path, "1-25", "a-file", code=-9)
    _, (first, later) = on_wandb(tmp_path, "21-30")
    assert {one["run"]["run_id"] for part in (first, later) for one in part if "run" in one} == {"0a1b2c3d"}
    assert history(later) == {step: "NaN" if step == 4 else 1 / step for step in range(1, 31)}


def test_wandb_knows_the_setting_that_keeps_the_last_seconds_of_a_killed_run() -> None:
    import wandb

    make: Any = wandb.Settings
    assert getattr(make(**{_FLUSH: _FLUSH_S}), _FLUSH) == _FLUSH_S < 15  # its default


@pytest.mark.slow
def test_wandb_of_a_killed_run_has_its_last_step_and_its_service_is_gone(tmp_path: Path) -> None:
    _, (found,) = on_wandb(tmp_path, "1-15", "the-last-step", code=-9)
    assert max(history(found)) == 15


def services_of(folder: Path) -> list[str]:
    """The processes that W&B has started for runs in a folder."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in path.read_bytes() and b"wandb-core" in (path.parent / "cmdline").read_bytes():
                found.append(path.parent.name)
        except OSError:  # it has ended, or is somebody else's
            continue
    return found
