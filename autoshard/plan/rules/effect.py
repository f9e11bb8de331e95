"""Rules against options that would do nothing, and against names that nobody knows."""

from autoshard.errors import nearest
from autoshard.plan.candidate import boundary_fault
from autoshard.plan.rules.columns import Columns, Mask, kernels_fault
from autoshard.plan.rules.rule import Verdict, implies, rule
from autoshard.schedule.builders import builders
from autoshard.spec.kernels import kernels_names, load_kernels

_NO_EFFECT = "autoshard: an option without effect is refused, because the user meant something by it"


@rule("sp", source=_NO_EFFECT)
def sp_effect(c: Columns) -> Verdict:
    yield implies(c.sp, c.tp > 1)
    yield "sp=true: cuts activations over tp, and tp is 1. Use a tp above 1, or leave sp out"


@rule("cp_kind", source=_NO_EFFECT)
def cp_kind_effect(c: Columns) -> Verdict:
    yield implies(c.cp_kind != "ring", c.cp > 1)
    yield f"cp_kind={c.cp_kind}: says how cp exchanges keys and values, and cp is 1. Leave it out, or use cp=2"


@rule("cp_order", source=_NO_EFFECT)
def cp_order_effect(c: Columns) -> Verdict:
    yield implies(c.cp_order != "contiguous", c.cp > 1)
    yield f"cp_order={c.cp_order}: says how cp cuts the sequence, and cp is 1. Leave it out, or use cp=2"


@rule("ep", source=_NO_EFFECT)
def ep_effect(c: Columns) -> Verdict:
    yield (c.ep == 1) | (c.model.num_experts > 0)
    yield f"ep={c.ep}: {c.model.name} is dense; it has no experts to spread. Use ep=1"


@rule(
    "vp,schedule",
    source="derived: 1f1b, gpipe and zb_h1 know one stage per rank (Narayanan et al. 2021, arXiv:2104.04473, section "
    "2.2; Qi et al. 2023, arXiv:2401.10241, section 2), zb_v has two; interleaving one is 1f1b",
)
def vp_schedule(c: Columns) -> Verdict:
    right: Mask = True
    for name, builder in builders().items():
        fits = c.vp > 1 if builder.num_chunks is None else c.vp == builder.num_chunks
        right = right & implies(c.schedule == name, fits)
    yield right
    count = builders()[str(c.schedule)].num_chunks
    remedy = "schedule=interleaved, or vp=1" if count == 1 else f"vp={count or 2}"
    per_rank = {1: "one stage", None: "several stages"}.get(count, f"{count} stages")
    yield f"vp={c.vp}: schedule={c.schedule} runs {per_rank} per rank. Use {remedy}"


@rule("schedule", source=_NO_EFFECT)
def schedule_effect(c: Columns) -> Verdict:
    yield (c.schedule == "1f1b") | (c.pp > 1)
    yield f"schedule={c.schedule}: there is no pipeline with pp=1. Leave schedule out"


@rule("zero", source=_NO_EFFECT)
def zero_effect(c: Columns) -> Verdict:
    yield implies(c.zero == 3, c.dp * c.cp > 1)
    yield f"zero={c.zero}: there is nothing to spread over with dp=1 and cp=1. Leave zero out"


@rule("boundary", source="derived: what is handed from block to block is a hidden state with nothing left to do about")
def boundary(c: Columns) -> Verdict:
    fault = boundary_fault(c.shared.boundary)
    yield fault == ""
    yield f"boundary={c.shared.boundary}: {fault}"


@rule("lnc", source="aws-neuron/aws-neuron-sdk about-neuron/arch/neuron-features/logical-neuroncore-config.rst")
def lnc(c: Columns) -> Verdict:
    have, wanted = c.cluster.lnc, c.shared.lnc
    yield wanted in (None, have)
    remedy = f"is planned with lnc {have}. Use --lnc {wanted} to plan for the other"
    yield f"lnc={wanted}: {c.cluster.name} {remedy if have else 'has no logical cores to configure. Leave lnc out'}"


@rule("place", source="derived: a placement is a permutation of the ranks of one node")
def place(c: Columns) -> Verdict:
    have, node = c.shared.place, c.cluster.ranks_per_node
    yield have is None or len(have.local_ranks) == node
    placed = len(have.local_ranks) if have else 0
    yield f"place={have}: places {placed} ranks, but a node of {c.cluster.name} has {node}: 0-{node - 1}"


@rule("kernels", source="autoshard/spec/kernel_tables: each table describes the kernels of one engine's platform")
def kernels(c: Columns) -> Verdict:
    fault = kernels_fault(c.kernels, c.engine)
    yield fault == ""
    yield f"kernels={c.kernels}: {fault}"


@rule("recompute", source="autoshard/spec/kernel_tables: what each framework can recompute selectively")
def recompute_ops(c: Columns) -> Verdict:
    # A framework's own name is right even where it computes nothing again.
    names = sorted({name for one in c.shared.recompute for name in one.ops})
    table = (
        load_kernels(c.kernels).selective if names and c.kernels in kernels_names() else dict[str, tuple[str, ...]]()
    )
    known = tuple(dict.fromkeys((*table, *(op for ops in table.values() for op in ops))))
    wrong = [name for name in names if table and name not in known]
    yield not wrong
    faults = " ".join(f"{name} is not known to {c.kernels}. {nearest(name, known)}" for name in wrong)
    yield f"recompute={c.recompute}: {faults}"
