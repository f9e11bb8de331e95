"""Rules against options that would do nothing, and against names that nobody knows."""

from autoshard.plan.rules.columns import Columns, Mask
from autoshard.plan.rules.rule import Verdict, implies, one_of, rule, schedules
from autoshard.schedule.builders import builders

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
    source="derived: gpipe, 1f1b and zb_h1 know one stage per rank (Narayanan et al. 2021, arXiv:2104.04473, "
    "section 2.2; Qi et al. 2023, arXiv:2401.10241, section 2)",
)
def vp_schedule(c: Columns) -> Verdict:
    yield implies(c.vp > 1, one_of(c.schedule, schedules(lambda builder: builder.num_chunks != 1)))
    yield f"vp={c.vp}: schedule={c.schedule} runs one stage per rank. Use schedule=interleaved, or vp=1"


@rule("schedule", source=_NO_EFFECT)
def interleaved_shape(c: Columns) -> Verdict:
    chunked = schedules(lambda builder: builder.num_chunks is None)
    yield implies(one_of(c.schedule, chunked), (c.vp > 1) & (c.pp > 1))
    yield (f"schedule={c.schedule}: needs several ranks and several stages on each, not pp={c.pp},vp={c.vp}. Use vp=2")


@rule("schedule", source=_NO_EFFECT)
def schedule_effect(c: Columns) -> Verdict:
    others = schedules(lambda builder: builder.num_chunks is not None)  # of which interleaved-shape does not speak
    yield implies(one_of(c.schedule, others) & (c.schedule != "1f1b"), c.pp > 1)
    yield f"schedule={c.schedule}: there is no pipeline with pp=1. Leave schedule out"


@rule("vp,schedule", source="derived: rank r holds stages r and 2*pp-1-r (ZB-V of Qi et al. 2023, arXiv:2401.10241)")
def zb_v_chunks(c: Columns) -> Verdict:
    counts = {name: builder.num_chunks for name, builder in builders().items() if (builder.num_chunks or 1) > 1}
    right: Mask = True
    for name, count in counts.items():
        right = right & implies(c.schedule == name, c.vp == count)
    yield right
    count = counts[str(c.schedule)]
    yield f"vp={c.vp}: schedule={c.schedule} runs {count} stages per rank. Use vp={count}"


@rule("zero", source=_NO_EFFECT)
def zero_effect(c: Columns) -> Verdict:
    yield implies(c.zero == 3, c.dp * c.cp > 1)
    yield f"zero={c.zero}: there is nothing to spread over with dp=1 and cp=1. Leave zero out"


@rule(
    "boundary", source="derived: what is handed from block to block is a hidden state that nothing is left to do about"
)
def boundary(c: Columns) -> Verdict:
    yield c.boundary_fault == ""
    yield f"boundary={c.boundary}: {c.boundary_fault}"


@rule(
    "lnc",
    source="aws-neuron/aws-neuron-sdk about-neuron/arch/neuron-features/logical-neuroncore-config.rst: "
    "set for the whole instance, it changes the number of ranks",
)
def lnc(c: Columns) -> Verdict:
    have = c.cluster.lnc
    yield (c.lnc == 0) | (c.lnc == (have or 0))
    remedy = f"is planned with lnc {have}. Use --lnc {c.lnc} to plan for the other"
    yield f"lnc={c.lnc}: {c.cluster.name} {remedy if have else 'has no logical cores to configure. Leave lnc out'}"


@rule("place", source="derived: a placement is a permutation of the ranks of one node")
def place(c: Columns) -> Verdict:
    yield c.place_fault == ""
    yield f"place={c.place}: {c.place_fault}"


@rule("kernels", source="autoshard/spec/kernel_tables: each table describes the kernels of one engine's platform")
def kernels(c: Columns) -> Verdict:
    yield c.kernels_fault == ""
    yield f"kernels={c.kernels}: {c.kernels_fault}"


@rule("recompute", source="autoshard/spec/kernel_tables: what each framework can recompute selectively")
def recompute_ops(c: Columns) -> Verdict:
    yield c.recompute_fault == ""
    yield f"recompute={c.recompute}: {c.recompute_fault}"
