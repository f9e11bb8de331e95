"""How long a stranger waits for the first answer, in units of ``import numpy`` on the same machine."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.measure import Usage, interleave, warm_environment, yardstick_s
from benchmarks.result import Result

ROUNDS = 7

# The bars of the project's definition of a fast start.
LIST_BAR = 3.0
PLAN_BAR = 6.0
PEAK_BAR_BYTES = 150_000_000

# What pip writes as the console script.
_SCRIPT = "import sys\nfrom autoshard.cli import main\nsys.exit(main())\n"


def run() -> Result:
    """Measure ``list models`` and ``plan`` against ``import numpy``, in interleaved rounds."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "autoshard"
        script.write_text(_SCRIPT, encoding="utf-8")
        program = [sys.executable, str(script)]
        commands = {
            "numpy": [sys.executable, "-c", "import numpy"],
            "list": [*program, "list", "models"],
            "plan": [*program, "plan", "--model", "llama3-70b", "--nodes", "16"],
        }
        env = warm_environment(Path(__file__).parents[1], Path(folder) / "bytecode")
        return judge(interleave(commands, rounds=ROUNDS, cwd=Path(folder), env=env), yardstick_s())


def judge(rounds: Sequence[dict[str, Usage]], loop_s: float) -> Result:
    """Compare within each round and take the median; the value is that of ``plan``."""
    list_ratio = median(_ratios(rounds, "list"))
    plan_ratio = median(_ratios(rounds, "plan"))
    peak_bytes = max(used[name].peak_bytes for used in rounds for name in ("list", "plan"))
    return Result(
        name="cold_start",
        value=round(plan_ratio, 3),
        unit="x import numpy",
        bar=PLAN_BAR,
        holds=list_ratio <= LIST_BAR and plan_ratio <= PLAN_BAR and peak_bytes < PEAK_BAR_BYTES,
        extras={
            "list_value": round(list_ratio, 3),
            "list_bar": LIST_BAR,
            "peak_bytes": peak_bytes,
            "peak_bar_bytes": PEAK_BAR_BYTES,
            "numpy_s": _cpu_s(rounds, "numpy"),
            "list_s": _cpu_s(rounds, "list"),
            "plan_s": _cpu_s(rounds, "plan"),
            "yardstick_s": loop_s,
            "rounds": len(rounds),
        },
    )


def _ratios(rounds: Sequence[dict[str, Usage]], name: str) -> list[float]:
    return [used[name].cpu_s / used["numpy"].cpu_s for used in rounds]


def _cpu_s(rounds: Sequence[dict[str, Usage]], name: str) -> float:
    return median(used[name].cpu_s for used in rounds)
