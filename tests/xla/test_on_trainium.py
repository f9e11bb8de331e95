"""What ``on_trainium`` calls of torch_xla, called there: collectives of one rank, and work on one core, on a CPU."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.trainium.wires import KINDS
from tests.xla.record import PYTHON

ROOT = Path(__file__).parents[2]
CORE = """
import torch, torch_xla.core.xla_model as xla
from benchmarks.trainium.cores import Core
core = Core(device=str(xla.xla_device()), engine="nxd", lnc=1)
print("seconds", core.seconds(torch.matmul, (core.make(64, 64), core.make(64, 64)), times=3))
"""

pytestmark = [pytest.mark.xla, pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no Python")]


def run(*arguments: str) -> str:
    env = {**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [os.environ[PYTHON], *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_kind_of_collective_is_called_as_torch_xla_has_it(tmp_path: Path) -> None:
    file, out = tmp_path / "wires.json", tmp_path / "wires.jsonl"
    wires = [{"name": kind, "kind": kind, "groups": [[0]], "bytes": 4096} for kind in KINDS]
    file.write_text(json.dumps({"device": "xla", "times": 2, "out": str(out), "wires": wires}), encoding="utf-8")
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    run(*start, "-m", "benchmarks.trainium.ranks", str(file))
    found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [name for name, _ in found] == [*KINDS] and all(seconds > 0 for _, seconds in found)


def test_a_core_runs_work_and_waits_for_it() -> None:
    name, seconds = run("-c", CORE).split()[-2:]
    assert name == "seconds" and float(seconds) > 0
