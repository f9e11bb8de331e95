"""What a checkpoint costs: reading the state when a run goes on; ending a step and saving when it is to stop."""

import math
from dataclasses import dataclass

from autoshard.graph.kinds.optimizer import UPDATES
from autoshard.plan.plan import Plan
from autoshard.spec.cluster import LOCAL, Cluster

_ENDING_S = 30.0  # until all ranks have agreed to stop, and have ended; what torchrun has always waited for that
_SAVES = 2  # one may be under way when the last one is due


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedStorage:
    """Where checkpoints lie, as long as nobody says: no plan does."""

    name: str
    bytes_per_s: float


# Assumed. FSx for Lustre (PERSISTENT-1000) gives 1,000 MB/s of disk throughput for each TiB of a file system:
# docs.aws.amazon.com/fsx/latest/LustreGuide/ssd-storage.html, 2026-11.
_SHARED = AssumedStorage(name="FSx for Lustre of 12 TiB at 1000 MB/s per TiB", bytes_per_s=12 * 1000e6)
# Assumed. What every gp3 volume gives: docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html, 2026-11; disks of
# laptops give more.
_DISK = AssumedStorage(name="a disk of this machine at 125 MiB/s, as EBS gp3 gives unasked", bytes_per_s=125 * 2**20)


def storage_of(cluster: Cluster) -> AssumedStorage:
    """Return where the runs of a cluster are assumed to keep their checkpoints."""
    return _DISK if cluster.name == LOCAL else _SHARED


@dataclass(frozen=True, slots=True, kw_only=True)
class Resuming:
    """What a run reads of a checkpoint when it goes on under a plan."""

    state_bytes: int  # weights as they are updated, and moments
    read_s: float  # from storage, no faster than nodes take it


def resuming(plan: Plan) -> Resuming:
    """Return what it costs to go on with a run under a plan."""
    precision, cluster = plan.workload.precision, plan.cluster
    part_bytes = precision.state_bytes(UPDATES[plan.workload.optimizer].num_moments)
    updated_bytes = part_bytes["masters" if precision.masters else "weights"]
    state = plan.model.num_parameters * (updated_bytes + part_bytes["optimizer"])
    link = cluster.links[-1]
    nodes_bytes_per_s = link.bandwidth_bytes_per_s * cluster.num_ranks / link.ranks_per_port
    network_bytes_per_s = nodes_bytes_per_s if link.domain == "cluster" else math.inf
    return Resuming(state_bytes=state, read_s=state / min(storage_of(cluster).bytes_per_s, network_bytes_per_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """What a run does between SIGTERM and its end."""

    step_s: float  # the step that has just begun, at the high end of the prediction
    save_s: float  # one save of the whole state

    @property
    def reserved_s(self) -> int:
        """How long torchrun, schedulers and a run of this machine must wait before they kill the run.

        A step at the high end of the prediction, a save that is under way, the last save, and a reserve.
        """
        return math.ceil(self.step_s + _SAVES * self.save_s + _ENDING_S)

    @property
    def busy_s(self) -> float:
        """How long the run works at least, if the step has just begun."""
        return self.step_s + self.save_s


def stopping(plan: Plan) -> Stopping:
    """Return what a run under a plan needs to stop without losing a step.

    AssumedStorage takes the state as fast as it gives it back: each rank writes its own share.
    """
    assert plan.prediction, "a checked plan has one"
    return Stopping(step_s=plan.prediction.high_s, save_s=resuming(plan).read_s)
