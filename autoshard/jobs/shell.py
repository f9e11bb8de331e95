"""What every node of a job does, under any scheduler: ``node.sh``. Only how nodes find each other differs."""

import hashlib
from collections.abc import Mapping

from autoshard.jobs.job import FIRST, HERE, NODE, PLAN, STRICT, TRAINING, Files, Job
from autoshard.plan.codec import dump
from autoshard.plan.environment import COMPILER_FLAGS, environment

_OPEN_FILES = 65535  # cited: aws-neuron/neuronx-distributed-training 9169aa0, examples/train_setup.sh
_PORT_CHECK = [
    "# Where the system may give that port to another connection, a start fails now and then.",
    "if read -r least most 2> /dev/null < /proc/sys/net/ipv4/ip_local_port_range &&",
    '  ((least <= port && port <= most)) && ! grep -qsw "$port" /proc/sys/net/ipv4/ip_local_reserved_ports; then',
    '  echo "port $port may be taken on $(hostname): sysctl -w net.ipv4.ip_local_reserved_ports=$port" >&2',
    "fi",
]
_FREED_S = 15  # in which the ranks of a start before this one end, and free their port
_PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # not its option --shutdown-timeout, which torch before 2.12 refuses
_CACHE = "NEURON_COMPILE_CACHE_URL"
_WAIT_S = 120  # for a file of node 0 to be seen: file systems over a network may keep for a minute what they knew

# How a scheduler tells a node which it is, where all meet, and one start of the job from the next; shell words.
# cited: Slurm sets SLURM_NODEID, SLURM_STEP_NODELIST and SLURM_RESTART_COUNT (srun's and sbatch's manuals, 22.05);
# Kubernetes sets JOB_COMPLETION_INDEX in the pods of an indexed Job, which those of a JobSet are; the controller of
# PyTorchJob counts its pods in RANK, and sets MASTER_ADDR and MASTER_PORT (kubeflow/training-operator 1417bbc,
# pkg/controller.v1/pytorch/envvar.go).
_MEETINGS: Mapping[str, tuple[str, str, str, str]] = {  # node, address, port, start
    "slurm": (
        "${SLURM_NODEID:?srun of a job starts this script: bash submit.sh}",
        '$(scontrol show hostnames "$SLURM_STEP_NODELIST" | sed -n 1p)',
        "$((20000 + SLURM_JOB_ID % 10000))",
        "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}",
    ),
    "pyxis": (  # scontrol is not in the container
        "${SLURM_NODEID:?srun of a job starts this script: bash submit.sh}",
        "$(python3 -c \"from autoshard.runtime.launch import first_node; print(first_node('$SLURM_STEP_NODELIST'))\")",
        "$((20000 + SLURM_JOB_ID % 10000))",
        "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}",
    ),
    "trainjob": (
        "${JOB_COMPLETION_INDEX:?a pod starts this script: bash submit.sh}",
        "$MASTER_ADDR",
        "29500",
        "$MASTER_ADDR",
    ),
    "pytorchjob": ("${RANK:?a pod starts this script: bash submit.sh}", "$MASTER_ADDR", "$MASTER_PORT", "$MASTER_PORT"),
    "torchrun": (
        "${NODE_RANK:?say which node this is: NODE_RANK=0 on the first}",
        "${MASTER_ADDR:?name the first node: MASTER_ADDR=its address}",
        "${MASTER_PORT:-29500}",
        "$MASTER_ADDR:$port",
    ),
    "alone": ("0", "127.0.0.1", "${MASTER_PORT:-29500}", ""),
}


def torchrun_files(job: Job) -> Files:
    """Return the files of a job without a scheduler: somebody starts it by hand on every node."""
    meeting = "alone" if job.num_nodes == 1 else "torchrun"
    return Files(texts={**job.common_texts(), NODE: node_text(job, meeting)})


def node_text(job: Job, meeting: str) -> str:
    """Write the script of a node, for nodes that meet as those of slurm, trainjob, pytorchjob or torchrun do."""
    node, address, port, start = _MEETINGS[meeting]
    digest = hashlib.sha256(dump(job.plan).encode()).hexdigest()
    takes = "compile | train" if job.compiles else "train"
    variables = [
        # What the engine sets too, so that nothing depends on who sets it. The user's compiler flags come after the
        # plan's, so that they win, as there.
        f'export {name}="{f"{value} ${{{name}:-}}" if name == COMPILER_FLAGS else f"${{{name}:-{value}}}"}"'
        for name, value in environment(job.plan).items()
    ]
    guide = "docs/developers/trainium.md of autoshard"
    explained = f"# The environment of the plan, as {guide} explains it. What is set already stays."
    what = f"What every node does: bash {NODE} {'compile, then ' if job.compiles else ''}train."
    parts = [
        [FIRST, *job.title(what), STRICT, HERE],
        [
            f'fail() {{ echo "{NODE} on $(hostname): $1" >&2; exit 1; }}',
            "stage=${1:-}",
            f'case $stage in {takes}) ;; *) fail "type: bash {NODE} {takes}" ;; esac',
            f'echo "{digest}  {PLAN}" | sha256sum --check --status ||',
            f'  fail "{PLAN} is not the plan of this job. Type autoshard launch again"',
            f'ulimit -S -n {_OPEN_FILES} 2> /dev/null || ulimit -S -n "$(ulimit -H -n)"',
        ],
        ["# Which node this is, and where all of them meet.", f"node={node}", f"address={address}", f"port={port}"],
        _PORT_CHECK if job.num_nodes > 1 else [],
        _free_port(meeting),
        [
            f"# Where the run writes{', and where compiled graphs lie' if job.compiles else ''}.",
            f"run={job.run_word}",
            *([f"export {_CACHE}=${{{_CACHE}:-$run-cache}}"] if job.compiles else []),
        ],
        ["# What makes torchrun and autoshard known here.", *setup_lines(job)] if job.setup else [],
        [explained, *variables] if variables else [],
        [
            "# How long torchrun waits after SIGTERM for ranks to end a step and save it, in seconds; by itself 30.",
            f'export {_PATIENCE}="${{{_PATIENCE}:-{job.stopping_s}}}"',
        ],
        [
            "# Files of this folder do not pass for modules of Python that have their names.",
            "export PYTHONSAFEPATH=1",
        ],
        _token(job, start) if job.num_nodes > 1 else [],
        _start(job),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _free_port(meeting: str) -> list[str]:
    """Return lines that wait for the port on the first node, and say that another program has it: torchrun's stack."""
    by_hand = meeting in ("torchrun", "alone")
    remedy = "set MASTER_PORT to another, alike on all nodes" if by_hand else "ss -tlnp says which program listens"
    return [
        'free() { ! (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; }',
        "if [[ $node -eq 0 ]]; then",
        f"  for ((second = 0; second < {_FREED_S}; second++)); do",
        "    if free; then break; else sleep 1; fi",
        "  done",
        f'  free || fail "port $port, at which nodes meet, is taken: {remedy}"',
        "fi",
    ]


def setup_lines(job: Job) -> list[str]:
    """Run the user's line; scripts that activate environments read variables that nobody has set."""
    return ["set +u", "# shellcheck disable=SC1091", job.setup, "set -u"] if job.setup else []


def _token(job: Job, start: str) -> list[str]:
    folders = f'"$run" "${_CACHE}"' if job.compiles else '"$run"'
    return [
        "# Every node must see what node 0 writes, or these folders are not shared.",
        f"token={job.hash[:12]}-{start}",
        f"folders=({folders})",
        'for folder in "${folders[@]}"; do',
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
    lines = [f'ranks={job.plan.cluster.ranks_per_node} words=(--out "$run")']
    if job.compiles:
        old = '"$run-compiled"' if job.num_nodes == 1 else '"$run-compiled/node-$node" "$run-compiled/short"'
        lines += [
            "if [[ $stage == compile ]]; then  # one process, which starts the ranks; an old try is in the way",
            f"  rm -rf {old}",
            '  ranks=1 words=(--compile-only --out "$run-compiled")',
            "fi",
        ]
    # The Neuron stack supports torch 2.9, whose torchrun waits 30 s after SIGTERM whatever is set.
    program = "python3 -m autoshard.runtime.agent" if job.compiles else "torchrun"
    where = '--node-rank "$node" --master-addr "$address" --master-port "$port"'
    return [
        *lines,
        f'exec {program} --nnodes {job.num_nodes} --nproc-per-node "$ranks" \\',
        f"  {where} \\",
        f'  -m autoshard.cli run {PLAN} --config {TRAINING} "${{words[@]}}"',
    ]
