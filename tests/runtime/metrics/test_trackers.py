"""Trackers: what their own readers find, and that none of them can end or delay a run."""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from autoshard.errors import InputError
from autoshard.runtime.metrics.trackers import (
    OnTensorBoard,
    Trackers,
    refuse_without_packages,
    tracker_ids,
    trackers_of,
)
from autoshard.spec.training import Tracking
from tests.runtime.cases import PATIENCE_S, wait_until
from tests.runtime.metrics.offline import records, wandb_environment

SCRIPT = Path(__file__).with_name("start_on_wandb.py")


class Kept:
    """A tracker that keeps what it hears, and fails or waits where it is told to."""

    def __init__(self, name: str = "kept", fails_in: str = "", waits_for: threading.Event | None = None) -> None:
        self.name, self._fails_in, self._waits_for = name, fails_in, waits_for
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
    assert fed(tracker) == [("note", "kept began")]
    assert tracker.heard == [{"a": 1}, (1, {"loss": 1.0}), (2, {"loss": 0.5}), (3, {"loss": 1 / 3}), ({"b": 2}, False)]
    assert len(tracker.threads) == 1 and threading.get_ident() not in tracker.threads


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_told_of_once_and_the_others_go_on(method: str) -> None:
    broken, sound = Kept("broken", fails_in=method), Kept("sound")
    warnings = [text for kind, text in fed(broken, sound) if kind == "warning"]
    assert warnings == [
        "broken failed, and gets nothing more of this run, which goes on: ConnectionError: no route to it"
    ]
    assert len(sound.heard) == 5


def test_a_tracker_that_hangs_is_left_alone() -> None:
    forever = threading.Event()
    said = fed(Kept("slow", waits_for=forever), within_s=0.1)
    forever.set()
    assert ("warning", "slow was not done 0.1 s after the run, and is left alone") in said


def test_a_run_without_steps_starts_no_tracker() -> None:
    tracker = Kept()
    Trackers([tracker], {}).finish({}, failed=True, within_s=1.0)
    assert not tracker.heard


def test_ids_are_those_of_a_checkpoint_then_those_of_the_folder_then_new(tmp_path: Path) -> None:
    made = tracker_ids(tmp_path)
    assert len(made["wandb"]) == 8 and tracker_ids(tmp_path) == made
    assert tracker_ids(tmp_path, {"wandb": "other"}) == {"wandb": "other"}, "the run of the checkpoint goes on"
    assert tracker_ids(tmp_path, made) == made
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert tracker_ids(elsewhere, made) == made
    (tmp_path / "trackers.json").write_text("{")
    with pytest.raises(InputError, match=r"trackers.json: is not JSON. Remove it"):
        tracker_ids(tmp_path)


def test_a_missing_package_is_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    refuse_without_packages(Tracking())
    with pytest.raises(InputError) as caught:
        trackers_of(Tracking(wandb="p", tensorboard=True), tmp_path, num_done=0, run_id="a", files={})
    assert str(caught.value).splitlines() == [
        f"track.{name}: {name} is not installed here. Type: pip install 'autoshard[{name}]'"
        for name in ("wandb", "tensorboard")
    ]
    assert not list(tmp_path.iterdir())


def tensorboard(folder: Path, steps: range, *, num_done: int = 0, offset: float = 0.0) -> None:
    trackers = Trackers([OnTensorBoard(folder=folder, num_done=num_done)], {"seed": 7})
    for step in steps:
        trackers.log(step, {"loss": 1 / step + offset, "neuron/core_use": 0.5})
    trackers.finish({"ratio": 1.25}, failed=False, within_s=PATIENCE_S)
    assert [kind for kind, _ in trackers.notes()] == ["note"]


def test_tensorboard_reads_every_step_of_a_run_that_was_continued_twice(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tensorboard(tmp_path, range(1, 31))
    tensorboard(tmp_path, range(21, 36), num_done=20, offset=1.0)
    tensorboard(tmp_path, range(31, 41), num_done=30, offset=2.0)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    losses = found.Scalars("loss")
    assert [event.step for event in losses] == list(range(1, 41))
    offsets = [0.0] * 20 + [1.0] * 10 + [2.0] * 10
    assert [event.value for event in losses] == pytest.approx(
        [1 / step + offset for step, offset in zip(range(1, 41), offsets, strict=True)]
    )
    assert len(found.Scalars("neuron/core_use")) == 40
    (summary,) = found.Tensors("summary")[-1:]
    assert json.loads(summary.tensor_proto.string_val[0]) == {"failed": False, "ratio": 1.25}
    assert found.PluginTagToContent("text").keys() == {"configuration", "summary"}


def on_wandb(folder: Path, *words: str, **more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), str(folder / "run"), *words]
    env = wandb_environment(folder, **more)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def history(found: list[dict[str, Any]]) -> dict[int, Any]:
    return {one["history"]["item"]["_step"]: one["history"]["item"]["loss"] for one in found if "history" in one}


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("run/wandb/offline-run-*/run-*.wandb"))


def test_wandb_without_a_key_keeps_a_run_that_is_continued_under_one_id(tmp_path: Path) -> None:
    done = on_wandb(tmp_path, "1-12,11-20")
    assert done.returncode == 0 and not done.stderr, done.stderr
    one, two = files_of(tmp_path)
    assert f"note: Weights & Biases: kept offline. To send it, type: wandb sync {one.parent}" in done.stdout
    found, later = records(one, tmp_path), records(two, tmp_path)
    (run,), (again,) = ([record["run"] for record in part if "run" in record] for part in (found, later))
    assert run["run_id"] == again["run_id"] == json.loads((tmp_path / "run/trackers.json").read_text())["wandb"]
    assert run["project"] == "tested" and run["display_name"] == "run" and run["resume"]
    config = run["config"]["update"]
    assert config["plan"]["model"]["name"] == "tiny-llama" and config["training"]["steps"] == 20
    assert history(found) == {step: "NaN" if step == 4 else 1 / step for step in range(1, 13)}
    assert list(history(later)) == list(range(11, 21))
    summary = {
        name: value for record in later if "summary" in record for name, value in record["summary"]["update"].items()
    }
    assert summary["step_time_s/measured"] == 0.25 and summary["step_time_s/ratio"] > 0
    assert summary["sent_bytes/tp/measured"] == 7 and summary["memory_bytes/weights/predicted"] > 0
    artifacts = {
        record["artifact"]["type"]: record["artifact"]["manifest"]["contents"]
        for record in found
        if "artifact" in record
    }
    assert set(artifacts) == {"plan", "predicted_trace"}
    assert [Path(part["local_path"]).name for part in artifacts["plan"]] == ["plan.json"]
    assert json.loads((tmp_path / "run" / "predicted_trace.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_wandb_with_a_key_of_no_form_says_so_and_keeps_the_run_offline(tmp_path: Path) -> None:
    done = on_wandb(tmp_path, "1-3", WANDB_API_KEY="short")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "note: Weights & Biases: WANDB_API_KEY invalid" in done.stdout and "short" not in done.stdout
    assert history(records(files_of(tmp_path)[0], tmp_path))[3] == 1 / 3


@pytest.mark.slow
def test_wandb_whose_server_cannot_be_reached_keeps_the_run_offline(tmp_path: Path) -> None:
    reach = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "5"}
    done = on_wandb(tmp_path, "1-3", **reach)
    assert done.returncode == 0, done.stderr
    assert "kept offline. To send it, type: wandb sync" in done.stdout
    assert history(records(files_of(tmp_path)[0], tmp_path))[3] == 1 / 3


@pytest.mark.slow
def test_wandb_of_a_killed_run_has_its_last_step_and_its_service_is_gone(tmp_path: Path) -> None:
    done = on_wandb(tmp_path, "1-15", "3")
    assert done.returncode == -9, done.stderr
    wait_until(lambda: not services_of(tmp_path), "the service of a killed run has ended")
    assert max(history(records(files_of(tmp_path)[0], tmp_path))) == 15


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
