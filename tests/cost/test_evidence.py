"""What parts of a step rest on: as many rows as the calibration has, and constants as the plan carries them."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from autoshard.calibration.measured_run import run_of
from autoshard.calibration.rows import measured_rows
from autoshard.cost.built_in import built_in
from autoshard.cost.calibration import uncalibrated
from autoshard.cost.doubt import compared
from autoshard.cost.evidence import evidence_of
from autoshard.cost.outside import Seen, features_of, seen_in
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.search.bound.request import plan_at
from tests.calibration.measured_cases import TRAINIUM
from tests.search.brute_force import ask

OURS, THEIRS = "tp=8,pp=8,dp=8,recompute=full", "tp=32,pp=8,dp=2,recompute=selective[CoreAttention,LlamaMLP]"


def made(text: str, seen: dict[str, Seen] | None = None) -> Plan:
    request = ask("llama3-70b", "trn1.32xlarge", 16)
    own = None if seen is None else replace(request.constants, seen=seen)
    return plan_at(replace(request, calibration=own), Candidate.parse(text))


def test_the_rows_that_are_counted_are_those_of_the_fit():
    constants = built_in("trn1.32xlarge")
    runs = [run_of(row) for row in measured_rows(TRAINIUM).rows.values()]
    features = [features_of(run.candidate, run.model, run.cluster, run.workload) for run in runs]
    for feature, seen in constants.seen.items():
        counts = Counter(value for own in features for value in own[feature])
        assert seen.counts == (() if feature in ("nodes", "sequence") else tuple(counts[one] for one in seen.values))
    again = seen_in(features, lambda out: np.zeros(len(out)))
    assert {name: one.counts for name, one in again.items()} == {
        name: one.counts for name, one in constants.seen.items()
    }


def test_a_value_is_not_left_out_where_too_few_rows_remain_for_a_fit():
    runs = [{"kernels": (name,)} for name in ("mcore", "mcore", "te", "te", "te")]
    numbers_left_out: list[list[int]] = []

    def errors(out: list[int]) -> np.ndarray:
        numbers_left_out.append(out)
        return np.full(len(out), 0.2)

    assert seen_in(runs, errors)["kernels"] == Seen(values=("mcore", "te"), off=0.2, counts=(2, 3))
    assert numbers_left_out == [[0, 1]], "two rows of mcore are too few for a fit"


def test_what_favours_fewer_ranks_of_tensor_parallelism_is_said_with_its_rows():
    words = evidence_of("tp", (made(OURS), made(THEIRS)))
    assert "near that of compute: rows hardly tell them apart; 31 rows have tp 8, 11 rows have tp 32" in words
    assert evidence_of("compute", (made(OURS),)) == "data sheet of the chip x 80%, fitted; 4 rows have recompute full"
    assert evidence_of("bubble", (made(OURS),)).startswith("derived: ")
    assert evidence_of("waiting", (made(OURS),)) == "25.5 ms for each task, fitted"
    assert evidence_of("cost.mine", (made(OURS),)) == "a term of your own"


@pytest.mark.parametrize("part", ["compute", "tp", "update", "fixed"])
def test_of_constants_without_rows_nothing_is_called_fitted(part: str):
    request = ask("llama3-70b", "trn1.32xlarge", 16)
    plan = plan_at(replace(request, calibration=uncalibrated()), Candidate.parse(OURS))
    words = evidence_of(part, (plan,))
    assert words.endswith("not fitted")


def test_where_rows_are_not_counted_their_values_are_named():
    old = {"tp": Seen(values=("8", "32"))}
    assert evidence_of("tp", (made(OURS, old),)).endswith("; rows have tp 8, 32")


def test_a_comparison_has_the_evidence_of_every_part():
    found = compared(made(THEIRS), made(OURS))
    assert found.evidence.keys() == {part.name for part in found.time.parts}
