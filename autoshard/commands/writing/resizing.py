"""The question of a plan again, for the nodes that are left: what is asked, and what the answer means for its run."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoshard.command_line.options import Counts
from autoshard.cost.built_in import calibration_of
from autoshard.cost.calibration import load_calibration
from autoshard.cost.predict import check_plan
from autoshard.cost.storage import resuming, storage_of
from autoshard.errors import Fault, InputError, require
from autoshard.extensions import EXTENSIONS
from autoshard.plan.codec import load
from autoshard.plan.diff import diff
from autoshard.plan.plan import Plan
from autoshard.run.folder import PLAN, TRAINING
from autoshard.search.ask.api import engines_of, layouts_of, pins_from_text
from autoshard.search.ask.planner import Size
from autoshard.search.bound.request import Request
from autoshard.spec.cluster import LOCAL, Cluster
from autoshard.spec.price import with_user_price
from autoshard.spec.recipe import QuestionOptions
from autoshard.spec.record import encode
from autoshard.units import counted, format_bytes, format_count, format_seconds


def request_like(path: Path, question: QuestionOptions, nodes: Counts) -> tuple[Plan, Request]:
    """Return a plan, and its question for other nodes: the same model, work and global batch."""
    again = question.given.keys() - {"ranks", "engine", "headroom", "calibration", "fix", "pins", "price"}
    why = f"is part of the question of {path}, which --like repeats. Leave it out"
    require(*((False, f"--{name.replace('_', '-')}", why) for name in sorted(again)))
    read = check_plan(load(path))
    if read.plan.prediction is None:
        raise InputError(Fault(where=f"--like {path}", message=str(rejection)) for rejection in read.rejections)
    old, constants = read.plan, question.calibration
    request = Request(
        model=old.model,
        cluster=with_user_price(_cluster_left(old, question.ranks, nodes[0] if nodes else 0), question.price),
        workload=old.workload,
        headroom=old.headroom if question.headroom is None else question.headroom,
        engines=engines_of(old.cluster, question.engine or old.engine),
        pins=pins_from_text(question.fix),
        layouts=layouts_of(question.pins),
        calibration=load_calibration(Path(constants)) if constants else calibration_of(old),
    )
    return old, request


def planned_size(plan: Plan) -> Size:
    """Return how long a step takes on the nodes of a plan."""
    assert plan.prediction, "a checked plan has one"
    return Size(num_nodes=plan.cluster.num_nodes, step_s=plan.prediction.step_time_s)


def _cluster_left(old: Plan, ranks: int | None, nodes: int) -> Cluster:
    """Return what is left of the cluster of a plan, as it stands in its file."""
    cluster = old.cluster
    if cluster.name == LOCAL:
        require(
            ((ranks or 0) >= 1, "--ranks", "type how many ranks of this machine are left"),
            (nodes <= 1, "--nodes", "this machine is one node. Type --ranks"),
        )
        return cluster.with_local_ranks(ranks or 1)
    need = (
        f"the plan is of {counted(cluster.num_nodes, 'node')}. Type how many are left: --nodes {cluster.num_nodes - 1}"
    )
    require(
        (nodes >= 1, "--nodes", need),
        (ranks is None, "--ranks", f"{cluster.name} always has {cluster.ranks_per_node} a node"),
    )
    return replace(cluster, num_nodes=nodes)


def resuming_answer(old: Plan, new: Plan, sizes: Sequence[Size]) -> tuple[dict[str, Any], str]:
    """Return what changes between two plans of one run and what resuming costs: as data, and for a person."""
    both, read, storage = diff(old, new), resuming(new), storage_of(new.cluster).name
    steps = {"before_s": both.a.step_time_s, "after_s": both.b.step_time_s, "slower_by": both.slower_by}
    nodes = {"before": old.cluster.num_nodes, "left": sizes[0].num_nodes, "after": new.cluster.num_nodes}
    tried = [encode(item) for item in sizes]
    data = {"nodes": nodes, "tried": tried, "step": steps, "resuming": encode(read), "storage": storage}
    before, after = (
        counted(item.num_ranks, "rank") if item.name == LOCAL else f"{item.num_nodes} x {item.name}"
        for item in (old.cluster, new.cluster)
    )
    speeds = [format_count(side.tokens_per_s, "tokens/s") for side in (both.a, both.b)]
    lines = [
        "",
        f"after {before}: {after}, the same {counted(new.workload.global_batch, 'sequence')} a step",
        *_spare_lines(new, sizes),
        f"step {format_seconds(both.a.step_time_s)} -> {format_seconds(both.b.step_time_s)} "
        f"({both.slower_by:+.1%}), {speeds[0]} -> {speeds[1]}",
        f"resuming reads {format_bytes(read.state_bytes)} of state from a checkpoint: "
        f"{format_seconds(read.read_s)} at best (assumed: {storage})",
    ]
    return {"like": data}, "\n".join(lines)


def _spare_lines(new: Plan, sizes: Sequence[Size]) -> list[str]:
    """Say how many nodes are spare, and why: what the other numbers of nodes would take."""
    num_nodes, num_left = new.cluster.num_nodes, sizes[0].num_nodes
    if num_nodes == num_left:
        return []
    alternatives = [
        f"{size.num_nodes} nodes {'at least ' if size.is_bound else ''}{format_seconds(size.step_s)}"
        for size in sizes
        if size.num_nodes != num_nodes and 0 < size.step_s < math.inf
    ]
    why = f", because a step takes longer on others: {', '.join(alternatives)}" if alternatives else ""
    return [f"{num_nodes} of {counted(num_left, 'node')}, {num_left - num_nodes} spare{why}"]


def resume_command(path: Path, out: Path) -> str:
    """Return what continues the run in whose folder a plan lies; nothing if it lies elsewhere."""
    if path.name != PLAN or not (path.parent / TRAINING).is_file():
        return ""
    return shlex.join(["autoshard", "run", str(out), "--out", str(path.parent), *EXTENSIONS.options()])
