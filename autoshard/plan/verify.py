"""Every reason why a plan cannot run on its cluster and engine: structure, Rules, predicted memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.errors import Fault, InputError
from autoshard.layout.layout import Layout, whole_axes
from autoshard.layout.program import Compute, Program
from autoshard.plan.build import num_kv_replicas, padding_of
from autoshard.plan.codec import fingerprint
from autoshard.plan.nxd.forms import SOURCE, plan_forms
from autoshard.plan.plan import Plan
from autoshard.plan.prediction import Prediction
from autoshard.plan.rules.check import all_rules, rejections
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
    misfits = _cluster_misfits(plan)
    if misfits:  # on another cluster every other answer would be about the wrong thing
        return misfits
    by_rules = rejections(plan.candidate, plan.model, plan.cluster, plan.workload, plan.engine, extra_rules=extra_rules)
    return (
        *_mesh_misfits(plan),
        *_stage_misfits(plan),
        *_schedule_misfits(plan),
        *_engine_misfits(plan),
        *_padding_misfits(plan),
        *_strategy_misfits(plan),
        *by_rules,
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


def _cluster_misfits(plan: Plan) -> tuple[Rejection, ...]:
    mesh, cluster = plan.mesh, plan.cluster
    found: list[Rejection] = []
    if mesh.ranks_per_node != cluster.ranks_per_node:
        found.append(
            _reject(
                "plan-node",
                f"mesh: places {mesh.ranks_per_node} ranks on a node, but a node of {cluster.name} has "
                f"{cluster.ranks_per_node}. End it with: on 0-{cluster.ranks_per_node - 1}",
            )
        )
    if mesh.num_ranks != cluster.num_ranks:
        found.append(
            _reject(
                "plan-ranks",
                f"mesh: has {mesh.num_ranks} ranks, but {cluster.num_nodes} nodes of {cluster.name} have "
                f"{cluster.num_ranks}. Change a size, or cluster.num_nodes",
            )
        )
    return tuple(found)


def _mesh_misfits(plan: Plan) -> list[Rejection]:
    mesh, tp = plan.mesh, plan.mesh.size("tp")
    sizes = {name: mesh.size(name) for name in ("pp", "dp", "ep", "cp", "tp")}
    replicas = num_kv_replicas(plan.model, tp)
    if tp % replicas:
        return []  # the Rule kv-heads says so
    expected = Mesh.laid_on(plan.cluster, {**sizes, "rep": replicas}, mesh.placement)
    if mesh == expected:
        return []
    return [
        _reject(
            "plan-mesh",
            f"mesh: engines lay out the axes of {plan.model.name} on {plan.cluster.name} as {expected}. "
            f"Type mesh: {expected}",
        )
    ]


def _stage_misfits(plan: Plan) -> list[Rejection]:
    found = _stage_count_misfits(plan)
    start = 0
    for index, stage in enumerate(plan.stages):
        where = f"stages[{index}]"
        if stage.first_layer != start:
            message = f"{where}.first_layer: is {stage.first_layer}, but {start} layers lie before. Type {start}"
            found.append(_reject("plan-layers", message))
        if index < plan.schedule.num_stages and plan.schedule.place_of(index) != (stage.rank, stage.chunk):
            rank, chunk = plan.schedule.place_of(index)
            message = (
                f"{where}: is chunk {stage.chunk} of rank {stage.rank}, but the schedule places stage "
                f"{index} elsewhere. Type rank {rank}, chunk {chunk}"
            )
            found.append(_reject("plan-place", message))
        start += stage.num_layers
    if start != plan.model.num_layers:
        difference = plan.model.num_layers - start
        message = (
            f"stages: hold {start} layers, but {plan.model.name} has {plan.model.num_layers}. "
            f"{'Add' if difference > 0 else 'Remove'} {abs(difference)}"
        )
        found.append(_reject("plan-layers", message))
    return found


def _stage_count_misfits(plan: Plan) -> list[Rejection]:
    schedule, found = plan.schedule, list[Rejection]()
    if schedule.num_ranks != plan.mesh.size("pp"):
        message = (
            f"schedule.num_ranks: is {schedule.num_ranks}, but pp of the mesh is {plan.mesh.size('pp')}. "
            f"Type {plan.mesh.size('pp')}"
        )
        found.append(_reject("plan-pipeline", message))
    if schedule.num_stages != len(plan.stages):
        message = (
            f"stages: lists {len(plan.stages)}, but the schedule has {schedule.num_ranks} ranks with "
            f"{schedule.num_chunks} stages each. List {schedule.num_stages}"
        )
        found.append(_reject("plan-pipeline", message))
    return found


def _schedule_misfits(plan: Plan) -> list[Rejection]:
    found: list[Rejection] = []
    group = plan.micro_batch * plan.mesh.size("dp")
    have = plan.schedule.num_micro_batches * group
    if have != plan.workload.global_batch:
        needed, rest = divmod(plan.workload.global_batch, group)
        remedy = "Change micro_batch or workload.global_batch" if rest else f"Type {needed}"
        message = (
            f"schedule.num_micro_batches: {plan.schedule.num_micro_batches} micro-batches of "
            f"{plan.micro_batch} on {plan.mesh.size('dp')} data-parallel ranks are {have} sequences, not "
            f"{plan.workload.global_batch}. {remedy}"
        )
        found.append(_reject("plan-batch", message))
    found += [_reject("plan-actions", f"schedule.{fault}") for fault in _action_faults(plan.schedule)]
    return found


def _action_faults(schedule: Schedule) -> tuple[Fault, ...]:
    if schedule.actions is not None:
        return verify_actions(schedule)
    if schedule.placement is None:
        return ()  # the builders' tests prove these for all sizes
    # A builder's order repeats from round to round, so a few rounds stand for all of them.
    few = min(schedule.num_micro_batches, 4 * schedule.num_ranks)
    return verify_actions(replace(schedule, num_micro_batches=few))


def _engine_misfits(plan: Plan) -> list[Rejection]:
    """Say why an engine does not run lists that the schedule's builder has not made: Rules know only its name."""
    schedule = plan.schedule
    if schedule.actions is None or _is_built(schedule):
        return []
    if plan.engine == "nxd":
        message = (
            f"schedule.actions: are not those of {schedule.builder}, and NxD follows its own scheduler, no list. "
            "Type actions: null"
        )
        return [_reject("nxd-actions", message, _source_of("nxd-schedule"))]
    return []


def _is_built(schedule: Schedule) -> bool:
    try:
        return schedule.steps() == replace(schedule, actions=None).steps()
    except InputError:  # no builder makes such lists
        return False


def _source_of(rule_id: str) -> str:
    return next(rule.source for rule in all_rules() if rule.id == rule_id)


def _padding_misfits(plan: Plan) -> list[Rejection]:
    tp, found = plan.mesh.size("tp"), list[Rejection]()
    least = padding_of(plan.model, tp)
    for dim in sorted({*plan.padding, *least}):
        if dim != "vocab":
            message = f"padding.{dim}: only vocab can be padded. Remove it"
            found.append(_reject("plan-padding", message))
            continue
        size = plan.padding.get(dim, plan.model.vocab)
        if size < plan.model.vocab or size % tp:
            remedy = f"Type {least[dim]}" if dim in least else "Remove it"
            message = f"padding.vocab: {size} does not hold {plan.model.vocab} entries in {tp} equal parts. {remedy}"
            found.append(_reject("plan-padding", message))
    return found


def _strategy_misfits(plan: Plan) -> list[Rejection]:
    """Say which lines of the table cannot be executed as they stand, with the line that would be right."""
    if not plan.strategies:
        return []
    try:
        programs = plan_programs(plan)
    except InputError as error:
        return [_reject("plan-strategies", str(fault)) for fault in error.faults]
    found = _tied_misfits(plan, programs) + _unit_misfits(plan)
    for name, block in plan_blocks(plan).items():
        computes = (entry for entry in programs[name].instructions if isinstance(entry, Compute))
        places = (
            AtomCut.of(block, entry.op, atom, dim)
            for entry in computes
            if entry.op.name == entry.op.source
            for dim, cut in entry.cuts.items()
            for atom in cut
        )
        against = (rule.rejection(place) for place in places for rule in engine_rules(plan.engine))
        found += [replace(one, message=f"strategies.{name}.{one.message}") for one in against if one]
    if plan.engine == "nxd" and not found:
        _, faults = plan_forms(plan, programs)
        found += [_reject("nxd-form", str(fault), SOURCE) for fault in faults]
    return found


def _unit_misfits(plan: Plan) -> list[Rejection]:
    """Say where a plan lists other collectives for a block's weights together than ZeRO-3 runs."""
    right = units_of(plan)
    return [
        _reject(
            "plan-units",
            f"units.{name}: what is gathered and reduced for a whole block follows from zero={plan.zero} and the "
            f"table, and cannot be edited. {f'Type {right[name]}' if name in right else 'Remove it'}",
        )
        for name in sorted({*right, *plan.units})
        if right.get(name) != plan.units.get(name)
    ]


def _tied_misfits(plan: Plan, programs: Mapping[str, Program]) -> list[Rejection]:
    """Say where two blocks that share a weight cut it differently."""
    found: list[Rejection] = []
    sizes = table_setting(plan).atoms
    for pair in step_of(plan).graph.tied.items():
        names = [tensor.partition(".")[::2] for tensor in pair]
        copy, owner = (programs[kind].results[f"{weight}.sum"].layout for kind, weight in names)
        if [cut for _, cut in copy.dims] != [cut for _, cut in owner.dims]:
            shown = [
                Layout(dims=tuple((dim, whole_axes(cut, sizes)) for dim, cut in one.dims)) for one in (copy, owner)
            ]
            message = f"strategies: {pair[0]} is {shown[0]}, but shares its values with {pair[1]}, which is {shown[1]}"
            found.append(_reject("plan-tied", f"{message}. Cut both alike"))
    return found


def _prediction_misfits(plan: Plan, prediction: Prediction) -> list[Rejection]:
    found: list[Rejection] = []
    if prediction.of != fingerprint(plan):
        message = (
            "prediction: was made for other choices than those that now stand in the plan. Predict again "
            f"with autoshard plan --at {plan.candidate}, or type prediction: null"
        )
        found.append(_reject("prediction-stale", message, _PREDICTED))
    if len(prediction.stage_memory) != plan.schedule.num_ranks:
        message = (
            f"prediction.stage_memory: lists {len(prediction.stage_memory)} pipeline ranks, but there are "
            f"{plan.schedule.num_ranks}. Predict again"
        )
        found.append(_reject("prediction-ranks", message, _PREDICTED))
    for rank, memory in enumerate(prediction.stage_memory):
        if memory.total > prediction.capacity_bytes:
            message = (
                f"prediction.stage_memory[{rank}]: pipeline rank {rank} is predicted to need "
                f"{format_bytes(memory.total)} of {format_bytes(prediction.capacity_bytes)}, "
                f"{format_bytes(memory.total - prediction.capacity_bytes)} too much. Use more recompute, a "
                "smaller mbs, or more tp or pp"
            )
            found.append(_reject("memory", message, _PREDICTED))
    return found
