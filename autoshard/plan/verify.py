"""Every reason why a plan cannot run on its cluster and engine: structure, Rules, predicted memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autoshard.errors import InputError
from autoshard.graph.block import OpGraph
from autoshard.layout.layout import Layout, whole_axes
from autoshard.layout.program import Compute, Program
from autoshard.plan.build import build_plan, padding_of
from autoshard.plan.codec import plan_hash
from autoshard.plan.nxd.forms import SOURCE, plan_forms
from autoshard.plan.plan import Plan, Prediction
from autoshard.plan.rules.check import rejections
from autoshard.plan.rules.nxd_engine import nxd_schedule
from autoshard.plan.rules.rule import Rejection, Rule
from autoshard.plan.rules.strategy import AtomCut, engine_rules
from autoshard.plan.tables import plan_blocks, plan_programs, step_graph_of, table_setting, units_of
from autoshard.schedule.verify import verify_actions
from autoshard.spec.workload import PRECISIONS, Dtype
from autoshard.units import format_bytes

_STRUCTURE = "autoshard: the parts of a plan must agree with each other"
_PREDICTED = "autoshard: the plan's own prediction"


def verify(plan: Plan, *, extra_rules: Sequence[Rule] = ()) -> tuple[Rejection, ...]:
    """Give every reason why a plan may not run; empty when there is none.

    That the sharded program computes the same as the whole one is not checked here: see ``notices``.
    """
    facts = plan.model, plan.cluster, plan.workload, plan.engine
    try:
        right = build_plan(plan.candidate, *facts)
    except InputError:
        right = None  # it has no shape, and Rules say why
    return (
        *(_misfits(plan, right) if right else ()),
        *_schedule_misfits(plan),
        *_padding_misfits(plan),
        *(_strategy_misfits(plan) if plan.strategies else ()),
        *rejections(plan.candidate, *facts, extra_rules=extra_rules),
        *(_prediction_misfits(plan, plan.prediction) if plan.prediction else ()),
    )


def notices(plan: Plan) -> tuple[str, ...]:
    """Say what a plan that may run still does not promise."""
    messages: list[str] = []
    if plan.model.traced:
        messages.append(
            unrun_code(plan) or "model: was read off its code, which a run executes in the place of the lines"
        )
        messages += (f"model: {note}" for note in plan.model.traced.unlifted)
    if not plan.strategies:
        why = "the table is empty, so that nothing says what is sent, and engines refuse it"
        messages.append(f"strategies: {why}. Make it again")
    if plan.prediction is None:
        messages.append("prediction: there is none, so nothing is said about memory and time")
    elif plan.prediction.basis.startswith("uncalibrated"):
        messages.append("prediction: uncalibrated; no number in it was compared with a measurement")
    if plan.prediction and "mfu" in plan.prediction.outside:
        messages.append(f"prediction.mfu: {plan.prediction.outside['mfu']}: the prediction is likely too fast")
    return tuple(messages)


def unrun_precision(plan: Plan) -> str:
    """Say why the engine of a plan does not compute in its precision yet, which is priced all the same; "" if it does.

    The update of torch computes in FP32, and keeps sums of gradients and moments in BF16 as well; products with
    weights may have factors in FP8, but not those of a module's code. NxD's ZeRO-1 keeps FP32 shards, and gradients in
    FP32 or in the format of the weights (engine/nxd/lowering.py).
    """
    have, weights = plan.workload.precision, plan.workload.precision.masters or plan.workload.precision.weights
    on_torch, small = plan.engine == "torch", {"bf16"} if plan.engine == "torch" else set[Dtype]()
    products = {None, "fp8"} if on_torch and not plan.model.traced else {None}
    gradients = {weights} | (small or {have.weights})
    fits = have.products in products and have.moments in {weights, *small} and have.gradients in gradients
    if fits or have.name in PRECISIONS:
        return ""
    where = " for the code of a module" if on_torch and have.products == "fp8" and plan.model.traced else ""
    return f"precision={have.name}: is priced, and the {plan.engine} engine does not run it yet{where}"


def unrun(plan: Plan) -> tuple[Rejection, ...]:
    """Say what no engine does yet of a plan that may be priced."""
    why, source = unrun_precision(plan), "autoshard: engine/torch/states, engine/nxd/lowering.py"
    remedy = f"Use --precision {', '.join(PRECISIONS)}"
    return (
        *([_reject("precision-engine", f"{why}. {remedy}", source)] if why else []),
        *([_reject("code-engine", why_not)] if (why_not := unrun_code(plan)) else []),
    )


def unrun_code(plan: Plan) -> str:
    """Say why no run executes the code off which a model was read; "" if one does, or if the model is of a card."""
    name, code = plan.model.name, plan.code
    if plan.model.traced is None or (code is not None and not code.unrun):
        return ""
    if code is None:
        again = "Plan it with autoshard plan --module FILE.py:FUNCTION, and the plan says where its code is"
        return (
            f"code: {name} was read off its code, which a run executes, and the plan does not say where it is. {again}"
        )
    return f"code: {name} cannot be trained by a run: {code.unrun}"


def _reject(rule_id: str, message: str, source: str = _STRUCTURE) -> Rejection:
    return Rejection(rule_id=rule_id, message=message, source=source)


def _misfits(plan: Plan, right: Plan) -> Iterator[Rejection]:
    """Yield where a plan differs from the one that follows from its sizes, with what to type instead."""
    schedule, facts = plan.schedule, list[tuple[str, object, object]]()
    facts += [("mesh", plan.mesh, right.mesh), ("number of stages", len(plan.stages), len(right.stages))]
    for name in ("num_ranks", "num_micro_batches"):
        facts.append((f"schedule.{name}", getattr(schedule, name), getattr(right.schedule, name)))
    if schedule.num_stages == len(right.stages):
        right = replace(right, schedule=schedule)
    for index, (stage, due) in enumerate(zip(plan.stages, right.stages, strict=False)):
        rank, chunk = right.schedule.place_of(index)
        expected = {"rank": rank, "chunk": chunk, "first_layer": due.first_layer}
        facts += [(f"stages[{index}].{name}", getattr(stage, name), value) for name, value in expected.items()]
    for where, have, due in facts:
        if have != due:
            yield _reject("plan-parts", f"{where}: is {have}, but {due} follows from the rest of the plan. Type {due}")


def _schedule_misfits(plan: Plan) -> Iterator[Rejection]:
    """Yield what is wrong with action lists, and where the stages of a builder's lists have been moved."""
    schedule = plan.schedule
    if schedule.actions is not None or schedule.placement is not None:  # tests prove what builders make
        # A builder's order repeats from round to round, so a few rounds stand for all of them.
        count = schedule.num_micro_batches
        few = count if schedule.actions is not None else min(count, 4 * schedule.num_ranks)
        for fault in verify_actions(replace(schedule, num_micro_batches=few)):
            yield _reject("plan-actions", f"schedule.{fault}")
    if plan.engine == "nxd" and schedule.actions is not None:
        try:
            is_built = schedule.actions == replace(schedule, actions=None).action_lists()
        except InputError:  # no builder makes such lists
            is_built = False
        if not is_built:  # Rules know only the name of the schedule's builder
            why = f"are not those of {schedule.builder}, and NxD follows its own scheduler, no list"
            yield _reject("nxd-actions", f"schedule.actions: {why}. Type actions: null", nxd_schedule.source)


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
    try:
        programs = plan_programs(plan)
    except InputError as error:
        yield from (_reject("plan-strategies", str(fault)) for fault in error.faults)
        return
    tied = tied_misfits(step_graph_of(plan).graph, programs, table_setting(plan).atoms)
    misfits = [_reject("plan-tied", f"strategies: {why}") for why in tied]
    right = units_of(plan)
    for name in sorted({*right, *plan.units}):
        if right.get(name) != plan.units.get(name):
            why = f"what a whole block gathers and reduces follows from zero={plan.zero} and the table"
            remedy = f"Type {right[name]}" if name in right else "Remove it"
            misfits.append(_reject("plan-units", f"units.{name}: {why}, and cannot be edited. {remedy}"))
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
        misfits += [
            replace(rejection, message=f"strategies.{name}.{rejection.message}") for rejection in against if rejection
        ]
    if plan.engine == "nxd" and not misfits:
        _, faults = plan_forms(plan, programs)
        misfits += [_reject("nxd-form", str(fault), SOURCE) for fault in faults]
    yield from misfits


def tied_misfits(graph: OpGraph, programs: Mapping[str, Program], sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield where two blocks that share a weight cut it differently, over atoms of these sizes."""
    for pair in graph.tied.items():
        names = [tensor.partition(".")[::2] for tensor in pair]
        cuts = [programs[kind].results[f"{weight}.sum"].layout.dims for kind, weight in names]
        if [cut for _, cut in cuts[0]] != [cut for _, cut in cuts[1]]:
            copy, owner = (Layout(dims=tuple((dim, whole_axes(cut, sizes)) for dim, cut in dims)) for dims in cuts)
            yield f"{pair[0]} is {copy}, but shares its values with {pair[1]}, which is {owner}. Cut both alike"


def _prediction_misfits(plan: Plan, prediction: Prediction) -> Iterator[Rejection]:
    capacity, ranks = prediction.capacity_bytes, plan.schedule.num_ranks
    usable = format_bytes(plan.cluster.rank_memory_bytes)
    has_less = capacity < plan.cluster.rank_memory_bytes
    filled = capacity - int(plan.cluster.rank_memory_bytes * (1 - plan.headroom))  # Kernels.capacity_bytes
    blocks = f", of which blocks of the allocator may fill {format_bytes(filled)}" if filled > 1 else ""
    left_free = f" ({usable} less {plan.headroom:.3g} of headroom{blocks})" if has_less else ""
    if prediction.of != plan_hash(plan):
        message = (
            "prediction: was made for other choices than those that now stand in the plan. Predict again "
            f"with autoshard plan --at {plan.candidate}, or type prediction: null"
        )
        yield _reject("prediction-stale", message, _PREDICTED)
    if len(prediction.stage_memory) != ranks:
        lists = f"lists {len(prediction.stage_memory)} pipeline ranks, but there are {ranks}"
        yield _reject("prediction-ranks", f"prediction.stage_memory: {lists}. Predict again", _PREDICTED)
    needs = {rank: memory.total for rank, memory in enumerate(prediction.stage_memory) if memory.total > capacity}
    if needs:
        rank = max(needs, key=needs.__getitem__)
        alike = f" ({len(needs)} of {ranks} pipeline ranks need too much)" if len(needs) > 1 else ""
        message = (
            f"prediction.stage_memory[{rank}]: pipeline rank {rank} is predicted to need {format_bytes(needs[rank])} "
            f"of {format_bytes(capacity)}{left_free}, {format_bytes(needs[rank] - capacity)} too much{alike}. "
            "Use more recompute, a smaller mbs, or more tp or pp"
        )
        yield _reject("memory", message, _PREDICTED)
    host_bytes = max((memory.host_bytes for memory in prediction.stage_memory), default=0)
    if host_bytes > plan.cluster.rank_host_bytes:
        ranks_per_node = plan.cluster.ranks_per_node
        need, have = (format_bytes(size * ranks_per_node) for size in (host_bytes, plan.cluster.rank_host_bytes))
        message = (
            f"prediction.stage_memory: the {ranks_per_node} ranks of a node are predicted to keep {need} in its "
            f"memory, of which a plan may fill {have}. Use more recompute, a smaller mbs, or no offload"
        )
        yield _reject("host-memory", message, _PREDICTED)
