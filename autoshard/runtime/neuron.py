"""Whether this machine runs a plan through NxD."""

from importlib.util import find_spec

from autoshard.errors import require
from autoshard.plan.plan import Plan
from autoshard.runtime.launch import GivenRank

_INSTALL = "pip install --extra-index-url https://pip.repos.neuron.amazonaws.com 'autoshard[neuron]'"


def refuse_without_neuron(plan: Plan, given: GivenRank | None, name: str) -> None:
    """Refuse a plan for Trainium on a machine without NxD, and ranks that nobody has started."""
    ranks = plan.cluster.ranks_per_node
    start = f"torchrun --nnodes {plan.cluster.num_nodes} --nproc-per-node {ranks} -m autoshard.cli run {name}"
    require(
        (
            find_spec("neuronx_distributed") is not None,
            "engine",
            "nxd runs on Trainium through neuronx-distributed, which is not installed here. On a Trainium machine "
            f"type: {_INSTALL}. To try a small plan of the same shape here, type --rehearse 8",
        )
    )
    require((given is not None, "engine", f"nxd takes one process for every rank. Type on every node: {start}"))
