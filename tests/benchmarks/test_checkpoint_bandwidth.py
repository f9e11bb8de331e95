from dataclasses import replace

import pytest

from autoshard.spec.model_catalogue import load_model
from benchmarks.checkpoint_bandwidth import Measured, Round, judge, measured, plan_of

ROUND = Round(
    copy_s=1.0, save_s=1.6, load_s=0.8, blocked_s=0.1, beside_s=2.0, step_s=4.0, plain_step_s=3.9,
    save_peak_bytes=2**20, load_peak_bytes=2**26,
)  # fmt: skip


@pytest.mark.parametrize(
    "worse",
    [{"save_s": 2.1}, {"load_s": 2.1}, {"blocked_s": 0.3}, {"save_peak_bytes": 2**28}, {"load_peak_bytes": 2**28}],
)
def test_both_ways_the_waiting_and_the_memory_are_judged(worse: dict[str, float]) -> None:
    good = judge(Measured(rounds=(ROUND,) * 3, state_bytes=2**30))
    assert good.holds and good.value == 0.625 and good.extras["load_ratio"] == 1.25
    assert good.extras["blocked_share"] == 0.05 and good.extras["load_peak_mib"] == 64.0
    assert not judge(Measured(rounds=(replace(ROUND, **worse),) * 3, state_bytes=2**30)).holds


@pytest.mark.slow
@pytest.mark.ranks
def test_what_two_ranks_hold_is_saved_and_loaded() -> None:
    model = load_model("tiny-llama")
    found = measured(plan_of(model, 16), 1)
    assert found.state_bytes == pytest.approx(12 * model.num_parameters, rel=0.01)
    assert all(second > 0 for one in found.rounds for second in (one.copy_s, one.save_s, one.load_s, one.beside_s))
    assert found.rounds[0].blocked_s < found.rounds[0].step_s
