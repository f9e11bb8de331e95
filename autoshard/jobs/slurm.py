"""A job under Slurm: one template, of which plain Slurm, HyperPod and ParallelCluster are profiles."""

import math
from collections.abc import Iterator

from autoshard.cost.storage import resuming, stopping
from autoshard.errors import require
from autoshard.extensions import EXTENSIONS
from autoshard.jobs.job import FIRST, HERE, NODE, STRICT, SUBMIT, Files, Job, default_name
from autoshard.jobs.place import TO_SBATCH
from autoshard.jobs.quoting import shell_words, word
from autoshard.jobs.shell import node_text, setup_lines
from autoshard.units import format_seconds

_LONGEST_NOTICE_S = 65535  # sbatch's manual, 22.05 and 25.05
_EARLY_S = 120  # that manual: the signal may come 60 s early; and what lies between the job's start and the script's
# Of lines of name, state, processors and devices: how many nodes a job may have that names its present ones so. A state
# ends in a sign where a node sleeps (~: it can be woken) or is lost (*).
_COUNT = r"""
      BEGIN { for (i = split(mine, names); i; i--) own[names[i]] }
      $2 ~ /^(idle|mix|alloc|comp)[a-z]*[~#-]?$/ { state[$1] = $2; type[$1] = $3 " " $4 }
      END {
        for (name in type) if (name in own) types[type[name]]
        for (name in type) n += name in own || (state[name] ~ /^idle/ && type[name] in types)
        print n + 0
      }"""
_NO_JOB_HERE = [  # Slurm gives the script's text a place of its own, so that only the submitter's folder is known
    f"if [[ ! -f {NODE} ]]; then",
    f'  echo "$SLURM_SUBMIT_DIR holds no {NODE}: submit by bash {SUBMIT}, or type sbatch in the folder of the job" >&2',
    "  exit 1",
    "fi",
]
_REQUEUE = 'scontrol requeue "$SLURM_JOB_ID" && sleep 60  # and is ended'
_LOST_S = 120  # until nodes that are gone count as such: slurmctld asks all within a third of SlurmdTimeout, 300 s


def slurm_files(job: Job) -> Files:
    """Return the files of a job under Slurm."""
    _refuse_short(job)
    texts = {**job.common_texts(), NODE: node_text(job, "slurm" if job.place.container_image is None else "pyxis")}
    if job.compiles:
        texts["compile.sbatch"] = _script(job, "compile") + f"\n{_srun(job, 'compile')}\n"
    limit_s = job.place.limit_s
    work = _again(job)
    if job.place.kind == "hyperpod":
        work = iter([_srun(job, "train")]) if limit_s is None else _after_its_time(job, limit_s)
    texts["train.sbatch"] = "\n".join([_script(job, "train"), *work]) + "\n"
    return Files(texts={**texts, SUBMIT: "\n".join(_submit(job)) + "\n"}, submitter="sbatch")


def _start_needs(job: Job) -> tuple[int, str]:
    """Return the seconds in which a start gets through a step, and what takes them."""
    stop = stopping(job.plan)
    parts = {"to read a checkpoint": resuming(job.plan).read_s, "for a step": stop.step_s, "to stop": job.notice_s}
    return math.ceil(sum(parts.values())), ", ".join(
        f"{format_seconds(time_s)} {what}" for what, time_s in parts.items()
    )


def _refuse_short(job: Job) -> None:
    """Refuse a time in which a start gets through no step, or in which no notice can be given."""
    limit_s, (needed_s, needed) = job.place.limit_s, _start_needs(job)
    slow = f"Slurm gives {_LONGEST_NOTICE_S} s of notice at most, and this run needs {job.notice_s} s to stop"
    short = (
        f"is {format_seconds(limit_s or 0)}, and a start needs {needed}. Type --time {math.ceil(needed_s / 60)} or more"
    )
    require(
        (job.notice_s <= _LONGEST_NOTICE_S, "--checkpoint.grace-seconds", f"{slow}. Set it to what you can wait for"),
        (limit_s is None or limit_s >= needed_s, f"--time {job.place.time}", short),
    )


def _long_enough(job: Job) -> Iterator[str]:
    """Yield lines that end a job in whose time, which its partition sets, no start gets through a step.

    Each start would be stopped and queued again, until five of them have come to no step.
    """
    needed_s, needed = _start_needs(job)
    minutes = math.ceil(needed_s / 60)
    yield 'ends=$(scontrol show job "$SLURM_JOB_ID" | sed -n "s/.* EndTime=\\([^ ]*\\).*/\\1/p") || ends='
    yield 'if ends=$(date -d "${ends:-unknown}" +%s 2> /dev/null) &&'
    yield f"  [[ $((ends - $(date +%s))) -lt {needed_s} ]]; then"
    yield f'  echo "partition $SLURM_JOB_PARTITION gives $((ends - $(date +%s))) s, and a start needs {needed}:" >&2'
    yield f'  echo "launch again with --time {minutes} or more, or with another --partition" >&2'
    yield "  exit 1"
    yield "fi"


def _script(job: Job, stage: str) -> str:
    """Return what sbatch reads, one task on every node with all that the node has, and how the script begins.

    cited: ParallelCluster gives nodes Feature=dynamic,<instance type>,... in its partition files, and starts them only
    when a job has them: hence --wait-all-nodes.
    """
    place, trains = job.place, stage == "train"
    options = {
        "job-name": job.name if trains else f"{job.name}-{stage}",
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        "exclusive": None,
        "mem": 0,
        "gpus-per-node": job.plan.cluster.chips_per_node if job.accelerator == "gpu" else "",
        "constraint": (job.instance_type or "") if place.kind == "parallelcluster" else "",
        "wait-all-nodes": 1,
        **{name: getattr(place, name) or "" for name in ("partition", *TO_SBATCH)},
        "time": place.time or "",
        "signal": f"TERM@{job.notice_s}" if trains else "",  # also where the partition sets the time
        "output": f"{stage}-%j.log",
        "open-mode": "append",
        "requeue": None if place.kind != "hyperpod" or (place.time and trains) else "",
        "no-kill": None if place.on_failure == "replan" and trains else "",
    }
    values = {name: "" if value is None else f"={value}" for name, value in options.items()}
    lines = [f"#SBATCH --{name}{value}" for name, value in values.items() if value != "="]
    title = job.title("The training job." if trains else "The compile job.")
    checks = [*_NO_JOB_HERE, *(_long_enough(job) if trains and place.time is None else ())]
    return "\n".join([FIRST, *title, *lines, STRICT, 'cd "$SLURM_SUBMIT_DIR"', *checks, ""])


def _segment(job: Job) -> int | None:
    """Return how many nodes of a rack of GPUs the job takes, which the plan has counted on; None if Slurm is not told.

    cited: sbatch's manual, 25.05: with the block topology a job's nodes come in segments of this size, each of them in
    one block; a number of nodes that the size does not divide is refused.
    """
    cluster, num_nodes = job.plan.cluster, job.num_nodes
    in_racks = job.accelerator == "gpu" and cluster.nodes_per_ultraserver > 1
    size = min(num_nodes, cluster.nodes_together)
    return size if in_racks and num_nodes > 1 and num_nodes % size == 0 else None


def _srun(job: Job, stage: str) -> str:
    """Return the line that starts the nodes.

    cited: docs.aws.amazon.com/sagemaker, "Automatic node recovery and auto-resume": what srun --auto-resume=1 has
    started is started again after faulty nodes were replaced.
    """
    resumes = "--auto-resume=1 " if job.place.kind == "hyperpod" else ""
    return f"srun {resumes}--kill-on-bad-exit=1 --cpu-bind=none{_container(job)} bash {NODE} {stage}"


def _container(job: Job) -> str:
    """Return the options of pyxis: the image, and the folder of the job at its own place in it.

    cited: NVIDIA/pyxis, README.md, "Command-line arguments".
    """
    image, mounts = job.place.container_image, job.place.container_mounts
    if image is None:
        return ""
    more = word(f",{mounts}") if mounts else ""
    return f' --container-image={word(image)} --container-mounts="$PWD:$PWD"{more} --container-workdir="$PWD"'


def _again(job: Job) -> Iterator[str]:
    """Yield lines that start the run, and queue it again after a failure if it had begun."""
    attempts, replans = word(f"{job.run}/attempts.jsonl"), job.place.on_failure == "replan"
    yield "# A run that began and failed is queued again, and goes on from its newest checkpoint. One that did not"
    yield "# begin is not: autoshard refuses what is wrong, and a sixth start in a row that took no step."
    yield f"begun() {{ grep -sc '\"from\"' -- {attempts} || true; }}"
    yield "before=$(begun)"
    if replans:
        yield from _replanned(job)
    yield f"if {_srun(job, 'train')}; then exit 0; fi"
    yield "if [[ $(begun) -eq $before ]]; then exit 1; fi"
    if replans:
        yield "if replanned; then exit 1; fi"
    yield _REQUEUE


def _after_its_time(job: Job, limit_s: int) -> Iterator[str]:
    """Yield lines that start a run on HyperPod, and queue it again when its time is up; srun replaces failed nodes."""
    yield "# srun starts a run again whose nodes were replaced. One that was stopped because its time was up goes on in"
    yield "# a new job."
    yield f"if {_srun(job, 'train')}; then exit 0; fi"
    yield f"if [[ $SECONDS -lt {max(0, limit_s - job.notice_s - _EARLY_S)} ]]; then exit 1; fi"
    yield _REQUEUE


def _replanned(job: Job) -> Iterator[str]:
    """Yield a shell function that submits a plan for the remaining nodes, if they are fewer than those of the plan."""
    place = job.place
    names = ("partition", "time", *TO_SBATCH, "container_image", "container_mounts")
    chosen = job.name if job.name != default_name(job.plan) else None  # else the next plan's own tells the two apart
    given = {"profile": place.kind, **{name: getattr(place, name) for name in names}, "setup": job.setup or None}
    given |= {"name": chosen}
    again = ["--scheduler", "slurm", "--on-failure", "replan", "--submit"]
    again += [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    extend = "".join(f" {word(f'--extend={path.name}')}" for path in EXTENSIONS.files)
    yield "# Where fewer nodes are left than the plan needs, a plan for at most those is submitted instead, for the"
    yield "# same run. Left are the nodes of this job that answer, and idle ones of their type (processors, devices)."
    yield "replanned() {"
    yield f"  sleep {_LOST_S}  # until nodes that are gone count as such"
    yield "  local left mine; mine=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | tr '\\n' ' ')"
    yield '  left=$(sinfo --responding --Node --noheader --partition="$SLURM_JOB_PARTITION" --format="%N %t %c %G" |'
    yield f"    awk -v mine=\"$mine\" '{_COUNT}')"
    yield f"  if [[ $left -eq 0 || $left -ge {job.num_nodes} ]]; then return 1; fi"
    yield from (f"  {line}" for line in setup_lines(job))
    yield f'  autoshard plan --like plan.json{extend} --nodes "$left" --out "plan-$left.json" --force || return 1'
    folders = f'--out "on-$left-nodes" --run-folder {job.run_word}'
    yield f'  autoshard launch "plan-$left.json" --config training.yaml {folders} \\'
    yield f"    {shell_words(again)}"
    yield "}"


def _if_known(segment: str) -> Iterator[str]:
    """Yield lines that ask sbatch whether it has an option: with an unknown one it takes no job at all."""
    yield "# Equally many nodes of each rack, as the plan counts on. An older Slurm has no such option."
    yield f"segment={segment}"
    yield 'if ! sbatch "$segment" --version > /dev/null 2>&1; then'
    yield '  echo "note: this sbatch has no $segment: nodes may lie in more racks than the plan counts on" >&2'
    yield "  segment="
    yield "fi"


def _submit(job: Job) -> Iterator[str]:
    """Yield the script that submits the job: the compile job first, where there is one."""
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
        yield 'printf \'log: tail -F %q %q\\n\' "$PWD/compile-${compile%%;*}.log" "$PWD/train-${train%%;*}.log"'
    else:
        segment = _segment(job)
        yield from _if_known(f"--segment={segment}") if segment else ()
        more = ' ${segment:+"$segment"}' if segment else ""
        yield f"train=$(sbatch --parsable{more} train.sbatch)"
        yield 'echo "training job: $train"'
        yield 'echo "watch: squeue --jobs ${train%%;*}"'
        yield "printf 'log: tail -F %q\\n' \"$PWD/train-${train%%;*}.log\""
    yield "job=${train%%;*}  # scancel alone kills after Slurm's KillWait"
    yield 'echo "to save and stop: scontrol update JobId=$job Requeue=0 && scancel --signal=TERM $job"'
    yield f"printf 'run: autoshard watch %q\\n' {job.run_word}"
