"""Bounds of blocks under recompute stay below the prices of their lowered programs, alone and in one piece."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.plan.candidate import Candidate, even_stages, parse_pins
from autoshard.plan.rules.check import legality
from autoshard.schedule.schedule import Schedule
from autoshard.search.bound import priced_layouts
from autoshard.search.bound.bounds import least_of_any
from autoshard.search.bound.priced_layouts import LayoutPricer
from autoshard.search.bound.space import whole_space
from autoshard.search.fill.stage_filling import Goal, fill_stages
from autoshard.search.fill.stage_options import StageChoices
from tests.cost.cases import ask
from tests.slower import rest_is_slow
from tests.tabled import cutting_of

SAMPLE = 12  # layouts of each case
SURE = 1 + 1e-9
CAPACITY = 80e9

# model, cluster, nodes, pins
CASES = {
    "experts": ("mixtral-8x7b", "h100-80", 2, ""),
    "experts-over-cp": ("deepseek-v2-lite", "h100-80", 2, "cp=2"),
    "dense-trn1": ("llama3-8b", "trn1.32xlarge", 2, ""),
    "nxd-core": ("llama2-7b", "trn1.32xlarge", 2, "kernels=nxd_core"),
    "mcore": ("llama3-8b", "h100-80", 2, "kernels=mcore"),
    "host memory": ("llama3-8b", "a100-80", 2, ""),
    "torch": ("llama3-8b", "h100-80", 2, "kernels=torch_cuda,cp=2"),
    "tokens-sent-once": ("qwen3-30b-a3b", "h100-80", 2, "kernels=mcore"),
    "heads-over-cp": ("llama3-8b", "h100-80", 2, "tp=1,cp_kind=all_to_all"),
}
CUT_ALIKE = ("nxd-core", "heads-over-cp", "host memory")  # whatever their sizes


def lowerings(case, num_cuttings=1):
    """Return a pricer, and some layouts by their lowering; so many parts of them are cut as the one with most tp."""
    model, cluster, nodes, pins = CASES[case]
    question = ask(model, cluster, nodes, seq_len=4096)
    facts = (question.model, question.cluster, question.workload)
    space = whole_space(*facts, question.cluster.engine, parse_pins(pins) if pins else {})
    question = replace(question, kernels=space.base.kernels or question.cluster.kernels)
    legal = np.flatnonzero(legality(space.columns(*facts, 0)))
    space = space.only(np.sort(np.random.default_rng(7).permutation(legal)[:SAMPLE]))
    pricer, order = LayoutPricer(question, space), np.argsort(space.rows["tp"], kind="stable")
    parts = []
    for layouts in np.array_split(order, num_cuttings):
        cutting = cutting_of(question, space.candidate(int(layouts[-1]), 0), space.engine)
        parts += pricer.priced(space, [(cutting, {space.base.cp_order: np.sort(layouts)})], apart=True)
    return pricer, parts


@pytest.mark.parametrize("case", rest_is_slow(CASES, 0, 2))
def test_no_recompute_takes_or_keeps_less_than_its_bound(case):
    pricer, parts = lowerings(case)
    for part in parts:
        (exact,), least = pricer.with_recompute([part]), pricer.least_with_recompute([part])
        assert exact.kinds == least.kinds and len(exact.kinds) > 2
        for layer, bound in zip(exact.layers, least.layers, strict=True):
            for name in ("forward_s", "input_s", "weight_s", "saved_bytes", "waiting_bytes"):
                assert (getattr(bound, name) <= getattr(layer, name) * SURE).all(), name
            held, at_least = (
                block.saved_bytes + block.moment_bytes + 3 * block.host_bytes for block in (layer, bound)
            )  # of host memory three layers are on their way
            assert (at_least <= held * SURE).all()
            on_device = [not kind.offload for kind in exact.kinds]
            assert (bound.pass_s >= 0.85 * layer.pass_s)[on_device].all()  # and not much less
            assert any(on_device) and (
                all(on_device) == (case in ("dense-trn1", "nxd-core", "mcore", "torch", "tokens-sent-once"))
            )


@pytest.mark.parametrize("case", rest_is_slow(CASES, 0, 2))
def test_layouts_in_one_piece_have_the_plans_that_they_have_in_parts(case):
    pricer, parts = lowerings(case, num_cuttings=2)
    assert len({cutting for part in parts for cutting in part.cuttings}) == (1 if case in CUT_ALIKE else 2)
    priced = pricer.with_recompute(parts)
    joined, numbers = pricer.joined(priced), np.concatenate([part.numbers for part in parts])
    assert len(parts) > 1 and (joined.numbers == numbers).all()
    assert [joined.cutting(row) for row in range(len(numbers))] == [
        part.cuttings[0] for part in parts for _ in part.numbers
    ]
    for base in (Candidate(zero=zero, schedule=builder) for zero in (0, 1, 3) for builder in ("1f1b", "zb_h1")):
        schedule = Schedule(builder=base.schedule, num_ranks=2, num_micro_batches=4)
        by_part = [steps(part, schedule, base) for part in priced]
        assert np.isfinite(by_part[0][0]).all()
        for whole, of_parts in zip(steps(joined, schedule, base), zip(*by_part, strict=True), strict=True):
            assert whole == pytest.approx(np.concatenate(of_parts), rel=1e-12)


def steps(priced, schedule, base):
    """Return the seconds and bytes of layouts whose stages share the layers evenly, whatever fits."""
    blocks, shape = priced.pipeline_blocks(slice(None), schedule, base), (len(priced.kinds), len(priced.numbers))
    choices = StageChoices(
        kinds=priced.kinds,
        allowed=np.ones(shape, dtype=bool),
        num_layers=(num_layers := priced.question.model.num_layers),
        stages=even_stages(num_layers, schedule.num_stages),
        recompute=None,
    )
    filling = fill_stages(blocks, choices, Goal(capacity=1e15), (0.0, np.inf), np.zeros(shape[1]))
    return filling.time_s, filling.peak_bytes


@pytest.mark.parametrize("case", rest_is_slow(CASES, 0, 2))
def test_layouts_in_one_piece_have_the_bounds_that_they_have_in_parts(case):
    pricer, parts = lowerings(case)
    assert len(parts) > 1
    for zero in (0, 1, 3):
        states = [Candidate(zero=zero)]
        apart = [least_of_any(part.at_least, states, CAPACITY) for part in parts]
        assert least_of_any(pricer.joined(parts).at_least, states, CAPACITY) == pytest.approx(np.concatenate(apart))


@pytest.mark.parametrize("case", rest_is_slow(CASES, 1, 2))
def test_parts_that_cut_a_block_alike_share_its_price_which_is_what_each_pays_alone(case, monkeypatch):
    asked, price = [], priced_layouts.price_block

    def counting(question, setting, kind, drop, counted):
        asked.append((kind, drop, setting.blocks.cut_of(kind), setting.blocks.atoms))
        return price(question, setting, kind, drop, counted)

    (pricer, parts), (lonely, lone_parts) = lowerings(case, num_cuttings=2), lowerings(case, num_cuttings=2)
    monkeypatch.setattr(priced_layouts, "price_block", counting)
    together = pricer.with_recompute(parts)
    assert len(set(asked)) == len(asked), "no block is priced twice"
    num_together = len(asked)
    alone = [lonely.with_recompute([part])[0] for part in lone_parts]
    assert len(asked) - num_together > num_together or case not in CUT_ALIKE
    for part, lone in zip(together, alone, strict=True):
        for layer, lone_layer in zip(part.layers, lone.layers, strict=True):
            for name in ("forward_s", "input_s", "weight_s", "saved_bytes", "moment_bytes", "host_bytes", "starts"):
                assert (getattr(layer, name) == getattr(lone_layer, name)).all(), name
