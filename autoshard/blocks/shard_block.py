"""The best sharding of one block within a memory limit, in one call: what GSPMD, Megatron or FSDP do, from costs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autoshard.blocks.cutting import Meshes, Terms, operator_problem
from autoshard.blocks.operators import OperatorSolution, solve
from autoshard.blocks.problem import OperatorProblem, weights_of
from autoshard.cost.built_in import built_in
from autoshard.cost.setting import Question
from autoshard.errors import nearest, require
from autoshard.graph.kinds.optimizer import UPDATES
from autoshard.layout.layout import show_atoms, whole_axes
from autoshard.layout.lower import lower
from autoshard.layout.table import strategies, written
from autoshard.plan.candidate import Candidate, parse_pins
from autoshard.plan.lowering import KINDS
from autoshard.plan.rules.columns import Engine
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import DTYPE_BYTES, Precision, Workload

_KEYS = ("tp", "pp", "cp", "ep", "dp", "mbs", "sp", "place", "kernels", "cp_kind", "boundary")
_LONGEST, _BATCH = 8192, 1024  # as in plans that say nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSharding:
    """The layouts of every operation of a block, as the lines of a plan's table, and what they cost on a rank.

    ``rests`` names the weights that rest in pieces and are gathered where they are used, as under FSDP. ``time_s`` is
    that of a micro-batch, forward and backward, with its share of what is reduced once per step; within the memory
    limit nothing takes less than ``bound_s``. ``memory_bytes`` counts weights, gradients, masters, moments and what is
    kept for backward; where nothing ``fits``, these are the layouts that need least.
    """

    table: Mapping[str, str]
    rests: Mapping[str, str]
    time_s: float
    bound_s: float
    memory_bytes: float
    fits: bool

    @classmethod
    def of(cls, problem: OperatorProblem, solution: OperatorSolution) -> "BlockSharding":
        """Write the cuts of a solution as the lines of a table."""
        block, atoms, keeps = problem.block, problem.atoms, problem.keeps_gathered
        program = lower(
            block, solution.cuts, atoms, problem.price("bf16"), boundary=problem.boundary, keeps_gathered=keeps
        )
        return cls(
            table=written(strategies(program, block), atoms),
            rests={
                weight: f"flat/{show_atoms(whole_axes(over, atoms))}"
                for name, over in solution.rests.items()
                for weight in weights_of(problem, block.op(name))
            },
            time_s=solution.cost_s,
            bound_s=solution.cost_s * (1 - solution.gap) if solution.fits else math.inf,
            memory_bytes=solution.kept_bytes,
            fits=solution.fits,
        )

    def __str__(self) -> str:
        """Print the costs, then a line per operation and per weight that rests in pieces."""
        proof = f"none takes less than {self.bound_s * 1e3:.4g}" if self.fits else "nothing fits; this needs least"
        cost = f"{self.time_s * 1e3:.4g} ms, {self.memory_bytes / 2**20:.4g} MiB ({proof})"
        return "\n".join([cost, *(f"{name}: {line}" for name, line in (*self.table.items(), *self.rests.items()))])


def shard_block(  # noqa: PLR0913
    model: ModelSpec | str | Path,
    cluster: Cluster | str | Path,
    mesh: str,
    workload: Workload | None = None,
    *,
    kind: str = "layer",
    memory_bytes: float = math.inf,
    engine: Engine | None = None,
) -> BlockSharding:
    """Return the fastest sharding of one block of a model within a memory limit per rank.

    ``mesh`` holds sizes of axes, and other keys of a candidate that say how a block is cut: ``dp=2,tp=4,mbs=2``. Every
    legal layout may be chosen, or what the Rules of an engine allow.

    >>> found = shard_block("tiny-llama", "local", "dp=2,tp=2", memory_bytes=1.8e6)
    >>> found.fits, found.bound_s == found.time_s, set(found.rests.values())
    (True, True, {'flat/dp'})
    """
    the_model = model if isinstance(model, ModelSpec) else load_model(model)
    the_cluster = cluster if isinstance(cluster, Cluster) else load_cluster(str(cluster))
    keys = parse_pins(mesh)
    require(
        (kind in KINDS, "kind", f"{kind!r} is not a kind of block. {nearest(kind, KINDS)}"),
        *((key in _KEYS, f"mesh.{key}", f"does not say how a block is cut. Known: {', '.join(_KEYS)}") for key in keys),
    )
    candidate = Candidate.parse(mesh, num_ranks=the_cluster.num_ranks)
    longest = min(the_model.max_positions, _LONGEST)
    work = workload or Workload(seq_len=longest, global_batch=_BATCH, precision=Precision.named("bf16"))
    question = Question(
        model=the_model,
        cluster=the_cluster,
        workload=work,
        kernels=candidate.kernels or the_cluster.kernels,
        calibration=built_in(the_cluster.name, chip=the_cluster.chip.name),
    )
    precision, num_moments = work.precision, UPDATES[work.optimizer].num_moments
    masters = DTYPE_BYTES[precision.masters] if precision.masters else 0
    states_bytes = DTYPE_BYTES[precision.weights] + DTYPE_BYTES[precision.gradients] + masters
    problem = replace(
        operator_problem(
            question, Meshes.of(question, candidate), Terms.of(candidate, engine or the_cluster.engine), kind
        ),
        memory_limit_bytes=memory_bytes,
        state_bytes_per_weight=states_bytes + num_moments * DTYPE_BYTES[precision.moments],
        cuts_rest=True,
    )
    problem = problem if engine else replace(problem, allowed={})
    return BlockSharding.of(problem, solve(problem))
