"""Every reason why a plan cannot run on its cluster and engine: structure, Rules, predicted memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autoshard.errors import Fault, InputError
from autoshard.layout.layout import Layout, whole_axes
from autoshard.layout.program import Compute, Program
from autoshard.plan.build import num_kv_replicas, padding_of
from autoshard.plan.codec import fingerprint
from autoshard.plan.nxd.forms import SOURCE, plan_forms
from autoshard.plan.plan import Plan
from autoshard.plan.prediction import Prediction
from autoshard.plan.rules.check import rejections
from autoshard.plan.rules.nxd_engine import nxd_schedule
from autoshard.plan.rules.rule import Rejection, Rule
from autoshard.plan.rules.strategy import AtomCut, engine_rules
from autoshard.plan.tables import plan_blocks, plan_programs, step_of, table_setting, units_of
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.verify import verify_actions
from autoshard.spec.mesh import Mesh
from autoshard.units import format_bytes

_STRUCTURE = "autoshard: the parts of a plan must agree with each other"
_PREDICTED = "autoshard: the plan's own prediction"


def verify(plan: Plan, *, extra_rules: Sequence[Rule] = ()) -> tuple[Rejection, ...]:
    """Give every reason why a plan may not run; empty when there is none.

    That the sharded program computes the same as the whole one is not checked here: see ``notices``.
    """
    misfits = tuple(_cluster_misfits(plan))
    if misfits:  # on another cluster every other answer would be about the wrong thing
        return misfits
    return (
        *_mesh_misfits(plan),
        *_stage_misfits(plan),
        *_schedule_misfits(plan),
        *_padding_misfits(plan),
        *_strategy_misfits(plan),
        *rejections(plan.candidate, plan.model, plan.cluster, plan.workload, plan.engine, extra_rules=extra_rules),
        *(_prediction_misfits(plan, plan.prediction) if plan.prediction else ()),
    )


def notices(plan: Plan) -> tuple[str, ...]:
    """Say what a plan that may run still does not promise."""
    found: list[str] = []
    if not plan.strategies:
        found.append(
            "strategies: the table is empty, so that nothing says what is sent, and engines refuse it. Make it again"
        )
    if plan.prediction is None:
        found.append("prediction: there is none, so nothing is said about memory and time")
    elif plan.prediction.basis.startswith("uncalibrated"):
        found.append("prediction: uncalibrated; no number in it was compared with a measurement")
    return tuple(found)


def _reject(rule_id: str, message: str, source: str = _STRUCTURE) -> Rejection:
    return Rejection(rule_id=rule_id, message=message, source=source)


def _typed(rule_id: str, where: str, have: object, right: object, why: str) -> Iterator[Rejection]:
    """Yield that a value is not what it must be, and what to type instead."""
    if have != right:
        yield _reject(rule_id, f"{where}: is {have}, but {why}. Type {right}")


def _cluster_misfits(plan: Plan) -> Iterator[Rejection]:
    mesh, cluster = plan.mesh, plan.cluster
    if mesh.ranks_per_node != cluster.ranks_per_node:
        yield _reject(
            "plan-node",
            f"mesh: places {mesh.ranks_per_node} ranks on a node, but a node of {cluster.name} has "
            f"{cluster.ranks_per_node}. End it with: on 0-{cluster.ranks_per_node - 1}",
        )
    if mesh.num_ranks != cluster.num_ranks:
        yield _reject(
            "plan-ranks",
            f"mesh: has {mesh.num_ranks} ranks, but {cluster.num_nodes} nodes of {cluster.name} have "
            f"{cluster.num_ranks}. Change a size, or cluster.num_nodes",
        )


def _mesh_misfits(plan: Plan) -> Iterator[Rejection]:
    mesh, replicas = plan.mesh, num_kv_replicas(plan.model, plan.mesh.size("tp"))
    if mesh.size("tp") % replicas == 0:  # otherwise the Rule kv-heads says so
        sizes = {name: mesh.size(name) for name in ("pp", "dp", "ep", "cp", "tp")}
        right = Mesh.laid_on(plan.cluster, {**sizes, "rep": replicas}, mesh.placement)
        why = f"engines lay out the axes of {plan.model.name} on {plan.cluster.name} otherwise"
        yield from _typed("plan-mesh", "mesh", mesh, right, why)


def _stage_misfits(plan: Plan) -> Iterator[Rejection]:
    schedule, pp = plan.schedule, plan.mesh.size("pp")
    yield from _typed("plan-pipeline", "schedule.num_ranks", schedule.num_ranks, pp, f"pp of the mesh is {pp}")
    if schedule.num_stages != len(plan.stages):
        yield _reject(
            "plan-pipeline",
            f"stages: lists {len(plan.stages)}, but the schedule has {schedule.num_ranks} ranks with "
            f"{schedule.num_chunks} stages each. List {schedule.num_stages}",
        )
    start = 0
    for index, stage in enumerate(plan.stages):
        where, why = f"stages[{index}]", f"the schedule places stage {index} elsewhere"
        before = f"{start} layers lie before"
        yield from _typed("plan-layers", f"{where}.first_layer", stage.first_layer, start, before)
        if index < schedule.num_stages:
            rank, chunk = schedule.place_of(index)
            yield from _typed("plan-place", f"{where}.rank", stage.rank, rank, why)
            yield from _typed("plan-place", f"{where}.chunk", stage.chunk, chunk, why)
        start += stage.num_layers
    more = plan.model.num_layers - start
    if more:
        yield _reject(
            "plan-layers",
            f"stages: hold {start} layers, but {plan.model.name} has {plan.model.num_layers}. "
            f"{'Add' if more > 0 else 'Remove'} {abs(more)}",
        )


def _schedule_misfits(plan: Plan) -> Iterator[Rejection]:
    schedule, batch = plan.schedule, plan.workload.global_batch
    group = plan.micro_batch * plan.mesh.size("dp")
    have = schedule.num_micro_batches * group
    if have != batch:
        remedy = "Change micro_batch or workload.global_batch" if batch % group else f"Type {batch // group}"
        yield _reject(
            "plan-batch",
            f"schedule.num_micro_batches: {schedule.num_micro_batches} micro-batches of {plan.micro_batch} on "
            f"{plan.mesh.size('dp')} data-parallel ranks are {have} sequences, not {batch}. {remedy}",
        )
    for fault in _action_faults(schedule):
        yield _reject("plan-actions", f"schedule.{fault}")
    if plan.engine == "nxd" and schedule.actions is not None and not _is_built(schedule):
        # Rules know only the name of the schedule's builder.
        message = (
            f"schedule.actions: are not those of {schedule.builder}, and NxD follows its own scheduler, no list. "
            "Type actions: null"
        )
        yield _reject("nxd-actions", message, nxd_schedule.source)


def _action_faults(schedule: Schedule) -> tuple[Fault, ...]:
    if schedule.actions is not None:
        return verify_actions(schedule)
    if schedule.placement is None:
        return ()  # the builders' tests prove these for all sizes
    # A builder's order repeats from round to round, so a few rounds stand for all of them.
    few = min(schedule.num_micro_batches, 4 * schedule.num_ranks)
    return verify_actions(replace(schedule, num_micro_batches=few))


def _is_built(schedule: Schedule) -> bool:
    try:
        return schedule.actions == replace(schedule, actions=None).action_lists()
    except InputError:  # no builder makes such lists
        return False


def _padding_misfits(plan: Plan) -> Iterator[Rejection]:
    tp, least = plan.mesh.size("tp"), padding_of(plan.model, plan.mesh.size("tp"))
    for dim in sorted({*plan.padding, *least}):
        size = plan.padding.get(dim, plan.model.vocab)
        if dim != "vocab":
            yield _reject("plan-padding", f"padding.{dim}: only vocab can be padded. Remove it")
        elif size < plan.model.vocab or size % tp:
            remedy = f"Type {least[dim]}" if dim in least else "Remove it"
            message = f"padding.vocab: {size} does not hold {plan.model.vocab} entries in {tp} equal parts. {remedy}"
            yield _reject("plan-padding", message)


def _strategy_misfits(plan: Plan) -> Iterator[Rejection]:
    """Yield which lines of the table cannot be executed as they stand, with the line that would be right."""
    if not plan.strategies:
        return
    try:
        programs = plan_programs(plan)
    except InputError as error:
        yield from (_reject("plan-strategies", str(fault)) for fault in error.faults)
        return
    found = [*_tied_misfits(plan, programs), *_unit_misfits(plan)]
    for name, block in plan_blocks(plan).items():
        computes = (entry for entry in programs[name].instructions if isinstance(entry, Compute))
        cuts = (
            AtomCut.of(block, entry.op, atom, dim)
            for entry in computes
            if entry.op.name == entry.op.source
            for dim, atoms in entry.cuts.items()
            for atom in atoms
        )
        against = (rule.rejection(cut) for cut in cuts for rule in engine_rules(plan.engine))
        found += [replace(one, message=f"strategies.{name}.{one.message}") for one in against if one]
    if plan.engine == "nxd" and not found:
        _, faults = plan_forms(plan, programs)
        found += [_reject("nxd-form", str(fault), SOURCE) for fault in faults]
    yield from found


def _unit_misfits(plan: Plan) -> Iterator[Rejection]:
    """Yield where a plan lists other collectives for a block's weights together than ZeRO-3 runs."""
    right = units_of(plan)
    for name in sorted({*right, *plan.units}):
        if right.get(name) != plan.units.get(name):
            yield _reject(
                "plan-units",
                f"units.{name}: what is gathered and reduced for a whole block follows from zero={plan.zero} and the "
                f"table, and cannot be edited. {f'Type {right[name]}' if name in right else 'Remove it'}",
            )


def _tied_misfits(plan: Plan, programs: Mapping[str, Program]) -> Iterator[Rejection]:
    """Yield where two blocks that share a weight cut it differently."""
    sizes = table_setting(plan).atoms
    for pair in step_of(plan).graph.tied.items():
        names = [tensor.partition(".")[::2] for tensor in pair]
        cuts = [programs[kind].results[f"{weight}.sum"].layout.dims for kind, weight in names]
        if [cut for _, cut in cuts[0]] != [cut for _, cut in cuts[1]]:
            copy, owner = (Layout(dims=tuple((dim, whole_axes(cut, sizes)) for dim, cut in dims)) for dims in cuts)
            message = f"strategies: {pair[0]} is {copy}, but shares its values with {pair[1]}, which is {owner}"
            yield _reject("plan-tied", f"{message}. Cut both alike")


def _prediction_misfits(plan: Plan, prediction: Prediction) -> Iterator[Rejection]:
    capacity, ranks = prediction.capacity_bytes, plan.schedule.num_ranks
    if prediction.of != fingerprint(plan):
        message = (
            "prediction: was made for other choices than those that now stand in the plan. Predict again "
            f"with autoshard plan --at {plan.candidate}, or type prediction: null"
        )
        yield _reject("prediction-stale", message, _PREDICTED)
    if len(prediction.stage_memory) != ranks:
        message = (
            f"prediction.stage_memory: lists {len(prediction.stage_memory)} pipeline ranks, but there are "
            f"{ranks}. Predict again"
        )
        yield _reject("prediction-ranks", message, _PREDICTED)
    for rank, memory in enumerate(prediction.stage_memory):
        if memory.total > capacity:
            message = (
                f"prediction.stage_memory[{rank}]: pipeline rank {rank} is predicted to need "
                f"{format_bytes(memory.total)} of {format_bytes(capacity)}, {format_bytes(memory.total - capacity)} "
                "too much. Use more recompute, a smaller mbs, or more tp or pp"
            )
            yield _reject("memory", message, _PREDICTED)
