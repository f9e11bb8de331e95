"""A job under Slurm: one template, of which plain Slurm, HyperPod and ParallelCluster are profiles."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoshard.errors import require
from autoshard.extensions import EXTENSIONS
from autoshard.jobs.job import NODE, SUBMIT, Files, Job, common_texts
from autoshard.jobs.shell import FIRST, HERE, STRICT, meeting_of, node_text, setup_lines

_NOTICE_S = 300  # between the signal and the end of a job's time: a step, a checkpoint, and what torchrun waits
_LOST_S = 120  # until nodes that are gone count as such: slurmctld asks all within a third of SlurmdTimeout, 300 s
_TIME = r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}"  # sbatch's manual: minutes, [hours:]minutes:seconds, days-hours[...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """In what a kind of Slurm cluster differs."""

    srun: tuple[str, ...] = ()  # words more
    requeues: bool = True  # the job queues itself again after a failure
    by_type: bool = False  # nodes have their instance type as a feature


# cited: docs.aws.amazon.com/sagemaker, "Automatic node recovery and auto-resume": what srun --auto-resume=1 has started
# is started again after faulty nodes were replaced. ParallelCluster gives nodes Feature=dynamic,<instance type>,... in
# its partition files, and starts them only when a job has them: hence --wait-all-nodes.
PROFILES: Mapping[str, Profile] = {
    "plain": Profile(),
    "hyperpod": Profile(srun=("--auto-resume=1",), requeues=False),
    "parallelcluster": Profile(by_type=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmWants:
    """What the user says of the Slurm cluster."""

    profile: str = "plain"
    partition: str | None = None
    time: str | None = None
    replans: bool = False  # after a failure, for the nodes that are left

    def __post_init__(self) -> None:
        """Refuse what sbatch would not take."""
        known, time = ", ".join(PROFILES), self.time
        require(
            (self.profile in PROFILES, "--profile", f"{self.profile!r} is none of Slurm's: {known}"),
            (
                not self.replans or self.profile != "hyperpod",
                "--on-failure",
                "hyperpod replaces nodes that are lost. Leave it out",
            ),
            (
                self.partition is None or bool(re.fullmatch(r"[\w.,+-]+", self.partition)),
                "--partition",
                f"must be a name, not {self.partition!r}",
            ),
            (
                time is None or bool(re.fullmatch(_TIME, time)),
                "--time",
                f"must be minutes, hours:minutes:seconds or days-hours, not {time!r}",
            ),
        )


def slurm_files(job: Job, wants: SlurmWants) -> Files:
    """Return the files of a job under Slurm."""
    texts = {**common_texts(job), NODE: node_text(job, meeting_of(job, "slurm"))}
    if job.compiles:
        texts["compile.sbatch"] = _joined(_header(job, wants, "compile"), [_srun(wants, "compile")])
    profile = PROFILES[wants.profile]
    train = _again(job, wants) if profile.requeues else [_srun(wants, "train")]
    texts["train.sbatch"] = _joined(_header(job, wants, "train"), train)
    return Files(texts={**texts, SUBMIT: _joined(_submit(job))}, submitter="sbatch")


def _joined(*parts: Iterator[str] | list[str]) -> str:
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _header(job: Job, wants: SlurmWants, stage: str) -> Iterator[str]:
    """Yield what sbatch reads: one task on every node, with all that the node has."""
    profile = PROFILES[wants.profile]
    yield FIRST
    yield from job.title("The compile job." if stage == "compile" else "The training job.")
    options = {
        "job-name": f"{job.name}-{stage}" if stage == "compile" else job.name,
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        "exclusive": None,
        "mem": 0,
        "gpus-per-node": job.plan.cluster.chips_per_node if job.accelerator == "gpu" else "",
        "constraint": (job.instance_type or "") if profile.by_type else "",
        "wait-all-nodes": 1,
        "partition": wants.partition or "",
        "time": wants.time or "",
        "signal": f"TERM@{_NOTICE_S}" if wants.time and stage == "train" else "",
        "output": f"{stage}-%j.log",
        "open-mode": "append",
    }
    for name, value in options.items():
        if value != "":
            yield f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={value}"
    if profile.requeues:
        yield "#SBATCH --requeue"
    if wants.replans and stage == "train":
        yield "#SBATCH --no-kill"  # this script is to see that a node is lost
    yield STRICT
    yield 'cd "$SLURM_SUBMIT_DIR"'


def _srun(wants: SlurmWants, stage: str) -> str:
    words = ("srun", *PROFILES[wants.profile].srun, "--kill-on-bad-exit=1", "--cpu-bind=none", f"bash {NODE} {stage}")
    return " ".join(words)


def _again(job: Job, wants: SlurmWants) -> Iterator[str]:
    """Yield a run that is queued again as long as it gets to begin."""
    attempts = f"{job.run}/attempts.jsonl"
    yield "# A run that began and failed is queued again, and goes on from its newest checkpoint. One that did not"
    yield "# begin is not: autoshard refuses what is wrong, and a sixth start in a row without a newer checkpoint."
    yield f"begun() {{ if [[ -f {attempts} ]]; then wc -l < {attempts}; else echo 0; fi; }}"
    yield "before=$(begun)"
    if wants.replans:
        yield from _replanned(job, wants)
    yield f"if {_srun(wants, 'train')}; then exit 0; fi"
    yield "if [[ $(begun) -eq $before ]]; then exit 1; fi"
    if wants.replans:
        yield "if replanned; then exit 1; fi"
    yield 'scontrol requeue "$SLURM_JOB_ID" && sleep 60  # and is ended'


def _replanned(job: Job, wants: SlurmWants) -> Iterator[str]:
    """Yield a function that submits a plan for the nodes that are left, if those are fewer than the plan's."""
    given = {"profile": wants.profile, "partition": wants.partition, "time": wants.time, "setup": job.setup or None}
    words = ["--scheduler", "slurm", "--on-failure", "replan", "--submit"]
    words += [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]
    run = job.run if job.run.startswith("/") else f"$PWD/{job.run}"
    yield "# Where fewer nodes are left than the plan needs, a plan for those is submitted instead, for the same run."
    yield "replanned() {"
    yield f"  sleep {_LOST_S}  # until nodes that are gone count as such"
    yield '  local alive=(--responding "--states=idle,mixed,allocated,completing" --partition="$SLURM_JOB_PARTITION")'
    yield "  local left; left=$(sinfo \"${alive[@]}\" --noheader --format=%D | awk '{ n += $1 } END { print n + 0 }')"
    yield f"  if [[ $left -eq 0 || $left -ge {job.num_nodes} ]]; then return 1; fi"
    yield from (f"  {line}" for line in (setup_lines(job) if job.setup else []))
    extend = "".join(f" --extend {path.name}" for path in EXTENSIONS.files)
    yield f'  autoshard plan --like plan.json{extend} --nodes "$left" --out "plan-$left.json" || return 1'
    yield f'  autoshard launch "plan-$left.json" --config training.yaml --out "on-$left-nodes" --run-folder "{run}" \\'
    yield f"    {shlex.join(words)}"
    yield "}"


def _submit(job: Job) -> Iterator[str]:
    yield FIRST
    yield from job.title(f"Submits the job: bash {SUBMIT}.")
    yield STRICT
    yield HERE
    if job.compiles:
        yield "compile=$(sbatch --parsable compile.sbatch)"
        yield 'after=(--dependency="afterok:${compile%%;*}" --kill-on-invalid-dep=yes)'
        yield 'train=$(sbatch --parsable "${after[@]}" train.sbatch)'
        yield 'echo "compile job: $compile"'
        yield 'echo "training job: $train, which starts when the compile job has ended well"'
        yield 'echo "watch: squeue --jobs ${compile%%;*},${train%%;*}"'
        yield 'echo "log: tail -F $PWD/compile-${compile%%;*}.log $PWD/train-${train%%;*}.log"'
    else:
        yield "train=$(sbatch --parsable train.sbatch)"
        yield 'echo "training job: $train"'
        yield 'echo "watch: squeue --jobs ${train%%;*}"'
        yield 'echo "log: tail -F $PWD/train-${train%%;*}.log"'
