"""docs/sweeps.md: its file is a sweep, and every command of it runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.sweep.points import load_sweep, points_of
from tests.runtime.cases import ROOT
from tests.runtime.metrics.offline import wandb_environment

PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")


def test_the_file_of_the_page_is_a_sweep(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "page.yaml"
    path.write_text(text, encoding="utf-8")
    found = points_of(load_sweep(path), tmp_path)
    assert len(found) == 3 * 2 * 2 * 3
    assert found[0].recipe.fix == "tp=8" and found[0].recipe.global_batch == 1024


@pytest.mark.slow
@pytest.mark.ranks
def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    assert len(lines) == 7 and all(line.startswith("autoshard ") for line in lines)
    for line in lines:
        _, *words = shlex.split(line)
        done = subprocess.run(
            [sys.executable, "-m", "autoshard.cli", *words],
            cwd=tmp_path,
            env=wandb_environment(tmp_path, PYTHONWARNINGS="default"),
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr}"
