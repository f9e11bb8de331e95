"""The best sharding of one block within a memory limit, in one call: what GSPMD, Megatron or FSDP do, from costs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autoshard.blocks.cutting import Meshes, Terms, operator_problem
from autoshard.blocks.operators import OperatorSolution, solve
from autoshard.blocks.problem import OperatorProblem, weights_of
from autoshard.blocks.reported import Platform, block_price
from autoshard.cost.built_in import built_in
from autoshard.cost.setting import Question
from autoshard.cost.sharded import LoweredBlock, step_block
from autoshard.errors import nearest, require
from autoshard.graph.kinds.optimizer import UPDATES
from autoshard.layout.layout import show_atoms, whole_axes
from autoshard.layout.program import Program
from autoshard.layout.table import strategies, strategy_lines
from autoshard.plan.candidate import Candidate, parse_pins
from autoshard.plan.lowering import ENDS
from autoshard.plan.module_plan import proof
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.columns import Engine
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload

_KEYS = ("tp", "pp", "cp", "ep", "dp", "mbs", "sp", "place", "kernels", "cp_kind", "boundary")
_LONGEST, _BATCH = 8192, 1024  # as in plans that say nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSharding:
    """The layouts of every operation of a block, as the lines of a plan's table, and what they cost on a rank.

    ``rests`` names the weights that rest in pieces and are gathered where they are used, as under FSDP. ``time_s`` is
    what a plan with this table predicts of a micro-batch, forward and backward, with its share of what is reduced once
    per step. ``memory_bytes`` counts weights, gradients, masters, moments and what is kept for backward. The solver
    compares layouts by a simpler price, the roofline of every operation by itself: by that price, no layouts within the
    memory limit are cheaper by more than the share ``gap``. Where nothing ``fits``, these need least.
    """

    table: Mapping[str, str]
    rests: Mapping[str, str]
    time_s: float
    memory_bytes: float
    gap: float
    fits: bool

    @classmethod
    def of(
        cls, problem: OperatorProblem, solution: OperatorSolution, lowered: LoweredBlock, program: Program,
        platform: Platform,
    ) -> "BlockSharding":  # fmt: skip
        """Write a solution as the lines of a table, and price the program to which it was lowered."""
        block, atoms = problem.block, problem.atoms
        rests = {
            weight: over for name, over in solution.rests.items() for weight in weights_of(problem, block.op(name))
        }
        price = block_price(problem, lowered, program, rests, platform)
        return cls(
            table=strategy_lines(strategies(program, block), atoms),
            rests={weight: f"flat/{show_atoms(whole_axes(over, atoms))}" for weight, over in rests.items()},
            time_s=price.time_s,
            memory_bytes=price.memory_bytes,
            gap=solution.gap,
            fits=solution.fits,
        )

    def __str__(self) -> str:
        """Print the costs, then a line per operation and per weight that rests in pieces."""
        cost = f"{self.time_s * 1e3:.4g} ms, {self.memory_bytes / 2**20:.4g} MiB ({proof(self.gap, fits=self.fits)})"
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
    >>> found.fits, found.gap, set(found.rests.values())
    (True, 0.0, {'flat/dp'})
    """
    the_model = model if isinstance(model, ModelSpec) else load_model(model)
    the_cluster = cluster if isinstance(cluster, Cluster) else load_cluster(str(cluster))
    keys, kinds = parse_pins(mesh), (*ENDS, *the_model.layer_counts)
    require(
        (kind in kinds, "kind", f"{kind!r} is not a kind of block. {nearest(kind, kinds)}"),
        *((key in _KEYS, f"mesh.{key}", f"does not say how a block is cut. Known: {', '.join(_KEYS)}") for key in keys),
    )
    candidate = Candidate.parse(mesh, num_ranks=the_cluster.num_ranks)
    kernels, longest = candidate.kernels or the_cluster.kernels, min(the_model.max_positions, _LONGEST)
    work = workload or Workload(seq_len=longest, global_batch=_BATCH, precision=Precision.named("bf16"))
    question = Question(
        model=the_model,
        cluster=the_cluster,
        workload=work,
        kernels=kernels,
        calibration=built_in(the_cluster.name, kernels, chip=the_cluster.chip.name),
    )
    terms = Terms.of(candidate, engine or the_cluster.engine)
    problem = replace(
        operator_problem(question, Meshes.of(question, candidate), terms, kind),
        memory_limit_bytes=memory_bytes,
        state_bytes_per_weight=sum(work.precision.state_bytes(UPDATES[work.optimizer].num_moments).values()),
        cuts_rest=True,
    )
    problem = problem if engine else replace(problem, allowed={})
    return priced_sharding(question, candidate, problem, solve(problem))


def priced_sharding(
    question: Question, candidate: Candidate, problem: OperatorProblem, solution: OperatorSolution
) -> BlockSharding:
    """Lower a solved block of a candidate, and price it."""
    program = problem.table_setting().lowered(problem.block, solution.cuts)
    lowered = step_block(question.step, problem.block.kind, Recompute(), program)
    ring = Meshes.of(question, candidate).ring
    platform = Platform(kernels=load_kernels(question.kernels), ring=ring, cp_order=candidate.cp_order)
    return BlockSharding.of(problem, solution, lowered, program, platform)
