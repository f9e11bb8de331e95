"""What a run prints: its steps, and predictions beside measurements with like ranks folded."""

from dataclasses import replace

from autoshard.engine.base import Measured
from autoshard.engine.ran import RunReport, TimedStep
from autoshard.report.ran import alike_ranks, ran_json, ran_report, steps_table
from autoshard.report.terminal import make_console
from tests.runtime.cases import tiny_plan

PLAN = tiny_plan("tp=2,pp=2,dp=1")


def counted(weights: int) -> Measured:
    return Measured(memory_bytes={"weights": weights}, calls={}, sent_bytes={"tp": 4096, "dp": 0, "cp": 7})


def report(*weights: int) -> RunReport:
    steps = tuple(
        TimedStep(number=number, loss=1 / number, norm=2.0, time_s=0.25, num_tokens=64) for number in range(1, 20)
    )
    return RunReport(steps=steps, ranks=tuple(counted(size) for size in weights))


def printed(part: object) -> str:
    console = make_console()
    with console.capture() as capture:
        console.print(part)
    return capture.get()


def test_ranks_of_which_all_is_the_same_are_folded() -> None:
    groups = alike_ranks(PLAN, report(5, 5, 6, 5).ranks)
    assert [group.ranks for group in groups] == [(0, 1), (2,), (3,)], (
        "the stages are predicted to hold different weights"
    )
    memory, sent = groups[0].memory, groups[0].sent
    assert PLAN.prediction and memory["weights"].predicted == PLAN.prediction.stage_memory[0].parts["weights"]
    assert memory["weights"].measured == 5 and memory["saved"].measured is None
    assert memory["optimizer"].predicted == 2 * memory["masters"].predicted == 2 * memory["gradients"].predicted
    assert set(sent) == {"tp", "pp", "cp"} and sent["cp"].predicted == 0 and sent["pp"].measured is None


def test_the_report_puts_numbers_side_by_side() -> None:
    text = printed(ran_report(PLAN, report(5, 5, 5, 5), PLAN.cluster.name))
    assert "250.0 ms" in text and "Memory of a rank" in text and "Sent by a rank in a step" in text
    assert "0-1" in text and "2-3" in text and "4.00 KiB" in text


def test_seconds_of_what_a_plan_is_for_are_divided_and_those_of_another_machine_are_not() -> None:
    gpus = replace(PLAN, cluster=replace(PLAN.cluster, name="h100-80"))
    assert "another machine" not in printed(ran_report(gpus, report(5), "h100-80"))
    assert "another machine" in printed(ran_report(gpus, report(5), "local"))


def test_an_engine_that_counts_nothing_leaves_the_times() -> None:
    nothing = Measured(memory_bytes={}, calls={}, sent_bytes={})
    text = printed(ran_report(PLAN, RunReport(steps=report(1).steps, ranks=(nothing,) * 4), PLAN.cluster.name))
    assert "Predicted and measured" in text and "Memory" not in text and "Sent" not in text


def test_the_same_as_json() -> None:
    found = ran_json(PLAN, report(5, 5, 5, 5))
    assert found["step_time_s"]["measured"] == 0.25 and len(found["steps"]) == 19
    assert found["ranks"][0]["sent_bytes"]["tp"]["measured"] == 4096


def test_the_live_table_shows_the_last_steps() -> None:
    text = printed(steps_table(report(1).steps, 40))
    assert "Step 19 of 40" in text and "0.0526" in text and "0.1429" not in text
