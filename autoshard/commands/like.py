"""``autoshard plan --like``: the question of a plan again, for the nodes that are left, and what resuming costs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from autoshard.commands.options import QuestionOptions, SearchOptions
from autoshard.cost.calibration import calibration_of, load_calibration
from autoshard.cost.predict import check_plan
from autoshard.cost.update import STORAGE, resuming
from autoshard.errors import Fault, InputError, require
from autoshard.plan.codec import load
from autoshard.plan.diff import diff
from autoshard.plan.plan import Plan
from autoshard.search.api import engines_of, pins_of
from autoshard.search.request import Request
from autoshard.spec.cluster import LOCAL, Cluster
from autoshard.spec.record import encode
from autoshard.units import format_bytes, format_count, format_seconds


def request_like(path: Path, question: QuestionOptions, options: SearchOptions) -> tuple[Plan, Request]:
    """Return a plan, and its question for other nodes: the same model, work and global batch."""
    message = f"is part of the question of {path}, which --like repeats. Leave it out"
    question.refuse(message, "nodes", "ranks", "engine", "calibration", "fix", "pins")
    read = check_plan(load(path))
    if read.plan.prediction is None:
        raise InputError(Fault(where=f"--like {path}", message=str(one)) for one in read.rejections)
    old, constants = read.plan, question.calibration
    request = Request(
        model=old.model,
        cluster=_cluster_left(old, question),
        workload=old.workload,
        engines=engines_of(old.cluster, question.engine or old.engine),
        pins=pins_of(question.fix),
        layouts=question.pinned(),
        calibration=load_calibration(Path(constants)) if constants else calibration_of(old),
    )
    return old, options.applied(request)


def _cluster_left(old: Plan, question: QuestionOptions) -> Cluster:
    """Return what is left of the cluster of a plan, as it stands in its file."""
    cluster, ranks, nodes = old.cluster, question.ranks or 0, (question.nodes or (0,))[0]
    if cluster.name == LOCAL:
        require(
            (ranks >= 1, "--ranks", "type how many ranks of this machine are left"),
            (nodes <= 1, "--nodes", "this machine is one node. Type --ranks"),
        )
        return replace(cluster, chips_per_node=ranks // cluster.ranks_per_chip)
    need = f"the plan is of {cluster.num_nodes} nodes. Type how many are left: --nodes {cluster.num_nodes - 1}"
    require(
        (nodes >= 1, "--nodes", need),
        (question.ranks is None, "--ranks", f"{cluster.name} always has {cluster.ranks_per_node} a node"),
    )
    return replace(cluster, num_nodes=nodes)


def resuming_answer(old: Plan, new: Plan) -> tuple[dict[str, Any], str]:
    """Return what changes between two plans of one run and what resuming costs: as data, and for a person."""
    both, read = diff(old, new), resuming(new)
    steps = {"before_s": both.a.step_time_s, "after_s": both.b.step_time_s, "slower_by": both.slower_by}
    nodes = {"before": old.cluster.num_nodes, "after": new.cluster.num_nodes}
    data = {"like": {"nodes": nodes, "step": steps, "resuming": encode(read), "storage": STORAGE}}
    before, after = (
        f"{one.num_ranks} ranks" if one.name == LOCAL else f"{one.num_nodes} x {one.name}"
        for one in (old.cluster, new.cluster)
    )
    speeds = [format_count(side.tokens_per_s, "tokens/s") for side in (both.a, both.b)]
    lines = [
        "",
        f"after {before}: {after}, the same {new.workload.global_batch} sequences a step",
        f"step {format_seconds(both.a.step_time_s)} -> {format_seconds(both.b.step_time_s)} "
        f"({both.slower_by:+.1%}), {speeds[0]} -> {speeds[1]}",
        f"resuming reads {format_bytes(read.state_bytes)} of state from a checkpoint: "
        f"{format_seconds(read.read_s)} at best (assumed: {STORAGE})",
    ]
    return data, "\n".join(lines)
