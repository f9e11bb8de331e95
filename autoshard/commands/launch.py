"""``autoshard launch``: a plan becomes the files that start it on a cluster, and starts if asked."""

import shlex
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Literal

from autoshard.command_line import PlanOrRecipe, is_recipe
from autoshard.commands.options import QuestionOptions
from autoshard.commands.output import print_json, print_refused
from autoshard.commands.plan import plan_of
from autoshard.errors import InputError, RunFailed, require
from autoshard.spec.training import Training

if TYPE_CHECKING:
    from autoshard.jobs.job import Files, Job, Scheduler
    from autoshard.plan.plan import Plan

_MADE = "Made by autoshard launch."


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """Where a job runs, as its scheduler wants to be told.

    Args:
        profile: What kind of cluster: slurm plain, hyperpod or parallelcluster; k8s trainjob (Kubeflow Trainer v2),
            pytorchjob (the operator before it) or hyperpod. Default: the first of the scheduler's.
        partition: Of slurm: the partition. Default: the cluster's own.
        time: Of slurm: the longest time of a job, e.g. 2-00:00:00; a run that needs more is queued again.
        on_failure: Of slurm: requeue, or replan: where fewer nodes are left than the plan needs, submit a plan for
            those. Default: requeue.
        image: Of k8s: the container image, with torchrun and autoshard in it.
        claim: Of k8s: the persistent volume claim that all nodes share.
        mount: Of k8s: where that volume is mounted. Default: /fsx.
    """

    profile: Literal["plain", "hyperpod", "parallelcluster", "trainjob", "pytorchjob"] | None = None
    partition: str | None = None
    time: str | None = None
    on_failure: Literal["requeue", "replan"] | None = None
    image: str | None = None
    claim: str | None = None
    mount: str | None = None

    def refuse_others(self, scheduler: str) -> None:
        """Refuse options that this scheduler has no use for, and demand those that it needs."""
        given = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        takes = {"slurm": ("profile", "partition", "time", "on_failure"), "k8s": ("profile", "image", "claim", "mount")}
        known, needs = takes.get(scheduler, ()), ("image", "claim") if scheduler == "k8s" else ()
        idle = [(name.replace("_", "-"), value is None or name in known) for name, value in given.items()]
        require(
            *((given[name] is not None, f"--{name}", f"missing, and {scheduler} needs it") for name in needs),
            *((holds, f"--{name}", f"says nothing to {scheduler}. Leave it out") for name, holds in idle),
        )


def launch(
    plan: PlanOrRecipe,
    scheduler: Literal["slurm", "k8s", "torchrun"],
    *,
    out: Path = Path("job"),
    name: str | None = None,
    run_folder: str | None = None,
    setup: str | None = None,
    submit: bool = False,
    json: bool = False,
    place: JobPlace,
    training: Training,
    question: QuestionOptions,
) -> int:
    """Write the files that start a plan on a cluster: a job that compiles, where that is needed, and one that trains.

    Args:
        plan: A plan file, or a recipe (.yaml), which is planned first; any key of a recipe is an option too.
        scheduler: What starts the nodes; torchrun: you do.
        out: The folder of the job.
        name: What the job is called. Default: the model, and the first digits of the plan's hash.
        run_folder: Where the run writes, as nodes see it. Default: run, in the folder of the job; k8s: in the volume.
        setup: A line of shell that makes torchrun and autoshard known on a node, e.g. 'source /fsx/venv/bin/activate'.
        submit: Submit the job as well, and say how to watch it.
        json: Print one JSON object instead of a summary.
        place: Where the job runs.
        training: What the run does beside its plan.
        question: What a recipe asks.
    """
    from autoshard.cost.checked import check_plan
    from autoshard.jobs.job import SUBMIT, Job, default_name

    place.refuse_others(scheduler)
    checked = check_plan(plan_of(plan, question))
    if checked.rejections:
        return print_refused(checked.rejections, json=json)
    job_name = name or default_name(checked.plan)
    mount = (place.mount or "/fsx") if scheduler == "k8s" else None
    job = Job(
        name=job_name,
        plan=checked.plan,
        training=_from_anywhere(training, plan, mount),
        run=run_folder or (f"{mount}/{job_name}" if mount else "run"),
        setup=setup or "",
    )
    files = _files(job, scheduler, place)
    if submit:
        _refuse_without(files.submitter, out)
    _write(files, out, checked.plan)
    if submit:  # the job's own script prints job ids, the line to watch and the log
        done = subprocess.run(["bash", str(out / SUBMIT)], check=False, stdout=sys.stderr if json else None)
        if done.returncode:
            raise RunFailed(f"bash {out / SUBMIT} ended with exit code {done.returncode}; nothing more was submitted")
    if json:
        print_json({"folder": str(out), "files": list(files.texts), "name": job.name, "plan": job.hash})
    elif not submit:
        print(_summary(job, files, out))
    return 0


def _files(job: "Job", scheduler: "Scheduler", place: JobPlace) -> "Files":
    from autoshard.jobs.kubernetes import KubernetesWants, kubernetes_files
    from autoshard.jobs.shell import torchrun_files
    from autoshard.jobs.slurm import SlurmWants, slurm_files

    if scheduler == "torchrun":
        return torchrun_files(job)
    if scheduler == "slurm":
        replans, profile = place.on_failure == "replan", place.profile or "plain"
        wants = SlurmWants(profile=profile, partition=place.partition, time=place.time, replans=replans)
        return slurm_files(job, wants)
    assert place.image and place.claim, "demanded before"
    profile, mount = place.profile or "trainjob", place.mount or "/fsx"
    return kubernetes_files(job, KubernetesWants(image=place.image, claim=place.claim, mount=mount, profile=profile))


def _from_anywhere(training: Training, path: Path, mount: str | None) -> Training:
    """Let paths lead where they lead from here, in a job that runs in its own folder; from a volume, in a container."""
    here = Path(mount) if mount else Path.cwd()

    def absolute(name: str) -> str:
        return name if "://" in name else str(here / name)

    data = training.data.seen_from(path.parent) if is_recipe(path) and not mount else training.data
    sets = {absolute(one): weight for one, weight in data.sets.items()}
    saved, weights = training.checkpoint.to, training.init_weights
    to = saved if saved in (None, "none") else absolute(saved)
    return replace(
        training, data=replace(data, sets=sets), checkpoint=replace(training.checkpoint, to=to),
        init_weights=weights and absolute(weights),
    )  # fmt: skip


def _write(files: "Files", out: Path, plan: "Plan") -> None:
    """Write a job into a new folder, or over one of the same plan."""
    from autoshard.jobs.job import NODE, PLAN
    from autoshard.plan.codec import fingerprint, load

    if out.is_dir() and any(out.iterdir()):
        node, read = out / NODE, out / PLAN
        made = node.is_file() and read.is_file() and _MADE in node.read_text(encoding="utf-8", errors="replace")
        require((made, f"--out {out}", "holds files that are no job, and none is overwritten. Name another folder"))
        same = fingerprint(load(read)) == fingerprint(plan)
        require((same, f"--out {out}", "holds the job of another plan. Name another folder"))
        for old in (*out.glob("*.sbatch"), *out.glob("*.yaml"), *out.glob("*.sh")):
            old.unlink()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.texts.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError.of(f"--out {out}", f"cannot be written: {error.strerror or error}") from None


def _refuse_without(program: str | None, out: Path) -> None:
    """Refuse to submit where there is nothing to submit to."""
    if program is None:
        raise InputError.of("--submit", "torchrun is started by hand on every node. Leave it out")
    there = f"Type the same where the cluster's jobs are submitted, or leave --submit out, take {out} there, and type"
    if which(program) is None:
        raise InputError.of("--submit", f"there is no {program} here. {there} bash {out}/submit.sh")


def _summary(job: "Job", files: "Files", out: Path) -> str:
    """Return what was made and what to type next."""
    from autoshard.jobs.job import NODE, SUBMIT
    from autoshard.units import format_seconds

    prediction = job.plan.prediction
    assert prediction, "a checked plan has one"
    steps = job.training.steps
    whole = f"{format_seconds(steps * prediction.step_time_s)} for {steps} steps"
    took = f"{format_seconds(prediction.step_time_s)} a step, {whole}"
    folder = shlex.quote(str(out))
    first = f"wrote {out}: {', '.join(files.texts)}\npredicted: {took}"
    if files.submitter:
        return f"{first}\nnext: bash {folder}/{SUBMIT}"
    stages = ("compile", "train") if job.compiles else ("train",)
    where = "" if job.num_nodes == 1 else "NODE_RANK=0 MASTER_ADDR=NODE-0 "
    numbers = "" if job.num_nodes == 1 else f" on every node, NODE_RANK from 0 to {job.num_nodes - 1}"
    lines = [f"next: {where}bash {folder}/{NODE} {stage}{numbers}" for stage in stages]
    return "\n".join([first, *lines])
