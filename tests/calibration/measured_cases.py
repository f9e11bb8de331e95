"""Measured rows for tests: where those of the repository lie, what is predicted of them, and a small one."""

import functools
import json
from pathlib import Path
from typing import Any

from autoshard.calibration.validate import Validation, validate

DATA = Path(__file__).parents[2] / "benchmarks" / "data"

ARCH = {"layers": 4, "hidden": 512, "ffn": 1024, "heads": 8, "kv_heads": 4, "vocab": 1000, "gated_mlp": True,
        "tied_embed": False}  # fmt: skip
SMALL: dict[str, Any] = {
    "id": "small", "group": "g", "platform": "h100", "model": "own", "arch": ARCH, "seq_len": 256,
    "global_batch_seqs": 16, "micro_batch": 1, "nodes": 1, "chips": 8, "tp": 2, "pp": 2, "vp": 1, "cp": 1, "ep": 1,
    "dp": 2, "sp": True, "recompute": "none", "sharding": "ZeRO-1", "precision": "BF16", "pipeline_schedule": "1F1B",
    "framework": "Megatron-Core", "step_time_s": 1.0, "peak_memory_gib": 10.0,
}  # fmt: skip


def written(folder: Path, *rows: object) -> Path:
    """A file of rows; texts are lines as they are."""
    path = folder / "runs.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


@functools.cache  # several folders of tests look at it
def published(path: Path = DATA) -> Validation:
    """The predictions of all rows of the repository, which take ten seconds, or of a file."""
    return validate(path)


TRAINIUM = DATA / "trainium.jsonl"  # many rows of few layouts: predicted in a second
