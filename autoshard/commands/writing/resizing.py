"""The question of a plan again, for the nodes that are left: what is asked, and what the answer means for its run."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.command_line.options import Counts
from autoshard.cost.built_in import calibration_of
from autoshard.cost.calibration import load_calibration
from autoshard.cost.predict import check_plan
from autoshard.cost.storage import resuming, storage_of
from autoshard.errors import Fault, InputError, require
from autoshard.extensions import EXTENSIONS
from autoshard.plan.candidate import parse_pins, pins_text
from autoshard.plan.codec import load
from autoshard.plan.diff import diff
from autoshard.plan.found import search_record
from autoshard.plan.plan import Plan
from autoshard.run.folder import PLAN, TRAINING
from autoshard.search.ask.answers import SMALLEST, PlanResult
from autoshard.search.ask.api import engines_of, layouts_of, pins_from_text
from autoshard.search.ask.planner import AtMost, Known, SearchResult, Size, at_most
from autoshard.search.bound.request import Request
from autoshard.search.bound.space import Pins, default_kernels
from autoshard.search.bound.watch import Watch
from autoshard.spec.cluster import LOCAL, Cluster
from autoshard.spec.price import with_user_price
from autoshard.spec.recipe import QuestionOptions
from autoshard.spec.record import encode
from autoshard.units import counted, format_bytes, format_change, format_count, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LikeQuestion:
    """The question of a plan for other nodes: the same model, work, global batch, and what it fixed.

    ``freed`` is the question without what the plan's own question fixed; None where nothing is kept from there.
    """

    old: Plan
    request: Request
    freed: Request | None

    def answered(self, watch: Watch, ask: Callable[[Request, Known], SearchResult]) -> tuple[AtMost, str]:
        """Return the answer, and what was fixed and is not kept, because no number of nodes allows it."""
        prediction = self.old.prediction
        assert prediction, "a checked plan has one"
        before = Size(num_nodes=self.old.cluster.num_nodes, step_s=prediction.step_time_s)
        try:
            answer = at_most(self.request, before, watch, ask)
        except InputError:  # the ranks cannot keep what is fixed
            if self.freed is None:
                raise
        else:
            if self.freed is None or answer.found.plans or answer.found.certificate.stopped:
                return answer, ""
        gone = {key: value for key, value in self.request.pins.items() if key not in self.freed.pins}
        layouts = [f"--pin '{pin.tensor}={pin.layout}'" for pin in self.request.layouts]
        words = [*([f"--fix {pins_text(gone)}"] if gone else []), *(layouts if not self.freed.layouts else [])]
        return at_most(self.freed, before, watch, ask), " ".join(words)


def request_like(
    path: Path, question: QuestionOptions, nodes: Counts, applied: Callable[[Request], Request]
) -> LikeQuestion:
    """Read a plan, and ask its question for other nodes, to which options of the search are applied."""
    again = question.given.keys() - {"ranks", "engine", "headroom", "calibration", "fix", "pins", "price"}
    why = f"is part of the question of {path}, which --like repeats. Leave it out"
    require(*((False, f"--{name.replace('_', '-')}", why) for name in sorted(again)))
    read = check_plan(load(path), place=path)
    if read.plan.prediction is None:
        raise InputError(Fault(where=f"--like {path}", message=str(rejection)) for rejection in read.rejections)
    old, constants = read.plan, question.calibration
    engines = engines_of(old.cluster, question.engine or old.engine)
    fixed, layouts = _fixed_in(old)
    stated, usual = pins_from_text(question.fix), {engine: default_kernels(old.cluster, engine) for engine in engines}
    kernels = {"kernels": old.kernels} if usual.get(old.engine, old.kernels) != old.kernels else {}
    pins = {**kernels, **(stated or fixed)}
    # What the plan carries holds for its kernels alone.
    carried = calibration_of(old) if {pins.get("kernels", name) for name in usual.values()} == {old.kernels} else None
    request = applied(
        Request(
            model=old.model,
            cluster=with_user_price(_cluster_left(old, question.ranks, nodes[0] if nodes else 0), question.price),
            workload=old.workload,
            headroom=old.headroom if question.headroom is None else question.headroom,
            engines=engines,
            pins=pins,
            layouts=layouts_of(question.pins or layouts),
            calibration=load_calibration(Path(constants)) if constants else carried,
        )
    )
    if _minimised_memory(old):
        request = replace(request, objective="memory")
    freed = replace(
        request,
        pins=request.pins if stated else kernels,
        layouts=request.layouts if question.pins else (),
    )
    return LikeQuestion(old=old, request=request, freed=None if freed == request else freed)


def _fixed_in(plan: Plan) -> tuple[Pins, Mapping[str, str]]:
    """Return the keys that the question of a plan fixed, but for dp, which follows from the nodes; and the tensors."""
    record = search_record(plan)
    if record is None:
        return {}, {}
    keys = {key: value for key, value in parse_pins(record.fix).items() if key != "dp"}
    return keys, {tensor: layout for tensor, _, layout in (pin.partition("=") for pin in record.pins)}


def _minimised_memory(plan: Plan) -> bool:
    """Say whether the question of a plan was for the least memory."""
    record = search_record(plan)
    return record is not None and record.answers[0].name == SMALLEST


def names_before(old: Plan) -> tuple[str, ...]:
    """Return the names that the answer of a plan had; the number of a runner-up only where it had no other name."""
    record = search_record(old)
    names = record.names_of(old) if record else ()
    return tuple(name for name in names if not name.isdecimal()) or names


def same_answer(old: Plan, result: PlanResult) -> PlanResult:
    """Return the answers, of which the one with the name of the old plan is preferred, where there is one."""
    names = names_before(old)
    name = next((answer.name for answer in result.answers if answer.name in names and not answer.against), result.name)
    return result if result.name in names else replace(result, name=name)


def _cluster_left(old: Plan, ranks: int | None, nodes: int) -> Cluster:
    """Return what is left of the cluster of a plan, as it stands in its file."""
    cluster = old.cluster
    if cluster.name == LOCAL:
        require(
            ((ranks or 0) >= 1, "--ranks", "type how many ranks of this machine are left"),
            (nodes <= 1, "--nodes", "this machine is one node. Type --ranks"),
        )
        return cluster.with_local_ranks(ranks or 1)
    size, fewer = counted(cluster.num_nodes, "node"), max(1, cluster.num_nodes - 1)
    need = f"the plan is of {size}. Type how many are left: --nodes {fewer}"
    require(
        (nodes >= 1, "--nodes", need),
        (ranks is None, "--ranks", f"{cluster.name} always has {cluster.ranks_per_node} a node"),
    )
    return replace(cluster, num_nodes=nodes)


def resuming_answer(old: Plan, new: Plan, sizes: Sequence[Size], not_kept: str) -> tuple[dict[str, Any], str]:
    """Return what changes between two plans of one run and what resuming costs: as data, and for a person."""
    both, read, storage = diff(old, new), resuming(new), storage_of(new.cluster).name
    steps = {"before_s": both.a.step_time_s, "after_s": both.b.step_time_s, "slower_by": both.slower_by}
    nodes = {"before": old.cluster.num_nodes, "left": sizes[0].num_nodes, "after": new.cluster.num_nodes}
    tried = [encode(item) for item in sizes]
    data = {
        "nodes": nodes,
        "tried": tried,
        "step": steps,
        "resuming": encode(read),
        "storage": storage,
        "not_kept": not_kept,
    }
    before, after = (
        counted(item.num_ranks, "rank") if item.name == LOCAL else f"{item.num_nodes} x {item.name}"
        for item in (old.cluster, new.cluster)
    )
    speeds = [format_count(side.tokens_per_s, "tokens/s") for side in (both.a, both.b)]
    lines = [
        "",
        f"after {before}: {after}, the same {counted(new.workload.global_batch, 'sequence')} a step",
        *_spare_lines(new, sizes),
        *([f"not kept, because no plan of so few nodes can: {not_kept}"] if not_kept else []),
        f"step {format_seconds(both.a.step_time_s)} -> {format_seconds(both.b.step_time_s)} "
        f"({format_change(both.slower_by)}), {speeds[0]} -> {speeds[1]}",
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
        f"{counted(size.num_nodes, 'node')} {'at least ' if size.is_bound else ''}{format_seconds(size.step_s)}"
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
