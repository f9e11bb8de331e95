"""A sweep handed to others: a job array of Slurm, or a configuration for W&B's own sweep controller."""

import hashlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from autoshard.errors import require
from autoshard.sweep.points import Sweep
from autoshard.sweep.work import SweepJob

PROGRAM = f"{sys.executable} -m autoshard.cli"
_AT_A_TIME = 16


def array_script(sweep: Sweep, jobs: Sequence[SweepJob], source: Path, folder: Path, program: str = PROGRAM) -> str:
    """Write the script of a job array: a task for each job, which leaves its rows for whoever gathers them."""
    many = {job.name for job in jobs if sweep.mode == "run" and not sweep.rehearse and job.points[0].recipe.nodes > 1}
    message = (
        f"a task has one node, and {', '.join(sorted(many)[:3])} runs on more. Set rehearse, or use autoshard launch"
    )
    require((not many, "--scheduler", message))
    name, place = source.stem, shlex.quote(str(folder.resolve()))
    digest = hashlib.sha256("".join(point.id for job in jobs for point in job.points).encode()).hexdigest()[:12]
    size = "#SBATCH --exclusive" if sweep.mode == "run" else "#SBATCH --cpus-per-task=1"
    return f"""\
#!/bin/bash
# The points of the sweep {name} as tasks of a job array. Written by autoshard sweep --scheduler slurm; points {digest}.
# Then: autoshard sweep {source} --out {folder}     gathers the rows, does what is left, and prints the table.
#SBATCH --job-name={name}
#SBATCH --array=0-{len(jobs) - 1}%{_AT_A_TIME}
#SBATCH --nodes=1
#SBATCH --ntasks=1
{size}
#SBATCH --output={folder.resolve()}/task-%a.log
set -euo pipefail
cd {shlex.quote(str(Path.cwd()))}
task=$SLURM_ARRAY_TASK_ID
unset SLURM_PROCID SLURM_NTASKS  # a run starts its own ranks here; it is no task of this job's
exec {program} sweep {shlex.quote(str(source))} --out {place} --task "$task"
"""


def controller_text(sweep: Sweep, source: Path, folder: Path, project: str, program: str = PROGRAM) -> str:
    """Write a configuration for ``wandb sweep``, whose agents call us for every point."""
    import yaml

    parameters = {
        name: {"values": [one[name] for one in choices] if name in sweep.grid else list(range(len(choices)))}
        for name, choices in sweep.axes.items()
    }
    command = [*shlex.split(program), "sweep", str(source.resolve()), "--out", str(folder.resolve()), "--wandb-agent"]
    found = {
        "name": source.stem,
        "project": project,
        "program": "autoshard",  # W&B asks for one; the command says what is called
        "command": command,
        "method": "grid",
        "metric": {"name": f"step_time_s/{'measured' if sweep.mode == 'run' else 'predicted'}", "goal": "minimize"},
        "parameters": parameters,
    }
    return yaml.safe_dump(found, sort_keys=False)
