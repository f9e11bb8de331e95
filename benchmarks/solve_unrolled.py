"""How long the search takes for all 32 layers of Llama-3 8B in a row, without the shortcut that they are alike."""

import sys
import tempfile
from pathlib import Path

from autoshard.blocks.chain import ChainSolution, ReducedBlock, solve_chain
from benchmarks.measure import Usage, measure, warm_environment, yardstick_s
from benchmarks.operator_problems import TWO_AXES, problems
from benchmarks.result import Result

BAR_S = 10.0
_SAME = 1e-9  # relative: sums of the same costs in another order


def unrolled() -> ChainSolution:
    """Solve embedding, 32 layers and head, every layer anew and with a layout of its own before and after it."""
    embed, layer, head = problems(TWO_AXES)
    layers = [ReducedBlock(layer) for _ in range(layer.block.repeat)]
    return solve_chain([ReducedBlock(embed), *layers, ReducedBlock(head)])


def repeated(*, layers_tied: bool) -> ChainSolution:
    """Solve the same with one layer's work used for all."""
    embed, layer, head = (ReducedBlock(problem) for problem in problems(TWO_AXES))
    return solve_chain([embed, *[layer] * layer.tables.problem.block.repeat, head], layers_tied=layers_tied)


def run() -> Result:
    """Measure a whole process, from starting Python to the answer."""
    with tempfile.TemporaryDirectory() as folder:
        env = warm_environment(Path(__file__).parents[1], Path(folder))
        command = [sys.executable, "-c", "from benchmarks.solve_unrolled import unrolled; unrolled()"]
        used = measure(command, cwd=Path(folder), env=env)
    return judge(used, unrolled(), repeated(layers_tied=False), repeated(layers_tied=True))


def judge(used: Usage, free: ChainSolution, shortcut: ChainSolution, tied: ChainSolution) -> Result:
    """Hold the time against the bar, and the three ways of solving against each other."""
    same = abs(free.cost_s - shortcut.cost_s) <= _SAME * free.cost_s
    never_worse = free.cost_s <= tied.cost_s * (1 + _SAME)
    return Result(
        name="solve_unrolled",
        value=round(used.cpu_s, 3),
        unit="CPU s",
        bar=BAR_S,
        holds=used.cpu_s <= BAR_S and same and never_worse,
        extras={
            "layers": len(free.blocks) - 2,
            "cost_ms": round(free.cost_s * 1e3, 3),
            "tied_cost_ms": round(tied.cost_s * 1e3, 3),
            "untied_saves_ms": round((tied.cost_s - free.cost_s) * 1e3, 6),
            "as_with_shortcut": same,
            "peak_bytes": used.peak_bytes,
            "yardstick_s": yardstick_s(),
        },
    )
