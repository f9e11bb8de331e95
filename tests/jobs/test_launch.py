"""``autoshard launch``: the folder it writes, what it refuses, what it submits; without torch."""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from autoshard.cli import main
from autoshard.command_line.reading import read_options
from autoshard.commands import command_of
from autoshard.cost.predict import predicted
from autoshard.plan.code import PlannedCode
from autoshard.plan.codec import dump, load, plan_hash, with_planned_code
from tests.jobs.cases import FIRST, plan_of
from tests.runtime.cases import ROOT, write_tiny

SLURM, TORCHRUN = "launch plan.json --scheduler slurm", "launch plan.json --scheduler torchrun"
K8S = "launch plan.json --scheduler k8s --image me/image:1 --claim volume"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(dump(plan_of(FIRST)), encoding="utf-8")
    write_tiny(tmp_path)
    return tmp_path


@pytest.fixture
def program(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that puts a stand-in for a scheduler's program before all others."""
    (here / "bin").mkdir()
    monkeypatch.setenv("TOLD", str(here / "told"))
    monkeypatch.setenv("PATH", f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def write(name: str, body: str) -> None:
        (here / "bin" / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (here / "bin" / name).chmod(0o755)

    return write


def typed(line: str) -> int:
    return main(line.split())


def test_a_plan_becomes_a_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(f"{SLURM} --steps 100") == 0
    said = capsys.readouterr().out
    files = ["plan.json", "training.yaml", "node.sh", "compile.sbatch", "train.sbatch", "submit.sh"]
    assert f"wrote job: {', '.join(files)}" in said and "for 100 steps" in said and "next: bash job/submit.sh" in said
    assert sorted(path.name for path in (here / "job").iterdir()) == sorted(files)
    assert plan_hash(load(here / "job" / "plan.json")) == plan_hash(plan_of(FIRST))
    assert typed(f"{TORCHRUN} --json --out by-hand") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"] == plan_hash(plan_of(FIRST)) and found["files"] == ["plan.json", "training.yaml", "node.sh"]


def test_a_long_training_says_its_days_and_how_many_jobs_that_is(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prediction = plan_of(FIRST).prediction
    assert prediction
    steps = math.ceil(10 * 86_400 / prediction.step_time_s)
    assert typed(f"{SLURM} --steps {steps} --time 3-00:00:00") == 0
    said = capsys.readouterr().out
    assert f", 10 d for {steps:,} steps: at least 4 jobs of 3-00:00:00\n" in said
    assert typed(f"{SLURM} --steps {steps} --time 30-00:00:00") == 0
    assert f"10 d for {steps:,} steps\n" in capsys.readouterr().out


def test_notes_are_as_wide_as_the_terminal(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    assert typed(SLURM) == 0
    said = capsys.readouterr().out.splitlines()
    assert "note: scancel and preemption kill" in "".join(said)
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in said[1:-1]) <= 80


def test_a_recipe_is_planned_and_its_keys_go_to_the_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ROOT / "recipes" / "tiny-text.yaml"
    assert typed(f"launch {recipe} --scheduler torchrun --checkpoint.to s3://bucket/run --seed 7") == 0
    assert "next: bash job/node.sh train\n" in capsys.readouterr().out
    options = yaml.safe_load((here / "job" / "training.yaml").read_text(encoding="utf-8"))
    assert options.pop("data") == {"sets": {str(ROOT / "recipes" / "data" / "poems.txt"): 1.0}}
    assert options["checkpoint"] == {"to": "s3://bucket/run", "every_steps": 50, "keep_last": 3}
    assert (options["seed"], options["steps"], options["learning_rate"]) == (7, 300, 3e-3)
    values = read_options("run", command_of("run"), ["job/plan.json", "--config", "job/training.yaml"])
    assert values and values["training"].values["seed"] == 7


@pytest.mark.parametrize("model", ["01-yi", "7", "模型", "-", "1" * 60, "Llama", "a" * 60])
def test_a_model_of_any_name_has_a_job(model: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(FIRST)
    renamed = predicted(replace(plan, model=replace(plan.model, name=model)))
    (here / "plan.json").write_text(dump(renamed), encoding="utf-8")
    assert typed(f"{SLURM} --json") == 0
    name = json.loads(capsys.readouterr().out)["name"]
    assert name.startswith(model.lower()[:33] if model.isascii() and model.isalpha() else "model-")
    assert name.endswith(f"-{plan_hash(renamed)[:6]}")


@pytest.mark.parametrize("name", ["1e5", "7e12345", "12", "on", "-x", "a: b", "2026-01-01"])
def test_a_name_that_looks_like_something_else_stays_a_name(name: str, here: Path) -> None:
    assert main([*f"{TORCHRUN} --steps 2".split(), f"--track.name={name}"]) == 0
    values = read_options("run", command_of("run"), ["job/plan.json", "--config", "job/training.yaml"])
    assert values["training"].values["track.name"] == name


@pytest.mark.parametrize(("line", "base"), [(SLURM, "."), (f"{K8S} --mount /mnt", "/mnt")])
def test_paths_lead_where_they_lead_from_here_or_from_the_volume(line: str, base: str, here: Path) -> None:
    words = "--data.set sets/web=2 --data.set /far/code=1 --init-weights weights --checkpoint.to saved"
    assert typed(f"{line} {words}") == 0
    options = yaml.safe_load((here / "job" / "training.yaml").read_text(encoding="utf-8"))
    place = str(here) if base == "." else base
    assert options["data"]["sets"] == {f"{place}/sets/web": 2.0, "/far/code": 1.0}
    assert (options["init_weights"], options["checkpoint"]["to"]) == (f"{place}/weights", f"{place}/saved")


@pytest.mark.parametrize(("line", "base"), [(TORCHRUN, "."), (f"{K8S} --mount /mnt", "/mnt")])
@pytest.mark.parametrize("source", ["models/mine.py:make", "/far/mine.py:make", "models.mine:make"])
def test_code_of_a_plan_leads_where_paths_lead(
    source: str, line: str, base: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = with_planned_code(plan_of(FIRST), PlannedCode(source=source, order="a", fingerprints={"a": "b"},
                                                           strategies={"a": {"c": "d"}}))  # fmt: skip
    (here / "plan.json").write_text(dump(before), encoding="utf-8")
    assert typed(f"{line} --data.set models.mine:data --data.set models/mine.py:data") == 0
    said, job = capsys.readouterr().out, load(here / "job" / "plan.json")
    place = str(here) if base == "." else base
    assert job.code and job.prediction and job.prediction.of == plan_hash(job)
    assert job.code.source == {"models/mine.py:make": f"{place}/{source}"}.get(source, source)
    options = yaml.safe_load((here / "job" / "training.yaml").read_text(encoding="utf-8"))
    assert {*options["data"]["sets"]} == {"models.mine:data", f"{place}/models/mine.py:data"}
    assert "note: models.mine:data is imported: install it" in said and "edited" not in said
    assert (f"note: {source} is imported" in said) == (source == "models.mine:make")
    assert ("copy this file" in said) == (base == "/mnt" and ".py" in source)


def test_the_folder_of_the_run_leads_from_the_volume_and_may_have_any_name(here: Path) -> None:
    assert typed(f"{K8S} --run-folder it's(a)") == 0
    assert """run='/fsx/it'"'"'s(a)'\n""" in (here / "job" / "node.sh").read_text(encoding="utf-8")


def test_a_job_of_the_same_plan_is_written_anew_and_nothing_else(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(SLURM) == 0
    (here / "job" / "run").mkdir()
    assert typed(K8S) == 0
    assert not (here / "job" / "train.sbatch").exists() and (here / "job" / "run").is_dir()
    assert typed("launch tiny.json --scheduler slurm") == 2
    assert "--out job: holds the job of another plan. Name another folder" in capsys.readouterr().err
    (here / "mine").mkdir()
    (here / "mine" / "notes").touch()
    assert typed(f"{SLURM} --out mine") == 2
    assert "--out mine: holds files that are not a job and are not overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "faults"),
    [
        ("", ["--scheduler: missing; one of slurm, k8s, torchrun"]),
        ("--scheduler k8s", ["--image: missing, and k8s needs it", "--claim: missing, and k8s needs it"]),
        ("--scheduler torchrun --on-failure replan", ["--on-failure: says nothing to torchrun. Leave it out"]),
        ("--scheduler slurm --profile hyperpod --on-failure replan", ["--on-failure: hyperpod replaces nodes"]),
        ("--scheduler slurm --image a --claim b", ["--image: says nothing to slurm", "--claim: says nothing to slurm"]),
        ("--scheduler slurm --profile trainjob", ["--profile: 'trainjob' is none of Slurm's: plain, hyperpod"]),
        ("--scheduler k8s --image a --claim b --profile plain", ["--profile: 'plain' is none of Kubernetes'"]),
        ("--scheduler slurm --time soon --partition a;b", ["--time: must be minutes", "--partition: must be a name"]),
        ("--scheduler slurm --name Mine", ["--name: must have small letters, digits and dashes"]),
        ("--scheduler slurm --setup cat<<X", ["--setup: is no whole line of shell (line 1: warning: here-document"]),
        (
            "--scheduler slurm --run-folder s3://b/x",
            ["--run-folder: must be a folder that nodes mount, not 's3://b/x'"],
        ),
        ("--scheduler k8s --image a --claim b --name a$b", ["--name: must have small letters, digits and dashes"]),
        ("--scheduler k8s --image a --claim b --mount /a$b", ["--mount: must be a plain path, not '/a$b'"]),
        ("--scheduler slurm --run-folder $HOME/x", ["--run-folder: must be a plain path, not '$HOME/x'"]),
        ("--scheduler k8s --image a --claim A_b --mount x", ["--claim: must be the name", "--mount: must be a folder"]),
        ("--scheduler slurm --model llama3-8b", ["--model: is part of the question that plan.json has answered"]),
        ("--scheduler torchrun --submit", ["--submit: torchrun is started by hand on every node. Leave --submit out"]),
    ],
)
def test_what_cannot_be_used_is_said(
    words: str, faults: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(f"launch plan.json {words}") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(faults) and not (here / "job").exists()
    assert all(line.startswith(f"autoshard: {fault}") for line, fault in zip(lines, faults, strict=True))


@pytest.mark.parametrize(("line", "name"), [(SLURM, "sbatch"), (K8S, "kubectl")])
def test_there_is_no_job_for_a_plan_that_may_not_run_or_where_there_is_no_scheduler(
    line: str, name: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert typed(f"{line} --submit") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"autoshard: --submit: there is no {name} here.") and said.endswith("bash job/submit.sh")
    text = (here / "plan.json").read_text(encoding="utf-8").replace('"micro_batch": 1,', '"micro_batch": 3,')
    (here / "plan.json").write_text(text, encoding="utf-8")
    assert typed(line) == 1 and "micro" in capsys.readouterr().out and not (here / "job").exists()


def test_submitting_says_jobs_the_line_to_watch_and_the_log(
    here: Path, program: Callable[[str, str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", 'echo "$@" >> $TOLD; wc -l < $TOLD')
    assert typed(f"{SLURM} --submit") == 0
    assert (here / "told").read_text().splitlines() == [
        "--parsable compile.sbatch",
        "--parsable --dependency=afterok:1 --kill-on-invalid-dep=yes train.sbatch",
    ]
    assert capfd.readouterr().out.splitlines() == [
        "compile job: 1",
        "training job: 2, which starts when the compile job has ended well",
        "watch: squeue --jobs 1,2",
        f"log: tail -F {here}/job/compile-1.log {here}/job/train-2.log",
        "to save and stop: scontrol update JobId=2 Requeue=0 && scancel --signal=TERM 2",
        f"run: autoshard watch {here}/job/run",
    ]
    program("sbatch", "echo no such partition >&2; exit 1")
    assert typed(f"{SLURM} --submit --json") == 3
    errors = capfd.readouterr().err
    assert "no such partition" in errors and "bash job/submit.sh ended with exit code 1" in errors


@pytest.mark.parametrize(("state", "code"), [("Succeeded", 0), ("Failed", 3)])
def test_a_pytorch_job_is_submitted_when_its_graphs_are_compiled(
    state: str, code: int, here: Path, program: Callable[[str, str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    program(
        "kubectl",
        f'echo "$*" | cut -c1-40 >> $TOLD; case $* in *"--output name") ;; get*) echo Created {state} ;; esac',
    )
    assert typed(f"{K8S} --profile pytorchjob --submit") == code
    told = (here / "told").read_text().splitlines()
    assert any(line.startswith("create configmap llama3-70b-") for line in told) and "apply -f compile.yaml" in told
    assert "apply --server-side --force-conflicts -f" in " ".join(told), "an annotation holds 256 KiB"
    assert told[told.index("apply -f compile.yaml") - 1].startswith("delete pytorchjob llama3-70b-"), "one has ended"
    assert ("apply -f train.yaml" in told) == (code == 0)
    said = capfd.readouterr()
    assert ("watch: kubectl get pytorchjob llama3-70b-" in said.out) == (code == 0)
    assert ("-compile failed: kubectl logs llama3-70b-" in said.err) == (code == 3)


@pytest.mark.parametrize(("line", "code"), [(SLURM, 2), (TORCHRUN, 0)])
def test_a_folder_in_which_slurm_would_write_no_log_is_refused(
    line: str, code: int, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(f"{line} --out 50%n/job") == code
    assert ("--out 50%n/job: Slurm takes % in the folder" in capsys.readouterr().err) == bool(code)
    assert (here / "50%n").exists() != bool(code)


@pytest.mark.parametrize("profile", ["trainjob", "pytorchjob"])
def test_a_job_of_kubernetes_that_is_there_is_left_as_it_is(
    profile: str, here: Path, program: Callable[[str, str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    program("kubectl", 'echo "$*" >> $TOLD; case $* in get*name) echo it ;; get*) echo Failed ;; esac')
    assert typed(f"{K8S} --profile {profile} --name mine --submit") == 3
    says = f"{profile}/mine is there already. To start it again, from its newest checkpoint:"
    assert capfd.readouterr().err.splitlines()[:2] == [says, f"kubectl delete {profile}/mine, and then this script"]
    (asked,) = (here / "told").read_text(encoding="utf-8").splitlines()
    assert asked == f"get {profile}/mine --ignore-not-found --output name"
