"""Rules of activations in host memory: which programs keep them there, and of which clusters the way is known."""

from autoshard.plan.rules.columns import Columns
from autoshard.plan.rules.rule import Verdict, rule
from autoshard.spec.kernels import kernels_names, load_kernels, table_fault


def _offloads(c: Columns) -> bool:
    return any(recompute.offload for recompute in c.shared.recompute)


@rule(
    "recompute",
    source="autoshard/engine/torch/offloading.py keeps them for the torch engine; no other program is modelled so",
    applies=_offloads,
)
def offload_program(c: Columns) -> Verdict:
    keeps = not table_fault(c.kernels) and bool(load_kernels(c.kernels).offloads)
    yield keeps
    tables = ", ".join(name for name in kernels_names() if load_kernels(name).offloads)
    why = f"{c.kernels} keeps activations on the device"
    yield f"recompute={c.recompute}: {why}. Leave +offload out, or use kernels={tables}"


@rule(
    "recompute", source="derived: torch keeps what it needs of code itself, where no engine sees it", applies=_offloads
)
def offload_code(c: Columns) -> Verdict:
    yield c.model.traced is None
    why = f"{c.model.name} runs as its own code, which keeps activations where torch puts them"
    yield f"recompute={c.recompute}: {why}. Leave +offload out"


@rule("recompute", source="autoshard/spec/clusters: what is published of a node", applies=_offloads)
def offload_link(c: Columns) -> Verdict:
    cluster, kernels = c.cluster, "" if table_fault(c.kernels) else c.kernels
    on_host = bool(kernels) and load_kernels(kernels).host_computes
    yield on_host or cluster.host_bandwidth_bytes_per_s is not None
    why = f"how fast a chip of {cluster.name} reaches host memory, and how much of it a node has, is not known"
    remedy = "Leave +offload out, or state host_bandwidth_bytes_per_s and host_memory_bytes in a cluster file"
    yield f"recompute={c.recompute}: {why}. {remedy}"
