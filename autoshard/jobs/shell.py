"""What every node of a job does, under any scheduler: ``node.sh``. Only how nodes find each other differs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoshard.jobs.job import NODE, PLAN, TRAINING, Files, Job, Scheduler, common_texts
from autoshard.plan.nxd.environment import COMPILER_FLAGS

STRICT = "set -euo pipefail"
HERE = 'cd "$(dirname "${BASH_SOURCE[0]}")"'
FIRST = "#!/usr/bin/env bash"
_CACHE = "NEURON_COMPILE_CACHE_URL"
_WAIT_S = 120  # for a file of node 0 to be seen: file systems over a network may keep for a minute what they knew


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How a scheduler tells a node which it is, and where all meet; shell words."""

    node: str
    address: str
    port: str
    start: str  # tells one start of the job from the next


# cited: Slurm sets SLURM_NODEID, SLURM_STEP_NODELIST and SLURM_RESTART_COUNT (srun's and sbatch's manuals, 22.05);
# Kubernetes sets JOB_COMPLETION_INDEX in the pods of an indexed Job, which those of a JobSet are; the controller of
# PyTorchJob counts its pods in RANK, and sets MASTER_ADDR and MASTER_PORT (kubeflow/training-operator 1417bbc,
# pkg/controller.v1/pytorch/envvar.go).
MEETINGS: Mapping[str, Meeting] = {
    "slurm": Meeting(
        node="$SLURM_NODEID",
        address='$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)',
        port="$((20000 + SLURM_JOB_ID % 10000))",
        start="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}",
    ),
    "trainjob": Meeting(node="$JOB_COMPLETION_INDEX", address="$MASTER_ADDR", port="29500", start="$MASTER_ADDR"),
    "pytorchjob": Meeting(node="$RANK", address="$MASTER_ADDR", port="$MASTER_PORT", start="$MASTER_PORT"),
    "torchrun": Meeting(
        node="${NODE_RANK:?say which node this is: NODE_RANK=0 on the first}",
        address="${MASTER_ADDR:?name the first node: MASTER_ADDR=its address}",
        port="${MASTER_PORT:-29500}",
        start="$MASTER_ADDR:$port",
    ),
}
_ALONE = Meeting(node="0", address="127.0.0.1", port="${MASTER_PORT:-29500}", start="")


def meeting_of(job: Job, scheduler: Scheduler, kind: str = "") -> Meeting:
    """Return how the nodes of a job meet; a single node that nobody counts is the first."""
    return _ALONE if scheduler == "torchrun" and job.num_nodes == 1 else MEETINGS[kind or scheduler]


def torchrun_files(job: Job) -> Files:
    """Return the files of a job without a scheduler: somebody starts it by hand on every node."""
    return Files(texts={**common_texts(job), NODE: node_text(job, meeting_of(job, "torchrun"))}, submitter=None)


def node_text(job: Job, meeting: Meeting) -> str:
    """Write the script of a node."""
    what = f"What every node does: bash {NODE} {'compile, then ' if job.compiles else ''}train."
    parts = [
        [FIRST, *job.title(what), STRICT, HERE],
        _words(job),
        ["# Which node this is, and where all of them meet.", *_places(meeting)],
        [f"# Where the run writes{', and where compiled graphs lie' if job.compiles else ''}.", *_folders(job)],
        ["# What makes torchrun and autoshard known here.", *setup_lines(job)] if job.setup else [],
        _variables(job),
        _token(job, meeting) if job.num_nodes > 1 else [],
        _start(job),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _words(job: Job) -> list[str]:
    takes = "compile | train" if job.compiles else "train"
    return [
        f'fail() {{ echo "{NODE} on $(hostname): $1" >&2; exit 1; }}',
        "stage=${1:-}",
        f'case $stage in {takes}) ;; *) fail "type: bash {NODE} {takes}" ;; esac',
        f'grep -q {job.hash} {PLAN} || fail "{PLAN} is not the plan of this job. Type autoshard launch again"',
    ]


def _places(meeting: Meeting) -> Iterator[str]:
    for name in ("node", "address", "port"):
        text: str = getattr(meeting, name)
        yield f"{name}={text}"


def _folders(job: Job) -> Iterator[str]:
    run = job.run if job.run.startswith("/") else f"$PWD/{job.run}"
    yield f"run={run}"
    if job.compiles:
        yield f"export {_CACHE}=${{{_CACHE}:-$run-cache}}"


def setup_lines(job: Job) -> list[str]:
    """Run the user's line; scripts that activate environments read variables that nobody has set."""
    return [
        "set +u",
        "# shellcheck disable=SC1091",
        job.setup,
        "set -u",
    ]


def _variables(job: Job) -> list[str]:
    if not job.variables:
        return []
    reason = "# The environment of the plan, as docs/trainium.md of autoshard explains it. What is set already stays."
    return [reason, *(_export(name, value) for name, value in job.variables.items())]


def _export(name: str, value: str) -> str:
    """Set a variable as the engine does: the user's compiler flags come after the plan's, so that they win."""
    text = f"{value} ${{{name}:-}}" if name == COMPILER_FLAGS else f"${{{name}:-{value}}}"
    return f'export {name}="{text}"'


def _token(job: Job, meeting: Meeting) -> list[str]:
    folders = f'"$run" "${_CACHE}"' if job.compiles else '"$run"'
    return [
        "# Every node must see what node 0 writes, or these folders are not shared.",
        f"token={job.hash[:12]}-{meeting.start}",
        f"for folder in {folders}; do",
        "  if [[ $folder == *://* ]]; then continue; fi",
        '  mkdir -p "$(dirname "$folder")"',
        '  if [[ $node -eq 0 ]]; then echo "$token" > "$folder.token"; fi',
        f"  for ((second = 0; second < {_WAIT_S}; second++)); do",
        '    if [[ "$(cat "$folder.token" 2> /dev/null)" == "$token" ]]; then continue 2; fi',
        "    sleep 1",
        "  done",
        '  fail "no $folder.token of node 0 here: give --run-folder on a file system that all nodes share"',
        "done",
    ]


def _start(job: Job) -> list[str]:
    ranks = job.plan.cluster.ranks_per_node
    lines = [f'ranks={ranks} words=(--out "$run")']
    if job.compiles:
        old = '"$run-compiled"' if job.num_nodes == 1 else '"$run-compiled/node-$node" "$run-compiled/short"'
        lines += [
            "if [[ $stage == compile ]]; then  # one process, which starts the ranks; an old try is in the way",
            f"  rm -rf {old}",
            '  ranks=1 words=(--compile-only --out "$run-compiled")',
            "fi",
        ]
    where = '--node-rank "$node" --master-addr "$address" --master-port "$port"'
    return [
        *lines,
        f'exec torchrun --nnodes {job.num_nodes} --nproc-per-node "$ranks" {where} \\',
        f'  -m autoshard.cli run {PLAN} --config {TRAINING} "${{words[@]}}"',
    ]
