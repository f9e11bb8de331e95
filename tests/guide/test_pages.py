"""Every command of a users' page runs, in the order of the page, in an empty folder with the files that it shows."""

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.sweep.points import load_sweep, points_of
from tests.forks import typed_on_a_fork
from tests.guide.pages import DOCS, ROOT, USERS, commands, fences
from tests.imports.logs.published import GPT_13B, LOGS, arguments, megatron
from tests.runtime.cases import environment
from tests.runtime.metrics.offline import wandb_environment

# Pages with tests of their own: test_llama3_on_trainium, test_launching_writes_what_the_page_says.
TWINS = ("guides/trainium", "guides/launching")
# Commands that start ranks, or import torch: each is a process.
WITH_TORCH = ("run", "generate", "convert", "tokenize", "sweep", "verify", "report", "watch")
THOROUGH = ("guides/sweeps",)  # many minutes
# What is typed here in the place of what a page says: fewer steps, and searches over GPUs that end after some seconds
# with the best plan so far.
SHORTER = {
    # Later commands read a plan that is written, which must be the same on a busy machine.
    r"^(autoshard plan (?![^|]* --out )[^|]*\b(?:h100|h100-80|our-h200\.yaml|lab\.yaml)\b[^|]*)$": r"\1 --time-limit 4",
    r"^(autoshard import [^|]*\blogs?\b[^|]*)$": r"\1 --time-limit 4",
    r"^(autoshard run tiny-text)$": r"\1 --steps 4",
    r"^(autoshard run tiny-\w+)": r"\1 --global-batch 8",
    r"--steps 300\b": "--steps 4",
    r"--steps 350\b": "--steps 5",
    r"--steps 40\b": "--steps 7",
    r"--steps 20\b": "--steps 6",
    r"--steps 10\b": "--steps 3",
    r"--nodes 1,2,4,8 --pareto": "--nodes 1,2 --pareto",
    r"torchrun --nproc-per-node 4": "torchrun --nproc-per-node 2",
}
NARROWER = '"dp=2,tp=2"', '"tp=2"'  # the mesh of the page's loop; test_sharded trains on all of it
REASON = re.compile(r"\w+ .*\w")


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


def typed(page: Path) -> list[str]:
    """The commands of a page that are run here."""
    blocks = [fence for fence in fences(page.read_text("utf-8")) if fence.kind == "bash" and not fence.not_run]
    return [command for fence in blocks for command in commands(fence)]


def starts_ranks(page: Path) -> bool:
    return any(re.search(rf"autoshard (?:{'|'.join(WITH_TORCH)})\b|torchrun", command) for command in typed(page))


PAGES = [page for page in USERS if typed(page) and name_of(page) not in TWINS]


def marked(page: Path) -> object:
    marks = [pytest.mark.slow, *([pytest.mark.ranks] if starts_ranks(page) else [])]
    marks += [pytest.mark.thorough] if name_of(page) in THOROUGH else []
    return pytest.param(page, marks=marks, id=name_of(page))


def write_logs_and_rows(folder: Path) -> None:
    """Write what the guide to calibrating is about: a log with its script, a folder of logs, and runs of autoshard."""
    published = next(log for log in LOGS if log.name == "gpt-175b.log")
    (folder / "train.log").write_text(published.text, encoding="utf-8")
    (folder / "pretrain_gpt.sh").write_text(published.config[1], encoding="utf-8")
    (folder / "logs").mkdir()
    log = arguments(GPT_13B) + megatron([190000.0] * 8, 1024)
    (folder / "logs" / "node0.log.gz").write_bytes(gzip.compress(log.encode()))
    for layout, time_s in (("dp=4,mbs=8", 0.4), ("tp=2,dp=2,mbs=8", 0.6), ("pp=2,dp=2,mbs=8", 0.5)):
        row = {"id": layout, "kind": "run", "platform": "local", "model": "tiny-llama", "chips": 4, "seq_len": 128,
               "global_batch_seqs": 32, "candidate": layout, "framework": "autoshard, torch engine",
               "step_time_s": time_s, "first_seen": "2026-11-26"}  # fmt: skip
        (folder / "runs" / layout).mkdir(parents=True)
        (folder / "runs" / layout / "measured.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")


PREPARED: Mapping[str, Callable[[Path], None]] = {"guides/calibrating": write_logs_and_rows}
WRITTEN = {
    "guides/other-programs": {"plan.json", "plan.nxdt.yaml", "train.sh", "mine.torchtitan.py"},
    "guides/calibrating": {"rows.jsonl", "next.megatron.sh", "mine.json", "advised", "contribution.jsonl"},
    "guides/page": {"report.html", "both.html"},
    "tutorial": {"plan.json", "report.html", "plan.nxdt.yaml", "exported"},
}


def prepared(page: Path, folder: Path) -> None:
    """Write the files that a page shows under their names, and what stands for those that its reader has."""
    for data in ("recipes", "benchmarks"):
        (folder / data).symlink_to(ROOT / data)
    for fence in fences(page.read_text("utf-8")):
        if fence.title:
            (folder / fence.title).write_text(fence.text.replace(*NARROWER), encoding="utf-8")
    PREPARED.get(name_of(page), lambda _: None)(folder)


def run_apart(command: str, folder: Path, env: Mapping[str, str]) -> None:
    """Run a command as a shell does; its words are the message when it fails."""
    python = shlex.quote(sys.executable)
    for program, module in (("autoshard", "autoshard.cli"), ("torchrun", "torch.distributed.run")):
        command = re.sub(rf"^{program}\b", f"{python} -m {module}", command)
    command = re.sub(r"^python ", f"{python} ", command)
    words = ["bash", "-c", command]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("page", [marked(page) for page in PAGES])
def test_every_command_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    prepared(page, folder)
    monkeypatch.chdir(folder)
    env = wandb_environment(tmp_path) if "--wandb" in page.read_text("utf-8") else environment()
    for command in typed(page):
        for long, short in SHORTER.items():
            command = re.sub(long, short, command)
        program, *words = shlex.split(command)
        if program != "autoshard" or "|" in command:
            run_apart(command, folder, env)
        elif words[0] in WITH_TORCH or "--module" in words:
            code, said = typed_on_a_fork(words, folder, env)
            assert code == 0, f"{command}\n{said[-4000:]}"
        else:
            assert main(words) == 0, f"{command}\n{capsys.readouterr().err}"
    assert WRITTEN.get(name_of(page), set()) <= {path.name for path in folder.iterdir()}


def test_commands_that_are_not_run_say_why_and_all_others_are() -> None:
    blocks = [(page, fence) for page in USERS for fence in fences(page.read_text("utf-8")) if fence.kind == "bash"]
    assert len(blocks) > 50
    unnamed = [f"{name_of(page)}: {fence.text}" for page, fence in blocks if fence.not_run is not None
               and not REASON.fullmatch(fence.not_run)]  # fmt: skip
    assert not unnamed, "say in a few words what is missing here"
    shown = [page for page in USERS if re.search(r"^```(?:console|sh|shell)\b", page.read_text("utf-8"), re.MULTILINE)]
    assert not shown, "commands stand in blocks of bash, which are run"
    assert all("autoshard" in command or "benchmarks" in command or "torchrun" in command
               for page in PAGES for command in typed(page))  # fmt: skip
    assert {*SHORTER} == {long for long in SHORTER for page in PAGES for command in typed(page)
                          if re.search(long, command)}  # fmt: skip


@pytest.mark.slow
def test_launching_writes_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = DOCS / "guides" / "launching.md"
    for command in typed(page):
        assert main(shlex.split(command)[1:]) == 0, command
    written = {path.name for path in tmp_path.glob("job-*/*")}
    named = re.findall(r"`([\w.]+)`", page.read_text("utf-8"))
    assert written == {name for name in named if (tmp_path / "job-k8s" / name).exists()} | {
        "compile.sbatch", "train.sbatch",
    }  # fmt: skip


def test_the_file_of_the_page_about_sweeps_is_a_sweep(tmp_path: Path) -> None:
    text = next(
        fence.text for fence in fences((DOCS / "guides" / "sweeps.md").read_text("utf-8")) if fence.kind == "yaml"
    )
    (tmp_path / "page.yaml").write_text(text, encoding="utf-8")
    found = points_of(load_sweep(tmp_path / "page.yaml"), tmp_path)
    assert len(found) == 3 * 2 * 2 * 3
    assert found[0].recipe.question.fix == "tp=8" and found[0].recipe.question.global_batch == 1024


def test_files_of_pages_lie_where_no_path_leads_out() -> None:
    titles = [fence.title for page in USERS for fence in fences(page.read_text("utf-8")) if fence.title]
    assert len(titles) >= 5 and not [title for title in titles if os.sep in title]
