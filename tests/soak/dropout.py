"""Cards with dropout in random layouts, on ranks of torchrun that are killed and go on: one process gives the same."""

import os
import pickle
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import matrix
from tests.ranks.cases import StepShare, Task, by_one_process, compare, engine_of, share_of
from tests.ranks.torchrun import on_torchrun
from tests.soak.hunt import HuntResult
from tests.soak.layouts import random_rows

_STEPS, _RANKS = 4, 4


def on_ranks(task: Task, folder: str, killed: bool) -> list[StepShare]:
    """Take half of the steps, from the state that is there; save the state, and be killed if so asked."""
    state, half = Path(folder, f"state-{dist.get_rank()}.pickle"), len(task.steps) // 2
    engine = engine_of(task, mode="generated")
    if state.exists():
        for piece, array in zip(engine.pieces(), pickle.loads(state.read_bytes())["pieces"], strict=True):
            piece.memory.copy_(torch.from_numpy(array))
        engine.restored(half)
    begins = half if state.exists() else 0
    shares = [share_of(engine, task, begins + step) for step in range(half)]
    pieces = [piece.memory.clone().numpy() for piece in engine.pieces()]
    state.write_bytes(pickle.dumps({"pieces": pieces, "shares": shares}))
    dist.barrier()
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    return shares


def endured(row: matrix.Row, place: Path) -> None:
    """Run a row's layout, killed after half of its steps, and hold each step against one process."""
    task = Task.of(matrix.plan_for(row), _STEPS, masked=row["mask"] == "yes")
    with pytest.raises(AssertionError, match="Signal 9"):  # as torchrun tells
        on_torchrun(place, _RANKS, on_ranks, task, str(place), True)
    first = [pickle.loads((place / f"state-{rank}.pickle").read_bytes())["shares"] for rank in range(_RANKS)]
    second = on_torchrun(place, _RANKS, on_ranks, task, str(place), False)
    for step, (expected, weights) in enumerate(by_one_process(task)):
        compare(expected, [(*one, *two)[step] for one, two in zip(first, second, strict=True)], weights=weights)


def hunt(cases: int, seed: int, folder: Path) -> HuntResult:
    """Run so many layouts of four ranks, none twice."""
    failures, tried = list[str](), set[str]()
    generator = random.Random(seed)
    for row in random_rows(generator.randrange(2**16)):
        row = {**row, "drop": "yes"}
        text = f"{matrix.candidate_of(row)} {row['model']} documents {row['documents']}"
        if matrix.num_ranks(row) != _RANKS or text in tried:
            continue
        tried.add(text)
        (place := folder / str(len(tried))).mkdir()
        begun_s = time.monotonic()
        try:
            endured(row, place)
        except Exception as error:
            failures.append(f"{text}: {str(error).strip()[-400:]}")
        print(f"{len(tried)}/{cases} {text}: {time.monotonic() - begun_s:.0f} s", flush=True)
        if len(tried) == cases:
            break
    remark = f"{_RANKS} ranks, hidden states and attention drop, killed after step 2 of {_STEPS}; equal to 1e-12"
    return HuntResult(held=cases - len(failures), failures=failures, remark=remark)
