"""What the simulation of a large pipeline costs: a whole process, from the import to the makespan."""

import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.measure import Usage, interleave, warm_environment, yardstick_s
from benchmarks.result import Result

ROUNDS = 5
BAR_S = 1.0  # a researcher's loop over schedules must not wait for its simulator

_SIMULATION = """
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import PipelineTimes, simulate
schedule = Schedule(builder="{builder}", num_ranks=64, num_chunks=2, num_micro_batches=512)
forward_s = tuple(1 + stage % 3 for stage in range(128))
times = PipelineTimes(forward_s=forward_s, input_s=(1.5,) * 128, weight_s=(0.5,) * 128)
assert simulate(schedule, times).makespan_s > 0
"""


def run() -> Result:
    """Simulate 64 ranks of two unequal chunks and 512 micro-batches, with whole and with split backwards."""
    builders = ("interleaved", "zb_v")
    commands = {name: [sys.executable, "-c", _SIMULATION.format(builder=name)] for name in builders}
    with tempfile.TemporaryDirectory() as folder:
        env = warm_environment(Path(__file__).parents[1], Path(folder))
        rounds = interleave(commands, rounds=ROUNDS, cwd=Path(folder), env=env)
    return judge(rounds, yardstick_s())


def judge(rounds: list[dict[str, Usage]], loop_s: float) -> Result:
    """Take the median of each schedule; the value is that of the slower one."""
    cpu_s = {name: median(used[name].cpu_s for used in rounds) for name in rounds[0]}
    slowest_s = max(cpu_s.values())
    return Result(
        name="simulate_pipeline",
        value=round(slowest_s, 3),
        unit="CPU s",
        bar=BAR_S,
        holds=slowest_s <= BAR_S,
        extras={
            **{f"{name}_s": seconds for name, seconds in cpu_s.items()},
            "peak_bytes": max(used[name].peak_bytes for used in rounds for name in cpu_s),
            "yardstick_s": loop_s,
        },
    )
