"""A plan's blocks, priced line by line as the prediction prices them, with the second-best cut of every operation."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.blocks.choices import atom_dims, op_cuts, real_cuts
from autoshard.blocks.cutting import Meshes, Terms, operator_problem
from autoshard.blocks.operators import CutTotals
from autoshard.blocks.problem import OperatorProblem
from autoshard.cost.built_in import calibration_of
from autoshard.cost.compute import kernel_time
from autoshard.cost.predict import question_of
from autoshard.cost.setting import PASSES, BlockWork, Question, Setting, block_cost, setting_of, work_of
from autoshard.cost.sharded import ListedBlocks
from autoshard.layout.layout import Cuts, show_atoms, whole_axes
from autoshard.layout.legal import cut_operations
from autoshard.layout.program import Compute
from autoshard.layout.table import Strategy
from autoshard.plan.lowering import ATOMS, ENDS
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.strategy import DATA_RULES, AtomCut, StrategyRule, strategy_rules
from autoshard.plan.tables import table_name
from autoshard.spec.kernels import load_kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class SentCollective:
    """One Collective: in which pass, what a rank sends, over which link, in a group of how many, for how long."""

    pass_: str
    collective: str
    sent_bytes: float
    link: str
    num_ranks: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherCut:
    """Another cut of an operation, and how much longer the block takes with it, all other operations solved again.

    Negative where the plan's cuts are not those that the solver prefers, or where a Rule refuses the other cut:
    ``refused`` holds its id.
    """

    cut: str
    more_s: float
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedOp:
    """One line of a table: layouts of what it gives, its kernels by pass, what it sends, its second-best cut.

    A fused kernel's time stands with its first operation, waiting for its start included. ``other`` is None for
    delivers, and where there is no other.
    """

    name: str
    gives: str
    seconds: Mapping[str, float]
    sent: tuple[SentCollective, ...]
    other: OtherCut | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedBlock:
    """One block: the name of its table, how many times the model has it, and its steps, once for a micro-batch."""

    name: str
    count: int
    steps: tuple[ExplainedOp, ...]
    waiting_s: float  # until hosts have started its kernels
    hidden_s: float  # of what it sends: while it computes

    @property
    def compute_s(self) -> float:
        """The time of all kernels, at work."""
        return sum(sum(step.seconds.values()) for step in self.steps)

    @property
    def sending_s(self) -> float:
        """The time of all Collectives."""
        return sum(collective.time_s for step in self.steps for collective in step.sent)

    @property
    def time_s(self) -> float:
        """The time of the block."""
        return self.compute_s + self.waiting_s + self.sending_s - self.hidden_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All blocks of a plan."""

    candidate: str
    blocks: tuple[ExplainedBlock, ...]
    rules: Mapping[str, str]  # those that refuse another cut: id -> what it says
    basis: str  # what the seconds rest on


def explain(plan: Plan) -> Explanation:
    """Explain each kind of block that a plan uses: how often, its time line by line, the second-best cuts."""
    question = question_of(plan, calibration_of(plan))
    blocks = ListedBlocks.of(plan)
    setting = setting_of(question, plan.candidate, blocks)
    counts = Counter((*(table_name(kind, drop) for kind, drop in plan.layers), *ENDS))
    shown = [(kind, drop, counts[table_name(kind, drop)]) for kind, drop in blocks.kinds]
    shown = [entry for entry in shown if entry[2]]
    other_cuts = {kind: _others(plan, question, setting, kind) for kind in dict.fromkeys(kind for kind, _, _ in shown)}
    explained = tuple(_explained(plan, question, setting, entry, other_cuts[entry[0]]) for entry in shown)
    named = {step.other.refused for block in explained for step in block.steps if step.other}
    rules = strategy_rules(plan.engine, sequence_parallel=plan.sp, cp_kind=plan.cp_kind)
    return Explanation(
        candidate=str(plan.candidate),
        blocks=explained,
        rules={rule.id: rule.remedy for rule in rules if rule.id in named},
        basis=question.calibration.basis,
    )


def second_best(
    problem: OperatorProblem, plan_cuts: Mapping[str, Cuts], rules: Sequence[StrategyRule]
) -> Mapping[str, OtherCut]:
    """Return the cheapest other cut of every operation, with the cuts of all other operations chosen anew.

    Where the Rules leave one cut only, the cheapest that the Rules about tp refuse.
    """
    totals, sizes = CutTotals(problem), {atom: problem.atoms.get(atom, 1) for atom in ATOMS}
    base_s, cheapest = totals.cost_of(plan_cuts), dict[str, OtherCut]()
    for name, costs in totals.every().items():
        op, current = problem.block.op(name), plan_cuts[name]

        def different(costs: Sequence[tuple[Cuts, float]], current: Cuts = current) -> list[tuple[Cuts, float]]:
            return [pair for pair in costs if real_cuts(pair[0]) != real_cuts(current) and math.isfinite(pair[1])]

        rest = different(costs)
        if not rest:
            free = [atom_dims(problem.block, op, atom, DATA_RULES) for atom in problem.real_atoms]
            choices = op_cuts(problem.block, op, problem.real_atoms, free)
            rest = different(totals.with_choices(name, choices))
        if not rest:
            continue
        cuts, cost_s = min(rest, key=lambda pair: pair[1])
        tied = dict(op.kind.tied_dims())
        dims = {atom: dim for dim, cut in cuts.items() if dim not in tied for atom in cut}
        places = [AtomCut.of(problem.block, op, atom, dims.get(atom)) for atom in problem.real_atoms]
        against = (refusal for rule in rules for place in places if (refusal := rule.rejection(place)))
        texts = [
            f"{dim}/{show_atoms(whole_axes(cuts[dim], sizes))}" if cuts.get(dim) else f"{dim} whole"
            for dim in {**cuts, **current}
            if cuts.get(dim, ()) != current.get(dim, ())
        ]
        refused = next((refusal.rule_id for refusal in against), None)
        cheapest[name] = OtherCut(cut=", ".join(texts), more_s=cost_s - base_s, refused=refused)
    return cheapest


def _explained(
    plan: Plan,
    question: Question,
    setting: Setting,
    which: tuple[str, Recompute, int],
    other_cuts: Mapping[str, OtherCut],
) -> ExplainedBlock:
    kind, drop, count = which
    name = table_name(kind, drop)
    lines = {**plan.strategies[kind], **plan.strategies[name]}
    work, block = work_of(question, setting, kind, drop), setting.blocks.block(kind, drop).block
    # a kernel stands with its first operation, whatever its backward runs first
    first = {op_name: group.ops[0] for group in block.fused for op_name in group.ops}
    computes: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for run, kernel in work.kernels:
        entry = run.ops[0].source  # of a sum of gradients the deliver that makes it
        computes[first.get(entry, entry)][run.pass_] += float(kernel_time(kernel, question.rates))
    sent = _sent(plan, work, setting)
    ordered = [op.name for op in block.select("micro_batch", "F")]
    steps = tuple(
        ExplainedOp(
            name=entry,
            gives=str(Strategy.parse(lines[entry]).outputs[0]),
            seconds={pass_: computes[entry][pass_] for pass_ in PASSES if pass_ in computes[entry]},
            sent=tuple(sorted(sent[entry], key=lambda collective: PASSES.index(collective.pass_))),
            other=other_cuts.get(entry),
        )
        for entry in (*ordered, *(entry for entry in lines if entry not in ordered))
    )
    cost = block_cost(work, setting.rings, question.rates)
    waiting_s, hidden_s = float(cost.part_s("waiting")), float(cost.hidden_s)
    return ExplainedBlock(name=name, count=count, steps=steps, waiting_s=waiting_s, hidden_s=hidden_s)


def _sent(plan: Plan, work: BlockWork, setting: Setting) -> Mapping[str, list[SentCollective]]:
    """Return what every line sends, by its name."""
    by_line: dict[str, list[SentCollective]] = defaultdict(list)
    sizes = {atom: int(setting.atoms[atom]) for atom in ATOMS}
    for message, message_bytes in work.messages:
        collective, ring = message.collective, setting.rings[message.collective.atoms]
        group = plan.mesh.group_of(0, tuple(atom for atom in collective.atoms if plan.mesh.atoms_of(atom)))
        if len(group) > 1 and collective.kind != "slice":
            sent = SentCollective(
                pass_=message.pass_,
                collective=str(replace(collective, atoms=whole_axes(collective.atoms, sizes))),
                sent_bytes=float(ring.sent_bytes(collective, message_bytes)),
                link=plan.cluster.link_of(group).name,
                num_ranks=len(group),
                time_s=float(ring.busy_s(collective, message_bytes, eager=load_kernels(plan.kernels).eager)),
            )
            by_line[message.entry].append(sent)
    return by_line


def _others(plan: Plan, question: Question, setting: Setting, kind: str) -> Mapping[str, OtherCut]:
    """Return the second-best cuts; an operation that is cut as no choice of the solver keeps its cut: it was pinned."""
    blocks = setting.blocks
    assert isinstance(blocks, ListedBlocks), "a plan is explained as its own table says"
    terms = Terms.of(plan.candidate, plan.engine)
    problem = operator_problem(question, Meshes.of(question, plan.candidate), terms, kind)
    program = blocks.programs[kind].instructions
    computes = {entry.op.name: entry.cuts for entry in program if isinstance(entry, Compute)}
    plan_cuts = {op.name: real_cuts(computes[op.name]) for op in cut_operations(problem.block)}
    pinned = {
        name: (cuts,)
        for name, cuts in plan_cuts.items()
        if not any(real_cuts(choice) == cuts for choice in problem.allowed[name])
    }
    return second_best(replace(problem, allowed={**problem.allowed, **pinned}), plan_cuts, terms.rules)
