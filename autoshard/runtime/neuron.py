"""Whether this machine runs a plan through NxD, and compiles for it."""

from importlib.util import find_spec
from shutil import which

from autoshard.errors import require
from autoshard.plan.plan import Plan
from autoshard.runtime.compiling import TOOL
from autoshard.runtime.launch import GivenRank

_INSTALL = "pip install --extra-index-url https://pip.repos.neuron.amazonaws.com 'autoshard[neuron]'"
_REMEDY = f"On a Trainium machine type: {_INSTALL}. To try a small plan of the same shape here, type --rehearse 8"


def refuse_without_neuron(plan: Plan, given: GivenRank | None, name: str) -> None:
    """Refuse a plan for Trainium on a machine without NxD, and ranks that nobody has started."""
    ranks = plan.cluster.ranks_per_node
    start = f"torchrun --nnodes {plan.cluster.num_nodes} --nproc-per-node {ranks} -m autoshard.cli run {name}"
    require(
        (
            find_spec("neuronx_distributed") is not None,
            "engine",
            f"nxd runs on Trainium through neuronx-distributed, which is not installed here. {_REMEDY}",
        )
    )
    require((given is not None, "engine", f"nxd takes one process for every rank. Type on every node: {start}"))


def refuse_without_compiler(plan: Plan, given: GivenRank | None, name: str) -> None:
    """Refuse to compile where the tool is missing, or started otherwise than once on every node."""
    nodes, started = plan.cluster.num_nodes, given.num_ranks if given else 1
    missing = f"{TOOL} starts the compiler, and comes with torch-neuronx, which is not installed here. {_REMEDY}"
    require((which(TOOL) is not None, "--compile-only", missing))
    slurm, torchrun = (
        f"srun --nodes {nodes} --ntasks-per-node 1 ",
        f", or torchrun --nnodes {nodes} --nproc-per-node 1 ...",
    )
    several = nodes > 1
    start = f"{slurm if several else ''}autoshard run {name} --compile-only{torchrun if several else ''}"
    once = f"takes one process for every node, which starts the ranks: {nodes}, not {started}. Type {start}"
    require((started == nodes, "--compile-only", once))
