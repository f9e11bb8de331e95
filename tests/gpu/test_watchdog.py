"""A device that never ends what it was given: the watchdog ends the run, and says where it stood."""

import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.plan.codec import dump
from tests.gpu.commands import plan_of_gpus
from tests.runtime.cases import environment

pytestmark = pytest.mark.gpu

# `autoshard run` whose third step begins with a kernel of hours; the host goes on until it reads the step's numbers.
HANGING = """
import sys, time, torch
from autoshard.cli import main
from autoshard.engine.torch.engine import TorchEngine

step = TorchEngine.step

def hanging(self, *given, **more):
    if self._num_updates == 2:
        torch.cuda._sleep(10**14) if torch.cuda.is_available() else time.sleep(10**6)
    return step(self, *given, **more)

TorchEngine.step = hanging
sys.exit(main())
"""


def test_a_kernel_that_never_ends_is_told_and_the_state_before_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(dump(plan_of_gpus("tp=1,pp=1,dp=1")), encoding="utf-8")
    (tmp_path / "hanging.py").write_text(HANGING, encoding="utf-8")
    words = ("--steps", "6", "--checkpoint.every-steps", "1", "--watchdog.step-s", "10")
    done = subprocess.run(
        [sys.executable, "hanging.py", "run", "plan.json", "--out", "run", *words],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "no rank has moved for" in done.stderr and "in step 3" in done.stderr
    assert "Traceback" not in done.stderr
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert any("2" in name for name in saved), saved
