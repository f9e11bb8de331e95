"""How soon a loader is ready over 2e12 tokens, and what share of a training step waits for it."""

# pyright: basic
# torch's own signatures are only partly typed.

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autoshard.engine.torch.engine import build
from autoshard.run.protocol import Run
from autoshard.runtime.data.batches import PrefetchLoader, StepShape, batches
from autoshard.runtime.data.indexed import IndexedWriter
from autoshard.runtime.data.opened import open_source
from autoshard.runtime.launch import Placing, launch
from autoshard.spec.training import DataSpec, Training
from benchmarks.measure import yardstick_s
from benchmarks.result import Result
from benchmarks.runtime_vs_plain import SEQ_LEN, plan_of

NUM_FILES, NUM_TOKENS = 2_500, 2_000_000_000_000
DOCUMENTS = 800_000  # of a file: of 1,000 tokens each, as on the web
START_BAR_S = 1.0
STARTS = 5  # of which the fastest counts: whatever else runs can only make one longer
BATCH, LENGTH, VOCAB = 1024, 4096, 32_000
FAR_STEP = 1_000_000
WAIT_BAR = 0.01
STEPS, WARM_UP = 40, 5


def loader_start() -> Result:
    """Open 2,500 sparse files, and make the first step and step 10^6, each from nothing."""
    with tempfile.TemporaryDirectory() as name:
        write_sparse(Path(name), NUM_FILES, NUM_TOKENS // NUM_FILES, DOCUMENTS)
        starts = [[start_s(Path(name), step) for step in (0, FAR_STEP)] for _ in range(STARTS)]
    opened_s, first_s = map(min, zip(*(start[0] for start in starts), strict=True))
    far_s = min(start[1][1] for start in starts)
    worst_s = max(first_s, far_s)
    return Result(
        name="loader_start",
        value=round(worst_s, 3),
        unit="s",
        bar=START_BAR_S,
        holds=worst_s <= START_BAR_S,
        extras={
            "open_s": round(opened_s, 3),
            "first_step_s": round(first_s, 3),
            "far_step_s": round(far_s, 3),
            "slowest_s": round(max(done_s for start in starts for _, done_s in start), 3),
            "files": NUM_FILES,
            "tokens": NUM_TOKENS,
            "samples_a_step": BATCH,
            "seq_len": LENGTH,
            "yardstick_s": yardstick_s(),
        },
    )


def write_sparse(folder: Path, num_files: int, num_tokens: int, num_documents: int) -> None:
    """Make files of zeros that take no room; all share one index, which does."""
    with IndexedWriter(folder / "0", VOCAB) as writer:
        empty = np.zeros(num_tokens // num_documents, np.uint16)
        for _ in range(num_documents):
            writer.add(empty[:0])
        writer.close()
    index = np.memmap(folder / "0.idx", np.uint8, "r+")  # lengths and places of the documents that are not written
    lengths = np.full(num_documents, len(empty), np.int32)
    offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    index[34 : 34 + 4 * num_documents] = lengths.view(np.uint8)
    index[34 + 4 * num_documents : 34 + 12 * num_documents] = offsets.view(np.uint8)
    index.flush()
    for number in range(num_files):
        if number:
            (folder / f"{number}.idx").hardlink_to(folder / "0.idx")
        (folder / f"{number}.bin").touch()
        os.truncate(folder / f"{number}.bin", 2 * num_tokens)


def start_s(folder: Path, step: int) -> tuple[float, float]:
    """Return the seconds until the set is open, and until the first batches are there."""
    shape = StepShape(num_micro_batches=8, micro_batch=BATCH // 8)
    begin_s = time.perf_counter()
    source = open_source(DataSpec(sets={str(folder): 1.0}), seq_len=LENGTH, vocab=VOCAB, seed=0, separate=True)
    open_s = time.perf_counter() - begin_s
    with PrefetchLoader(source, shape, step * shape.num_samples) as loader:
        loader.next()
        return open_s, time.perf_counter() - begin_s


def loader_wait() -> Result:
    """Train a small Llama by the torch engine from files, and add up what its steps wait for batches."""
    plan = plan_of("tp=1,pp=1,dp=1,mbs=2")
    shape = StepShape.of(plan)

    def body(_: object) -> Sequence[tuple[float, float, float]]:
        with tempfile.TemporaryDirectory() as name:
            write_random(Path(name) / "a", plan.model.vocab)
            spec = DataSpec(sets={f"{name}/a": 1.0})
            sources = [
                open_source(spec, seq_len=SEQ_LEN, vocab=plan.model.vocab, seed=0, separate=False) for _ in range(2)
            ]
            engine = build(plan, Run(folder=Path(name), training=Training(steps=1)))
            with PrefetchLoader(sources[0], shape) as loader:
                return [_step(engine, loader, sources[1], shape) for _ in range(WARM_UP + STEPS)]

    with tempfile.TemporaryDirectory() as name:
        found = launch(None, 1, body, show=lambda _: None, placing=Placing(folder=Path(name)))
    waited_s, step_s, made_s = (sum(times) for times in zip(*found[WARM_UP:], strict=True))
    share = waited_s / (waited_s + step_s)
    return Result(
        name="loader_wait",
        value=round(share, 5),
        unit="of step time",
        bar=WAIT_BAR,
        holds=share <= WAIT_BAR,
        extras={
            "step_ms": round(step_s / STEPS * 1e3, 2),
            "waited_ms": round(waited_s / STEPS * 1e3, 4),
            "without_prefetch": round(made_s / (made_s + step_s), 5),
            "steps": STEPS,
            "tokens_a_step": shape.num_samples * SEQ_LEN,
            "yardstick_s": yardstick_s(),
        },
    )


def write_random(prefix: Path, vocab: int) -> None:
    """Write a set of tokens by chance, in documents of 500."""
    random = np.random.default_rng(0)
    with IndexedWriter(prefix, vocab) as writer:
        for _ in range(4000):
            writer.add(random.integers(0, vocab, 500))
        writer.close()


def _step(engine, loader, source, shape) -> tuple[float, float, float]:
    """Return what a step waited and took, and what its batches would have taken without a thread."""
    prepared = loader.next()
    begin_s = time.perf_counter()
    engine.step(prepared.batches, 1e-3)
    step_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    batches(source, prepared.first_sample, shape)
    return prepared.waited_s, step_s, time.perf_counter() - begin_s
