"""Loads of a checkpoint: read by each rank or once and sent, the same bits come; what fails on a rank fails on all."""

import math
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from autoshard.engine.torch.engine import build
from autoshard.errors import InputError
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Run
from autoshard.runtime.checkpoint import loading
from autoshard.runtime.checkpoint.loading import LoadRates, Needs, load_checkpoint
from autoshard.runtime.checkpoint.shelf import Shelf
from autoshard.runtime.checkpoint.storage import Storage, StorageError
from autoshard.runtime.resume import begin
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import Checkpointing, Training
from autoshard.spec.workload import Precision
from tests.ranks.cases import plan_of
from tests.ranks.spawn import on_ranks
from tests.runtime.convert.cases import converted, reduced, written
from tests.slower import rest_is_slow

EACH = LoadRates(storage_bytes_per_s=1e18, network_bytes_per_s=1.0)
SHARED = LoadRates(storage_bytes_per_s=1.0, network_bytes_per_s=1e18)
LAYOUTS = (
    "tp=4,pp=1,dp=1",
    "tp=1,pp=1,dp=4,zero=1",
    "tp=2,pp=1,dp=2,zero=3",
    "tp=2,pp=2,dp=1",
    "tp=1,pp=1,dp=4,zero=0",
)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no plan has cut, so that every rank needs a part of most boxes."""
    folder = tmp_path_factory.mktemp("loading")
    converted(written(folder / "hf", reduced("llama3-8b")), folder / "ours", form="autoshard")
    return folder / "ours"


def plan_for(text: str, first: Path) -> Plan:
    return plan_of(text, load_model(first), seq_len=8, global_batch=8, precision=Precision.named("fp32"))


def loaded(plan: Plan, first: Path, rates: LoadRates, folder: Path) -> tuple[str, int, list[torch.Tensor]]:
    """What every rank runs: the note, how many boxes it has read, and what it was given; each is a host of its own."""
    engine, count = build(plan, Run(folder=folder, training=Training(seed=9))), [0]
    pieces = [piece for piece in engine.pieces() if piece.part == "weight" and piece.reads]
    shelf, real = Shelf(storage=Storage.of(str(first))), loading._Loading._read

    def counting(self: Any, opened: Any, number: int) -> torch.Tensor:
        count[0] += 1
        return real(self, opened, number)

    with (
        patch.object(loading._Loading, "_read", counting),
        patch.object(socket, "gethostname", lambda: f"host {dist.get_rank()}"),
    ):
        note = load_checkpoint(shelf, shelf.open(0), pieces, None, rates)
    return note, count[0], [piece.memory.clone() for piece in pieces]


@pytest.mark.ranks
@pytest.mark.parametrize("text", rest_is_slow(LAYOUTS, 1, 3))
def test_boxes_that_are_read_once_fill_the_same_bits(text: str, first: Path, tmp_path: Path) -> None:
    plan = plan_for(text, first)
    each = on_ranks(4, loaded, plan, first, EACH, tmp_path)
    shared = on_ranks(4, loaded, plan, first, SHARED, tmp_path)
    for (_, _, numbers), (_, _, others) in zip(each, shared, strict=True):
        assert all(torch.equal(*both) for both in zip(numbers, others, strict=True))
    boxes = sum(len(tensor.boxes) for tensor in Shelf(storage=Storage.of(str(first))).open(0).tensors.values())
    read = [sum(count for _, count, _ in ranks) for ranks in (each, shared)]
    notes = {note for note, _, _ in each}, {note for note, _, _ in shared}
    if "zero=0" in text:  # only one rank reads, in either way
        assert read == [boxes, boxes] and notes == ({""}, {""})
        return
    assert read[1] == boxes < read[0]
    assert notes[0] == {""} and notes[1].pop().startswith("storage gave "), "all ranks decide alike"
    if "tp=4" in text:
        assert max(count for _, count, _ in shared) < boxes / 2, "ranks share the reading"


def failing(plan: Plan, first: Path, folder: Path, fault: str) -> str:
    """What every rank runs: something fails on one rank alone, and all say the same."""

    def breaks(self: Any, *_: Any) -> Any:
        raise ValueError("cannot be used")

    method = {"memory": "_take", "surprise": "_read_alone"}.get(fault)
    try:
        if method and dist.get_rank() == 2:
            with patch.object(loading._Loading, method, breaks):
                loaded(plan, first, SHARED, folder)
        else:
            loaded(plan, first, SHARED, folder)
    except StorageError as error:
        return str(error)
    return "nothing failed"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("damage", "the checksum of weight/"),
        ("memory", "rank 2: ValueError: cannot be used"),
        ("surprise", "rank 2: ValueError: cannot be used"),
    ],
)
def test_what_fails_on_one_rank_is_known_to_all_and_none_waits(
    fault: str, says: str, first: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(first, tmp_path / "copy")
    if fault == "damage":
        (file,) = (folder / "step-00000000").glob("*.safetensors")
        whole = bytearray(file.read_bytes())
        whole[-50] ^= 1
        file.write_bytes(whole)
    said = on_ranks(4, failing, plan_for("tp=4,pp=1,dp=1", first), folder, tmp_path, fault)
    assert len(set(said)) == 1 and says in said[0], said


def refused(plan: Plan, first: Path, folder: Path) -> str:
    """What every rank runs: it begins where no checkpoint is whole, and says why."""
    run = Run(folder=folder, training=Training(seed=9, checkpoint=Checkpointing(to=str(first))))
    try:
        begin(plan, run, build(plan, run), None)
    except InputError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.ranks
def test_all_ranks_say_why_no_checkpoint_can_be_used(first: Path, tmp_path: Path) -> None:
    """Whichever rank is first to fail is the one that people read."""
    folder = shutil.copytree(first, tmp_path / "copy")
    (folder / "step-00000000" / "index.json").unlink()
    said = on_ranks(2, refused, plan_for("tp=2,pp=1,dp=1", first), folder, tmp_path)
    assert len(set(said)) == 1 and "step-00000000" in said[0] and "type another --out" in said[0], said


def needs(ranks: Sequence[set[int]], hosts: Sequence[str], sizes: Sequence[int] = (5, 3, 2)) -> Needs:
    return Needs(num_bytes=tuple(sizes), ranks=tuple(map(frozenset, ranks)), hosts=tuple(hosts))


def test_it_is_decided_by_figures_and_by_hosts() -> None:
    """Ranks of one host find in its memory what another has read; a box that nobody needs is read by nobody."""
    apart, together = needs([{0, 1}, {0}], "ab"), needs([{0, 1}, {0}], "aa")
    assert (apart.read_bytes, apart.once_bytes, apart.sent_bytes) == (13, 8, 5)
    assert (together.read_bytes, together.once_bytes) == (8, 8)
    assert apart.gain(LoadRates(storage_bytes_per_s=2, network_bytes_per_s=5)) == (6.5, 5.0)
    each_s, shared_s = together.gain(LoadRates(storage_bytes_per_s=1, network_bytes_per_s=math.inf))
    assert each_s == shared_s
    assert needs([{0, 1, 2}, {0, 1, 2}], "ab").readers() == {0: 0, 1: 1, 2: 1}
    assert needs([{1}, {0, 1}], "ab").readers() == {0: 1, 1: 0}


def test_the_figures_are_those_of_the_plan(first: Path) -> None:
    plan = plan_for("tp=4,pp=1,dp=1", first)
    rates, link = LoadRates.of(plan), load_cluster("local", ranks=4).links[-1]
    assert rates.network_bytes_per_s == pytest.approx(link.bandwidth_bytes_per_s * 4 / link.ranks_per_port)
