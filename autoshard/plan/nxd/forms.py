"""From a plan to forms: the layouts of tensors and the collectives decide; names of layers do not.

A form stands for a run of operations only if NxD's layer sends exactly the collectives that the table lists for them.
An entry of the table that no form covers is a fault.
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
from autoshard.plan.tables import plan_blocks, step_graph_of

_RUN = ("einsum", "top_k", "softmax", "slot", "dispatch", "einsum", "einsum", "", "multiply", "einsum", "combine")
_FUNCTIONS = ("silu", "relu", "gelu")  # that NxD calls the same
_BLOCKWISE = 0.0  # the capacity_factor that stands for none


SOURCE = (
    "aws-neuron/neuronx-distributed parallel_layers/layers.py and loss_functions.py, modules/qkv_linear.py: "
    "what each layer sends"
)
_LOSS = ("max", "subtract", "exp", "sum", "log", "pick", "subtract")  # kinds, after the cast to FP32


def plan_forms(plan: Plan, programs: Mapping[str, Program]) -> tuple[Mapping[str, tuple[Form, ...]], tuple[Fault, ...]]:
    """Return the forms of each kind of block in the order of its operations, and a fault per entry without a form.

    Other tables of a layer differ in what is computed again: NxD computes whole modules again, with what they send.
    """
    forms, faults = dict[str, tuple[Form, ...]](), list[Fault]()
    for name, block in plan_blocks(plan).items():
        if name == block.kind:
            atoms = {atom: plan.mesh.size(atom) for atom in TP if plan.mesh.size(atom) > 1}
            sizes, dtype = form_sizes(plan), plan.workload.precision.weights
            block_match = BlockMatch(block=block, program=programs[name], sizes=sizes, atoms=atoms, dtype=dtype)
            form_by_leaf: dict[str, Form] = {}  # leaf -> the form that replaces it
            for op in block_match.operations:
                form = None if op.name in form_by_leaf else _matcher(op, block_match)(block_match, op)
                form_by_leaf |= dict.fromkeys(form.leaves, form) if form else {}
            forms[name] = tuple(dict.fromkeys(form_by_leaf.values()))
            for entry in sorted(block_match.sent.keys() - block_match.matched):
                block_match.fault(entry, f"no layer of NxD sends {lists_text(block_match.sent[entry])} here")
            faults += [fault.under(f"strategies.{name}") for fault in block_match.faults]
    return forms, tuple(faults)


def form_sizes(plan: Plan) -> Mapping[str, int]:
    """Return the sizes of all dims, vocab padded."""
    return {**step_graph_of(plan).sizes(plan.micro_batch), **plan.padding}


def _matcher(op: Op, block_match: BlockMatch) -> "Callable[[BlockMatch, Op], Form | None]":
    """Choose the function that matches an operation, by its kind and by the dims that tp cuts."""
    weights = block_match.weights(op)
    if not weights:
        reads = [block_match.cuts(op, block_match.block.tensors[name]) for name in op.inputs]
        # Collectives around other operations without weights belong to neighbouring layers, or to no layer.
        return _loss if any(cuts.get("vocab") for cuts in reads) else lambda block_match, op: None
    following = block_match.operations[block_match.operations.index(op) + 1 :][:1]
    if following and isinstance(following[0].kind, TopK):
        return _experts
    cuts = block_match.cuts(op, weights[0])
    if isinstance(op.kind, Lookup) and cuts:
        return _embedding
    if isinstance(op.kind, Einsum) and cuts:
        return _column if set(cuts) <= set(block_match.dims(op)) else _row
    return _leaf


def _leaf(block_match: BlockMatch, op: Op) -> Form:
    """Keep the decoder's own module."""

    def parameter(weight: Tensor) -> FormParameter:
        # The plan says who has parts of a gradient; beside keys that ranks hold alike, NxD sums later than the plan.
        cuts, dims = block_match.cuts(op, weight), block_match.dims(op)
        beside_keys = "rep" in block_match.atoms and "kv_heads" in dims and "q_group" not in dims
        split = next((axis for axis, dim in enumerate(weight.dims) if dim in cuts), None)
        summed = split is None and (block_match.is_summed(weight) or beside_keys)
        name = weight.name.rpartition(".")[2]
        return FormParameter(name=name, pieces=(block_match.piece(op, weight),), split=split, summed=summed)

    return Form(
        layer="leaf", leaves=(op.name,), arguments={}, parameters=tuple(map(parameter, block_match.weights(op)))
    )


def _embedding(block_match: BlockMatch, op: Op) -> Form:
    num_embeddings, embedding_dim = (block_match.sizes[dim] for dim in block_match.weights(op)[0].dims)
    arguments: dict[str, Argument] = {
        "num_embeddings": num_embeddings,
        "embedding_dim": embedding_dim,
        "dtype": block_match.dtype,
        "sequence_parallel_enabled": _collects(block_match, op, "ParallelEmbedding"),
    }
    parameters = (_weight(block_match, [op], "weight", split=0),)
    return Form(layer="ParallelEmbedding", leaves=(op.name,), arguments=arguments, parameters=parameters)


def _row(block_match: BlockMatch, op: Op) -> Form:
    output_dims, input_dims = _sides(block_match, op)
    sequence = _collects(block_match, op, "RowParallelLinear")
    arguments: dict[str, Argument] = {
        "input_size": block_match.size(input_dims),
        "output_size": block_match.size(output_dims),
    }
    arguments |= {"bias": False, "input_is_parallel": True, **_common(block_match, sequence)}
    parameters = (_weight(block_match, [op], "weight", split=1),)
    return Form(layer="RowParallelLinear", leaves=(op.name,), arguments=arguments, parameters=parameters)


def _column(block_match: BlockMatch, op: Op) -> Form | None:
    """Match the products of one input together: queries, keys and values; halves of a gated MLP; or one product."""
    mates = [
        mate for mate in block_match.operations if isinstance(mate.kind, Einsum) and mate.inputs[0] == op.inputs[0]
    ]
    sequence = _gathers(block_match, op, "ColumnParallelLinear")
    output_dims = [_sides(block_match, mate)[0] for mate in mates]
    if any("kv_heads" in dims for dims in output_dims):
        return _attention_inputs(block_match, mates, sequence)
    names = tuple(mate.name for mate in mates)
    if len(set(output_dims)) > 1 or any(_matcher(mate, block_match) is not _column for mate in mates):
        block_match.fault(op.name, f"no layer of NxD makes {', '.join(names)} of one input")
        return None
    arguments: dict[str, Argument] = {
        "input_size": block_match.size(_sides(block_match, op)[1]),
        "output_size": sum(map(block_match.size, output_dims)),
        "stride": len(mates),
        "bias": False,
        "gather_output": False,
        **_common(block_match, sequence),
    }
    parameters = (_weight(block_match, mates, "weight", split=0),)
    return Form(layer="ColumnParallelLinear", leaves=names, arguments=arguments, parameters=parameters)


def _attention_inputs(block_match: BlockMatch, mates: Sequence[Op], sequence: bool) -> Form | None:
    """Fuse weights where each rank has its own keys; split them where ranks share keys: the norm counts these once."""
    layer, output_dims = "GQAQKVColumnParallelLinear", [_sides(block_match, mate)[0] for mate in mates]
    copies = block_match.atoms.get("rep", 1)
    if [("q_group" in dims) for dims in output_dims] != [True, False, False]:
        block_match.fault(mates[0].name, "NxD makes queries, keys and values at once, of one input")
        return None
    # Where ranks hold the same keys, the layer sums the gradients of these keys over the ranks.
    shared = [Send("all_reduce", None, ("rep",))] if "rep" in block_match.atoms else []
    for op in block_match.block.select("micro_batch", "F"):
        if (
            isinstance(op.kind, Deliver)
            and op.kind.rename
            and "kv_heads" in block_match.block.tensors[op.inputs[0]].dims
        ):
            block_match.match(op.name, layer, I=shared)
    parameters = [_weight(block_match, mates, "weight_qkv", split=0)]
    if copies > 1:
        parameters = [
            _weight(block_match, [mate], f"weight_{name}", split=0, copies=1 if name == "q" else copies)
            for name, mate in zip("qkv", mates, strict=True)
        ]
    arguments: dict[str, Argument] = {
        "input_size": block_match.sizes["hidden"],
        "output_sizes": (block_match.size(output_dims[0]), block_match.size(output_dims[1])),
        "bias": False,
        "gather_output": False,
        "kv_size_multiplier": copies,
        "fuse_qkv": copies == 1,
        **{name: value for name, value in _common(block_match, sequence).items() if name != "sequence_dimension"},
    }
    leaves = tuple(mate.name for mate in mates)
    return Form(layer=layer, leaves=leaves, arguments=arguments, parameters=tuple(parameters))


def _loss(block_match: BlockMatch, op: Op) -> Form | None:
    """Match the run from the logits, which are cut along the vocabulary, to the loss of every token."""
    layer, rest = "parallel_cross_entropy", block_match.operations[block_match.operations.index(op) :]
    start = 0 if rest[0].kind.label == _LOSS[0] else 1
    run = rest[: start + len(_LOSS)]
    if tuple(operation.kind.label for operation in run[start:]) != _LOSS:
        block_match.fault(op.name, "no layer of NxD computes this of a cut vocabulary")
        return None
    for operation in run:
        layout = block_match.computes[operation.name].writes[0].layout
        if layout.maxima or layout.sums or isinstance(operation.kind, Pick):
            block_match.match(
                block_match.after(operation),
                layer,
                F=[block_match.whole("all_reduce_max" if layout.maxima else "all_reduce")],
            )
    leaves = tuple(operation.name for operation in run)
    return Form(layer=layer, leaves=leaves, arguments={"label_smoothing": 0}, parameters=())


def _sides(block_match: BlockMatch, op: Op) -> tuple[Dims, Dims]:
    """Return the dims of its weight that a product makes, and those over which it sums."""
    dims, result_dims = block_match.weights(op)[0].dims, block_match.dims(op)
    return tuple(dim for dim in dims if dim in result_dims), tuple(dim for dim in dims if dim not in result_dims)


def _weight(block_match: BlockMatch, ops: Sequence[Op], name: str, *, split: int, copies: int = 1) -> FormParameter:
    """Return a matrix of NxD, [out, in], made of our weights behind each other."""
    pieces = tuple(
        block_match.piece(
            op, block_match.weights(op)[0], None if isinstance(op.kind, Lookup) else _sides(block_match, op)
        )
        for op in ops
    )
    return FormParameter(name=name, pieces=pieces, split=split, copies=copies)


def _common(block_match: BlockMatch, sequence: bool) -> dict[str, Argument]:
    """Return what all linear layers take; sums travel in the format of the activations (see the docs of the engine)."""
    where: dict[str, Argument] = {"sequence_dimension": 0} if sequence else {}
    return {
        "sequence_parallel_enabled": sequence,
        **where,
        "dtype": block_match.dtype,
        "reduce_dtype": block_match.dtype,
    }


def _gathers(block_match: BlockMatch, op: Op, layer: str) -> bool:
    """Match the entry before a column layer; say whether the sequence is cut there."""
    entry, gather = block_match.before(op), [block_match.whole("all_gather", "seq")]
    sequence = block_match.is_sequence(entry)
    if entry not in block_match.matched and sequence:
        block_match.match(entry, layer, F=gather, I=[block_match.whole("reduce_scatter", "seq")], W=gather)
    elif entry not in block_match.matched:
        block_match.match(entry, layer, I=[block_match.whole("all_reduce")])
    return sequence


def _collects(block_match: BlockMatch, op: Op, layer: str) -> bool:
    """Match the entry after a layer that leaves sums pending; say whether the sequence is cut there."""
    entry, gather = block_match.after(op), block_match.whole("all_gather", "seq")
    if not block_match.is_sequence(entry):
        block_match.match(entry, layer, F=[block_match.whole("all_reduce")])
        return False
    lists = block_match.sent[entry]
    # Beside a parallel residual two products take one gradient: the table lists one gather, which NxD repeats.
    elsewhere = not lists.get("I") and any(
        entry_lists.get("I") == (gather,) and entry_lists.get("F") == lists.get("F")
        for name, entry_lists in block_match.sent.items()
        if name != entry
    )
    block_match.match(entry, layer, F=[block_match.whole("reduce_scatter", "seq")], I=[] if elsewhere else [gather])
    return True


def _experts(block_match: BlockMatch, op: Op) -> Form | None:
    """Match NxD's layer of experts: router, dispatch, experts and combine. The layer does their communication itself.

    It gathers tokens and logits. In the backward pass it sums the gradients of the shares and of the experts' inputs
    at once, and slices them. These inputs are slots where tokens may be dropped, and tokens where none is dropped.
    """
    run = block_match.operations[block_match.operations.index(op) :][: len(_RUN)]
    labels = tuple(operation.kind.label for operation in run)
    if any(have != need for have, need in zip(labels, _RUN, strict=False) if need) or labels[7] not in _FUNCTIONS:
        block_match.fault(op.name, f"no layer of NxD is {', '.join(labels)}")
        return None
    router, share, dispatch, gate, up, down, combine = (run[number] for number in (0, 2, 4, 5, 6, 9, 10))
    sequence = bool(block_match.cuts(op, block_match.block.tensors[op.inputs[0]]).get("seq"))
    dispatched = block_match.block.op(block_match.after(dispatch)).kind
    drops = isinstance(dispatched, Deliver) and dispatched.settles
    if block_match.atoms:
        whole, layer = block_match.whole, "MoE"
        gather, cut = ([whole("all_gather", "seq")], [whole("slice", "seq")]) if sequence else ([], [])
        total: list[Send] = [whole("all_reduce")]
        block_match.match(block_match.before(router), layer, F=gather, I=[*([] if drops else total), *cut])
        block_match.match(block_match.after(router), layer, F=gather, I=cut)
        block_match.match(block_match.after(share), layer, I=total)
        block_match.match(block_match.after(dispatch), layer, I=total if drops else [])
        block_match.match(
            block_match.after(combine), layer, F=[whole("reduce_scatter", "seq")] if sequence else total, I=gather
        )

    def piece(op: Op, *dims: str) -> FormPiece:
        return block_match.piece(op, block_match.weights(op)[0], tuple((dim,) for dim in dims))

    # The router's weight is whole on every rank; those of experts are turned: [experts, in, out].
    halves = (piece(gate, "experts", "hidden", "ffn"), piece(up, "experts", "hidden", "ffn"))
    outer, summed = (piece(down, "experts", "ffn", "hidden"),), block_match.is_summed(block_match.weights(router)[0])
    return Form(
        layer="MoE",
        leaves=tuple(operation.name for operation in run),
        arguments=_experts_arguments(block_match, labels[7], sequence=sequence, drops=drops),
        parameters=(
            FormParameter(name="router.linear_router.weight", pieces=(piece(router),), summed=summed),
            FormParameter(name="expert_mlps.mlp_op.gate_up_proj.weight", pieces=halves, axis=2, split=2),
            FormParameter(name="expert_mlps.mlp_op.down_proj.weight", pieces=outer, split=1),
        ),
    )


def _experts_arguments(
    block_match: BlockMatch, function: str, *, sequence: bool, drops: bool
) -> Mapping[str, Argument]:
    """Shares are a softmax over a token's choices, whichever of them are dropped: none is normalised afterwards."""
    sizes = block_match.sizes
    where: dict[str, Plain] = {"sequence_parallel_enabled": sequence, **({"sequence_dimension": 0} if sequence else {})}
    common: dict[str, Plain] = {"num_experts": sizes["experts"], "top_k": sizes["choices"]}
    common |= {"hidden_size": sizes["hidden"], "dtype": block_match.dtype}
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
