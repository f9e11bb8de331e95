"""Every command of docs/launching.md runs, in the order of the page, in one folder beside the recipes."""

import re
import shlex
from pathlib import Path

import pytest

from autoshard.cli import main
from tests.runtime.cases import ROOT

PAGE = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_command_of_the_page_writes_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).splitlines()
    assert len(lines) >= 6
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "autoshard" and main(words) == 0, f"{line}\n{capsys.readouterr().err}"
    written = {path.name for path in tmp_path.glob("job-*/*")}
    assert written == {name for name in re.findall(r"`([\w.]+)`", PAGE) if (tmp_path / "job-k8s" / name).exists()} | {
        "compile.sbatch", "train.sbatch",
    }  # fmt: skip
