"""What a run prints: its steps, and predictions beside measurements with like ranks folded."""

import json
import math
from dataclasses import replace
from typing import Any

from autoshard.plan.plan import Compiling
from autoshard.report.run import alike_ranks, run_json, run_sheet, run_summary, start_lines, step_line
from autoshard.report.sheet import Node, Sheet
from autoshard.run.reports import Measured, RouterReport, RunReport, TimedStep
from tests.report.printed import printed
from tests.runtime.cases import tiny_plan

PLAN = tiny_plan("tp=2,pp=2,dp=1")


def counted(weights: int) -> Measured:
    return Measured(memory_bytes={"weights": weights}, sent_bytes={"tp": 4096, "dp": 0, "cp": 7})


def report(*weights: int) -> RunReport:
    steps = tuple(
        TimedStep(number=number, loss=1 / number, norm=2.0, time_s=0.25, num_tokens=64) for number in range(1, 20)
    )
    return RunReport(steps=steps, ranks=tuple(counted(size) for size in weights))


def sheet_of(run: RunReport, *, comparable: bool = True) -> Sheet:
    return run_sheet(PLAN, Node(run_json(PLAN, run)), comparable=comparable)


def test_ranks_of_which_all_is_the_same_are_folded() -> None:
    groups = alike_ranks(PLAN, report(5, 5, 6, 5).ranks)
    assert [group.ranks for group in groups] == [[0, 1], [2], [3]], "the stages are predicted to hold different weights"
    memory, sent = groups[0].memory, groups[0].sent
    sizes = {name: pair["predicted"] or 0 for name, pair in memory.items()}
    assert PLAN.prediction and sizes["weights"] == PLAN.prediction.stage_memory[0].parts["weights"]
    assert sizes["optimizer"] == 2 * sizes["masters"] == 2 * sizes["gradients"]
    assert memory["weights"]["measured"] == 5 and memory["saved"]["measured"] is None
    assert set(sent) == {"tp", "pp", "cp"} and sent["cp"]["predicted"] == 0 and sent["pp"]["measured"] is None


def test_the_report_puts_numbers_side_by_side_and_seconds_of_another_machine_are_not_divided() -> None:
    text = printed(sheet_of(report(5, 5, 5, 5)))
    assert "250.0 ms" in text and "Memory of a rank" in text and "Sent by a rank in a step" in text
    assert "0-1" in text and "2-3" in text and "4.00 KiB" in text and "another machine" not in text
    assert "another machine" in printed(sheet_of(report(5), comparable=False))
    nothing = Measured(memory_bytes={}, sent_bytes={})
    text = printed(sheet_of(RunReport(steps=report(1).steps, ranks=(nothing,) * 4)))
    assert "Predicted and measured" in text and "Memory" not in text and "Sent" not in text


def test_a_loss_that_is_no_number_is_still_json() -> None:
    usual = report(5)
    strange = replace(usual, steps=(replace(usual.steps[0], loss=math.nan, norm=-math.inf), *usual.steps[1:]))
    first, second = json.loads(json.dumps(run_json(PLAN, strange), allow_nan=False))["steps"][:2]
    assert first["loss"] is None and first["nonfinite"] == {"loss": "nan", "norm": "-inf"}
    assert second["loss"] == 0.5 and "nonfinite" not in second
    found = run_json(PLAN, usual)
    assert found["step_time_s"]["measured"] == 0.25 and len(found["steps"]) == 19
    assert found["ranks"][0]["sent_bytes"]["tp"]["measured"] == 4096


def test_the_summary_is_flat_and_of_the_fullest_rank() -> None:
    found = run_summary(PLAN, report(5, 9, 6, 5), PLAN.cluster.name)
    assert found["memory_bytes/weights/measured"] == 9 and found["sent_bytes/tp/measured"] == 4096
    assert found["step_time_s/ratio"] == 0.25 / found["step_time_s/predicted"]
    assert all(isinstance(value, int | float) for value in found.values())
    assert "step_time_s/ratio" not in run_summary(PLAN, report(5), "another")


FULL = TimedStep(
    number=7, loss=2.5, norm=1.25, time_s=1.5, num_tokens=6000, learning_rate=3e-4, waited_s=0.25, memory_bytes=2**31
)
KNOWN: dict[str, Any] = {"mfu": 0.385, "ratio": 1.0625, "left_s": 7200.0}


def test_a_line_says_all_that_is_known_and_keeps_what_matters_where_it_is_short() -> None:
    assert step_line(FULL, 1000, **KNOWN) == (
        "step    7/1000   loss 2.5000   norm 1.250   lr 3.00e-04   1.50 s   1.06 x predicted   4.00 ktokens/s   "
        "MFU 38.5%   2.00 GiB   waited 250.0 ms for data   2 h left"
    )
    mixture = replace(FULL, router=RouterReport(busiest=1.5, entropy=2.0, dropped=0.0))
    assert "busiest expert 1.50 x mean" in step_line(mixture, 1000) and "busiest" not in step_line(
        mixture, 1000, width=60
    )
    skipped = replace(FULL, loss=math.nan, updated=False, phase="compile", waited_s=0.0)
    assert step_line(skipped, 10, ratio=2.0).endswith("2.00 GiB   compiled in it   no update")
    lines = {width: step_line(FULL, 1000, **KNOWN, width=width) for width in range(20, 200, 7)}
    for width, line in lines.items():
        assert "step    7/1000   loss 2.5000" in line and "1.50 s" in line
        assert len(line) <= max(width, 37) and len(lines.get(width + 7, line)) >= len(line)


def test_what_is_said_before_the_first_step() -> None:
    assert start_lines(PLAN, "runs/a", "node0", tensorboard=False) == []
    assert PLAN.prediction
    compiling = Compiling(num_graphs=3, compile_s=900.0, basis="a guess")
    for_neuron = replace(PLAN, engine="nxd", prediction=replace(PLAN.prediction, compiling=compiling))
    first, second, third = start_lines(for_neuron, "runs/a", "node0", tensorboard=False)
    assert first == "before the first step, 3 distinct graphs to compile: 15.0 min by a guess"
    assert second == "NeuronCores: type neuron-top on a node to watch them"
    assert "tensorboard --logdir runs/a/tensorboard --port 6006" in third
    assert "ssh -N -L 6006:localhost:6006 node0" in third
    assert start_lines(PLAN, "runs/a", "node0", tensorboard=True) == [third]
