"""What pricing a hundred thousand candidates of a model costs each, and whether each is priced as if it were alone."""

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from autoshard.blocks.cutting import Terms, solved_cutting
from autoshard.cost.built_in import built_in
from autoshard.cost.predict import plan_cost
from autoshard.cost.setting import Question
from autoshard.cost.sharded import CutBlocks
from autoshard.layout.layout import Cutting
from autoshard.plan.build import build_plan, cut_atoms
from autoshard.plan.candidate import CpOrder, even_stages
from autoshard.plan.rules.check import legality
from autoshard.schedule.schedule import Schedule
from autoshard.search.bound.priced_layouts import LayoutPricer, PricedLayouts
from autoshard.search.bound.space import Space, whole_space
from autoshard.search.fill.stage_options import ChunkLayers, RankOptions, StageChoices, StageFilling
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload
from benchmarks.measure import yardstick_s
from benchmarks.result import Result

BAR_US = 20.0  # a hundred times less than the fastest published search takes for one (Calculon, 3.3 ms)
SAME = 1e-9
LEAST, ROUNDS, SAMPLE = 100_000, 5, 100
MODEL, CLUSTER, NODES, BATCH = "llama3.1-405b", "h100-80", 1536, 24_576


def run() -> Result:
    """Price all legal candidates of a large machine in one batch, and a sample of them one by one."""
    question, space, cutting = case(MODEL, CLUSTER, NODES, BATCH)
    found = evaluate(question, space, cutting)
    each_us = [_timed_us(question, space, cutting) for _ in range(ROUNDS)]
    return judge(each_us, space.num_candidates, furthest(question, space, cutting, found, SAMPLE), yardstick_s())


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Step time and peak memory of every candidate: a row per layout, a column per kind of recompute."""

    time_s: Any
    peak_bytes: Any


def evaluate(question: Question, space: Space, cutting: Cutting, *, apart: bool = False) -> Evaluated:
    """Price every layout of a space with every kind of recompute, on the stages that are pinned or else even ones."""
    shape = (space.num_layouts, len(space.recomputes))
    time_s, peak_bytes = np.full(shape, np.inf), np.full(shape, np.inf)
    layouts: dict[CpOrder, Any] = {space.base.cp_order: np.arange(space.num_layouts)}
    pricer = LayoutPricer(question, space)
    for priced in pricer.with_recompute(pricer.priced(space, [(cutting, layouts)], apart=apart)):
        rows = priced.space.rows
        counts = question.workload.global_batch // (rows["dp"] * rows["mbs"])
        shapes, shape = np.unique(np.stack([rows["pp"], rows["vp"], counts], axis=1), axis=0, return_inverse=True)
        for number, (ranks, chunks, count) in enumerate(shapes.tolist()):
            mine = np.flatnonzero(shape.reshape(-1) == number)
            builder = priced.space.base.schedule
            schedule = Schedule(builder=builder, num_ranks=ranks, num_chunks=chunks, num_micro_batches=count)
            found = _filled(priced, mine, schedule)
            own = (len(space.recomputes), len(mine))
            time_s[priced.numbers[mine]] = found.time_s.reshape(own).T
            peak_bytes[priced.numbers[mine]] = found.peak_bytes.reshape(own).T
    return Evaluated(time_s=time_s, peak_bytes=peak_bytes)


def _filled(priced: PricedLayouts, mine: Any, schedule: Schedule) -> StageFilling:
    """Price layouts that share their pipeline with every recompute, one stretch of layouts after the other."""
    space, num_layers = priced.space, priced.question.model.num_layers
    blocks = priced.pipeline_blocks(mine, schedule, space.base)
    pinned = space.recomputes[0] if len(space.recomputes) == 1 else None
    choices = StageChoices(
        kinds=priced.kinds,
        allowed=np.ones((len(priced.kinds), len(mine)), dtype=bool),
        num_layers=num_layers,
        stages=space.base.stages,
        recompute=pinned,
        partly=False,
    )
    stages = space.base.stages or even_stages(num_layers, schedule.num_stages)
    options = RankOptions.of(blocks, choices, ChunkLayers.of_splits(blocks, [stages]), np.inf)
    kinds = [0 if pinned else priced.kinds.index(entry[0]) for entry in space.recomputes]
    option = np.broadcast_to(np.repeat(kinds, len(mine)), (schedule.num_ranks, len(kinds) * len(mine)))
    return options.timed(option, np.tile(np.arange(len(mine)), len(kinds)))


def judge(each_us: list[float], count: int, difference: float, loop_s: float) -> Result:
    """Take the median; it holds only for as many candidates as are promised, each priced as it would be alone."""
    value = median(each_us)
    return Result(
        name="estimate_batch",
        value=round(value, 2),
        unit="CPU us per candidate",
        bar=BAR_US,
        holds=value <= BAR_US and count >= LEAST and difference <= SAME,
        extras={
            "candidates": count,
            "fastest_us": round(min(each_us), 2),
            "difference_from_one_by_one": difference,
            "yardstick_s": loop_s,
        },
    )


def case(model: str, cluster: str, nodes: int, global_batch: int) -> tuple[Question, Space, Cutting]:
    """Return a question, its legal candidates, and a cutting that serves all of them."""
    workload = Workload(seq_len=4096, global_batch=global_batch, precision=Precision.named("bf16"))
    machine, spec = load_cluster(cluster, nodes), load_model(model)
    question = Question(
        model=spec, cluster=machine, workload=workload, kernels=machine.kernels, calibration=built_in(machine.name)
    )
    facts = (spec, machine, workload)
    whole = whole_space(*facts, machine.engine, {})
    space = whole.only(legality(whole.columns(*facts, 0)))
    widest = space.candidate(int(np.argmax(space.rows["tp"])), 0)
    terms = Terms(engine=machine.engine, sequence_parallel=widest.sequence_parallel)
    return question, space, solved_cutting(question, widest, terms)


def furthest(question: Question, space: Space, cutting: Cutting, found: Evaluated, sample: int) -> float:
    """Return the largest relative difference between the batch and single plans, of a sample of candidates."""
    random = np.random.default_rng(0)
    worst = 0.0
    for index in random.choice(space.num_layouts, size=min(sample, space.num_layouts), replace=False).tolist():
        number = int(random.integers(len(space.recomputes)))
        candidate = space.candidate(index, number)
        plan = build_plan(candidate, question.model, question.cluster, question.workload, space.engine)
        blocks = CutBlocks(step=question.step, cutting=cutting, atoms=cut_atoms(candidate, question.model))
        alone = plan_cost(plan, question, blocks)
        pairs = [
            (found.time_s[index, number], alone.time_s),
            (found.peak_bytes[index, number], alone.peak_bytes),
        ]
        worst = max(worst, *(abs(float(one) / float(other) - 1) for one, other in pairs))
    return worst


def _timed_us(question: Question, space: Space, cutting: Cutting) -> float:
    start_s = time.process_time()
    evaluate(question, space, cutting)
    return (time.process_time() - start_s) / space.num_candidates * 1e6
