"""Every point costs what its plans do, and no filling of a point is below its bound."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.cost.stages import StageOptions, price_stages
from autoshard.cost.step import step_seconds
from autoshard.plan.candidate import Candidate
from autoshard.plan.explanation import Certificate
from autoshard.plan.recompute import Recompute
from autoshard.search.ask.planner import search
from autoshard.search.bound.bounds import least_bytes, least_of_any, states_of
from autoshard.search.bound.legal_space import RunVariant, legal_space
from autoshard.search.bound.points import Points
from autoshard.search.bound.pool import Pool
from autoshard.search.bound.priced_layouts import LayoutPricer, PricedLayouts
from autoshard.search.bound.request import Request
from autoshard.search.bound.unsolved import least_bounds
from autoshard.search.fill.split_bounds import SplitSearch
from autoshard.search.fill.stage_filling import Goal
from tests.search.brute_force import FULL, PLAIN, Point, Truth, ask, requests
from tests.slower import rest_is_slow

SEVERAL = 2  # random fillings of each point
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zb_v", "interleaved")
SURE = 1 + 1e-9


def single_points(truth: Truth) -> Iterator[tuple[Point, RunVariant, PricedLayouts, PricedLayouts, PricedLayouts]]:
    """Yield every legal point alone: a variant of one row, its layout without recompute, with, and with the least."""
    request, (engine,) = truth.request, truth.request.engines
    legal = legal_space(request, engine)
    for variant in legal.variants:
        for place, layout in enumerate(variant.layouts.tolist()):
            point = truth.point_of(variant.space.candidate(place, 0))
            space = replace(legal.space, base=variant.space.base, sp=variant.space.sp)
            pricer = LayoutPricer(point.question, space)
            (plain,) = pricer.priced(space, [(point.blocks.cutting, {space.base.cp_order: np.array([layout])})])
            (one,) = pricer.with_recompute([plain])
            yield point, variant.only(np.array([place])), plain, one, pricer.least_with_recompute([plain])


def is_bounded(request: Request, share: float) -> None:
    """Compare every point's bound with the best way to fill its stages, in as much memory as it needs or some more."""
    for point, variant, plain, priced, least in islice(single_points(Truth(request)), 12):
        fastest, small = point.fastest(), point.smallest()
        if fastest is None or small is None:
            continue
        capacity = small.peak_bytes + share * max(0.0, fastest.peak_bytes - small.peak_bytes)
        best = point.fastest(capacity)
        assert (
            least_of_any(plain.at_least, [states_of(point.candidate)], capacity)[0]
            <= (best.time_s if best else np.inf) * SURE
        )
        assert least_bytes(plain.at_least, states_of(point.candidate))[0] <= small.peak_bytes * SURE
        time, memory = Goal(capacity=capacity), Goal(objective="memory", capacity=capacity)
        assert least_bounds(least, [variant], time, np.inf)[0] <= (best.time_s if best else np.inf) * SURE
        for goal, value in ((time, best.time_s if best else np.inf), (memory, small.peak_bytes)):
            found = Points.of(priced, variant, goal)
            assert best and len(found.rows), (str(small.candidate), "is said not to fit in what it takes")
            (group,) = found.by_schedule()
            sharper = [group.sharpened(goal, limit, SplitSearch(seconds_left=1.0)) for limit in (np.inf, 1.2 * value)]
            assert max(points.bound[0] for points in (found, *sharper)) <= value * SURE, str(best.candidate)


@pytest.mark.thorough
@given(requests(), st.sampled_from([0.0, 0.02, 0.2, 1.1]))
def test_no_filling_of_a_point_is_below_its_bound(request: Request, share: float):
    is_bounded(request, share)


@pytest.mark.parametrize(
    ("layers", "kind", "schedule"), rest_is_slow(product((5, 4), ("full", "none"), SCHEDULES), len(SCHEDULES), 5)
)
def test_what_just_fits_is_not_said_to_be_too_large(layers: int, kind: str, schedule: str):
    pins = f"pp=2,tp=4,zero=0,schedule={schedule},recompute={kind}"
    request = ask("tiny-llama", ranks=8, global_batch=4, seq_len=8, pins=pins)
    is_bounded(replace(request, model=replace(request.model, num_layers=layers)), 0.0)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.1])
@pytest.mark.parametrize("pins", ["pp=1,tp=2,cp=1", "pp=2,tp=1,cp=1,schedule=1f1b"])
def test_whole_layers_compute_again_what_memory_asks_for(pins: str, share: float):
    """A pipeline of one rank waits for nobody, so that its bound is nearly its time."""
    request = ask("tiny-llama", ranks=2, global_batch=8, seq_len=64, pins=f"{pins},dp=1,mbs=2,zero=0")
    is_bounded(replace(request, model=replace(request.model, num_layers=5)), share)


def drawn(point: Point, random: np.random.Generator) -> tuple[tuple[int, ...], tuple[Recompute, ...]]:
    """Draw layers and recompute for every stage."""
    layers, stages = point.question.model.num_layers, point.candidate.num_stages
    cuts = np.sort(random.choice(np.arange(1, layers), stages - 1, replace=False)).tolist()
    split = point.candidate.stages or tuple(np.diff((0, *cuts, layers)).tolist())
    kinds = [kind for pinned in point.kinds for entry in pinned for kind in entry.kinds]
    chosen = [kinds[int(random.integers(len(kinds)))] for _ in split]
    if {PLAIN, FULL} <= set(kinds):
        partly = [Recompute(kind="full", num_layers=int(random.integers(1, max(2, count)))) for count in split]
        chosen = [
            some if random.random() < 0.4 and (some.num_layers or 1) < count else kind
            for some, kind, count in zip(partly, chosen, split, strict=True)
        ]
    return split, tuple(chosen)


def cost_in_columns(point: Point, variant: RunVariant, priced: PricedLayouts, filling) -> tuple[float, float]:
    """Price one way to fill the stages of a point."""
    split, entries = filling
    schedule = point.plan.schedule
    ranks, chunks = range(schedule.num_ranks), range(schedule.num_chunks)
    stage = [[schedule.stages_of(rank)[chunk] for chunk in chunks] for rank in ranks]
    again = np.array([[entries[one].num_layers or split[one] for one in own] for own in stage])
    options = StageOptions(
        kind=np.array([[[priced.kinds.index(entries[one].kinds[0]) for one in own]] for own in stage]),
        recomputed=again[:, None],
        plain=(np.array(split)[np.array(stage)] - again)[:, None],
        plain_kind=priced.kinds.index(PLAIN),
        first=(np.cumsum(split) - split)[np.array(stage)][:, None],
    )
    first = np.zeros(1, dtype=int)
    blocks = priced.pipeline_blocks(first, schedule, variant.space.base)
    prices = price_stages(blocks, options).of_options(np.zeros((schedule.num_ranks, 1), dtype=int), first)
    return float(step_seconds(blocks, prices).total_s[0]), float(prices.peak_bytes.max())


def agrees(request: Request, seed: int, most: int) -> None:
    """Compare some points of a question."""
    random = np.random.default_rng(seed)
    for point, variant, _, priced, _ in islice(single_points(Truth(request)), most):
        for _ in range(SEVERAL):
            split, entries = drawn(point, random)
            if any((one.num_layers or 1) > size for one, size in zip(entries, split, strict=True)):
                continue
            candidate = replace(point.candidate, stages=split, recompute=entries)
            found = cost_in_columns(point, variant, priced, (split, entries))
            assert found == pytest.approx(point.cost_of(candidate), rel=1e-9), str(candidate)


@pytest.mark.slow
@given(requests(), st.integers(0, 10**6))
def test_small_questions_cost_what_their_plans_do(request: Request, seed: int):
    agrees(request, seed, 6)


@pytest.mark.parametrize(("objective", "is_kept"), [("time", True), ("memory", False)])
def test_a_solution_that_a_choice_finds_is_kept_if_it_is_the_fastest(objective: str, is_kept: bool):
    request = replace(ask("tiny-llama", global_batch=8, pins="cp=1"), objective=objective)
    (engine,) = request.engines
    legal = legal_space(request, engine)
    pricer = LayoutPricer(request.question(legal.space.base), legal.space)
    pool = Pool(pricer, legal, request.goal(pricer.question.kernels))
    pool.settle(1)
    best, *_, last = pool.solutions
    pool.keep(replace(last, value=best.value * 1.01))
    assert pool.solutions[0] is best and pool.certificate(Certificate()).value == best.value
    pool.keep(replace(last, value=best.value * 0.99))
    assert (pool.solutions[0].layout == last.layout) == is_kept
    assert pool.certificate(Certificate()).value == best.value * (0.99 if is_kept else 1.0)


def test_a_search_that_is_stopped_when_all_kinds_of_mesh_are_priced_has_nearly_the_best():
    """The fastest layout needs recompute and two chunks a rank: fewer do not fit, or wait longer."""
    request = ask("deepseek-v3", "h100-80", nodes=256, global_batch=16384, pins="tp=1,pp=16,cp=1,ep=8")
    (engine,) = request.engines
    legal = legal_space(request, engine)
    pricer = LayoutPricer(request.question(legal.space.base), legal.space)
    pool = Pool(pricer, legal, request.goal(pricer.question.kernels))
    pool._price_all()  # pyright: ignore[reportPrivateUsage]
    soon = pool.solutions[0].value
    pool.settle(1)
    assert soon < 1.01 * pool.solutions[0].value


ONE_LOWERING = [
    ("olmo2-7b", "a100-80", "pp=2,mbs=1,schedule=1f1b,cp=1,recompute=none"),  # norms behind blocks
    ("llama3-8b", "h100-80", "pp=4,mbs=1,schedule=1f1b,cp=1,zero=1,recompute=full,kernels=nanotron"),  # queues sums
    ("olmo3-7b", "h100-80", "mbs=1"),
    ("exaone4-32b", "h100-80", "mbs=1"),
    ("gemma2-2b", "a100-80", "mbs=1"),
    ("gemma3-4b", "a100-80", "mbs=1"),
    ("qwen1.5-moe-a2.7b", "h100-80", "mbs=1"),
    ("mixtral-8x7b", "h100-80", "pp=4,mbs=1,kernels=nanotron"),
    ("qwen3.5-35b-a3b", "h100-80", "mbs=1"),
    ("nemotron4-15b", "h100-80", "mbs=1"),
    ("llama3-8b", "h100-80", "mbs=1,kernels=mcore"),
]


@pytest.mark.parametrize(("model", "cluster", "pins"), rest_is_slow(ONE_LOWERING, 0, 1))
def test_a_lowering_that_serves_several_meshes_costs_what_that_of_each_plan_does(model: str, cluster: str, pins: str):
    """Where one rank stands along an axis, nothing is scattered over it, and products add gradients."""
    request = ask(model, cluster, nodes=2, global_batch=256, pins=pins)
    best = search(request).layouts[:3]  # those beyond have no cutting of their own
    solved = {Candidate.parse(layout.candidate): layout for layout in best}
    assert len(solved) == 3
    for candidate, layout in solved.items():
        prediction = request.plan(candidate, request.engines[0]).prediction
        assert prediction, "every plan has one"
        assert layout.step_time_s == pytest.approx(prediction.step_time_s, rel=1e-7)
        assert layout.peak_bytes == pytest.approx(prediction.peak_bytes, abs=1)
