"""Text of a user in the files of a job: it is refused, or it arrives as it was typed, and nothing of it is run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from autoshard.cost.predict import predicted
from autoshard.errors import InputError
from autoshard.extensions import EXTENSIONS
from autoshard.jobs.job import PLAN, Files, Job
from autoshard.jobs.place import JobPlace
from autoshard.jobs.quoting import shell_faults
from autoshard.sweep.table import array_script
from tests.jobs.cases import FIRST, files_of, job_of, plan_of
from tests.jobs.test_golden import SHELLCHECK
from tests.sweep.sweep_cases import jobs, tiny

EVIL = (
    "a;touch<pwned", "a;touch pwned", "$(touch pwned)", "`touch pwned`", "a'b", "';touch pwned;'", '";touch pwned;"',
    "a\ntouch pwned", "a&touch pwned", "a|touch pwned", "a(b)", "{a,b}", "a b", "-x", "--help", "#x", "a\\", "~", "*",
    "!a", "a\tb", "\u00e9\u2028", "a%b", "${PWD}", "", "a\x00", "\udc80",
)  # fmt: skip
TEXTS = st.one_of(st.sampled_from(EVIL), st.text("ab.-'\"\\$`;&|<>()[]{}*?!#~%=:@, \n\té", max_size=12))
# What a scheduler would be, each a stand-in that tells its words; srun is a run that begins and fails.
PROGRAMS = {
    "torchrun": "tell", "python3": "tell", "autoshard": "tell", "kubectl": "tell", "sbatch": "echo 5",
    "srun": 'mkdir -p "$RUN" && echo \'"from"\' >> "$RUN/attempts.jsonl"; exit 1',
    "sinfo": "echo first alloc 2 none",
    "scontrol": "echo first", "sleep": "exit 0",
}  # fmt: skip
TELL = (
    f"#!{sys.executable} -I\nimport json, sys\nprint(json.dumps(sys.argv[1:]), file=open(sys.argv[0] + '.told', 'a'))\n"
)


@contextmanager
def extended(name: str) -> Iterator[None]:
    """Have a file of this name loaded."""
    with TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_text("", encoding="utf-8")
        EXTENSIONS.files[path] = "digest"
        try:
            yield
        finally:
            del EXTENSIONS.files[path]


def taken(options: Mapping[str, str], under: str) -> tuple[Job, Files] | None:
    """The files of a job with these texts; None if one of them is refused."""
    place = {name: text for name, text in options.items() if name in JobPlace.__dataclass_fields__}
    rest = {name: text for name, text in options.items() if name in Job.__dataclass_fields__}
    plan = predicted(replace(plan_of(FIRST), model=replace(plan_of(FIRST).model, name=options["model"])))
    try:
        usual = job_of(plan_of(FIRST), under, replans=under == "slurm plain")
        job: Any = replace(usual, plan=plan, place=replace(usual.place, **place), **rest)
        return job, files_of(job)
    except InputError:
        return None


def start(script: str, folder: Path, run: str, *words: str) -> str:
    slurm = {"SLURM_SUBMIT_DIR": str(folder / "job"), "SLURM_JOB_ID": "5", "SLURM_JOB_PARTITION": "p"}
    nodes = {"SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "first", "SLURM_JOB_NODELIST": "first", "RUN": run}
    kube = {"NODE_RANK": "0", "RANK": "0", "JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "first", "MASTER_PORT": "1"}
    variables = {**slurm, **nodes, **kube, "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder)}
    command = ["bash", script, *words]
    done = subprocess.run(command, cwd=folder / "job", env=variables, capture_output=True, text=True, check=False)
    assert "syntax" not in done.stderr and "command not found" not in done.stderr, done.stderr
    return done.stderr


def told(folder: Path, program: str) -> list[list[str]]:
    path = folder / "bin" / f"{program}.told"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def check(job: Job, texts: Mapping[str, str], under: str, folder: Path) -> None:
    for name in ("job", "bin"):
        (folder / name).mkdir()
    for name, body in PROGRAMS.items():
        text = TELL if body == "tell" else f"#!/bin/bash\n{body}\n"
        (folder / "bin" / name).write_text(text, encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    for name, text in texts.items():
        (folder / "job" / name).write_text(text, encoding="utf-8")
    scripts = sorted(name for name in texts if name.endswith((".sh", ".sbatch")))
    for name in scripts:
        assert not subprocess.run(["bash", "-n", name], cwd=folder / "job", capture_output=True, check=False).stderr
    assert SHELLCHECK
    done = subprocess.run(
        [SHELLCHECK, "--severity=warning", *scripts], cwd=folder / "job", capture_output=True, text=True, check=False
    )
    assert not done.stdout and not done.returncode
    place = folder / "job"
    run = job.run if job.run.startswith("/") else f"{place}/{job.run}"
    said = start("node.sh", folder, run, "train")
    assert len(told(folder, "python3")) == 1, said
    (words,) = told(folder, "python3")
    assert words[-2:] == ["--out", run]
    for script in (name for name in scripts if name != "node.sh"):
        start(script, folder, run)
    if under == "slurm plain":
        first, second = told(folder, "autoshard")
        assert first[:4] == ["plan", "--like", "plan.json", *(f"--extend={path.name}" for path in EXTENSIONS.files)][:4]
        assert second[second.index("--run-folder") + 1] == run and f"--setup={job.setup}" in second
    assert not [path for path in folder.rglob("*") if path.name == "pwned"]


@pytest.mark.parametrize("under", ["slurm plain", "k8s trainjob", "torchrun"])
@settings(max_examples=max(4, settings().max_examples // 3))
@example(**dict.fromkeys(("run", "name", "partition", "image", "mount", "file", "model"), EVIL[0]))
@example(run=EVIL[0], name="a", partition="a", image="a", mount="/a", file="a;touch pwned", model=EVIL[7])
@example(run="it's a(b)", name="a", partition="a", image="a", mount="/a", file="a'b", model="a`touch pwned`")
@given(run=TEXTS, name=st.just("a"), partition=st.just("a"), image=TEXTS, mount=TEXTS, file=TEXTS, model=TEXTS)
def test_text_is_refused_or_arrives_as_it_was_typed(under: str, **texts: str) -> None:
    file = "".join(sign for sign in texts.pop("file") if sign not in "/\0\udc80") + ".py"
    names = {"slurm": ("partition",), "k8s": ("image", "mount"), "torchrun": ()}[under.partition(" ")[0]]
    options = {key: text for key, text in texts.items() if key in ("run", "name", "model", *names)}
    with extended(file), TemporaryDirectory() as folder:
        if "/" in options["run"]:
            options["run"] = f"{folder}/{options['run']}"
        if files := taken({**options, "setup": ": \"it's\" 'two words'"}, under):
            check(files[0], files[1].texts, under, Path(folder))


@pytest.mark.parametrize("text", EVIL[::3])  # the property above tries all
@pytest.mark.parametrize("key", ["partition", "time", "name", "run", "setup", "image", "claim", "mount", "model"])
def test_no_option_lets_text_into_a_script_that_does_not_parse(key: str, text: str) -> None:
    under = "k8s pytorchjob" if key in ("image", "claim", "mount") else "slurm plain"
    if files := taken({"model": "llama", key: text}, under):
        for name, content in files[1].texts.items():
            if name != PLAN:
                content.encode()
                done = subprocess.run(["bash", "-n"], input=content, capture_output=True, text=True, check=False)
                assert not name.endswith((".sh", ".sbatch")) or not done.stderr, (name, done.stderr)
                assert key == "setup" or not [line for line in content.splitlines() if line.startswith("touch pwned")]


@pytest.mark.parametrize(
    "text", ['echo "', "cat <<X", "a \\", "a \\\\\\", "f() {", "if true; then", "a &&", "a\nb", "x\x07"]
)
def test_a_line_that_is_no_whole_line_of_shell_is_refused(text: str) -> None:
    assert list(shell_faults(text))
    with pytest.raises(InputError, match="--setup"):
        job_of(plan_of(FIRST), setup=text)


@pytest.mark.parametrize("text", ["", "source /fsx/venv/bin/activate", "echo a\\\\", "a && b; c\t'd'", 'eval "$(x)"'])
def test_a_whole_line_of_shell_is_taken(text: str) -> None:
    assert not list(shell_faults(text))


@pytest.mark.parametrize("text", ["a;touch pwned", "it's", "a b", "$(touch pwned)", "a%b"])
def test_the_job_array_of_a_sweep_is_quoted_too(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / text
    place.mkdir()
    monkeypatch.chdir(place)
    sweep = tiny(grid={"ranks": (1,)})
    script = array_script(sweep, jobs(sweep, place), Path(f"{text}.yaml"), Path(text))
    assert SHELLCHECK
    done = subprocess.run(
        [SHELLCHECK, "--severity=warning", "-"], input=script, capture_output=True, text=True, check=False
    )
    assert not done.stdout and not done.returncode
    (told,) = (line for line in script.splitlines() if line.startswith("exec "))
    echoed = script.replace("exec ", "printf '%s\\n' ")
    env = {"SLURM_ARRAY_TASK_ID": "0", "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", echoed], env=env, capture_output=True, text=True, check=False)
    assert f"{text}.yaml" in done.stdout.splitlines() and str(place / text) in done.stdout.splitlines(), told
    assert not list(tmp_path.rglob("pwned"))
