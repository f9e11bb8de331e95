"""Saves beside training: when the state may change, and what all ranks know of how a save ended."""

import errno
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from autoshard.engine.base import Engine, Run
from autoshard.errors import InputError
from autoshard.plan.plan import Plan
from autoshard.runtime import resume
from autoshard.runtime.checkpoint import saver
from autoshard.runtime.checkpoint.shelf import Shelf
from autoshard.runtime.checkpoint.storage import Storage, StorageError
from autoshard.runtime.checkpoint.writer import SaveProgress
from autoshard.runtime.engines import builder
from tests.runtime.training_cases import Trained, plan_of, trained
from tests.slower import rest_is_slow

STEPS = 6


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return trained(plan_of("tp=1,pp=1,dp=2"), tmp_path_factory.mktemp("whole"), STEPS, to="none").curve


def two_ranks(folder: Path, **options: Any) -> Trained:
    return trained(plan_of("tp=1,pp=1,dp=2"), folder, STEPS, **({"every_steps": 2, "keep_last": 9} | options))


def test_a_state_is_copied_or_given_up_and_never_both() -> None:
    copied, left = SaveProgress(), SaveProgress()
    copied.end_copy("a file")
    copied.abandon()
    assert copied.settled.is_set() and not copied.abandoned.is_set()
    left.abandon()
    with pytest.raises(StorageError, match="a file: given up, so that training goes on"):
        left.end_copy("a file")


@pytest.mark.ranks
def test_updates_do_not_wait_for_a_place_that_hangs_longer_than_their_patience(
    curve: dict[int, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(saver, "_PATIENCE_S", 0.3)
    real = Storage.writing

    @contextmanager
    def hanging(self: Storage, name: str) -> Any:
        with real(self, name) as file:
            if "step-00000002.partial/rank-00001" in name:
                time.sleep(3.0)  # like a mount whose server is gone: nothing inside can look at a clock
            yield file

    monkeypatch.setattr(Storage, "writing", hanging)
    found = two_ranks(tmp_path)
    assert found.curve == curve
    assert max(step.time_s for step in found.steps) < 1.5
    assert "step 2 was not saved: rank 1: " in found.notes and "given up, so that training goes on" in found.notes
    assert "saved step 6" in found.notes


@pytest.mark.ranks
def test_a_file_that_failed_after_the_state_moved_on_is_not_written_again(
    curve: dict[int, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its second try would hold another state under the name of the first, with checksums that fit."""
    real, failed = os.fsync, list[int]()

    def failing(number: int) -> None:
        if str(Path(f"/proc/self/fd/{number}").readlink()).endswith("step-00000002.partial/rank-00001.safetensors"):
            assert not failed, "one try"
            failed.append(number)
            time.sleep(0.5)
            raise OSError(errno.EIO, "Input/output error")
        real(number)

    monkeypatch.setattr(os, "fsync", failing)
    found = two_ranks(tmp_path)
    assert found.curve == curve
    assert "step 2 was not saved: rank 1: " in found.notes and "Input/output error" in found.notes


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["make_ready", "publish", "prune"])
def test_what_fails_on_the_first_rank_alone_is_known_to_all(
    name: str, curve: dict[int, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last save as well: ranks that disagree about it would wait for each other for ever."""

    def failing(*_: Any) -> None:
        raise StorageError("somewhere: no")

    monkeypatch.setattr(Shelf, name, failing)
    found = two_ranks(tmp_path)
    assert found.curve == curve and found.report is not None
    if name == "prune":
        assert "older checkpoints are still there: somewhere: no" in found.notes and not found.report.unsaved
    else:
        assert found.report.unsaved == "somewhere: no"


@pytest.mark.ranks
@pytest.mark.parametrize(("zero", "precision"), rest_is_slow([(1, "bf16"), (3, "fp32"), (1, "fp32")]))
def test_listing_the_state_copies_none_of_it(zero: int, precision: str, tmp_path: Path) -> None:
    """A step waits for the list, and a copy would be a second state for a moment."""

    def build(plan: Plan, run: Run) -> Engine:
        engine: Any = builder("torch")(plan, run)
        pieces = engine.pieces

        def watched() -> Any:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                found = pieces()
            taken = sum(max(0, event.cpu_memory_usage) for event in profiled.events() or ())
            assert taken == 0, f"{taken} bytes were taken"
            return found

        engine.pieces = watched
        return engine

    plan = plan_of(f"tp=1,pp=1,dp=2,zero={zero}", precision=precision)
    assert "saved step 1" in trained(plan, tmp_path, 1, build=build).notes


@pytest.mark.ranks
def test_a_save_that_is_due_while_another_runs_comes_after_it(
    curve: dict[int, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = Shelf.publish

    def slow(self: Shelf, folder: str) -> None:
        if folder.startswith("step-00000002"):
            time.sleep(1.0)
        real(self, folder)

    def build(plan: Plan, run: Run) -> Engine:
        engine: Any = builder("torch")(plan, run)
        step, taken = engine.step, list[int]()

        def paced(*arguments: Any) -> Any:
            taken.append(1)
            time.sleep({4: 0.1, 5: 1.5}.get(len(taken), 0.0))  # step 4 ends before the save of step 2, step 5 after it
            return step(*arguments)

        engine.step = paced
        return engine

    monkeypatch.setattr(Shelf, "publish", slow)
    found = two_ranks(tmp_path, build=build)
    assert found.curve == curve and found.saved_steps == [2, 5, 6]


@pytest.mark.ranks
def test_of_two_runs_with_one_place_the_second_to_save_fails_and_touches_nothing(
    curve: dict[int, float], tmp_path: Path
) -> None:
    def build(plan: Plan, run: Run) -> Engine:
        engine: Any = builder("torch")(plan, run)
        step = engine.step

        def beside_another(*arguments: Any) -> Any:
            (tmp_path / "both" / "step-00000002").mkdir(exist_ok=True)  # which began when nothing was there, too
            return step(*arguments)

        engine.step = beside_another
        return engine

    found = two_ranks(tmp_path / "run", build=build, to=str(tmp_path / "both"))
    assert found.curve == curve and found.report is not None and not found.saved_steps
    assert (
        "both/step-00000002: was saved by another run meanwhile. Give each run a checkpoint.to" in found.report.unsaved
    )
    assert [one.name for one in (tmp_path / "both").iterdir()] == ["step-00000002"]


@pytest.mark.ranks
def test_a_run_that_went_back_goes_on_from_there(tmp_path: Path) -> None:
    two_ranks(tmp_path)  # saves step 4 only if the save of step 2 had ended
    again = trained(plan_of("tp=1,pp=1,dp=2"), tmp_path, 3, resume=2)
    assert "6) are removed when the first new one is saved" in again.notes
    steps = sorted(one.name for one in (tmp_path / "checkpoints").iterdir())
    assert steps == ["step-00000002", "step-00000003"]


@pytest.mark.ranks
def test_a_place_that_ranks_do_not_share_is_found_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with two nodes that have a folder of the same name each."""
    real = resume.place_of

    def own(run: Any) -> Storage:
        place = real(run)
        return Storage(place.system, f"{place.root}-{resume.dist.get_rank()}")

    monkeypatch.setattr(resume, "place_of", own)
    with pytest.raises(InputError, match=r"rank 1 on .* does not see what rank 0 writes there.*that all nodes share"):
        two_ranks(tmp_path)
    assert not list((tmp_path / "checkpoints-0").iterdir()), "nothing is left"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("to", "told"),
    [
        ("/dev/null/here", "checkpoint.to: cannot be used: .*Not a directory. Give --checkpoint.to another place"),
        ("gs://bucket/run", r"checkpoint.to: gs://bucket/run cannot be opened: .*gcsfs"),
        ("nosuch://bucket", r"checkpoint.to: nosuch://bucket cannot be opened: Protocol not known: nosuch"),
    ],
)
def test_a_place_that_cannot_be_written_is_found_before_the_first_step(to: str, told: str, tmp_path: Path) -> None:
    found = Trained()
    with pytest.raises(InputError, match=told):
        found = two_ranks(tmp_path, to=to)
    assert not found.said
