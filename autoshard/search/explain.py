"""A plan's blocks, priced line by line as the prediction prices them, with the second-best cut of every operation."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.blocks.cutting import Terms, operator_problem
from autoshard.blocks.operators import cost_of, totals
from autoshard.blocks.places import op_places
from autoshard.blocks.problem import OperatorProblem, op_choices, real_cuts
from autoshard.cost.block import PASSES, BlockWork, Setting, block_cost
from autoshard.cost.calibration import Calibration
from autoshard.cost.compute import kernel_time
from autoshard.cost.predict import question_of
from autoshard.cost.provenance import calibration_of, interval_and_basis
from autoshard.cost.setting import Question, setting_of, work_of
from autoshard.cost.sharded import ListedBlocks
from autoshard.graph.block import Block
from autoshard.layout.collective import Collective
from autoshard.layout.layout import Cuts, show_atoms, whole_axes
from autoshard.layout.legal import cut_operations
from autoshard.layout.program import Compute, Program
from autoshard.layout.strategy import Strategy
from autoshard.plan.explanation import ExplainedBlock, ExplainedOp, Explanation, OtherCut, SentCollective
from autoshard.plan.lowering import ATOMS
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.strategy import DATA_RULES, AtomCut, StrategyRule, strategy_rules
from autoshard.plan.tables import table_name

Seconds = Mapping[str, Mapping[str, float]]  # operation -> pass -> seconds


def explain(plan: Plan, calibration: Calibration | None = None) -> Explanation:
    """Explain every block of a plan with a table."""
    question = question_of(plan, calibration or calibration_of(plan))
    blocks = ListedBlocks.of(plan)
    setting = setting_of(question, plan.candidate, blocks)
    counts = _counts(plan)
    found = tuple(
        _explained(plan, question, setting, kind, drop, counts[table_name(kind, drop)])
        for kind, drop in blocks.kinds
        if counts[table_name(kind, drop)]
    )
    named = {step.other.refused for block in found for step in block.steps if step.other}
    rules = strategy_rules(plan.engine, sequence_parallel=plan.sp, cp_kind=plan.cp_kind)
    return Explanation(
        candidate=str(plan.candidate),
        blocks=found,
        rules={rule.id: rule.remedy for rule in rules if rule.id in named},
        basis=interval_and_basis(question.calibration, plan)[1],
    )


def second_best(
    problem: OperatorProblem, own: Mapping[str, Cuts], rules: Sequence[StrategyRule]
) -> Mapping[str, OtherCut]:
    """Return the cheapest cut of every operation but its own, with all others chosen anew.

    Where the Rules leave one cut only, the cheapest that the Rules about tp refuse.
    """
    base_s = cost_of(problem, own)
    found: dict[str, OtherCut] = {}
    for name, costs in totals(problem, list(own)).items():
        op = problem.block.op(name)
        free = [op_places(problem.block, op, atom, DATA_RULES) for atom in problem.real_atoms]
        freed = replace(
            problem, allowed={**problem.allowed, name: op_choices(problem.block, op, problem.real_atoms, free)}
        )
        other = _cheapest(own[name], costs) or _cheapest(own[name], totals(freed, [name])[name])
        if other:
            cuts, cost_s = other
            refused = _refusal(problem, name, cuts, rules)
            found[name] = OtherCut(cut=_shown(problem, cuts, own[name]), more_s=cost_s - base_s, refused=refused)
    return found


def _cheapest(own: Cuts, costs: Sequence[tuple[Cuts, float]]) -> tuple[Cuts, float] | None:
    rest = [one for one in costs if real_cuts(one[0]) != real_cuts(own) and math.isfinite(one[1])]
    return min(rest, key=lambda one: one[1], default=None)


def _refusal(problem: OperatorProblem, name: str, cuts: Cuts, rules: Sequence[StrategyRule]) -> str | None:
    """Return the Rule that refuses a cut of an operation, if one does."""
    op = problem.block.op(name)
    tied = dict(op.kind.tied_dims())
    where = {atom: dim for dim, cut in cuts.items() if dim not in tied for atom in cut}
    places = [AtomCut.of(problem.block, op, atom, where.get(atom)) for atom in problem.real_atoms]
    against = (rule.rejection(place) for rule in rules for place in places)
    return next((found.rule_id for found in against if found), None)


def _counts(plan: Plan) -> Counter[str]:
    drops = Counter(stage.recompute.of_layer(number) for stage in plan.stages for number in range(stage.num_layers))
    found = Counter({table_name("layer", drop): count for drop, count in drops.items()})
    return found + Counter(("embed", "head"))


def _explained(
    plan: Plan, question: Question, setting: Setting, kind: str, drop: Recompute, count: int
) -> ExplainedBlock:
    name = table_name(kind, drop)
    lines = {**plan.strategies[kind], **plan.strategies[name]}
    work, block = work_of(question, setting, kind, drop), setting.blocks.block(kind, drop).block
    kernels = _kernels(work, block, question)
    computes: dict[str, dict[str, float]] = defaultdict(dict)
    for kernel in kernels:
        mine = computes[kernel.op]
        mine[kernel.pass_] = mine.get(kernel.pass_, 0.0) + kernel.work_s + kernel.waiting_s
    sent = _sent(plan, work, setting)
    others = _others(plan, question, setting, kind)
    ordered = [op.name for op in block.select("micro_batch", "F")]
    edges = [entry for entry in lines if entry not in ordered]
    return ExplainedBlock(
        name=name,
        count=count,
        steps=tuple(
            ExplainedOp(
                name=entry,
                gives=str(Strategy.parse(lines[entry]).outputs[0]),
                seconds={pass_: computes[entry][pass_] for pass_ in PASSES if pass_ in computes[entry]},
                sent=tuple(sorted(sent[entry], key=lambda one: PASSES.index(one.pass_))),
                other=others.get(entry),
            )
            for entry in (*ordered, *edges)
        ),
        waiting_s=sum(kernel.waiting_s for kernel in kernels),
        hidden_s=float(block_cost(work, setting.rings, question.rates).hidden_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    op: str  # the first operation of the kernel, whatever its backward runs first
    pass_: str
    work_s: float
    waiting_s: float


def _kernels(work: BlockWork, block: Block, question: Question) -> list[_Kernel]:
    """Price the kernel runs of a block."""
    first = {name: group.ops[0] for group in block.fused for name in group.ops}
    found = [(run, kernel_time(kernel, question.rates)) for run, kernel in work.kernels]
    return [
        _Kernel(op=first[run.ops[0].source], pass_=run.pass_, work_s=float(work_s), waiting_s=float(waiting_s))
        for run, (work_s, waiting_s) in found
    ]


def _sent(plan: Plan, work: BlockWork, setting: Setting) -> Mapping[str, list[SentCollective]]:
    """Return what every line sends, by its name."""
    found: dict[str, list[SentCollective]] = defaultdict(list)
    for message, message_bytes in work.messages:
        ring = setting.rings[message.collective.atoms]
        atoms = tuple(atom for atom in message.collective.atoms if plan.mesh.atoms_of(atom))
        group = plan.mesh.group_of(0, atoms)
        if len(group) > 1 and message.collective.kind != "slice":
            one = SentCollective(
                pass_=message.pass_,
                collective=str(_whole(message.collective, setting)),
                sent_bytes=float(ring.sent_bytes(message.collective, message_bytes)),
                link=plan.cluster.link_of(group).name,
                num_ranks=len(group),
                time_s=float(ring.time_s(message.collective, message_bytes)),
            )
            found[message.entry].append(one)
    return found


def _others(plan: Plan, question: Question, setting: Setting, kind: str) -> Mapping[str, OtherCut]:
    """Return the second-best cuts; an operation that is cut as no choice of the solver keeps its cut: it was pinned."""
    blocks = setting.blocks
    assert isinstance(blocks, ListedBlocks), "a plan is explained as its own table says"
    terms = Terms.of(plan.candidate, plan.engine)
    problem = operator_problem(question, plan.candidate, terms, kind)
    own = _own_cuts(problem, blocks.programs[kind])
    pinned = {name: (cuts,) for name, cuts in own.items() if not _is_choice(problem, name, cuts)}
    return second_best(replace(problem, allowed={**problem.allowed, **pinned}), own, terms.rules)


def _is_choice(problem: OperatorProblem, name: str, cuts: Cuts) -> bool:
    return any(real_cuts(choice) == cuts for choice in problem.allowed[name])


def _own_cuts(problem: OperatorProblem, program: Program) -> Mapping[str, Cuts]:
    computes = {entry.op.name: entry.cuts for entry in program.instructions if isinstance(entry, Compute)}
    return {op.name: real_cuts(computes[op.name]) for op in cut_operations(problem.block)}


def _shown(problem: OperatorProblem, cuts: Cuts, own: Cuts) -> str:
    """Print only what differs: the cuts of dims that another atom cuts."""
    sizes = {atom: problem.atoms.get(atom, 1) for atom in ATOMS}
    moved = [dim for dim in {**cuts, **own} if cuts.get(dim, ()) != own.get(dim, ())]
    texts = [f"{dim}/{show_atoms(whole_axes(cuts[dim], sizes))}" if cuts.get(dim) else f"{dim} whole" for dim in moved]
    return ", ".join(texts)


def _whole(collective: Collective, setting: Setting) -> Collective:
    return replace(collective, atoms=whole_axes(collective.atoms, {atom: int(setting.atoms[atom]) for atom in ATOMS}))
