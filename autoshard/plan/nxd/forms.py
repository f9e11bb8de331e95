"""From a plan to forms: what lies in which layout, and what is sent, decides; names of layers do not.

A form stands for a run of operations only if NxD's layer sends exactly what the table lists for them. What no form
stands for is a fault, with the entry of the table.
"""

from collections.abc import Callable, Mapping, Sequence

from autoshard.errors import Fault
from autoshard.graph.kinds.experts import TopK
from autoshard.graph.kinds.indexing import Lookup, Pick
from autoshard.graph.kinds.linear import Deliver, Einsum
from autoshard.graph.op import Dims, Op, Tensor
from autoshard.layout.program import Program
from autoshard.plan.nxd.match import TP, Argument, BlockMatch, Form, FormParameter, FormPiece, Plain, Send, lists_text
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_blocks, step_of

_RUN = ("einsum", "top_k", "softmax", "slot", "dispatch", "einsum", "einsum", "", "multiply", "einsum", "combine")
_FUNCTIONS = ("silu", "relu", "gelu")  # that NxD calls the same
_BLOCKWISE = 0.0  # the capacity_factor that stands for none


SOURCE = (
    "aws-neuron/neuronx-distributed parallel_layers/layers.py and loss_functions.py, modules/qkv_linear.py: "
    "what each layer sends"
)
_LOSS = ("max", "subtract", "exp", "sum", "log", "pick", "subtract")  # kinds, after the cast to FP32


def plan_forms(plan: Plan, programs: Mapping[str, Program]) -> tuple[Mapping[str, tuple[Form, ...]], tuple[Fault, ...]]:
    """Return the forms of each kind of block in the order of its operations, and every entry for which there is none.

    Other tables of a layer differ in what is computed again: NxD computes whole modules again, with what they send.
    """
    forms, faults = dict[str, tuple[Form, ...]](), list[Fault]()
    for name, block in plan_blocks(plan).items():
        if name == block.kind:
            atoms = {atom: plan.mesh.size(atom) for atom in TP if plan.mesh.size(atom) > 1}
            sizes, dtype = form_sizes(plan), plan.workload.precision.weights
            found = BlockMatch(block=block, program=programs[name], sizes=sizes, atoms=atoms, dtype=dtype)
            made: dict[str, Form] = {}  # by the leaves that they replace
            for op in found.operations:
                form = None if op.name in made else _matcher(op, found)(found, op)
                made |= dict.fromkeys(form.leaves, form) if form else {}
            forms[name] = tuple(dict.fromkeys(made.values()))
            for entry in sorted(found.sent.keys() - found.matched):
                found.fault(entry, f"no layer of NxD sends {lists_text(found.sent[entry])} here")
            faults += [fault.under(f"strategies.{name}") for fault in found.faults]
    return forms, tuple(faults)


def form_sizes(plan: Plan) -> Mapping[str, int]:
    """Return the sizes of all dims, vocab padded."""
    return {**step_of(plan).sizes(plan.micro_batch), **plan.padding}


def _matcher(op: Op, found: BlockMatch) -> "Callable[[BlockMatch, Op], Form | None]":
    """Choose by what an operation is and where tp cuts it."""
    weights = found.weights(op)
    if not weights:
        reads = [found.cuts(op, found.block.tensors[name]) for name in op.inputs]
        # What is sent around others without weights belongs to their neighbours, or to none.
        return _loss if any(cuts.get("vocab") for cuts in reads) else lambda found, op: None
    following = found.operations[found.operations.index(op) + 1 :][:1]
    if following and isinstance(following[0].kind, TopK):
        return _experts
    cuts = found.cuts(op, weights[0])
    if isinstance(op.kind, Lookup) and cuts:
        return _embedding
    if isinstance(op.kind, Einsum) and cuts:
        return _column if set(cuts) <= set(found.dims(op)) else _row
    return _leaf


def _leaf(found: BlockMatch, op: Op) -> Form:
    """Keep the decoder's own module."""

    def parameter(weight: Tensor) -> FormParameter:
        # The plan says who has parts of a gradient; beside keys that ranks hold alike, NxD sums later than the plan.
        cuts, dims = found.cuts(op, weight), found.dims(op)
        beside_keys = "rep" in found.atoms and "kv_heads" in dims and "q_group" not in dims
        split = next((axis for axis, dim in enumerate(weight.dims) if dim in cuts), None)
        summed = split is None and (found.is_summed(weight) or beside_keys)
        name = weight.name.rpartition(".")[2]
        return FormParameter(name=name, pieces=(found.piece(op, weight),), split=split, summed=summed)

    return Form(layer="leaf", leaves=(op.name,), arguments={}, parameters=tuple(map(parameter, found.weights(op))))


def _embedding(found: BlockMatch, op: Op) -> Form:
    num_embeddings, embedding_dim = (found.sizes[dim] for dim in found.weights(op)[0].dims)
    arguments: dict[str, Argument] = {
        "num_embeddings": num_embeddings,
        "embedding_dim": embedding_dim,
        "dtype": found.dtype,
        "sequence_parallel_enabled": _collects(found, op, "ParallelEmbedding"),
    }
    parameters = (_weight(found, [op], "weight", split=0),)
    return Form(layer="ParallelEmbedding", leaves=(op.name,), arguments=arguments, parameters=parameters)


def _row(found: BlockMatch, op: Op) -> Form:
    made, read = _sides(found, op)
    sequence = _collects(found, op, "RowParallelLinear")
    arguments: dict[str, Argument] = {"input_size": found.size(read), "output_size": found.size(made)}
    arguments |= {"bias": False, "input_is_parallel": True, **_common(found, sequence)}
    parameters = (_weight(found, [op], "weight", split=1),)
    return Form(layer="RowParallelLinear", leaves=(op.name,), arguments=arguments, parameters=parameters)


def _column(found: BlockMatch, op: Op) -> Form | None:
    """Products of one input go together: queries, keys and values; the two halves of a gated MLP; one alone."""
    mates = [one for one in found.operations if isinstance(one.kind, Einsum) and one.inputs[0] == op.inputs[0]]
    sequence = _gathers(found, op, "ColumnParallelLinear")
    made = [_sides(found, one)[0] for one in mates]
    if any("kv_heads" in dims for dims in made):
        return _attention_inputs(found, mates, sequence)
    names = tuple(one.name for one in mates)
    if len(set(made)) > 1 or any(_matcher(one, found) is not _column for one in mates):
        found.fault(op.name, f"no layer of NxD makes {', '.join(names)} of one input")
        return None
    arguments: dict[str, Argument] = {
        "input_size": found.size(_sides(found, op)[1]),
        "output_size": sum(map(found.size, made)),
        "stride": len(mates),
        "bias": False,
        "gather_output": False,
        **_common(found, sequence),
    }
    parameters = (_weight(found, mates, "weight", split=0),)
    return Form(layer="ColumnParallelLinear", leaves=names, arguments=arguments, parameters=parameters)


def _attention_inputs(found: BlockMatch, mates: Sequence[Op], sequence: bool) -> Form | None:
    """Fused where each rank has its own keys; apart where several hold the same, so that the norm counts them once."""
    layer, made = "GQAQKVColumnParallelLinear", [_sides(found, one)[0] for one in mates]
    copies = found.atoms.get("rep", 1)
    if [("q_group" in dims) for dims in made] != [True, False, False]:
        found.fault(mates[0].name, "NxD makes queries, keys and values at once, of one input")
        return None
    # Where ranks hold the same keys, the layer sums what they send back for them.
    shared = [Send("all_reduce", None, ("rep",))] if "rep" in found.atoms else []
    for op in found.block.select("micro_batch", "F"):
        if isinstance(op.kind, Deliver) and op.kind.rename and "kv_heads" in found.block.tensors[op.inputs[0]].dims:
            found.match(op.name, layer, I=shared)
    parameters = [_weight(found, mates, "weight_qkv", split=0)]
    if copies > 1:
        parameters = [
            _weight(found, [one], f"weight_{name}", split=0, copies=1 if name == "q" else copies)
            for name, one in zip("qkv", mates, strict=True)
        ]
    arguments: dict[str, Argument] = {
        "input_size": found.sizes["hidden"],
        "output_sizes": (found.size(made[0]), found.size(made[1])),
        "bias": False,
        "gather_output": False,
        "kv_size_multiplier": copies,
        "fuse_qkv": copies == 1,
        **{name: value for name, value in _common(found, sequence).items() if name != "sequence_dimension"},
    }
    leaves = tuple(one.name for one in mates)
    return Form(layer=layer, leaves=leaves, arguments=arguments, parameters=tuple(parameters))


def _loss(found: BlockMatch, op: Op) -> Form | None:
    """The run from the logits, which are cut along the vocabulary, to the loss of every token."""
    layer, rest = "parallel_cross_entropy", found.operations[found.operations.index(op) :]
    start = 0 if rest[0].kind.label == _LOSS[0] else 1
    run = rest[: start + len(_LOSS)]
    if tuple(one.kind.label for one in run[start:]) != _LOSS:
        found.fault(op.name, "no layer of NxD computes this of a cut vocabulary")
        return None
    for one in run:
        layout = found.computes[one.name].writes[0].layout
        if layout.maxima or layout.sums or isinstance(one.kind, Pick):
            found.match(found.after(one), layer, F=[found.whole("all_reduce_max" if layout.maxima else "all_reduce")])
    leaves = tuple(one.name for one in run)
    return Form(layer=layer, leaves=leaves, arguments={"label_smoothing": 0}, parameters=())


def _sides(found: BlockMatch, op: Op) -> tuple[Dims, Dims]:
    """Return the dims of its weight that a product makes, and those over which it sums."""
    dims, made = found.weights(op)[0].dims, found.dims(op)
    return tuple(dim for dim in dims if dim in made), tuple(dim for dim in dims if dim not in made)


def _weight(found: BlockMatch, ops: Sequence[Op], name: str, *, split: int, copies: int = 1) -> FormParameter:
    """Return a matrix of NxD, [out, in], made of our weights behind each other."""
    pieces = tuple(
        found.piece(op, found.weights(op)[0], None if isinstance(op.kind, Lookup) else _sides(found, op)) for op in ops
    )
    return FormParameter(name=name, pieces=pieces, split=split, copies=copies)


def _common(found: BlockMatch, sequence: bool) -> dict[str, Argument]:
    """Return what all linear layers take; sums travel in the format of the activations (see the docs of the engine)."""
    where: dict[str, Argument] = {"sequence_dimension": 0} if sequence else {}
    return {"sequence_parallel_enabled": sequence, **where, "dtype": found.dtype, "reduce_dtype": found.dtype}


def _gathers(found: BlockMatch, op: Op, layer: str) -> bool:
    """Match the entry before a column layer; say whether the sequence is cut there."""
    entry, gather = found.before(op), [found.whole("all_gather", "seq")]
    sequence = found.is_sequence(entry)
    if entry not in found.matched and sequence:
        found.match(entry, layer, F=gather, I=[found.whole("reduce_scatter", "seq")], W=gather)
    elif entry not in found.matched:
        found.match(entry, layer, I=[found.whole("all_reduce")])
    return sequence


def _collects(found: BlockMatch, op: Op, layer: str) -> bool:
    """Match the entry after a layer that leaves sums pending; say whether the sequence is cut there."""
    entry, gather = found.after(op), found.whole("all_gather", "seq")
    if not found.is_sequence(entry):
        found.match(entry, layer, F=[found.whole("all_reduce")])
        return False
    lists = found.sent[entry]
    # Beside a parallel residual two products take one gradient: the table lists one gather, which NxD repeats.
    elsewhere = not lists.get("I") and any(
        other.get("I") == (gather,) and other.get("F") == lists.get("F")
        for name, other in found.sent.items()
        if name != entry
    )
    found.match(entry, layer, F=[found.whole("reduce_scatter", "seq")], I=[] if elsewhere else [gather])
    return True


def _experts(found: BlockMatch, op: Op) -> Form | None:
    """Match NxD's layer of experts: router, dispatch, experts and combine. The layer does their communication itself.

    It gathers tokens and logits. In the backward pass it sums the gradients of the shares and of the experts' inputs
    at once, and slices them. These inputs are slots where tokens may be dropped, and tokens where none is dropped.
    """
    run = found.operations[found.operations.index(op) :][: len(_RUN)]
    labels = tuple(one.kind.label for one in run)
    if any(have != need for have, need in zip(labels, _RUN, strict=False) if need) or labels[7] not in _FUNCTIONS:
        found.fault(op.name, f"no layer of NxD is {', '.join(labels)}")
        return None
    router, share, dispatch, gate, up, down, combine = (run[number] for number in (0, 2, 4, 5, 6, 9, 10))
    sequence = bool(found.cuts(op, found.block.tensors[op.inputs[0]]).get("seq"))
    dispatched = found.block.op(found.after(dispatch)).kind
    drops = isinstance(dispatched, Deliver) and dispatched.settles
    if found.atoms:
        whole, layer = found.whole, "MoE"
        gather, cut = ([whole("all_gather", "seq")], [whole("slice", "seq")]) if sequence else ([], [])
        total: list[Send] = [whole("all_reduce")]
        found.match(found.before(router), layer, F=gather, I=[*([] if drops else total), *cut])
        found.match(found.after(router), layer, F=gather, I=cut)
        found.match(found.after(share), layer, I=total)
        found.match(found.after(dispatch), layer, I=total if drops else [])
        found.match(found.after(combine), layer, F=[whole("reduce_scatter", "seq")] if sequence else total, I=gather)

    def piece(op: Op, *dims: str) -> FormPiece:
        return found.piece(op, found.weights(op)[0], tuple((dim,) for dim in dims))

    # The router's weight is whole on every rank; those of experts are turned: [experts, in, out].
    halves = (piece(gate, "experts", "hidden", "ffn"), piece(up, "experts", "hidden", "ffn"))
    outer, summed = (piece(down, "experts", "ffn", "hidden"),), found.is_summed(found.weights(router)[0])
    return Form(
        layer="MoE",
        leaves=tuple(one.name for one in run),
        arguments=_experts_arguments(found, labels[7], sequence=sequence, drops=drops),
        parameters=(
            FormParameter(name="router.linear_router.weight", pieces=(piece(router),), summed=summed),
            FormParameter(name="expert_mlps.mlp_op.gate_up_proj.weight", pieces=halves, axis=2, split=2),
            FormParameter(name="expert_mlps.mlp_op.down_proj.weight", pieces=outer, split=1),
        ),
    )


def _experts_arguments(found: BlockMatch, function: str, *, sequence: bool, drops: bool) -> Mapping[str, Argument]:
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
