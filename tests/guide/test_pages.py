"""Every command of docs/launching.md and docs/sweeps.md runs, in the order of the page, in one folder."""

import gzip
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.sweep.points import load_sweep, points_of
from tests.imports.logs.published import GPT_13B, LOGS, arguments, megatron
from tests.runtime.cases import ROOT
from tests.runtime.metrics.offline import wandb_environment


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def lines(name: str) -> Iterator[list[str]]:
    """The words of every command of a page."""
    for line in "\n".join(re.findall(r"```bash\n(.*?)```", page(name), re.DOTALL)).splitlines():
        words = shlex.split(line, comments=True)
        assert words[:1] in ([], ["autoshard"])
        if words:
            yield words[1:]


@pytest.mark.slow
def test_launching_writes_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for words in lines("launching"):
        assert main(words) == 0, f"{words}\n{capsys.readouterr().err}"
    written = {path.name for path in tmp_path.glob("job-*/*")}
    named = re.findall(r"`([\w.]+)`", page("launching"))
    assert written == {name for name in named if (tmp_path / "job-k8s" / name).exists()} | {
        "compile.sbatch", "train.sbatch",
    }  # fmt: skip


def test_the_file_of_the_page_about_sweeps_is_a_sweep(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", page("sweeps"), re.DOTALL)
    (tmp_path / "page.yaml").write_text(text, encoding="utf-8")
    found = points_of(load_sweep(tmp_path / "page.yaml"), tmp_path)
    assert len(found) == 3 * 2 * 2 * 3
    assert found[0].recipe.question.fix == "tp=8" and found[0].recipe.question.global_batch == 1024


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.ranks
def test_every_command_of_the_page_about_sweeps_runs(tmp_path: Path) -> None:
    env = wandb_environment(tmp_path, PYTHONWARNINGS="default")
    for words in lines("sweeps"):
        command = [sys.executable, "-m", "autoshard.cli", *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr}"


@pytest.mark.slow
def test_every_command_of_the_page_about_other_programs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = re.findall(r"```yaml\n(.*?)```", page("interchange"), re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    published = next(log for log in LOGS if log.name == "gpt-175b.log")
    (tmp_path / "train.log").write_text(published.text, encoding="utf-8")
    (tmp_path / "pretrain_gpt.sh").write_text(published.config[1], encoding="utf-8")
    (tmp_path / "runs").mkdir()
    log = arguments(GPT_13B) + megatron([190000.0] * 8, 1024)
    (tmp_path / "runs" / "node0.log.gz").write_bytes(gzip.compress(log.encode()))
    for words in lines("interchange"):
        code = main(words)
        assert code == 0, f"{words}\n{capsys.readouterr()}"
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {
        "plan.json",
        "plan.nxdt.yaml",
        "train.sh",
        "mine.torchtitan.py",
        "rows.jsonl",
        "next.megatron.sh",
    }
