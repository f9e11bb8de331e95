"""Saves beside training: what they write, when the state may change, and what all ranks know of how a save ended."""

import errno
import json
import os
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile

from autoshard.errors import InputError
from autoshard.layout.shards import Box
from autoshard.plan.codec import dump
from autoshard.plan.plan import Plan
from autoshard.run.folder import INDEX
from autoshard.run.placement import StatePiece
from autoshard.run.protocol import Engine, Run
from autoshard.runtime import resume
from autoshard.runtime.checkpoint import agreed, files, saver
from autoshard.runtime.checkpoint.files import StoredBox, StoredTensor
from autoshard.runtime.checkpoint.saver import RankFile, joined_tensors
from autoshard.runtime.checkpoint.shelf import Shelf
from autoshard.runtime.checkpoint.storage import Storage, StorageError
from autoshard.runtime.machine import builder
from tests.runtime.cases import wait_until
from tests.runtime.training_cases import Trained, before_steps, plan_of, trained
from tests.slower import rest_is_slow

PLAN = "tp=1,pp=1,dp=2"
STEPS = 6


def two_ranks(folder: Path, **options: Any) -> Trained:
    keeping: dict[str, Any] = {"every_steps": 2, "keep_last": 9}
    return trained(plan_of(PLAN), folder, STEPS, **keeping | options)


def begins(curve: dict[int, float]) -> dict[int, float]:
    return {step: curve[step] for step in range(1, STEPS + 1)}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.integers(4, 200))
def test_a_piece_is_cut_into_runs_of_memory_that_are_not_too_large(shape: list[int], most: int) -> None:
    memory = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    piece = StatePiece(weight="w", part="weight", whole=tuple(shape), offsets=(7,) * len(shape), memory=memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_MOST_BYTES", most)
        parts = files.cut_piece(piece)
    assert all(part.memory.nbytes <= most and part.memory.is_contiguous() for part in parts)
    found = torch.full(shape, -1.0)
    for part in parts:
        where = tuple(slice(at - 7, at - 7 + n) for at, n in zip(part.offsets, part.memory.shape, strict=True))
        assert (found[where] == -1).all(), "no overlap"
        found[where] = part.memory
    assert torch.equal(found, memory)


@pytest.mark.parametrize("dtype", files.DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), None])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, bad: float | None) -> None:
    numbers = torch.full((1001,), torch.finfo(dtype).max, dtype=dtype)  # whose sum overflows
    if bad is not None:
        numbers[500] = bad
    assert files.is_finite(numbers) == (bad is None)


def _file(boxes: list[Box], shape: tuple[int, ...]) -> RankFile:
    stored = tuple(StoredBox(offsets, lengths, "a", 0, 0, 0) for offsets, lengths in boxes)
    return RankFile(file="a", num_bytes=0, finite=True, tensors={"weight/w": StoredTensor("F32", shape, stored)})


@given(shape=st.lists(st.integers(1, 5), max_size=3).map(tuple), data=st.data())
def test_boxes_fill_a_tensor_where_every_element_lies_in_one(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Boxes of random cuts, of which one may be moved or put in twice, against a count of every element."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for axis in data.draw(st.lists(st.sampled_from(range(len(shape))), max_size=6)) if shape else ():
        low, n = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        cut = data.draw(st.integers(0, n[axis]))
        boxes.append((low, (*n[:axis], cut, *n[axis + 1 :])))
        boxes.append(((*low[:axis], low[axis] + cut, *low[axis + 1 :]), (*n[:axis], n[axis] - cut, *n[axis + 1 :])))
    if data.draw(st.booleans()):
        low, n = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        moved = tuple(data.draw(st.integers(0, size - own)) for size, own in zip(shape, n, strict=True))
        boxes += [(moved, n)] * data.draw(st.integers(0, 2))
    count = np.zeros(shape, dtype=int)
    for low, n in boxes:
        count[tuple(slice(one, one + own) for one, own in zip(low, n, strict=True))] += 1
    if boxes and (count == 1).all():
        assert set(joined_tensors([_file(boxes, shape)])) == {"weight/w"}
    else:
        with pytest.raises(StorageError, match="exactly once"):
            joined_tensors([_file(boxes, shape)])


@pytest.mark.ranks
def test_files_are_safetensors_that_others_read(tmp_path: Path) -> None:
    trained(plan_of(PLAN), tmp_path, 1)
    folder = tmp_path / "checkpoints" / "step-00000001"
    index = json.loads((folder / INDEX).read_text())["index"]
    boxes = {name: load_file(folder / name) for name in index["files"]}
    assert len(boxes) == 2
    assert (folder / "plan.json").read_text() == dump(plan_of(PLAN))
    assert sum(map(len, boxes.values())) == sum(len(one["boxes"]) for one in index["tensors"].values())
    for name, tensor in index["tensors"].items():
        for offsets, lengths, file, *_ in tensor["boxes"]:
            assert list(boxes[file][f"{name}@{','.join(map(str, offsets))}"].shape) == lengths


@pytest.mark.slow
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
                time.sleep(10.0)  # like a mount whose server is gone: nothing inside can look at a clock
            yield file

    monkeypatch.setattr(Storage, "writing", hanging)
    found = two_ranks(tmp_path)
    assert found.curve == begins(curve)
    assert max(step.time_s for step in found.steps) < 8.0
    assert "step 2 was not saved: rank 1: " in found.notes and "given up, so that training goes on" in found.notes
    assert "saved step 6" in found.notes


@pytest.mark.slow
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
    assert found.curve == begins(curve)
    assert "step 2 was not saved: rank 1: " in found.notes and "Input/output error" in found.notes
    assert "step-00000002.partial/rank-00001.safetensors" in found.notes
    assert found.report is not None and not found.report.unsaved, "the next one is saved"


@pytest.mark.ranks
@pytest.mark.parametrize("name", rest_is_slow(["publish", "prune"]))
def test_what_fails_on_the_first_rank_alone_is_known_to_all(
    name: str, curve: dict[int, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last save as well: ranks that disagree about it would wait for each other for ever."""

    def failing(*_: Any, **__: Any) -> None:
        raise StorageError("somewhere: no")

    monkeypatch.setattr(Shelf, name, failing)
    found = two_ranks(tmp_path)
    assert found.curve == begins(curve) and found.report is not None
    if name == "prune":
        assert "older checkpoints are still there: somewhere: no" in found.notes and not found.report.unsaved
    else:
        assert found.report.unsaved == "somewhere: no"
        assert not [*tmp_path.rglob("*.partial")], "a disk that is full gets its space back"


@pytest.mark.slow
@pytest.mark.ranks
def test_listing_the_state_copies_none_of_it(tmp_path: Path) -> None:
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

    for zero, precision in ((1, "bf16"), (3, "fp32")):
        plan = plan_of(f"{PLAN},zero={zero}", precision=precision)
        assert "saved step 1" in trained(plan, tmp_path / precision, 1, build=build).notes


@pytest.mark.slow
@pytest.mark.ranks
def test_a_save_that_is_due_while_another_runs_comes_after_it(
    curve: dict[int, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, fifth, published = Shelf.publish, tmp_path / "fifth step", tmp_path / "published"

    def slow(self: Shelf, folder: str) -> None:
        if folder.startswith("step-00000002"):
            wait_until(fifth.exists, "the fifth step")
        real(self, folder)
        published.touch()

    def pause(number: int) -> None:
        """Let step 4 end before the save of step 2, and step 5 after it."""
        if number == 5:
            fifth.touch()
            wait_until(published.exists, "the save of step 2")
            time.sleep(1.0)

    monkeypatch.setattr(Shelf, "publish", slow)
    found = two_ranks(tmp_path, build=before_steps(pause))
    assert found.curve == begins(curve) and found.saved_steps == [2, 5, 6]


@pytest.mark.ranks
def test_of_two_runs_with_one_place_the_second_to_save_fails_and_touches_nothing(
    curve: dict[int, float], tmp_path: Path
) -> None:
    other = tmp_path / "both" / "step-00000002"  # of a run which began when nothing was there, too
    found = two_ranks(
        tmp_path / "run", build=before_steps(lambda _: other.mkdir(exist_ok=True)), to=str(tmp_path / "both")
    )
    assert found.curve == begins(curve) and found.report is not None and not found.saved_steps
    said = "both/step-00000002: was saved by another run meanwhile. Give each run a checkpoint.to"
    assert said in found.report.unsaved
    failures = [line for line in found.notes.splitlines() if "was not saved" in line]
    assert ["The next try is in" in line for line in failures] == [True] * (len(failures) - 1) + [False], "none is left"
    assert [one.name for one in (tmp_path / "both").iterdir()] == ["step-00000002"]


@pytest.mark.ranks
def test_a_place_that_ranks_do_not_share_is_found_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with two nodes that have a folder of the same name each."""
    real = resume.run_storage

    def own(run: Any) -> Storage:
        storage = real(run)
        return Storage(storage.system, f"{storage.root}-{torch.distributed.get_rank()}")

    monkeypatch.setattr(resume, "run_storage", own)
    with pytest.raises(InputError, match=r"rank 1: .* does not see what rank 0 writes there.*that all nodes share"):
        two_ranks(tmp_path)
    assert not list((tmp_path / "checkpoints-0").iterdir()), "nothing is left"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("to", "told"),
    [
        ("/dev/null/here", "checkpoint.to: cannot be used: .*Not a directory. Give --checkpoint.to another place"),
        ("nosuch://bucket", r"checkpoint.to: nosuch://bucket cannot be opened: Protocol not known: nosuch"),
    ],
)
def test_a_place_that_cannot_be_written_is_found_before_the_first_step(to: str, told: str, tmp_path: Path) -> None:
    found = Trained()
    with pytest.raises(InputError, match=told):
        trained(plan_of(PLAN), tmp_path, STEPS, found=found, to=to)
    assert not found.said


def test_ranks_hear_of_a_failure_also_where_its_log_is_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise ZeroDivisionError("of all things")

    with Path("/dev/full").open("w", buffering=1, encoding="utf-8") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        _, error = agreed._tried(failing)
        with suppress(OSError):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert isinstance(error, StorageError) and str(error) == "ZeroDivisionError: of all things"
