"""Rules against options that would do nothing, and against names that nobody knows."""

from autoshard.plan.rules.columns import Column, Columns
from autoshard.plan.rules.rule import Rule, implies, one_of

SPLIT = ("zb_h1", "zb_v")  # schedules that run the two halves of a backward pass apart
_NO_EFFECT = "autoshard: an option without effect is refused, because the user meant something by it"


def _sp(c: Columns) -> str:
    return "sp=true: cuts activations over tp, and tp is 1. Use a tp above 1, or leave sp out"


def _cp_kind(c: Columns) -> str:
    return f"cp_kind={c.cp_kind}: says how cp exchanges keys and values, and cp is 1. Leave it out, or use cp=2"


def _cp_order(c: Columns) -> str:
    return f"cp_order={c.cp_order}: says how cp cuts the sequence, and cp is 1. Leave it out, or use cp=2"


def _ep(c: Columns) -> str:
    return f"ep={c.ep}: {c.model.name} is dense; it has no experts to spread. Use ep=1"


def _chunks(c: Columns) -> str:
    return f"vp={c.vp}: schedule={c.schedule} runs one stage per rank. Use schedule=interleaved, or vp=1"


def _interleaved_allows(c: Columns) -> Column:
    return implies(c.schedule == "interleaved", (c.vp > 1) & (c.pp > 1))


def _interleaved(c: Columns) -> str:
    return f"schedule=interleaved: needs several ranks and several stages on each, not pp={c.pp},vp={c.vp}. Use vp=2"


def _schedule(c: Columns) -> str:
    return f"schedule={c.schedule}: there is no pipeline with pp=1. Leave schedule out"


def _v_chunks(c: Columns) -> str:
    return f"vp={c.vp}: schedule={c.schedule} folds the pipeline once, into two stages per rank. Use vp=2"


def _zero(c: Columns) -> str:
    return f"zero={c.zero}: there is nothing to spread over with dp=1 and cp=1. Leave zero out"


def _lnc(c: Columns) -> str:
    have = "has no logical cores to configure. Leave lnc out"
    if c.cluster.lnc is not None:
        have = f"is planned with lnc {c.cluster.lnc}. Use --lnc {c.lnc} to plan for the other"
    return f"lnc={c.lnc}: {c.cluster.name} {have}"


RULES = (
    Rule(
        id="sp-effect",
        subject="sp",
        allows=lambda c: implies(c.sp, c.tp > 1),
        message=_sp,
        source=_NO_EFFECT,
    ),
    Rule(
        id="cp-kind-effect",
        subject="cp_kind",
        allows=lambda c: implies(c.cp_kind != "ring", c.cp > 1),
        message=_cp_kind,
        source=_NO_EFFECT,
    ),
    Rule(
        id="cp-order-effect",
        subject="cp_order",
        allows=lambda c: implies(c.cp_order != "contiguous", c.cp > 1),
        message=_cp_order,
        source=_NO_EFFECT,
    ),
    Rule(
        id="ep-effect",
        subject="ep",
        allows=lambda c: (c.ep == 1) | (c.model.num_experts > 0),
        message=_ep,
        source=_NO_EFFECT,
    ),
    Rule(
        id="vp-schedule",
        subject="vp,schedule",
        allows=lambda c: implies(c.vp > 1, one_of(c.schedule, ("interleaved", "zb_v"))),
        message=_chunks,
        source="derived: gpipe, 1f1b and zb_h1 know one stage per rank (Narayanan et al. 2021, arXiv:2104.04473, "
        "section 2.2; Qi et al. 2023, arXiv:2401.10241, section 2)",
    ),
    Rule(
        id="interleaved-shape",
        subject="schedule",
        allows=_interleaved_allows,
        message=_interleaved,
        source=_NO_EFFECT,
    ),
    Rule(
        id="schedule-effect",
        subject="schedule",
        allows=lambda c: implies(one_of(c.schedule, ("gpipe", *SPLIT)), c.pp > 1),
        message=_schedule,
        source=_NO_EFFECT,
    ),
    Rule(
        id="zb-v-chunks",
        subject="vp,schedule",
        allows=lambda c: implies(c.schedule == "zb_v", c.vp == 2),
        message=_v_chunks,
        source="derived: rank r holds stages r and 2*pp-1-r (ZB-V of Qi et al. 2023, arXiv:2401.10241)",
    ),
    Rule(
        id="zero-effect",
        subject="zero",
        allows=lambda c: implies(c.zero == 3, c.dp * c.cp > 1),
        message=_zero,
        source=_NO_EFFECT,
    ),
    Rule(
        id="boundary",
        subject="boundary",
        allows=lambda c: c.boundary_fault == "",
        message=lambda c: f"boundary={c.boundary}: {c.boundary_fault}",
        source="derived: what is handed from block to block is a hidden state that nothing is left to do about",
    ),
    Rule(
        id="lnc",
        subject="lnc",
        allows=lambda c: (c.lnc == 0) | (c.lnc == (c.cluster.lnc or 0)),
        message=_lnc,
        source="aws-neuron/aws-neuron-sdk about-neuron/arch/neuron-features/logical-neuroncore-config.rst: "
        "set for the whole instance, it changes the number of ranks",
    ),
    Rule(
        id="place",
        subject="place",
        allows=lambda c: c.place_fault == "",
        message=lambda c: f"place={c.place}: {c.place_fault}",
        source="derived: a placement is a permutation of the ranks of one node",
    ),
    Rule(
        id="kernels",
        subject="kernels",
        allows=lambda c: c.kernels_fault == "",
        message=lambda c: f"kernels={c.kernels}: {c.kernels_fault}",
        source="autoshard/spec/kernel_tables: each table describes the kernels of one engine's platform",
    ),
    Rule(
        id="recompute-ops",
        subject="recompute",
        allows=lambda c: c.recompute_fault == "",
        message=lambda c: f"recompute={c.recompute}: {c.recompute_fault}",
        source="autoshard/spec/kernel_tables: what each framework can recompute selectively",
    ),
)
