"""What a compiler has to do before the first step, on platforms that compile whole graphs."""

from collections.abc import Sequence

from autoshard.cost.pipeline import StageLayers
from autoshard.plan.prediction import Compiling, rounded
from autoshard.schedule.schedule import Schedule
from autoshard.spec.kernels import Kernels

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
