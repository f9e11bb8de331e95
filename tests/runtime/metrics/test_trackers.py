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
from autoshard.runtime.metrics.trackers import OnTensorBoard, Trackers, trackers_of
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
        trackers_of(Tracking(wandb="p", tensorboard=True), tmp_path, num_done=0, run_id="a", files={})
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


def on_wandb(folder: Path, *words: str, code: int = 0, **more: str) -> tuple[str, list[list[dict[str, Any]]]]:
    """Start runs on W&B; return what was printed, and what W&B's reader finds in the file of each start."""
    command = [sys.executable, str(SCRIPT), str(folder / "run"), *words]
    env = wandb_environment(folder, **more)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    wait_until(lambda: not services_of(folder), "the service of W&B has ended, also of a killed run")
    files = sorted(folder.glob("run/wandb/offline-run-*/run-*.wandb"))
    assert code or f"kept offline. To send it, type: wandb sync {files[0].parent}" in done.stdout
    return done.stdout + done.stderr, [records(file, folder) for file in files]


def history(found: list[dict[str, Any]]) -> dict[int, Any]:
    return {one["history"]["item"]["_step"]: one["history"]["item"]["loss"] for one in found if "history" in one}


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


UNREACHED = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "5"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "says"),
    [({"WANDB_API_KEY": "short"}, "note: Weights & Biases: WANDB_API_KEY invalid"), (UNREACHED, "")],
)
def test_wandb_with_a_wrong_key_or_server_keeps_the_run_offline(settings: dict[str, Any], says: str, tmp_path: Path):
    said, (found,) = on_wandb(tmp_path, "1-3", **settings)
    assert says in said and "short" not in said
    assert history(found)[3] == 1 / 3


@pytest.mark.slow
def test_wandb_of_a_killed_run_has_its_last_step_and_its_service_is_gone(tmp_path: Path) -> None:
    _, (found,) = on_wandb(tmp_path, "1-15", "3", code=-9)
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
