"""Random layouts on ranks that the real torchrun starts: every gradient is that of one process, in FP64."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

from tests.ranks import matrix
from tests.ranks.cases import Task, compare
from tests.ranks.torchrun import on_torchrun, run_agreeing
from tests.soak.hunt import HuntResult


def random_rows(seed: int) -> Iterator[matrix.Row]:
    """Yield rows of the matrix of features at random that may run, without end."""
    generator = random.Random(seed)
    while True:
        row = {name: generator.choice(values) for name, values in matrix.FEATURES.items()}
        if not any(excludes(row) for excludes in matrix.IMPOSSIBLE.values()) and matrix.is_legal(row):
            yield row


def hunt(cases: int, seed: int, folder: Path) -> HuntResult:
    """Run so many layouts, none twice."""
    failures, tried = list[str](), dict[str, int]()
    for row in random_rows(seed):
        text = f"{matrix.candidate_of(row)} {row['model']} documents {row['documents']}"
        if text in tried:
            continue
        tried[text] = matrix.num_ranks(row)
        task = Task.of(matrix.plan_for(row), masked=row["mask"] == "yes")
        (place := folder / str(len(tried))).mkdir()
        begun_s = time.monotonic()
        try:
            compare(task.reference(), on_torchrun(place, tried[text], run_agreeing, task))
        except Exception as error:
            failures.append(f"{text}: {str(error).strip()[-400:]}")
        print(f"{len(tried)}/{cases} {text}: {time.monotonic() - begun_s:.0f} s", flush=True)
        if len(tried) == cases:
            break
    remark = f"{min(tried.values())} to {max(tried.values())} ranks, another hash seed on each; equal to 1e-12"
    return HuntResult(held=cases - len(failures), failures=failures, remark=remark)
