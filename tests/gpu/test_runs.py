"""What can only be wrong on a device, in processes of their own: NCCL, full memory, errors that come late."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from autoshard.engine.torch.engine import build
from autoshard.errors import RunFailed
from autoshard.run.activity import RankActivity
from autoshard.run.protocol import Run
from autoshard.runtime.data.batches import synthetic_step
from autoshard.runtime.out_of_memory import explained_when_full
from autoshard.spec.training import Training
from tests.gpu.commands import losses, plan_of_gpus, ran
from tests.ranks.spawn import RankFailed, on_ranks

pytestmark = pytest.mark.gpu

SEVERAL = (
    "tp=2,pp=1,dp=1", "tp=1,pp=2,dp=1", "tp=1,pp=2,dp=1,vp=2,schedule=zb_v", "tp=1,pp=1,dp=2,zero=0",
    "tp=1,pp=1,dp=2,zero=1", "tp=1,pp=1,dp=2,zero=3", "tp=1,pp=1,cp=2,dp=1",
)  # fmt: skip
ONE = "tp=1,pp=1,dp=1"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one GPU."""
    folder = tmp_path_factory.mktemp("alone")
    done = ran(plan_of_gpus(ONE), folder)
    assert done.returncode == 0, done.stderr
    return losses(folder)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes one rank a GPU, and there are not two")
@pytest.mark.parametrize("text", SEVERAL)
def test_two_gpus_follow_the_curve_of_one(text: str, alone: list[float], tmp_path: Path) -> None:
    done = ran(plan_of_gpus(text), tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("mode", ["literal", "generated"])
def test_modes_follow_the_curve_of_compiled_functions(mode: str, alone: list[float], tmp_path: Path) -> None:
    done = ran(plan_of_gpus(ONE), tmp_path, "--engine-mode", mode)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(alone, rel=1e-4)


def test_a_run_of_a_gpu_says_what_it_took_and_leaves_a_row(alone: list[float], tmp_path: Path) -> None:
    plan = plan_of_gpus(ONE, "bf16")
    assert ran(plan, tmp_path, steps=3).returncode == 0
    row = (tmp_path / "run" / "measured.jsonl").read_text("utf-8")
    assert '"platform": "h100-80"' in row and '"memory_bytes"' in (tmp_path / "run" / "metrics.jsonl").read_text(
        "utf-8"
    )


def step_in_a_full_device(text: str) -> str:
    """Take a step with a few MiB of the device; return what the failed run says."""
    plan = plan_of_gpus(text, "bf16", global_batch=256)
    with TemporaryDirectory() as folder:
        engine = build(plan, Run(folder=Path(folder), training=Training(), device="cuda", mode="literal"))
    torch.cuda.set_per_process_memory_fraction(1e-4)
    try:
        with explained_when_full(plan, 0, "cuda", RankActivity(), "in step 1"):
            engine.step(synthetic_step(plan), 0.0)
    except RunFailed as error:
        return str(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)  # this interpreter takes other tests
    return "it ended well"


def test_full_memory_is_one_line_with_a_remedy() -> None:
    (said,) = on_ranks(1, step_in_a_full_device, "tp=1,pp=1,dp=1,mbs=256", timeout_s=120.0)
    (line,) = said.splitlines()
    assert line.startswith("rank 0, on place 0 of the pipeline, ran out of the memory of ") and "in step 1" in line
    assert "more were asked for. The plan predicts " in line and "--headroom" in line


def look_up_a_token_that_is_none() -> None:
    table, tokens = torch.zeros(8, 4, device="cuda"), torch.tensor([3, 8], device="cuda")
    table[tokens].sum()
    torch.cuda.synchronize()


def test_an_error_of_the_device_reaches_who_started_the_ranks() -> None:
    """It comes with a later call than the one that caused it, and the device is of no use to its process any more."""
    with pytest.raises(RankFailed, match=r"CUDA error|device-side assert"):
        on_ranks(1, look_up_a_token_that_is_none, timeout_s=120.0)
    assert on_ranks(1, torch.cuda.device_count, timeout_s=120.0) == [torch.cuda.device_count()]
