"""The problems that the searches of cuts are timed on: Llama-3 8B on ranks like an H100, sequence 8192."""

from collections.abc import Mapping
from math import prod

from autoshard.blocks.problem import OperatorProblem
from autoshard.cost.collective import Ring
from autoshard.cost.compute import Rates
from autoshard.graph.decoder import decoder_graph
from autoshard.layout.layout import Collective, Cuts
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload

# Assumed, two thirds of an H100 SXM's data sheet or less: what is timed is the search, whatever the rates.
_RATES = Rates(matrix_flops_per_s=600e12, vector_flops_per_s=30e12, memory_bytes_per_s=2e12)
_BANDWIDTH_BYTES_PER_S = 200e9
_LATENCY_S = 3e-6

TWO_AXES: Mapping[str, int] = {"dp": 8, "tp": 8}
THREE_AXES: Mapping[str, int] = {"dp": 8, "cp": 8, "tp": 4}
BOUNDARY: Cuts = {"batch": ("dp",), "seq": ("cp", "tp")}


def problems(atoms: Mapping[str, int]) -> tuple[OperatorProblem, ...]:
    """Return the problems of embedding, layer and head, forward and backward, without pins."""
    workload = Workload(seq_len=8192, global_batch=64, precision=Precision.named("bf16"))
    graph = decoder_graph(load_model("llama3-8b"), workload, load_kernels("torch_cuda"), micro_batch=8)
    boundary = {dim: tuple(atom for atom in cut if atom in atoms) for dim, cut in BOUNDARY.items()}

    def seconds(collective: Collective, message_bytes: float) -> float:
        size = prod(atoms[atom] for atom in collective.atoms)
        ring = Ring(size=size, bandwidth_bytes_per_s=_BANDWIDTH_BYTES_PER_S, latency_s=_LATENCY_S * (size - 1))
        return ring.time_s(collective, message_bytes)

    return tuple(
        OperatorProblem(
            block=block,
            sizes=graph.sizes,
            atoms=atoms,
            boundary=boundary,
            rates=_RATES,
            seconds=seconds,
            num_micro_batches=8,
            state_bytes_per_weight=18.0,  # derived: BF16 weight, FP32 gradient, master and two moments
        )
        for block in graph.blocks
    )
