"""``autoshard launch``: write the job files of a plan for a cluster, and submit them with --submit."""

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which

from autoshard.command_line.options import DEFAULT_PLAN, PlanOrRecipe, is_recipe
from autoshard.commands.output import print_answer, print_notes, print_refused
from autoshard.commands.plan import plan_of
from autoshard.commands.writing.places import folder_checks
from autoshard.cost.predict import check_plan
from autoshard.errors import Check, RunFailed, file_faults, require
from autoshard.files import replace_text
from autoshard.jobs.job import NODE, PLAN, SUBMIT, Files, Job, default_name
from autoshard.jobs.kubernetes import kubernetes_files
from autoshard.jobs.place import JobPlace
from autoshard.jobs.quoting import word
from autoshard.jobs.remarks import remarks
from autoshard.jobs.shell import torchrun_files
from autoshard.jobs.slurm import slurm_files
from autoshard.plan.codec import load, plan_hash, with_planned_code
from autoshard.plan.plan import Plan
from autoshard.spec.recipe import QuestionOptions
from autoshard.spec.training import Training
from autoshard.units import counted, format_seconds, format_wait

_MADE = "Made by autoshard launch."


def launch(
    plan: PlanOrRecipe = DEFAULT_PLAN,
    *,
    place: JobPlace,
    nodes: int | None = None,
    out: Path = Path("job"),
    name: str | None = None,
    run_folder: str | None = None,
    setup: str | None = None,
    submit: bool = False,
    json: bool = False,
    training: Training,
    question: QuestionOptions,
) -> int:
    """Write the job files that run a plan on a cluster: one job to compile, where that is needed, and one to train.

    Args:
        plan: A plan file or a recipe (.yaml, or a name of autoshard list recipes), whose keys are options too.
        place: Where the job runs.
        nodes: How many nodes the cluster of a recipe has. Default: 1.
        out: The folder of the job.
        name: The name of the job. Default: the model and the first digits of the plan's hash.
        run_folder: The folder of the run, as nodes see it. Default: run, in the folder of the job; k8s: in the volume.
        setup: A shell command that puts torchrun and autoshard on a node's PATH, e.g. 'source /fsx/venv/bin/activate'.
        submit: Also submit the job, and print how to watch it.
        json: Print one JSON object instead of a summary.
        training: Steps, data, checkpoints and other options of training.
        question: The question of a recipe.
    """
    require(*folder_checks(out), _log_check(out, place))
    checked = check_plan(plan_of(plan, question, nodes), to_run=True, place=plan)
    if checked.rejections:
        return print_refused(checked.rejections, json=json)
    edited, planned = [checked.remark] if checked.remark else [], checked.plan
    if planned.code:
        planned = with_planned_code(planned, planned.code.in_folder(Path(place.volume or Path.cwd())))
    job_name, options = name or default_name(planned), _from_anywhere(training, plan, place.volume)
    run = run_folder or (job_name if place.volume else "run")
    run = run if "://" in run or not place.volume else str(Path(place.volume) / run)
    job = Job(name=job_name, plan=planned, training=options, place=place, run=run, setup=setup or "")
    files = {"slurm": slurm_files, "k8s": kubernetes_files, "torchrun": torchrun_files}[place.scheduler](job)
    if submit:
        there = f"Type the same where the cluster's jobs are submitted, or leave --submit out, take {out} there, and"
        program = files.submitter or ""
        require(
            (bool(program), "--submit", "torchrun is started by hand on every node. Leave --submit out"),
            (not program or which(program) is not None, "--submit",
             f"there is no {program} here. {there} type bash {word(str(out / SUBMIT))}"),
        )  # fmt: skip
    _write(files, out, planned)
    if submit:  # the job's own script prints job ids, the line to watch and the log
        done = subprocess.run(["bash", str(out / SUBMIT)], check=False, stdout=sys.stderr if json else None)
        if done.returncode:
            raise RunFailed(f"bash {out / SUBMIT} ended with exit code {done.returncode}; no further job was submitted")
    if json:
        print_answer({"folder": str(out), "files": list(files.texts), "name": job.name, "plan": job.hash,
                      "stopping_s": job.stopping_s, "notes": [*edited, *remarks(job)]})  # fmt: skip
    elif not submit:
        _print_summary(job, files, out, edited)
    return 0


def _log_check(out: Path, place: JobPlace) -> Check:
    """Check that Slurm writes the log into the folder of a job."""
    plain = place.scheduler != "slurm" or "%" not in str(out.absolute())
    signs = "Slurm takes % in the folder of a job for a sign of its own, and writes no log. Choose another"
    return plain, f"--out {out}", signs


def _from_anywhere(training: Training, path: Path, volume: str | None) -> Training:
    """Make relative paths absolute, because a job runs in its own folder: from here, or from the container's volume."""
    seen = training.seen_from(path.parent) if is_recipe(path) and not volume else training
    return seen.absolute(Path(volume) if volume else Path.cwd())


def _write(files: Files, out: Path, plan: Plan) -> None:
    """Write a job into a new folder, or over the job of the same plan."""
    if out.is_dir() and any(out.iterdir()):
        node, read = out / NODE, out / PLAN
        is_job = node.is_file() and read.is_file() and _MADE in node.read_text(encoding="utf-8", errors="replace")
        require((is_job, f"--out {out}", "holds files that are not a job and are not overwritten. Name another folder"))
        same = plan_hash(load(read)) == plan_hash(plan)
        require((same, f"--out {out}", "holds the job of another plan. Name another folder"))
        for old in (*out.glob("*.sbatch"), *out.glob("*.yaml"), *out.glob("*.sh")):
            old.unlink()
    with file_faults(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.texts.items():
            replace_text(out / name, text)


def _print_summary(job: Job, files: Files, out: Path, edited: Sequence[str]) -> None:
    """Print the list of files, what became of the plan's numbers, and the next command: a line that can be copied."""
    prediction = job.plan.prediction
    assert prediction, "a checked plan has one"
    steps, folder = job.training.steps, word(str(out))
    whole_s, limit_s = steps * prediction.step_time_s, job.place.limit_s
    count = counted(steps, "step", form=",")
    took = f"{format_seconds(prediction.step_time_s)} a step, {format_wait(whole_s)} for {count}"
    took += (
        f": at least {math.ceil(whole_s / limit_s)} jobs of {job.place.time}" if limit_s and whole_s > limit_s else ""
    )
    print(f"wrote {out}: {', '.join(files.texts)}")
    print_notes(f"predicted: {took}", *(f"note: {remark}" for remark in (*edited, *remarks(job))))
    if files.submitter:
        print(f"next: bash {folder}/{SUBMIT}")
        return
    stages = ("compile", "train") if job.compiles else ("train",)
    where = "" if job.num_nodes == 1 else "NODE_RANK=0 MASTER_ADDR=NODE-0 "
    numbers = "" if job.num_nodes == 1 else f" on every node, NODE_RANK from 0 to {job.num_nodes - 1}"
    print("\n".join(f"next: {where}bash {folder}/{NODE} {stage}{numbers}" for stage in stages))
