"""How long ``autoshard report`` takes for plans of 512 and of 32,768 ranks, and how large their pages are."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.measure import Usage, interleave, measure, warm_environment, yardstick_s
from benchmarks.result import Result

ROUNDS = 5
BAR_S = 1.0  # CPU seconds of either page
BAR_BYTES = 300_000  # of the page of the first plan

_QUESTIONS = {
    "70b_16": ("--model", "llama3-70b", "--nodes", "16"),
    "405b_512": ("--model", "llama3.1-405b", "--cluster", "trn2.48xlarge", "--nodes", "512"),
}
_WITHOUT_TORCH = "import sys\nsys.modules['torch'] = None\nfrom autoshard.cli import main\nsys.exit(main())\n"


def run() -> Result:
    """Plan once, then draw each plan in turns; torch cannot be imported meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "autoshard").write_text(_WITHOUT_TORCH, encoding="utf-8")
        program = [sys.executable, str(folder / "autoshard")]
        env = warm_environment(Path(__file__).parents[1], folder / "bytecode")
        for plan, question in _QUESTIONS.items():
            measure([*program, "plan", *question, "--out", f"{plan}.json"], cwd=folder, env=env)
        commands = {plan: [*program, "report", f"{plan}.json", "--out", f"{plan}.html"] for plan in _QUESTIONS}
        rounds = interleave(commands, rounds=ROUNDS, cwd=folder, env=env)
        return judge(rounds, {plan: (folder / f"{plan}.html").stat().st_size for plan in _QUESTIONS}, yardstick_s())


def judge(rounds: Sequence[Mapping[str, Usage]], sizes: Mapping[str, int], loop_s: float) -> Result:
    """Take the slower of both pages; the first must be small as well."""
    cpu_s = {plan: median(used[plan].cpu_s for used in rounds) for plan in sizes}
    value = max(cpu_s.values())
    return Result(
        name="report_page",
        value=round(value, 3),
        unit="CPU s",
        bar=BAR_S,
        holds=value < BAR_S and sizes["70b_16"] <= BAR_BYTES,
        extras={
            **{f"{plan}_s": round(time_s, 3) for plan, time_s in cpu_s.items()},
            **{f"{plan}_bytes": size for plan, size in sizes.items()},
            "bar_bytes": BAR_BYTES,
            "peak_bytes": max(used[plan].peak_bytes for used in rounds for plan in sizes),
            "yardstick_s": loop_s,
        },
    )
