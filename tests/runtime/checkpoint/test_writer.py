"""What a save writes: boxes that other programs read, plans that are agreed on once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

from autoshard.engine.placement import StatePiece
from autoshard.runtime.checkpoint import files, saver
from autoshard.runtime.checkpoint.index import FILE
from autoshard.runtime.checkpoint.writer import AgreedPlan, PieceSavePlanner
from tests.runtime.training_cases import plan_of, trained


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
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), None])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, bad: float | None) -> None:
    numbers = torch.full((1001,), torch.finfo(dtype).max, dtype=dtype)  # whose sum overflows
    if bad is not None:
        numbers[500] = bad
    assert files.is_finite(numbers) == (bad is None)


@pytest.mark.ranks
def test_files_are_safetensors_that_others_read(tmp_path: Path) -> None:
    trained(plan_of("tp=1,pp=1,dp=2"), tmp_path, 1)
    folder = tmp_path / "checkpoints" / "step-00000001"
    index = json.loads((folder / FILE).read_text())["index"]
    boxes = {name: load_file(folder / name) for name in index["files"]}
    assert sum(map(len, boxes.values())) == sum(len(one["boxes"]) for one in index["tensors"].values())
    for name, tensor in index["tensors"].items():
        for offsets, lengths, file, *_ in tensor["boxes"]:
            assert list(boxes[file][f"{name}@{','.join(map(str, offsets))}"].shape) == lengths


@pytest.mark.ranks
def test_plans_are_agreed_on_once_and_nobody_waits_for_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Later saves send none, and the state may change before the first of them is agreed on."""
    real, log = PieceSavePlanner.create_global_plan, tmp_path / "sent"
    settled: list[Any] = []
    begin = saver.Saver.begin

    def noted(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        settled[:] = [self._progress.settled]

    def counted(self: Any, plans: Any) -> Any:
        with log.open("a") as file:
            file.write(f"{sum(len(plan.items) for plan in plans)} {settled[0].is_set()}\n")
        return real(self, plans)

    monkeypatch.setattr(saver.Saver, "begin", noted)
    monkeypatch.setattr(PieceSavePlanner, "create_global_plan", counted)
    found = trained(plan_of("tp=1,pp=1,dp=2"), tmp_path / "run", 4, every_steps=1)
    first, *later = [line.split() for line in log.read_text().splitlines()]
    assert int(first[0]) > 50 and later and all(one[0] == "0" for one in later)
    assert {one[1] for one in (first, *later)} == {"True"}
    assert trained(plan_of("tp=1,pp=1,dp=2"), tmp_path / "run", 4).started.step == 4
    assert found.notes.count("saved step") == len(later) + 1


def test_a_plan_that_changes_is_sent_again() -> None:
    def pieces(length: int) -> list[StatePiece]:
        return [StatePiece(weight="w", part="weight", whole=(9,), offsets=(0,), memory=torch.zeros(length))]

    known = AgreedPlan()
    first = PieceSavePlanner(pieces(9), known)
    assert first.create_local_plan().usable
    first.finish_plan(first.plan)
    assert not PieceSavePlanner(pieces(9), known).create_local_plan().usable
    assert PieceSavePlanner(pieces(8), known).create_local_plan().usable


def test_a_box_that_nobody_saves_is_found() -> None:
    def planner(offset: int, length: int) -> PieceSavePlanner:
        memory = torch.zeros(length)
        return PieceSavePlanner(
            [StatePiece(weight="w", part="weight", whole=(9,), offsets=(offset,), memory=memory)], AgreedPlan()
        )

    for second in (planner(5, 3), planner(4, 5)):
        with pytest.raises(ValueError, match="Failed to validate global plan"):
            second.create_global_plan([planner(0, 5).create_local_plan(), second.create_local_plan()])
