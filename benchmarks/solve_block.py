"""How long the search for the cuts of every operation takes: embedding, layer and head of Llama-3 8B."""

import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autoshard.blocks.operators import OperatorSolution, solve
from benchmarks.measure import Usage, measure, warm_environment, yardstick_s
from benchmarks.operator_problems import THREE_AXES, TWO_AXES, problems
from benchmarks.result import Result

BAR_S = 1.0
PEAK_BAR_BYTES = 200_000_000
THREE_AXES_BAR_S = 5.0
LIMITED_GAP_BAR = 0.005
LIMITED_SHARE = 0.5  # of the memory that the fastest cuts need
LEAST_BYTES = 1.0  # a limit that nothing keeps to: the answer is what needs least
DEEP_SHARE = 1.3  # of the least memory that any cuts need; here a price alone leaves a large gap


def two_axes() -> list[OperatorSolution]:
    """Solve all blocks on an 8x8 mesh."""
    return [solve(problem) for problem in problems(TWO_AXES)]


def three_axes() -> list[OperatorSolution]:
    """Solve all blocks on an 8x8x4 mesh."""
    return [solve(problem) for problem in problems(THREE_AXES)]


def limited(limit_bytes: float) -> OperatorSolution:
    """Solve the layer on an 8x8x4 mesh within a memory limit."""
    return solve(replace(problems(THREE_AXES)[1], memory_limit_bytes=limit_bytes))


def run() -> Result:
    """Measure whole processes, from starting Python to the last block; a process of its own for each search."""
    two, three = two_axes(), three_axes()
    limit_bytes = LIMITED_SHARE * three[1].kept_bytes
    deep_bytes = DEEP_SHARE * limited(LEAST_BYTES).kept_bytes
    calls = {"two_axes": "two_axes()", "three_axes": "three_axes()"}
    calls |= {"limited": f"limited({limit_bytes})", "deep": f"limited({deep_bytes})"}
    with tempfile.TemporaryDirectory() as folder:
        env = warm_environment(Path(__file__).parents[1], Path(folder))
        used: dict[str, Usage] = {}
        for name, call in calls.items():
            command = [sys.executable, "-c", f"from benchmarks import solve_block; solve_block.{call}"]
            measure(command, cwd=Path(folder), env=env)  # compiles, so that the next one does not
            used[name] = measure(command, cwd=Path(folder), env=env)
    return judge(used, two, three, {"limited": limited(limit_bytes), "deep": limited(deep_bytes)})


def judge(
    used: Mapping[str, Usage],
    two: Sequence[OperatorSolution],
    three: Sequence[OperatorSolution],
    short: Mapping[str, OperatorSolution],
) -> Result:
    """Hold every number against its bar; the value is that of the 8x8 mesh."""
    gaps = {"gap": _gap(two), "three_axes_gap": _gap(three), **{f"{name}_gap": one.gap for name, one in short.items()}}
    fast = used["two_axes"].cpu_s <= BAR_S
    fast = fast and max(used[name].cpu_s for name in ("three_axes", *short)) <= THREE_AXES_BAR_S
    small = max(usage.peak_bytes for usage in used.values()) <= PEAK_BAR_BYTES
    exact = gaps["gap"] == gaps["three_axes_gap"] == 0 and _gap(short.values()) <= LIMITED_GAP_BAR
    return Result(
        name="solve_block",
        value=round(used["two_axes"].cpu_s, 3),
        unit="CPU s",
        bar=BAR_S,
        holds=fast and small and exact and all(one.fits for one in (*two, *three, *short.values())),
        extras={
            "peak_bytes": used["two_axes"].peak_bytes,
            "peak_bar_bytes": PEAK_BAR_BYTES,
            **gaps,
            "three_axes_s": round(used["three_axes"].cpu_s, 3),
            "three_axes_bar_s": THREE_AXES_BAR_S,
            "three_axes_peak_bytes": used["three_axes"].peak_bytes,
            **{f"{name}_s": round(used[name].cpu_s, 3) for name in short},
            **{f"{name}_peak_bytes": used[name].peak_bytes for name in short},
            "cost_ms": round(sum(one.cost_s for one in two) * 1e3, 3),
            "yardstick_s": yardstick_s(),
        },
    )


def _gap(solutions: Iterable[OperatorSolution]) -> float:
    return max(one.gap for one in solutions)
