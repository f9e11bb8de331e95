"""Stages that are filled and timed in columns take and hold what a plan of the same stages does."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autoshard.plan.recompute import Recompute
from autoshard.search.fillings import Fillings, filled
from autoshard.search.planner import Request
from autoshard.search.timed import timed
from tests.search.brute_force import FULL, PLAIN, Point, Truth, ask, compositions, near_even
from tests.search.frame_cases import single_frames
from tests.search.question_cases import Asked, requests
from tests.search.test_columns import ACTIVE, NO_MASTERS, SLOW_VECTORS

SEVERAL = 3  # random fillings of each point


def drawn(point: Point, random: np.random.Generator) -> tuple[tuple[int, ...], tuple[Recompute, ...]]:
    """Draw layers and recompute for every stage."""
    layers, stages = point.question.model.num_layers, point.candidate.num_stages
    listed = list(compositions(layers, stages)) if layers < 8 else list(near_even(layers, stages))
    split = point.candidate.stages or listed[int(random.integers(len(listed)))]
    kinds = [kind for pinned in point.kinds for entry in pinned for kind in entry.kinds]
    chosen = [kinds[int(random.integers(len(kinds)))] for _ in split]
    if {PLAIN, FULL} <= set(kinds):
        partly = [Recompute(kind="full", num_layers=int(random.integers(1, max(2, count)))) for count in split]
        chosen = [
            some if random.random() < 0.4 and (some.num_layers or 1) < count else kind
            for some, kind, count in zip(partly, chosen, split, strict=True)
        ]
    return split, tuple(chosen)


def cost_in_columns(point: Point, family, zero: int, filling) -> tuple[float, float]:
    """Price one way to fill the stages of a point."""
    split, entries = filling
    schedule = point.plan.schedule
    ranks, chunks = range(schedule.num_ranks), range(schedule.num_chunks)
    stage = [[schedule.stages_of(rank)[chunk] for chunk in chunks] for rank in ranks]
    dropped = np.array([[entries[one].num_layers or split[one] for one in own] for own in stage])
    fillings = Fillings(
        kind=np.array([[[family.kinds.index(entries[one].kinds[0]) for one in own]] for own in stage]),
        dropped=dropped[:, None],
        plain=(np.array(split)[np.array(stage)] - dropped)[:, None],
        plain_kind=family.kinds.index(PLAIN),
    )
    frame = family.frame(np.zeros(1, dtype=int), schedule, zero)
    found = filled(frame, fillings)
    option = np.zeros((schedule.num_ranks, 1), dtype=int)
    chosen = timed(frame, fillings, found, option, np.array([True]))
    assert chosen.stages(0) == split
    assert chosen.recompute(0, family.kinds) == entries
    return float(chosen.time_s[0]), float(chosen.peak_bytes[0])


def agrees(request: Request, seed: int, most: int) -> int:
    """Compare some points of a question; return how many."""
    random, count = np.random.default_rng(seed), 0
    for point, legal, _, family in single_frames(Truth(request)):
        for _ in range(SEVERAL):
            split, entries = drawn(point, random)
            if any((one.num_layers or 1) > size for one, size in zip(entries, split, strict=True)):
                continue
            candidate = replace(point.candidate, stages=split, recompute=entries)
            found = cost_in_columns(point, family, legal.variant.space.base.zero, (split, entries))
            assert found == pytest.approx(point.cost_of(candidate), rel=1e-9), str(candidate)
        count += 1
        if count >= most:
            break
    return count


@settings(max_examples=60)
@given(requests(), st.integers(0, 10**6))
def test_small_questions_cost_what_their_plans_do(asked: Asked, seed: int):
    agrees(asked.request, seed, 40)


# model, cluster, nodes, pins
CASES = {
    "trn1": ("llama3-8b", "trn1.32xlarge", 4, "tp=8,mbs=1"),
    "trn1, core": ("llama2-7b", "trn1.32xlarge", 4, "tp=8,mbs=1,kernels=nxd_core"),
    "trn2": ("llama3-8b", "trn2.48xlarge", 2, "tp=4,pp=4,mbs=1"),
    "experts": ("mixtral-8x7b", "h100-80", 4, "tp=2,pp=4,mbs=1,zero=1"),
    "experts, all spread": ("mixtral-8x7b", "h100-80", 4, "tp=2,pp=4,mbs=1,zero=3"),
    "tied": ("gpt2-xl", "a100-40", 1, "tp=1,mbs=1"),
    "te": ("llama3-8b", "h100-80", 2, "tp=2,pp=4,cp=2,mbs=1"),
    "mcore": ("llama3-8b", "h100-80", 2, "tp=2,pp=4,cp=1,mbs=1,kernels=mcore"),
    "torch": ("llama3-8b", "h100-80", 2, "tp=2,pp=4,cp=1,mbs=1,kernels=torch_cuda"),
    "torch, v": ("llama3-8b", "h100-80", 2, "tp=2,pp=4,cp=1,mbs=1,kernels=torch_cuda,schedule=zb_v,zero=0"),
    "chunks": ("llama3-8b", "h100-80", 2, "tp=2,pp=4,cp=1,mbs=1,schedule=interleaved,zero=1"),
}


@pytest.mark.parametrize("case", CASES)
def test_large_questions_cost_what_their_plans_do(case: str):
    model, cluster, nodes, pins = CASES[case]
    request = ask(
        model, cluster, nodes, pins=pins, seq_len=4096 if cluster.startswith("trn") else 1024, global_batch=64
    )
    constants = ACTIVE if "trn" in cluster else SLOW_VECTORS
    assert agrees(replace(request, calibration=constants), 5, 15)
    if "trn" in cluster:  # NxD keeps masters only inside ZeRO-1
        workload = replace(request.workload, precision=NO_MASTERS)
        free = replace(request, workload=workload, pins={**request.pins, "zero": 0}, calibration=constants)
        agrees(free, 6, 5)
