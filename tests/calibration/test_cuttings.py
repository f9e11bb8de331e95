"""The cuttings of runs, solved together, are those that each run has alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.calibration.cuttings import run_cuttings
from autoshard.calibration.measured_run import MeasuredRun, run_of
from autoshard.calibration.rows import measured_rows
from autoshard.calibration.validate import predicted_run
from autoshard.layout.layout import Cutting
from autoshard.plan.plan import Prediction

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
EVERY = 40  # the first of so many rows


def runs_of(file: str) -> list[MeasuredRun]:
    return [run_of(row) for row in [*measured_rows(DATA / file).rows.values()][::EVERY]]


def predicted(run: MeasuredRun, cutting: Cutting | None) -> Prediction:
    return predicted_run(run, run.constants, cutting)


@pytest.mark.slow
def test_runs_that_are_cut_together_take_what_each_takes_alone():
    runs = [*runs_of("sweeps/nanotron_h100.jsonl"), *runs_of("trainium.jsonl")]
    cuttings = run_cuttings([(run, run.constants) for run in runs])
    assert len(cuttings) == len({*runs})
    for run in runs:
        together, alone = predicted(run, cuttings[run, run.constants]), predicted(run, None)
        assert abs(together.step_time_s / alone.step_time_s - 1) < 1e-9, run.candidate
        assert [one.total for one in together.stage_memory] == [one.total for one in alone.stage_memory]


def test_a_run_that_cannot_be_priced_has_no_cutting_and_the_others_keep_theirs():
    run, other = runs_of("sweeps/nanotron_h100.jsonl")[:2]
    chip = run.cluster.chip
    no_rates = replace(run.cluster, chip=replace(chip, matrix_flops_per_s={"fp8": 1e15}))
    asked = [(replace(run, cluster=no_rates), run.constants), (other, other.constants)]
    assert [*run_cuttings(asked)] == asked[1:]
