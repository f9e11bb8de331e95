"""The losses of routers in the graph: results of a layer beside its hidden state, whose gradients are constants.

So a loss travels nowhere: each layer adds what it has to the gradient of its own router's logits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.graph.builder import BlockBuilder
from autoshard.graph.kinds.experts import Choosing
from autoshard.graph.kinds.norm import Softmax
from autoshard.graph.kinds.router import RouterBalance, RouterLoad, RouterZ
from autoshard.graph.op import Dims, Op
from autoshard.spec.workload import Workload

BALANCE, Z = "router_balance", "router_z"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoss:
    """A loss that layers with experts add: its coefficient, and over which dims its sum becomes a mean."""

    coefficient: float
    over: Dims

    def weight(self, sizes: Mapping[str, int], num_micro_batches: int) -> float:
        """Return by what the sum in one micro-batch counts in the mean over all that a step has, for whole dims."""
        return 1 / (num_micro_batches * math.prod(sizes[dim] for dim in self.over))


def router_losses(workload: Workload) -> Mapping[str, RouterLoss]:
    """Return the losses of a workload by the names of their results in a block."""
    sequences: Dims = ("batch",) if workload.router_balance_over == "sequence" else ()
    losses = {
        BALANCE: RouterLoss(coefficient=workload.router_balance_loss, over=sequences),
        Z: RouterLoss(coefficient=workload.router_z_loss, over=("batch", "seq")),
    }
    return {name: loss for name, loss in losses.items() if loss.coefficient > 0}


def add_router_losses(b: BlockBuilder, workload: Workload) -> tuple[str, ...]:
    """Write the losses of the router of a block, if it has one; return the names of their results."""
    choice = next((op for op in b.ops if isinstance(op.kind, Choosing)), None)
    names = tuple(router_losses(workload)) if choice else ()
    if choice and names and isinstance(choice.kind, Choosing):
        logits = _logits(b, choice)
        if BALANCE in names:
            load = b.emit("router_load", RouterLoad(over=workload.router_balance_over), choice.outputs[1])
            b.emit(BALANCE, RouterBalance(scores=choice.kind.probabilities), logits, load)
        if Z in names:
            b.emit(Z, RouterZ(), logits)
    return names


def _logits(b: BlockBuilder, choice: Op) -> str:
    """Return the logits by which a choice is made; code may choose by probabilities, which are made of them."""
    made = {output: op for op in b.ops for output in op.outputs}
    source = made[made[choice.inputs[0]].inputs[0]]  # behind the deliver
    if isinstance(source.kind, Softmax):
        source = made[made[source.inputs[0]].inputs[0]]
    return source.outputs[0]
