"""``autoshard plan --like``: the question of a plan again, for the nodes that are left, and what resuming costs."""

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.commands.asked import Asked, How, pins_of
from autoshard.errors import Fault, InputError, require

if TYPE_CHECKING:
    from autoshard.plan.plan import Plan
    from autoshard.search.planner import Request

_MAY_CHANGE = ("nodes", "ranks", "engine", "calibration", "fix", "pins")


def asked_again(path: Path, asked: Asked, how: How) -> "tuple[Plan, Request]":
    """Return a plan, and its question for other nodes: the same model, work and global batch."""
    from autoshard.commands.output import constants_in
    from autoshard.cost.checked import check_plan
    from autoshard.cost.provenance import calibration_of
    from autoshard.plan.codec import load
    from autoshard.search.api import engines_of, pins_of as fixed
    from autoshard.search.planner import Request

    usual = Asked()
    names = [one.name for one in fields(asked) if one.name not in _MAY_CHANGE]
    given = [name for name in names if getattr(asked, name) != getattr(usual, name)]
    message = f"is part of the question of {path}, which --like asks again. Leave it out"
    require(*((False, f"--{name.replace('_', '-')}", message) for name in given))
    read = check_plan(load(path))
    if read.plan.prediction is None:
        raise InputError(Fault(where=f"--like {path}", message=str(one)) for one in read.rejections)
    old = read.plan
    request = Request(
        model=old.model,
        cluster=_left(old, asked),
        workload=old.workload,
        engines=engines_of(old.cluster, asked.engine or old.engine),
        pins=fixed(asked.fix),
        layouts=tuple(pins_of(asked.pins)),
        calibration=constants_in(Path(asked.calibration)) if asked.calibration else calibration_of(old),
        effort=how.effort,
        objective=how.objective,
    )
    return old, request


def _left(old: "Plan", asked: Asked) -> Any:
    """Return what is left of the cluster of a plan, as it stands in its file."""
    from autoshard.spec.cluster import LOCAL

    here, per_chip = old.cluster.name == LOCAL, old.cluster.ranks_per_chip
    nodes, ranks = (asked.nodes or (0,))[0], asked.ranks
    need = f"the plan is of {old.cluster.num_nodes} nodes. Type how many are left: --nodes {old.cluster.num_nodes - 1}"
    require(
        (here or nodes >= 1, "--nodes", need),
        (here or ranks is None, "--ranks", f"{old.cluster.name} always has {old.cluster.ranks_per_node} a node"),
        (not here or bool(ranks and ranks >= 1), "--ranks", "type how many ranks of this machine are left"),
        (not here or nodes <= 1, "--nodes", "this machine is one node. Type --ranks"),
    )
    return (
        replace(old.cluster, chips_per_node=(ranks or 1) // per_chip) if here else replace(old.cluster, num_nodes=nodes)
    )


def resuming_json(old: "Plan", new: "Plan") -> dict[str, Any]:
    """Return what goes on otherwise, and what it costs to get there."""
    from autoshard.cost.resuming import STORAGE, resuming
    from autoshard.plan.diff import diff
    from autoshard.spec.record import encode

    found = diff(old, new)
    steps = {"before_s": found.a.step_time_s, "after_s": found.b.step_time_s, "slower_by": found.slower_by}
    nodes = {"before": old.cluster.num_nodes, "after": new.cluster.num_nodes}
    return {"like": {"nodes": nodes, "step": steps, "resuming": encode(resuming(old, new)), "storage": STORAGE}}


def resuming_text(old: "Plan", new: "Plan") -> str:
    """Say what goes on otherwise, and what it costs to get there."""
    from autoshard.cost.resuming import STORAGE, resuming
    from autoshard.plan.diff import diff
    from autoshard.units import format_bytes, format_count, format_seconds

    both, moved = diff(old, new), resuming(old, new)
    speeds = [format_count(side.tokens_per_s, "tokens/s") for side in (both.a, both.b)]
    share = moved.lacking_bytes / moved.held_bytes
    lines = [
        "",
        f"after {_size(old)}: {_size(new)}, the same {new.workload.global_batch} sequences a step",
        f"step {format_seconds(both.a.step_time_s)} -> {format_seconds(both.b.step_time_s)} "
        f"({both.slower_by:+.1%}), {speeds[0]} -> {speeds[1]}",
        f"resuming reads {format_bytes(moved.state_bytes)} of state from a checkpoint: "
        f"{format_seconds(moved.read_s)} at best (assumed: {STORAGE})",
        f"if the last nodes are gone, {share:.0%} of the state lay with others: {format_bytes(moved.lacking_bytes)}",
    ]
    if moved.send_s is not None:
        most = f"{format_bytes(moved.busiest_node_bytes)} to the busiest node"
        lines.append(f"sent instead of read, {most} would take {format_seconds(moved.send_s)}; a run does not do that")
    return "\n".join(lines)


def _size(plan: "Plan") -> str:
    from autoshard.spec.cluster import LOCAL

    cluster = plan.cluster
    return f"{cluster.num_ranks} ranks" if cluster.name == LOCAL else f"{cluster.num_nodes} x {cluster.name}"
