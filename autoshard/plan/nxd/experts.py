"""Experts: one layer of NxD from the router to what comes back from the experts, which sends all that lies between.

It gathers tokens and logits, sums the gradients of shares and of what experts read as soon as they are there, and
slices them. Where tokens may be dropped, that is the gradient of the slots; where none is, of the tokens.
"""

from collections.abc import Mapping, Sequence

from autoshard.errors import Fault
from autoshard.graph.kinds.experts import TopK
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Dims, Op
from autoshard.plan.nxd.form import Argument, Form, FormParameter, Piece, Plain
from autoshard.plan.nxd.matching import TP, Matching, Send

_RUN = ("einsum", "top_k", "softmax", "slot", "dispatch", "einsum", "einsum", "", "multiply", "einsum", "combine")
_FUNCTIONS = ("silu", "relu", "gelu")  # that NxD calls the same
_BLOCKWISE = 0.0  # the capacity_factor that stands for none
_INNER: tuple[Dims, ...] = (("experts",), ("hidden",), ("ffn",))
_OUTER: tuple[Dims, ...] = (("experts",), ("ffn",), ("hidden",))


def starts_experts(found: Matching, op: Op) -> bool:
    """Tell the router: the largest of what it makes are taken."""
    operations = found.operations()
    after = operations[operations.index(op) + 1 :]
    return bool(after) and isinstance(after[0].kind, TopK)


def experts_form(found: Matching, op: Op) -> Form | None:
    """Return the layer that stands for a router and all that follows from it."""
    operations = found.operations()
    run = operations[operations.index(op) :][: len(_RUN)]
    labels = tuple(one.kind.label for one in run)
    if any(have != need for have, need in zip(labels, _RUN, strict=False) if need) or labels[7] not in _FUNCTIONS:
        found.faults.append(Fault(where=op.name, message=f"no layer of NxD is {', '.join(labels)}"))
        return None
    sequence = bool(found.cuts(op, found.block.tensors[op.inputs[0]]).get("seq"))
    drops = _settles(found, run[4])
    if found.setting.atoms:
        _claim(found, run, sequence=sequence, drops=drops)
    return Form(
        layer="MoE",
        leaves=tuple(one.name for one in run),
        arguments=_arguments(found, labels[7], sequence=sequence, drops=drops),
        parameters=_parameters(found, run),
    )


def _settles(found: Matching, dispatch: Op) -> bool:
    """Whether the gradient of slots is what is summed, as where tokens may be dropped."""
    kind = found.block.op(found.after(dispatch)).kind
    return isinstance(kind, Deliver) and kind.settles


def _claim(found: Matching, run: Sequence[Op], *, sequence: bool, drops: bool) -> None:
    router, share, dispatch, combine = run[0], run[2], run[4], run[10]
    whole, what = found.setting.whole, "MoE"
    gather, cut = ([whole("all_gather", "seq")], [whole("slice", "seq")]) if sequence else ([], [])
    total: list[Send] = [whole("all_reduce")]
    found.claim(found.before(router), what, F=gather, I=[*([] if drops else total), *cut])
    found.claim(found.after(router), what, F=gather, I=cut)
    found.claim(found.after(share), what, I=total)
    found.claim(found.after(dispatch), what, I=total if drops else [])
    found.claim(found.after(combine), what, F=[whole("reduce_scatter", "seq")] if sequence else total, I=gather)


def _arguments(found: Matching, function: str, *, sequence: bool, drops: bool) -> Mapping[str, Argument]:
    """Shares are a softmax over a token's choices, whichever of them are dropped: none is normalised afterwards."""
    sizes, dtype = found.setting.sizes, found.setting.dtype
    where: dict[str, Plain] = {"sequence_parallel_enabled": sequence, **({"sequence_dimension": 0} if sequence else {})}
    common: dict[str, Plain] = {"num_experts": sizes["experts"], "top_k": sizes["choices"]}
    common |= {"hidden_size": sizes["hidden"], "dtype": dtype}
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


def _parameters(found: Matching, run: Sequence[Op]) -> tuple[FormParameter, ...]:
    """The router's weight is whole on every rank; those of experts are turned: [experts, in, out]."""
    router, gate, up, down = run[0], run[5], run[6], run[9]
    (weight,) = found.weights(router)
    summed = set(TP).intersection(found.program.results[f"{weight.name}.sum"].layout.sums)
    whole = _piece(found, router, tuple((dim,) for dim in weight.dims))
    halves = (_piece(found, gate, _INNER), _piece(found, up, _INNER))
    return (
        FormParameter(name="router.linear_router.weight", pieces=(whole,), summed=bool(summed)),
        FormParameter(name="expert_mlps.mlp_op.gate_up_proj.weight", pieces=halves, axis=2, split=2),
        FormParameter(name="expert_mlps.mlp_op.down_proj.weight", pieces=(_piece(found, down, _OUTER),), split=1),
    )


def _piece(found: Matching, op: Op, axes: tuple[Dims, ...]) -> Piece:
    (weight,) = found.weights(op)
    return Piece(tensor=weight.name, dims=weight.dims, axes=axes, cuts=found.cuts(op, weight))
