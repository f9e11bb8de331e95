"""A step of one rank of a plan, alone in this process: everything but numbers."""

import numpy as np

from autoshard.engine.base import Batch, Measured
from autoshard.engine.initial import no_memory, no_weights
from autoshard.engine.programs import graph_of
from autoshard.engine.torch.executor import Executor
from autoshard.engine.torch.fake import faked
from autoshard.engine.torch.formats import NOWHERE, Formats
from autoshard.plan.plan import Plan


def counted(plan: Plan, rank: int) -> Measured:
    """Build a rank of a plan, run a step, and return what it would have held and sent; shapes are checked on the way.

    Nothing is known of routed tokens: experts that drop none are given room for all, as in a real step.
    """
    with faked(rank, plan.mesh.num_ranks):
        executor = Executor(plan, no_weights(graph_of(plan)), Formats(device=NOWHERE))
        executor.step([_batch(plan)] * plan.schedule.num_micro_batches, 0.0, lambda _: True)
        return executor.measured()


def _batch(plan: Plan) -> Batch:
    shape = (plan.micro_batch * plan.mesh.size("dp"), plan.workload.seq_len)
    numbers = {"tokens": np.int64, "labels": np.int64, "token_weight": np.float64, "document_starts": np.int64}
    return {name: no_memory(shape, dtype) for name, dtype in numbers.items()}
