"""How long ``autoshard validate`` takes for 2,000 layouts: the largest sweep, at four lengths of its sequences."""

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import Usage, measure, warm_environment, yardstick_s
from benchmarks.pages import ROOT
from benchmarks.result import Result

BAR_S = 60.0
ROWS = ROOT / "benchmarks" / "data" / "sweeps" / "nanotron_h100.jsonl"
LENGTHS = (1024, 2048, 4096, 8192)


def run() -> Result:
    """Validate all rows once, after a file of few rows has filled the cache of bytecode."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few, every = folder / "few.jsonl", folder / "every.jsonl"
        rows = rows_at(LENGTHS)
        few.write_text("\n".join(rows[:2]), encoding="utf-8")
        every.write_text("\n".join(rows), encoding="utf-8")
        env = warm_environment(ROOT, folder / "bytecode")
        for path in (few, every):
            usage = measure([sys.executable, "-m", "autoshard.cli", "validate", str(path)], cwd=folder, env=env)
    return judge(usage, len(rows), yardstick_s())


def rows_at(lengths: tuple[int, ...]) -> list[str]:
    """Return the rows of the sweep at other lengths; what they measured says nothing then, and is not looked at."""
    found: list[str] = []
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found += [json.dumps({**row, "id": f"{row['id']}-{length}", "group": f"{row['group']}-{length}",
                              "seq_len": length}) for length in lengths]  # fmt: skip
    return found


def judge(usage: Usage, num_rows: int, loop_s: float) -> Result:
    """Hold the CPU seconds against the bar."""
    return Result(
        name="validate_speed", value=round(usage.cpu_s, 1), unit="CPU s", bar=BAR_S, holds=usage.cpu_s <= BAR_S,
        extras={"rows": num_rows, "peak_mb": round(usage.peak_bytes / 1e6, 1), "yardstick_s": round(loop_s, 3)},
    )  # fmt: skip
