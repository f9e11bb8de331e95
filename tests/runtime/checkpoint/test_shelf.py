"""The shelf: which checkpoints are there, in a folder and in a store, and which are kept; indexes and their damage."""

import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from autoshard.errors import InputError
from autoshard.run.folder import INDEX
from autoshard.runtime.checkpoint import storage
from autoshard.runtime.checkpoint.files import (
    CheckpointIndex,
    RunState,
    StoredBox,
    StoredTensor,
    dump_index,
    load_index,
)
from autoshard.runtime.checkpoint.shelf import Shelf, meant
from autoshard.runtime.checkpoint.storage import Storage, StorageError, persistent
from autoshard.spec.training import Checkpointing

_stores = itertools.count()


@pytest.fixture(params=["folder", "store"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Shelf:
    return Shelf(storage=Storage.of(str(tmp_path) if request.param == "folder" else in_memory()))


def in_memory() -> str:
    return f"memory://shelf-{next(_stores)}/run"


def put(shelf: Shelf, step: int, *, finite: bool = True) -> None:
    """Save as a saver does, a file of a rank and then the index."""
    folder = begun(shelf, step)
    state = RunState(step=step, num_updates=step, next_sample=step)
    sizes = {"rank-00000.safetensors": 8}
    index = CheckpointIndex(state=state, model="tiny", candidate="tp=1", finite=finite, files=sizes, tensors={})
    shelf.storage.write(f"{folder}/{INDEX}", dump_index(index))
    shelf.publish(folder)


def begun(shelf: Shelf, step: int) -> str:
    shelf.make_ready(step, shelf.steps())
    folder = shelf.folder(step)
    shelf.storage.write(f"{folder}/rank-00000.safetensors", b"12345678")
    return folder


def usable(shelf: Shelf) -> list[int]:
    return [one.state.step for one in shelf.usable()]


def test_what_is_damaged_unfinished_or_not_finite_is_passed_over_with_a_remark(shelf: Shelf) -> None:
    for step in (2, 4, 6, 8, 10):
        put(shelf, step, finite=step != 6)
    shelf.storage.remove(f"step-00000010/{INDEX}")
    shelf.storage.remove("step-00000008/rank-00000.safetensors")
    assert usable(shelf) == [4, 2]
    unfinished, damaged, infinite = shelf.remarks
    assert "step-00000010: was not finished: it has no index" in unfinished
    assert "step-00000008: is damaged: rank-00000.safetensors is missing" in damaged
    assert "step-00000006: holds numbers that are not finite" in infinite
    with pytest.raises(
        StorageError, match=r"step-00000002: was saved by another run meanwhile.*to of its own"
    ) as caught:
        shelf.make_ready(2, own_steps=(4, 6, 8, 10))
    assert caught.value.lasts and usable(shelf) == [4, 2], "it is not touched"


def test_a_run_its_checkpoints_and_one_of_them_are_told_from_their_names(shelf: Shelf) -> None:
    assert meant(shelf.storage) == ("", None, ())
    for step in (2, 4):
        put(Shelf(storage=replace(shelf.storage, root=shelf.storage.path("checkpoints"))), step)
    for below, folder, step in (
        ("", "checkpoints/step-00000004", 4),
        ("/checkpoints", "step-00000004", 4),
        ("/checkpoints/step-00000002", "", 2),
    ):
        place = replace(shelf.storage, root=f"{shelf.storage.root}{below}")
        found, index, remarks = meant(place)
        assert (found, index and index.state.step, remarks) == (folder, step, ())
    place.remove("rank-00000.safetensors")
    with pytest.raises(InputError, match=r"step-00000002: is damaged: rank-00000\.safetensors is missing"):
        meant(place)


def test_a_step_that_is_saved_again_is_no_checkpoint_while_it_is_written(shelf: Shelf) -> None:
    put(shelf, 2)
    put(shelf, 4)
    begun(shelf, 4)
    whole = [4, 2] if shelf.storage.is_local else [2]  # files of a store have their names at once
    assert usable(shelf) == whole
    put(shelf, 4)
    assert usable(shelf) == [4, 2]


def test_a_kill_while_a_step_is_saved_again_spares_a_whole_checkpoint_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(storage=Storage.of(str(tmp_path)))

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    put(shelf, 2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Storage, "remove", dies)  # as long as the removal of a large checkpoint takes
        put(shelf, 2)
    assert usable(shelf) == [2]
    put(shelf, 4)
    assert shelf.storage.folders() == ["step-00000002", "step-00000004"], "nothing is left of the first one"


@pytest.mark.parametrize(("keep_last", "earlier"), [(2, True), (1, False)])
def test_what_a_run_saves_after_it_went_back_stays_and_what_it_left_goes(
    keep_last: int, earlier: bool, shelf: Shelf
) -> None:
    for step in (2, 4, 6, 8, 3):  # the last after --resume 2
        put(shelf, step)
    shelf.prune(Checkpointing(keep_last=keep_last), 3, earlier=earlier)
    assert usable(shelf) == [3, 2]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 3),
    st.none() | st.integers(2, 4),
)
def test_pruning_keeps_the_newest_finite_and_every_nth(
    saves: Sequence[tuple[int, bool]], keep_last: int, keep_every: int | None
) -> None:
    shelf = Shelf(storage=Storage.of(in_memory()))
    there: dict[int, bool] = {}
    for step, finite in saves:
        put(shelf, step, finite=finite)
        shelf.prune(Checkpointing(keep_last=keep_last, keep_every=keep_every), step)
        there[step] = finite
        good = sorted((one for one in there if there[one] and one <= step), reverse=True)[:keep_last]
        if good:
            later = good[0] == step
            first: dict[int, int] = {}
            for one in sorted(there, reverse=True):
                first[one // (keep_every or 100)] = one
            for_good = [one for multiple, one in first.items() if multiple]
            there = {
                one: is_finite
                for one, is_finite in there.items()
                if (one in good or one > good[0] or one in for_good) and not (later and one > step)
            }
        assert shelf.steps() == sorted(there, reverse=True)


def test_a_save_that_failed_is_not_what_is_kept_for_good() -> None:
    shelf = Shelf(storage=Storage.of(in_memory()))
    begun(shelf, 4)
    for step in (5, 6, 7):
        put(shelf, step)
    shelf.prune(Checkpointing(keep_last=1, keep_every=4), 7)
    assert shelf.steps() == [7, 5]


def test_a_file_of_a_store_is_not_seen_before_it_is_whole() -> None:
    """An upload that ends with an exception makes no object; buffered files would close, and so finish it."""
    sent: list[bytes] = []

    class Upload(storage.AbstractBufferedFile):
        def _upload_chunk(self, final: bool = False) -> Any:
            sent.append(self.buffer.getvalue())
            return True

        def discard(self) -> None:
            sent.clear()

    memory = Storage.of(in_memory())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.system, "open", lambda path, mode, **options: Upload(memory.system, path, mode, **options))
        with pytest.raises(StorageError, match="given up"), memory.writing("a") as file:
            file.write(b"12")
            raise StorageError("given up")
        del file
        assert sent == []
        memory.write("a", b"12")
        assert sent == [b"12"]


@pytest.mark.parametrize(
    ("cause", "times"), [(OSError(28, "full"), 1), (PermissionError("403"), 1), (OSError(5, "away"), 3)]
)
def test_what_cannot_get_better_is_not_tried_again(cause: OSError, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "TRIES_S", (0.01, 0.02))
    tries: list[int] = []

    def fail() -> None:
        tries.append(1)
        raise StorageError("somewhere") from cause

    with pytest.raises(StorageError):
        persistent(fail)
    assert len(tries) == times


BOX, SCALAR = StoredBox((0, 0), (4, 2), "rank-00000.safetensors", 64, 32, 123), StoredBox((), (), "rank-1", 62, 2, 5)
TINY_INDEX = CheckpointIndex(
    state=RunState(step=7, num_updates=6, next_sample=56, num_tokens=448, seed=3, trackers=(("wandb", "ab12"),)),
    model="tiny",
    candidate="tp=1,pp=1,dp=2",
    finite=True,
    files={"rank-00000.safetensors": 96, "rank-1": 64},
    tensors={
        "weight/layer.0.up.weight": StoredTensor("F32", (4, 2), (BOX,)),
        "weight/scalar": StoredTensor("BF16", (), (SCALAR,)),
    },
)


@given(st.integers(0, len(dump_index(TINY_INDEX)) - 1), st.integers(0, 7))
def test_an_index_comes_back_and_a_flipped_bit_is_found(place: int, bit: int) -> None:
    assert load_index(dump_index(TINY_INDEX), "here") == TINY_INDEX
    data = bytearray(dump_index(TINY_INDEX))
    data[place] ^= 1 << bit
    try:
        found = load_index(bytes(data), "here")
    except InputError as error:
        assert "here" in str(error)
    else:
        assert found == TINY_INDEX, "a flip that changes nothing, such as of a digit's case in an escape"


def test_an_index_that_ends_too_early_or_is_of_another_format_is_refused() -> None:
    for length in (0, 1, 40, len(dump_index(TINY_INDEX)) - 1):
        with pytest.raises(InputError, match="here: is damaged"):
            load_index(dump_index(TINY_INDEX)[:length], "here")
    with pytest.raises(InputError, match="here: is damaged"):
        load_index(b"[" * 5000, "here")
    text = json.dumps(json.loads(dump_index(TINY_INDEX))["index"] | {"format": 9}, separators=(",", ":"))
    with pytest.raises(InputError, match="is of format 9, and this version reads 1"):
        load_index(f'{{"crc32":{zlib.crc32(text.encode())},"index":{text}}}'.encode(), "here")


def test_an_index_that_places_a_part_of_a_tensor_is_refused_before_anything_is_loaded() -> None:
    half = StoredTensor("F32", (8, 2), (BOX,))
    partial = replace(TINY_INDEX, tensors={"weight/layer.0.up.weight": half})
    with pytest.raises(InputError, match=r"here: is damaged: it places 8 of the 16 numbers of weight/layer\.0\.up"):
        load_index(dump_index(partial), "here")
