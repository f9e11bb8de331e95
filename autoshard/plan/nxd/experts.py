"""Experts: one layer of NxD from the router to what comes back from the experts, which sends all that lies between.

It gathers tokens and logits, sums the gradients of shares and of what experts read as soon as they are there, and
slices them. Where tokens may be dropped, that is the gradient of the slots; where none is, of the tokens.
"""

from collections.abc import Mapping, Sequence

from autoshard.graph.kinds.experts import TopK
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Op
from autoshard.plan.nxd.form import Argument, Form, FormParameter, FormPiece, Plain
from autoshard.plan.nxd.match import BlockMatch, Send

_RUN = ("einsum", "top_k", "softmax", "slot", "dispatch", "einsum", "einsum", "", "multiply", "einsum", "combine")
_FUNCTIONS = ("silu", "relu", "gelu")  # that NxD calls the same
_BLOCKWISE = 0.0  # the capacity_factor that stands for none


def starts_experts(found: BlockMatch, op: Op) -> bool:
    """Whether an operation is the router: the largest of what it makes are taken."""
    after = found.operations[found.operations.index(op) + 1 :]
    return bool(after) and isinstance(after[0].kind, TopK)


def experts_form(found: BlockMatch, op: Op) -> Form | None:
    """Return the layer that stands for a router and all that follows from it."""
    run = found.operations[found.operations.index(op) :][: len(_RUN)]
    labels = tuple(one.kind.label for one in run)
    if any(have != need for have, need in zip(labels, _RUN, strict=False) if need) or labels[7] not in _FUNCTIONS:
        found.fault(op.name, f"no layer of NxD is {', '.join(labels)}")
        return None
    sequence = bool(found.cuts(op, found.block.tensors[op.inputs[0]]).get("seq"))
    # Where tokens may be dropped, the gradient of slots is what is summed.
    dispatched = found.block.op(found.after(run[4])).kind
    drops = isinstance(dispatched, Deliver) and dispatched.settles
    if found.atoms:
        _match(found, run, sequence=sequence, drops=drops)
    return Form(
        layer="MoE",
        leaves=tuple(one.name for one in run),
        arguments=_arguments(found, labels[7], sequence=sequence, drops=drops),
        parameters=_parameters(found, run),
    )


def _match(found: BlockMatch, run: Sequence[Op], *, sequence: bool, drops: bool) -> None:
    router, share, dispatch, combine = run[0], run[2], run[4], run[10]
    whole, layer = found.whole, "MoE"
    gather, cut = ([whole("all_gather", "seq")], [whole("slice", "seq")]) if sequence else ([], [])
    total: list[Send] = [whole("all_reduce")]
    found.match(found.before(router), layer, F=gather, I=[*([] if drops else total), *cut])
    found.match(found.after(router), layer, F=gather, I=cut)
    found.match(found.after(share), layer, I=total)
    found.match(found.after(dispatch), layer, I=total if drops else [])
    found.match(found.after(combine), layer, F=[whole("reduce_scatter", "seq")] if sequence else total, I=gather)


def _arguments(found: BlockMatch, function: str, *, sequence: bool, drops: bool) -> Mapping[str, Argument]:
    """Shares are a softmax over a token's choices, whichever of them are dropped: none is normalised afterwards."""
    sizes = found.sizes
    where: dict[str, Plain] = {"sequence_parallel_enabled": sequence, **({"sequence_dimension": 0} if sequence else {})}
    common: dict[str, Plain] = {"num_experts": sizes["experts"], "top_k": sizes["choices"]}
    common |= {"hidden_size": sizes["hidden"], "dtype": found.dtype}
    # In the middle of what NxD rounds up to our slots, so that no rounding of floats makes it one more.
    share = (sizes["slots"] - 0.5) * sizes["experts"] / (sizes["batch"] * sizes["seq"] * sizes["choices"])
    experts: dict[str, Plain] = {
        "intermediate_size": sizes["ffn"],
        "hidden_act": function,
        "glu_mlp": True,
        "capacity_factor": share if drops else _BLOCKWISE,
        "normalize_top_k_affinities": False,
        "parallelize_token_to_block_mapping": False,  # else ranks would exchange numbers of tokens
    }
    return {
        "router": {**common, **where, "act_fn": "softmax", "apply_act_fn_over_topk": True},
        "expert_mlps": {**common, **experts},
        **where,
    }


def _parameters(found: BlockMatch, run: Sequence[Op]) -> tuple[FormParameter, ...]:
    """The router's weight is whole on every rank; those of experts are turned: [experts, in, out]."""

    def piece(op: Op, *dims: str) -> FormPiece:
        return found.piece(op, found.weights(op)[0], tuple((dim,) for dim in dims))

    router, gate, up, down = run[0], run[5], run[6], run[9]
    halves = (piece(gate, "experts", "hidden", "ffn"), piece(up, "experts", "hidden", "ffn"))
    outer, summed = (piece(down, "experts", "ffn", "hidden"),), found.is_summed(found.weights(router)[0])
    return (
        FormParameter(name="router.linear_router.weight", pieces=(piece(router),), summed=summed),
        FormParameter(name="expert_mlps.mlp_op.gate_up_proj.weight", pieces=halves, axis=2, split=2),
        FormParameter(name="expert_mlps.mlp_op.down_proj.weight", pieces=outer, split=1),
    )
