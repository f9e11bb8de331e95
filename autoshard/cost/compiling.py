"""What a compiler has to do before the first step, on platforms that compile whole graphs."""

from collections.abc import Callable, Sequence

from autoshard.cost.block import BlockWork
from autoshard.cost.step import StageLayers
from autoshard.plan.prediction import Compiling, rounded
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.spec.kernels import Kernels

# cited: aws-neuron-sdk issue 987: "[XTP002] Number of instructions (8658944) is over the threshold (5000000)".
MOST_INSTRUCTIONS = 5_000_000
# cited: Neuron documentation, nki.isa.nc_matmul: one instruction multiplies at most [128, 128] with [128, 512].
_FLOPS_OF_ONE = 2 * 128 * 128 * 512
_SENDS = 4  # a hidden state and its gradient, to be sent and to be received; the same on all stages


def compiling(schedule: Schedule, stages: Sequence[StageLayers], kernels: Kernels) -> Compiling | None:
    """Count the distinct graphs of a step; None where nothing is compiled ahead.

    Stages with the same contents share their graphs. In a pipeline, forward and backward of a stage are graphs of
    their own (aws-neuron/neuronx-distributed pipeline/model.py marks a step after every task), as are what ranks send
    each other; without one they are a single graph. Ranks that hold the same update their weights by the same graph.
    """
    if not kernels.seconds_per_graph:
        return None
    ranks = {
        tuple(stages[stage] for _, stage in sorted(schedule.stages_of(rank).items()))
        for rank in range(schedule.num_ranks)
    }
    in_pipeline = schedule.num_ranks > 1
    passes = 3 if schedule.splits_backward else 2
    count = len(set(stages)) * (passes if in_pipeline else 1) + len(ranks) + (_SENDS if in_pipeline else 0)
    return Compiling(
        num_graphs=count,
        compile_s=rounded(count * kernels.seconds_per_graph),
        basis=kernels.sources["seconds_per_graph"],
    )


def least_instructions(stage: StageLayers, work: Callable[[str, Recompute], BlockWork], *, in_pipeline: bool) -> float:
    """Return how many instructions of the matrix unit the largest graph of a stage has at least.

    Loads, copies and element-wise work come on top; how many is the compiler's own affair.
    """
    flops = {"F": 0.0, "B": 0.0}
    for kind, drop, count in stage.contents():
        for run, kernel in work(kind, drop).kernels:
            products = kernel.matrix_flops + kernel.products_flops + kernel.attention_flops
            flops["F" if run.pass_ == "F" else "B"] += count * float(products)
    return (max(flops.values()) if in_pipeline else sum(flops.values())) / _FLOPS_OF_ONE
