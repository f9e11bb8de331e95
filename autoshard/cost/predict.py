"""From a plan to what it promises: its prediction, what is compiled for it, and whether a plan file may be run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path

from autoshard.cost.built_in import calibration_of
from autoshard.cost.calibration import Calibration, calibration_entries, trust, uncalibrated
from autoshard.cost.collective import Number
from autoshard.cost.compute import seen_share
from autoshard.cost.setting import (
    BlockCost,
    Question,
    Setting,
    block_cost,
    boundary_bytes,
    handed_on,
    offloaded,
    price_block,
    rings_on,
    setting_of,
    work_of,
)
from autoshard.cost.sharded import Blocks, ListedBlocks
from autoshard.cost.stages import Sends
from autoshard.cost.step import PlanPipeline, PlanStep, Price, StageLayers, StepCost, step_cost
from autoshard.cost.terms import term_entries, term_seconds, user_terms
from autoshard.errors import inside
from autoshard.graph.block import OpGraph
from autoshard.graph.decoder import num_slots
from autoshard.graph.kinds.attention import Attend, AttendGradient
from autoshard.plan.codec import plan_hash
from autoshard.plan.plan import Compiling, Plan, Prediction, StageMemory, rounded
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.rule import Rejection
from autoshard.plan.verify import unrun, verify
from autoshard.spec.kernels import Kernels, load_kernels

# cited: aws-neuron-sdk issue 987: "[XTP002] Number of instructions (8658944) is over the threshold (5000000)".
MOST_INSTRUCTIONS = 5_000_000
# cited: Neuron documentation, nki.isa.nc_matmul: one instruction multiplies at most [128, 128] with [128, 512].
_FLOPS_OF_INSTRUCTION = 2 * 128 * 128 * 512
_SENDS = 4  # a hidden state and its gradient, to be sent and to be received; the same on all stages
_LINKS = ("near_link_efficiency", "far_link_efficiency", "collective_s", "joined_s", "reach")  # sends depend on these
_NOTHING = 1e-12  # of a step: what is left of two sums of the same times, a waiting that is none


def predict(plan: Plan, calibration: Calibration | None = None, blocks: Blocks | None = None) -> Prediction:
    """Return time, memory and traffic of one step of a plan, as its own table shards it.

    Without a calibration, it is predicted with the constants that the plan carries. Who has made the table from cuts
    may hand over its blocks as they were sharded for that.
    """
    question = question_of(plan, calibration or calibration_of(plan))
    cost = plan_cost(plan, question, blocks)
    least_s = _NOTHING * float(cost.time_s)
    seconds = {part: rounded(float(value)) for part, value in sorted(cost.seconds.items()) if float(value) > least_s}
    step_time_s = rounded(sum(seconds.values()))
    interval, outside = trust(question.calibration, plan)
    # Utilisation counts the model's own FLOPs, without slots that no token needs; published ones count masked pairs.
    graph, model, workload = question.step.graph, question.model, question.workload
    if model.num_experts:
        graph = replace(graph, sizes={**graph.sizes, "slots": num_slots(model, workload.seq_len, None)})
    flops = graph.model_flops_per_token() * workload.tokens_per_step
    peak = question.cluster.rank_matrix_flops_per_s(workload.precision.activations) * question.cluster.num_ranks
    masked = _masked_flops_per_token(graph) * workload.tokens_per_step
    mfu_causal = rounded((flops - masked) / (step_time_s * peak))
    # What no row of these chips has reached is not promised as the fastest that may be, whatever a fit is off.
    fastest_s = (flops - masked) / (peak * best) if (best := question.calibration.best_mfu) else 0.0
    return Prediction(
        step_time_s=step_time_s,
        low_s=rounded(min(step_time_s, max(step_time_s / (1 + interval), fastest_s))),
        high_s=rounded(step_time_s * (1 + interval)),
        time_parts=seconds,
        stage_memory=tuple(
            StageMemory(num_weights=int(weights), parts=_whole(parts), host_bytes=round(host_bytes))
            for weights, parts, host_bytes in zip(cost.weights, cost.memory, cost.host_bytes, strict=True)
        ),
        peak_interval_bytes=_peak_interval(cost, load_kernels(plan.kernels)),
        capacity_bytes=load_kernels(plan.kernels).capacity_bytes(plan.cluster.rank_memory_bytes, plan.headroom),
        tokens_per_s=rounded(workload.tokens_per_step / step_time_s),
        mfu=rounded(flops / (step_time_s * peak)),
        mfu_causal=mfu_causal,
        outside={**outside, **_above(mfu_causal, question.calibration)},
        communication_bytes={axis: size for axis, size in _whole(cost.sent_bytes).items() if size},
        basis=question.calibration.basis,
        of=plan_hash(plan),
        compiling=compiling(plan),
    )


def _above(mfu_causal: float, calibration: Calibration) -> Mapping[str, str]:
    """Say that a plan would use its chips better than any row of the fit does."""
    best = calibration.best_mfu
    is_above = best is not None and mfu_causal > best
    return {"mfu": f"{mfu_causal:.1%} without masked pairs, and the best row has {best:.1%}"} if is_above else {}


def _masked_flops_per_token(graph: OpGraph) -> float:
    """Return the FLOPs of attention per token that are of pairs which the mask hides."""
    seq_len, flops = graph.sizes["seq"], 0.0
    for block in graph.blocks:
        for op in block.select("micro_batch"):
            if isinstance(op.kind, Attend | AttendGradient) and not op.again:
                hidden = 1 - float(seen_share(op.kind, seq_len, 1, 1))
                flops += block.repeat * hidden * op.kind.matrix_flops(block.call(op, graph.sizes))
    return flops / (graph.sizes["batch"] * seq_len)


def _peak_interval(cost: StepCost, kernels: Kernels) -> tuple[int, int] | None:
    """Return what the fullest rank holds at least and at most, as far as what an allocator reserves is known."""
    if not kernels.reserved:
        return None
    reserved, runtime = kernels.reserved, kernels.runtime_bytes
    allocated = (cost.peak_bytes - runtime) / (1 + reserved.share)
    return round(allocated * (1 + reserved.low) + runtime), round(allocated * (1 + reserved.high) + runtime)


def sent_by_stage(plan: Plan) -> tuple[Mapping[str, int], ...]:
    """Return by pipeline rank what is sent along each axis, by the rank that has the largest part of its stages."""
    return tuple(_whole(sent) for sent in plan_cost(plan, question_of(plan, calibration_of(plan))).sent)


def _whole(parts: Mapping[str, Number]) -> Mapping[str, int]:
    return {name: round(float(value)) for name, value in sorted(parts.items())}


def predicted(plan: Plan, calibration: Calibration | None = None, blocks: Blocks | None = None) -> Plan:
    """Return the plan with its prediction filled in."""
    return replace(plan, prediction=predict(plan, calibration, blocks))


def question_of(plan: Plan, calibration: Calibration) -> Question:
    """Return what a plan answers."""
    return Question(
        model=plan.model,
        cluster=plan.cluster,
        workload=plan.workload,
        kernels=plan.kernels,
        calibration=calibration,
    )


def plan_cost(plan: Plan, question: Question, blocks: Blocks | None = None) -> StepCost:
    """Price a plan's step, with the terms that it states."""
    cost = step_cost(question, *priced(plan, question, blocks))
    return replace(cost, seconds={**cost.seconds, **term_seconds(plan.provenance)})


def priced(plan: Plan, question: Question, blocks: Blocks | None = None) -> tuple[Setting, PlanPipeline, Price]:
    """Return what the price of a plan's step is made of: its numbers, its pipeline, and the price of every block."""
    setting = setting_of(question, plan.candidate, blocks or ListedBlocks.of(plan))
    kernels = load_kernels(plan.kernels)
    send_s, share = handed_on(setting, kernels)
    pipeline = PlanPipeline(
        schedule=plan.schedule,
        stages=StageLayers.of(plan),
        boundary_bytes=boundary_bytes(setting),
        sends=replace(Sends.of(send_s, plan.schedule.builder, kernels), share=share),
        bucket_bytes=plan.buckets.total_bytes,
    )
    return setting, pipeline, cache(partial(price_block, question, setting))


def step_timer(plan: Plan, blocks: Blocks) -> Callable[[Calibration], float]:
    """Count once what a plan does, and return a function that times its step under any constants."""
    nominal = question_of(plan, uncalibrated())
    setting, whole, _ = priced(plan, nominal, blocks)
    work, divided = cache(partial(work_of, nominal, setting)), plan.mesh.divided(plan.num_copies, plan.num_parts)

    @lru_cache(maxsize=2)  # a fit moves one constant at a time
    def linked(links: Calibration) -> tuple[Setting, PlanPipeline]:
        relinked = replace(nominal, calibration=links)
        rings = rings_on(relinked, plan.mesh, setting.rings)
        state_rings = rings_on(relinked, divided, setting.state_rings)
        there = replace(setting, rings=rings, state_rings=state_rings)
        send_s, _ = handed_on(there, load_kernels(plan.kernels))
        return there, replace(whole, sends=replace(whole.sends, time_s=send_s))

    def time_s(calibration: Calibration) -> float:
        question = replace(nominal, calibration=calibration)
        here, pipeline = linked(replace(uncalibrated(), **{name: getattr(calibration, name) for name in _LINKS}))

        @cache
        def price(kind: str, drop: Recompute) -> BlockCost:
            cost = block_cost(work(kind, drop.on_device), here.rings, question.rates)
            return offloaded(cost, question) if drop.offload else cost

        return float(PlanStep.of(question, here, pipeline, price).seconds.total_s[0])

    return time_s


def compiling(plan: Plan) -> Compiling | None:
    """Count the distinct graphs of a step; None where nothing is compiled ahead.

    Stages with the same contents share their graphs. In a pipeline, forward and backward of a stage are graphs of
    their own (aws-neuron/neuronx-distributed pipeline/model.py marks a step after every task), as are what ranks send
    each other; without one they are a single graph. Ranks that hold the same update their weights by the same graph;
    the nxd engine reads loss and norm before it, so that what reduces gradients is a graph of its own.
    """
    kernels, schedule, stages = load_kernels(plan.kernels), plan.schedule, StageLayers.of(plan)
    if not kernels.seconds_per_graph:
        return None
    ranks = {
        tuple(stages[stage] for _, stage in sorted(schedule.stages_of(rank).items()))
        for rank in range(schedule.num_ranks)
    }
    in_pipeline = schedule.num_ranks > 1
    passes = 3 if schedule.splits_backward else 2
    ends = 2 if plan.engine == "nxd" else 1  # graphs of a rank after its passes
    count = len(set(stages)) * (passes if in_pipeline else 1) + ends * len(ranks) + (_SENDS if in_pipeline else 0)
    return Compiling(
        num_graphs=count,
        compile_s=rounded(count * kernels.seconds_per_graph),
        basis=kernels.sources["seconds_per_graph"],
    )


def most_instructions(plan: Plan) -> tuple[int, float]:
    """Return the stage with the largest graph, and how many instructions of the matrix unit that has at least.

    Loads, copies and element-wise work come on top; how many is the compiler's own affair.
    """
    question = question_of(plan, uncalibrated())
    work = cache(partial(work_of, question, setting_of(question, plan.candidate, ListedBlocks.of(plan))))
    counts: list[float] = []
    for stage in StageLayers.of(plan):
        flops = {"F": 0.0, "B": 0.0}
        for kind, drop, count in stage.contents():
            for run, kernel in work(kind, drop).kernels:
                products = kernel.matrix_flops + kernel.products_flops + kernel.attention_flops
                flops["F" if run.pass_ == "F" else "B"] += count * float(products)
        most = max(flops.values()) if len(plan.stages) > 1 else sum(flops.values())
        # a compiler parts a graph over the cores of a logical one
        counts.append(most / _FLOPS_OF_INSTRUCTION / (plan.cluster.lnc or 1))
    return max(enumerate(counts), key=lambda pair: pair[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPlan:
    """A plan with its prediction, if it has a shape; the reasons against it; and what became of the stored numbers."""

    plan: Plan
    rejections: tuple[Rejection, ...]
    remark: str = ""


def check_plan(
    read: Plan, calibration: Calibration | None = None, *, to_run: bool = False, place: str | Path = ""
) -> CheckedPlan:
    """Check a plan with the constants that it carries, or with others, which it carries from then on.

    Some plans may be priced, but not be run yet. Faults name the ``place`` of the plan.

    It gets a new prediction where the plan or its numbers were edited.
    """
    with inside(place):
        return _checked(read, calibration, to_run=to_run)


def _checked(read: Plan, calibration: Calibration | None, *, to_run: bool) -> CheckedPlan:
    if calibration:
        entries = {key: entry for key, entry in read.provenance.items() if not key.startswith("calibration")}
        read = replace(read, provenance={**entries, **calibration_entries(calibration)}, prediction=None)
    terms = [term for term in user_terms() if term.part in read.provenance]
    if terms and read.prediction and read.prediction.of != plan_hash(read):  # edited: so are the seconds of its terms
        updated = term_entries(terms, read.candidate, read.model, read.cluster, read.workload, read.engine)
        read = replace(read, provenance={**read.provenance, **updated})
    bare, stored = replace(read, prediction=None), read.prediction
    reasons = (*verify(bare), *(unrun(bare) if to_run else ()))
    if reasons:
        return CheckedPlan(plan=bare, rejections=reasons)
    current, remarks = predicted(bare), list[str]()
    if stored is None or stored.of != plan_hash(read):
        remarks.append("prediction: the plan was edited after it was made, so it was predicted again here")
    elif stored != current.prediction:
        remarks.append("prediction: the numbers in the file are not what this version predicts; its own are used here")
    unknown = sorted(term_seconds(current.provenance).keys() - {term.part for term in user_terms()})
    if unknown:
        remarks.append(f"{', '.join(unknown)}: not known here, so its seconds are those that the plan states")
    return CheckedPlan(plan=current, rejections=verify(current), remark="; ".join(remarks))
