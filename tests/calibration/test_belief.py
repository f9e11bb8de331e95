"""The belief about step times: against closed forms, against information form, and what more rows may do to it."""

import math
from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autoshard.calibration.advice import run_of_plan
from autoshard.calibration.belief import Belief, belief_of, plans_of
from autoshard.calibration.fitting import log_seconds
from autoshard.calibration.measured_run import MeasuredRun, run_of
from autoshard.calibration.prior import believed_prior, prior_of
from autoshard.calibration.rows import MeasuredRow, measured_rows
from autoshard.calibration.validate import outlined_run
from autoshard.cost.built_in import built_in
from autoshard.cost.calibration import WIDEST, trust, uncalibrated
from autoshard.cost.departures import EFFICIENCIES
from autoshard.cost.doubt import EIGHTY_PERCENT, alike, beyond, model_error, ratio_of
from autoshard.plan.candidate import Candidate
from autoshard.search.bound.request import plan_at
from tests.calibration.measured_cases import ARCH, SMALL, TRAINIUM
from tests.search.brute_force import ask

NORMAL = NormalDist()
DRAWN = 0.03  # of a standard deviation: a mean over some thousand draws
TWO = [(0.1, 0.2, 0.1, 0.0), (0.0, 0.3, 0.3, 0.6), (0.3, 0.1, 0.2, -0.5)]
LARGE = {**SMALL, "arch": {**ARCH, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8}, "seq_len": 4096}
LAYOUTS = [{"tp": 2, "pp": 2, "dp": 2}, {"tp": 4, "pp": 1, "dp": 2}, {"tp": 8, "pp": 1, "dp": 1}]


def runs(*changes: dict[str, Any]) -> list[MeasuredRun]:
    return [run_of(MeasuredRow.read({**LARGE, **change})) for change in changes or LAYOUTS]


def belief(mean: list[float], covariance: np.ndarray, noise: float = 0.1) -> Belief:
    return Belief(mean=np.array(mean), covariance=covariance, noise=np.full(len(mean), noise))


def loss(gap: float, deviation: float) -> float:
    """E[max(0, X)] for X of mean -gap: what the choice of the first of two options is behind the better one."""
    return deviation * NORMAL.pdf(gap / deviation) - gap * NORMAL.cdf(-gap / deviation) if deviation else 0.0


@st.composite
def beliefs(draw: st.DrawFn) -> Belief:
    size = draw(st.integers(2, 6))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    root = random.normal(size=(size, size)) * random.uniform(0, 0.3, size=size)
    return belief(random.normal(scale=0.2, size=size).tolist(), root @ root.T, noise=random.uniform(0.01, 0.2))


class TestTwoOptions:
    """Of two options the regret is the mean of a normal distribution cut at 0, before and after a measurement."""

    @pytest.mark.parametrize(("gap", "one", "two", "shared"), TWO)
    def test_regret_is_that_of_the_closed_form(self, gap: float, one: float, two: float, shared: float) -> None:
        covariance = np.array([[one**2, shared * one * two], [shared * one * two, two**2]])
        found = belief([0.0, gap], covariance)
        deviation = math.sqrt(one**2 + two**2 - 2 * shared * one * two)
        today, after = found.regrets([0, 1], [(), (1,)])
        assert today == pytest.approx(loss(gap, deviation), abs=DRAWN * deviation)
        # The gap then moves by one normal variable; the regret falls by what the choice gains from it.
        moves = (covariance[1, 1] - covariance[0, 1]) / math.sqrt(covariance[1, 1] + 0.1**2)
        assert after == pytest.approx(loss(gap, deviation) - loss(gap, abs(moves)), abs=DRAWN * deviation)

    def test_the_option_that_is_uncertain_is_the_one_to_measure(self) -> None:
        found = belief([0.0, 0.05, 0.05], np.diag([0.01, 0.2, 0.01]) ** 2, noise=0.01)
        after = found.regrets([0, 1, 2], [(0,), (1,), (2,)])
        assert min(after) == after[1] < 0.2 * found.regrets([0, 1, 2], [()])[0]

    def test_nothing_is_lost_where_all_is_known_or_there_is_nothing_to_choose(self) -> None:
        assert belief([0.3, 0.1], np.zeros((2, 2))).regrets([0, 1], [(), (1,)]) == [0.0, 0.0]
        assert belief([0.3, 0.1], np.eye(2)).regrets([1], [()]) == [0.0]

    def test_a_run_that_says_nothing_about_the_options_changes_nothing(self) -> None:
        today, after = belief([0.0, 0.1, 0.0], np.diag([0.1, 0.2, 0.3])).regrets([0, 1], [(), (2,)])
        assert after == today > 0


@given(beliefs())
def test_a_regret_is_never_negative_and_no_measurement_raises_it(found: Belief) -> None:
    options = range(len(found.mean))
    sets = [tuple(range(count)) for count in range(len(found.mean) + 1)]
    regrets = found.regrets(options, sets)
    assert min(regrets) >= 0
    error = DRAWN * math.sqrt(found.covariance.diagonal().max())
    assert all(after <= before + error for before, after in pairwise(regrets))
    assert found.regrets(options, sets) == regrets, "draws repeat"


@given(beliefs(), st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_what_is_believed_after_rows_is_that_of_the_information_form(found: Belief, rows: list[int]) -> None:
    found = replace(found, covariance=found.covariance + 1e-4 * np.eye(len(found.mean)))
    rows = [row % len(found.mean) for row in rows]
    logs = np.linspace(-0.5, 0.5, len(rows))
    precision, wanted = np.linalg.inv(found.covariance), np.linalg.solve(found.covariance, found.mean)
    for row, log in zip(rows, logs, strict=True):
        precision[row, row] += 1 / found.noise[row] ** 2
        wanted[row] += log / found.noise[row] ** 2
    after = found.given(rows, np.exp(logs).tolist())
    assert after.mean == pytest.approx(np.linalg.solve(precision, wanted), abs=1e-6)
    assert after.covariance == pytest.approx(np.linalg.inv(precision), abs=1e-6)


class TestBeliefOfRuns:
    """Around a calibration: constants move steps as the cost model says, and its own error stays with a layout."""

    def test_steps_follow_the_constants(self) -> None:
        three, constants = runs(), built_in("h100-80", "te")
        found, prior = belief_of(three, constants), believed_prior(constants, three)
        before = log_seconds(three, constants)
        expected = model_error(constants) ** 2 * alike(plans_of(three))
        if constants.fit:
            expected += beyond(plans_of(three), constants)
        for number, unknown in enumerate(prior.unknowns):
            moved = np.zeros(len(prior.unknowns))
            moved[number] = 0.005
            slopes = (log_seconds(three, prior.constants(moved)) - before) / 0.005 * unknown.deviation
            expected += np.outer(slopes, slopes)
        assert found.mean == pytest.approx(before)
        assert found.covariance == pytest.approx(expected, rel=0.02)

    def test_single_shares_of_compiled_graphs_are_believed_to_differ_more_than_a_fit_tells_apart(self) -> None:
        known = [run_of(row) for row in measured_rows(TRAINIUM).rows.values()]
        believed = believed_prior(built_in("trn1.32xlarge"), known)
        narrow = prior_of(known)
        wider = [one.deviation / two.deviation for one, two in zip(believed.unknowns, narrow.unknowns, strict=True)]
        names = [unknown.names[0] for unknown, one in zip(believed.unknowns, wider, strict=True) if one > 1]
        assert names == [*EFFICIENCIES] and min(wider) == 1

    def test_the_models_error_does_not_go_away_with_rows_of_another_layout(self) -> None:
        found = belief_of(runs(), uncalibrated())
        after = found.given([0] * 400, [1.0] * 400)
        error = model_error(uncalibrated())
        assert after.covariance[0, 0] < 1e-6
        assert after.covariance[1, 1] > (1 - alike(plans_of(runs()))[0, 1] ** 2) * error**2 * 0.99

    def test_fitted_constants_have_the_error_of_their_fit(self) -> None:
        fitted = built_in("h100-96", "torch_compiled", "torchtitan")
        assert fitted.fit and model_error(fitted) == pytest.approx(
            fitted.fit.left_out_mape / math.sqrt(2 / math.pi), rel=0.1
        )
        for count, least, most in ((1, 0.1, 0.2), (10, 0.3, 0.4), (1000, 0.49, 0.5)):
            few = replace(fitted.fit, rows={str(number): 1.5 for number in range(count)}, left_out_mape=0.5)
            assert least < model_error(replace(fitted, fit=few)) / math.sqrt(math.pi / 2) < most, "few rows say little"

    def test_each_step_between_layouts_halves_what_they_share(self) -> None:
        same = {"tp": 4, "pp": 1, "dp": 2}
        others = {**same, "global_batch_seqs": 32}, {**same, "micro_batch": 2}, {**LAYOUTS[0], "recompute": "full"}
        four = runs(same, *others)
        assert alike(plans_of(four))[0].tolist() == [
            1.0,
            1.0,
            0.5,
            0.5 ** (1 + 1 + 1 + 1),
        ]  # tp, pp, recompute, schedule

    def test_runs_that_lie_outside_the_rows_in_the_same_way_are_off_together(self) -> None:
        fitted = built_in("h100-80", "mcore")
        fitted = replace(fitted, seen={**fitted.seen, "schedule": replace(fitted.seen["schedule"], off=0.2)})
        zb = {"pipeline_schedule": "ZB-H1", "pp": 2, "dp": 1}
        ring = {"tp": 2, "pp": 1, "cp": 4, "dp": 1}
        inside, one, two, wide = runs(LAYOUTS[2], {"tp": 4, **zb}, {"tp": 4, **zb, "micro_batch": 2}, ring)
        found = beyond(plans_of([inside, one, two, wide]), fitted)
        assert found[1, 1] == found[1, 2] == found[2, 2] > found[1, 3], "both share all of it"
        for number, run in enumerate((inside, one, two, wide)):
            plan, _ = outlined_run(run, fitted)
            interval, _ = trust(fitted, plan)
            square = found[number, number] * 1.2816**2
            assert interval == pytest.approx(min(WIDEST, math.sqrt(fitted.interval**2 + square)), rel=1e-3)
        assert np.linalg.eigvalsh(found).min() > -1e-9
        before, after = belief_of([one, two], replace(fitted, fit=None)), belief_of([one, two], fitted)
        assert after.covariance.min() > before.covariance.min(), "a fit knows what its rows have"

    @settings(max_examples=10)
    @given(st.lists(st.sampled_from([{"tp": tp, "dp": 8 // tp, "pp": 1, "micro_batch": mbs, "recompute": kind}
                                     for tp in (1, 2, 8) for mbs in (1, 2) for kind in ("none", "full")]), min_size=2,
                    max_size=6))  # fmt: skip
    def test_what_is_shared_is_a_correlation(self, changes: list[dict[str, Any]]) -> None:
        assert np.linalg.eigvalsh(alike(plans_of(runs(*changes)))).min() > -1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["tp=8,pp=8,dp=8,recompute=full*5/selective[LlamaMLP,LlamaRMSNorm]*3", "tp=8,pp=16,dp=4,recompute=full"]
)
def test_the_interval_of_a_ratio_is_nearly_that_of_the_belief_given_the_rows(text: str) -> None:
    constants, request = built_in("trn1.32xlarge"), ask("llama3-70b", "trn1.32xlarge", 16)
    theirs = "tp=32,pp=8,recompute=selective[CoreAttention,LlamaMLP]"
    plans = [plan_at(request, Candidate.parse(one, 512)) for one in (text, theirs)]
    rows = list(measured_rows(TRAINIUM).rows.values())
    known = [run_of(row) for row in rows]
    found = belief_of([*known, *map(run_of_plan, plans)], constants)
    found = found.given(range(len(rows)), [row.step_time_s or 0.0 for row in rows]).covariance[len(rows) :, len(rows) :]
    ratio = ratio_of(*plans)
    deviation = math.log(ratio.high / ratio.value) / EIGHTY_PERCENT
    assert deviation == pytest.approx(math.sqrt(found[0, 0] + found[1, 1] - 2 * found[0, 1]), rel=0.15)
