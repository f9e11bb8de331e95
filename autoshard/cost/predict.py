"""From a plan to what it promises."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache

from autoshard.cost.block import BlockCost, Blocks, BlockWork, Setting, block_cost
from autoshard.cost.calibration import Calibration, uncalibrated
from autoshard.cost.collective import Number, mesh_ring
from autoshard.cost.compiling import compiling, least_instructions
from autoshard.cost.provenance import calibration_of, interval_and_basis, term_seconds
from autoshard.cost.setting import Question, boundary_bytes, price_block, setting_of, work_of
from autoshard.cost.sharded import ListedBlocks
from autoshard.cost.stages import Sends
from autoshard.cost.step import PlanPipeline, PlanStep, Price, StageLayers, StepCost, step_cost
from autoshard.graph.decoder import num_slots
from autoshard.plan.codec import fingerprint
from autoshard.plan.plan import Plan
from autoshard.plan.prediction import Prediction, StageMemory, rounded
from autoshard.plan.recompute import Recompute
from autoshard.spec.kernels import load_kernels

_LINKS = ("near_link_efficiency", "far_link_efficiency", "collective_s", "reach")  # what sends take depends on these
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
    interval, basis = interval_and_basis(question.calibration, plan)
    return Prediction(
        step_time_s=step_time_s,
        low_s=rounded(step_time_s * (1 - interval)),
        high_s=rounded(step_time_s * (1 + interval)),
        time_parts=seconds,
        stage_memory=tuple(
            StageMemory(num_weights=int(weights), parts=_whole(parts))
            for weights, parts in zip(cost.weights, cost.memory, strict=True)
        ),
        capacity_bytes=plan.cluster.rank_memory_bytes,
        tokens_per_s=rounded(plan.workload.tokens_per_step / step_time_s),
        mfu=rounded(utilisation(question, step_time_s)),
        communication_bytes={axis: size for axis, size in _whole(cost.sent_bytes).items() if size},
        basis=basis,
        of=fingerprint(plan),
        compiling=compiling(plan.schedule, _stages(plan), load_kernels(plan.kernels)),
    )


def most_instructions(plan: Plan) -> tuple[int, float]:
    """Return the stage with the largest graph, and how many instructions of the matrix unit that has at least."""
    asked = question_of(plan, uncalibrated())
    setting = setting_of(asked, plan.candidate, ListedBlocks.of(plan))

    @cache
    def work(kind: str, drop: Recompute) -> BlockWork:
        return work_of(asked, setting, kind, drop)

    split = plan.cluster.lnc or 1  # a compiler parts a graph over the cores of a logical one
    in_pipeline = len(plan.stages) > 1
    counts = [least_instructions(stage, work, in_pipeline=in_pipeline) / split for stage in _stages(plan)]
    return max(enumerate(counts), key=lambda one: one[1])


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

    @cache
    def price(kind: str, drop: Recompute) -> BlockCost:
        return price_block(question, setting, kind, drop)

    return setting, _pipeline(plan, question, setting), price


def step_timer(plan: Plan, blocks: Blocks) -> Callable[[Calibration], float]:
    """Count once what a plan does, and return how to time its step under any constants: what a fit asks often."""
    asked = question_of(plan, uncalibrated())
    setting = setting_of(asked, plan.candidate, blocks)
    whole = _pipeline(plan, asked, setting)

    @cache
    def work(kind: str, drop: Recompute) -> BlockWork:
        return work_of(asked, setting, kind, drop)

    @lru_cache(maxsize=2)  # a fit moves one constant at a time
    def linked(links: Calibration) -> tuple[Setting, PlanPipeline]:
        rings = {atoms: mesh_ring(plan.cluster, plan.mesh, atoms, links) for atoms in (*setting.rings, ("pp",))}
        sends = replace(whole.sends, time_s=rings["pp",].send_s(whole.boundary_bytes))
        return replace(setting, rings=rings), replace(whole, sends=sends)

    def time_s(calibration: Calibration) -> float:
        question = replace(asked, calibration=calibration)
        here, pipeline = linked(replace(uncalibrated(), **{name: getattr(calibration, name) for name in _LINKS}))

        @cache
        def price(kind: str, drop: Recompute) -> BlockCost:
            return block_cost(work(kind, drop), here.rings, question.rates)

        return float(PlanStep.of(question, here, pipeline, price).seconds.total_s[0])

    return time_s


def utilisation(question: Question, step_time_s: float) -> float:
    """Return the share of the matrix peak that the model's own FLOPs use, counted as published ones are.

    That is with masked pairs, and without slots of experts that no token needs.
    """
    graph, model, workload = question.step.graph, question.model, question.workload
    if model.num_experts:
        graph = replace(graph, sizes={**graph.sizes, "slots": num_slots(model, workload.seq_len, None)})
    flops = graph.model_flops_per_token() * workload.tokens_per_step
    peak = question.cluster.rank_matrix_flops_per_s(workload.precision.activations)
    return flops / (step_time_s * peak * question.cluster.num_ranks)


def _stages(plan: Plan) -> tuple[StageLayers, ...]:
    last = len(plan.stages) - 1
    return tuple(
        StageLayers.of(stage.num_layers, stage.recompute, is_first=number == 0, is_last=number == last)
        for number, stage in enumerate(plan.stages)
    )


def _pipeline(plan: Plan, question: Question, setting: Setting) -> PlanPipeline:
    size = boundary_bytes(setting)
    send_s = mesh_ring(plan.cluster, plan.mesh, ("pp",), question.calibration).send_s(size)
    return PlanPipeline(
        schedule=plan.schedule,
        stages=_stages(plan),
        boundary_bytes=size,
        sends=Sends.of(send_s, plan.schedule.builder, load_kernels(plan.kernels)),
        bucket_bytes=plan.buckets.total_bytes,
    )


def _whole(parts: Mapping[str, Number]) -> Mapping[str, int]:
    """Return whole bytes; a part may stand in a numpy scalar."""
    return {name: round(float(value)) for name, value in sorted(parts.items())}
