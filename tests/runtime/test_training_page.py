"""Every command of docs/training.md runs, in the order of the page, in one folder beside the recipes."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.cases import ROOT, environment

PAGE = ROOT / "docs" / "training.md"


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.slow
@pytest.mark.ranks
def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    assert len(commands()) >= 6
    for line in commands():
        _, *words = shlex.split(line)
        done = subprocess.run(
            [sys.executable, "-m", "autoshard.cli", *words],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr}"
