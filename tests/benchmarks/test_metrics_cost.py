from autoshard.spec.training import Tracking
from benchmarks.metrics_cost import WARM_UP, StepTimes, judge, step_times


def test_the_median_with_tensorboard_is_judged() -> None:
    cheap, dear = (StepTimes(passed_ms=(ms, ms, 9.0), cpu_ms=ms) for ms in (0.05, 0.2))
    assert judge({"file": cheap, "tensorboard": cheap, "wandb_offline": dear}).holds
    result = judge({"file": cheap, "tensorboard": dear, "wandb_offline": None})
    assert not result.holds and result.value == 0.2 and result.extras["wandb_offline_median_ms"] is None
    assert judge({"file": cheap, "tensorboard": None, "wandb_offline": None}).value == 0.05


def test_every_step_after_the_first_is_timed() -> None:
    found = step_times(Tracking(tensorboard=True), WARM_UP + 5)
    assert len(found.passed_ms) == 5 and found.cpu_ms > 0
