"""Rules about cutting the sequence: sequence parallelism and context parallelism."""

from autoshard.plan.rules.columns import Column, Columns
from autoshard.plan.rules.rule import Rule, implies


def _cp_seq(c: Columns) -> str:
    return f"cp={c.cp}: a sequence of {c.workload.seq_len} does not divide by {c.cp}. Use a cp that divides it"


def _zigzag(c: Columns) -> str:
    return (
        f"cp_order=zigzag: gives each rank two pieces, and a sequence of {c.workload.seq_len} does not "
        f"divide by 2*cp={2 * c.cp}. Use cp_order=contiguous or another --seq-len"
    )


def _sp_allows(c: Columns) -> Column:
    # Under zig-zag a rank holds two pieces, but tp cuts them as one sequence, so the same number must divide.
    return implies(c.sp, c.workload.seq_len // c.cp % c.tp == 0)


def _sp(c: Columns) -> str:
    piece = c.workload.seq_len // c.cp
    return (
        f"sp=true: the {piece} tokens of a sequence on each rank do not divide by tp={c.tp}. Use sp=false, "
        f"or a --seq-len that is a multiple of cp*tp={c.cp * c.tp}"
    )


def _cp_heads(c: Columns) -> str:
    return (
        f"cp_kind=all_to_all: {c.model.num_kv_heads} KV heads of {c.model.name} do not divide by cp={c.cp}. Use "
        "cp_kind=ring, or a smaller cp"
    )


def _cp_tp(c: Columns) -> str:
    return (
        f"cp_kind=all_to_all: heads are cut over cp, so they cannot be cut over tp={c.tp} too. Use cp_kind=ring or tp=1"
    )


RULES = (
    Rule(
        id="cp-seq",
        subject="cp",
        allows=lambda c: c.workload.seq_len % c.cp == 0,
        message=_cp_seq,
        source="derived: every context-parallel rank holds an equal piece of each sequence",
    ),
    Rule(
        id="zigzag-seq",
        subject="cp_order",
        allows=lambda c: implies(c.cp_order == "zigzag", c.workload.seq_len % (2 * c.cp) == 0),
        message=_zigzag,
        source="derived: zig-zag gives rank i the pieces i and 2*cp-1-i (Llama 3, arXiv:2407.21783, section 3.3.2)",
    ),
    Rule(
        id="sp-seq",
        subject="sp",
        allows=_sp_allows,
        message=_sp,
        source="aws-neuron/neuronx-distributed src/neuronx_distributed/parallel_layers/mappings.py: a "
        "reduce-scatter needs the dim to divide by tp; derived for the torch engine",
    ),
    Rule(
        id="cp-heads",
        subject="cp_kind",
        allows=lambda c: implies(c.cp_kind == "all_to_all", c.model.num_kv_heads % c.cp == 0),
        message=_cp_heads,
        source="derived: the all-to-all changes a cut of the sequence into a cut of the heads (Jacobs et "
        "al. 2023, arXiv:2309.14509)",
    ),
    Rule(
        id="cp-heads-tp",
        subject="cp_kind,tp",
        allows=lambda c: implies(c.cp_kind == "all_to_all", c.tp == 1),
        message=_cp_tp,
        source="autoshard: tables cut a dim over several atoms in the order of the mesh; heads that come back from an "
        "all-to-all over cp would be cut over tp first",
    ),
)
