"""Remarks on a job for the person who starts it: on its data, and on limits of its end that no file of it can set."""

from collections.abc import Iterator

from autoshard.cost.storage import stopping, storage_of
from autoshard.extensions import is_imported
from autoshard.jobs.job import Job
from autoshard.units import format_seconds

# cited: Slurm's slurm.conf manual, KillWait and GraceTime; docs.aws.amazon.com/AWSEC2/latest/UserGuide,
# spot-instance-termination-notices.html.
_KILL_WAIT_S, _SPOT_S = 30, 120


def remarks(job: Job) -> Iterator[str]:
    """Yield sentences about data and stopping, for the user who has just written a job."""
    yield from filter(None, [job.training.without_data])
    code = job.plan.code.source if job.plan.code else ""
    if code and job.place.volume and not is_imported(code):
        yield f"the model is read from {code.rpartition(':')[0]}: copy this file, and what it imports, to the volume"
    for name in filter(is_imported, (code, *job.training.data.sets, *job.training.eval.sets)):
        yield f"{name} is imported: install it beside autoshard on the nodes, or name FILE.py:FUNCTION"
    stop, grace_s = stopping(job.plan), job.training.checkpoint.grace_seconds
    save = f"{format_seconds(stop.save_s)} for a save (assumed: {storage_of(job.plan.cluster).name})"
    yield f"stopping takes up to {format_seconds(stop.busy_s)}: {format_seconds(stop.step_s)} for a step, {save}"
    if grace_s is not None and grace_s < stop.busy_s:
        yield f"checkpoint.grace_seconds is {grace_s:g}, so SIGTERM may lose the step that has begun"
    if job.place.scheduler == "slurm":
        yield f"SIGTERM comes {job.notice_s} s before a job's time is up"
        if stop.busy_s > _KILL_WAIT_S:
            kills = (
                f"scancel and preemption kill after Slurm's KillWait and GraceTime ({_KILL_WAIT_S} s and 0 by default)"
            )
            yield f"{kills}, which loses the step; submit.sh prints how to save and stop"
    if job.instance_type and stop.busy_s > _SPOT_S:
        yield "a spot instance goes two minutes after its notice, which is less: all since the last checkpoint is lost"
