"""From a block's program to forms: what lies in which layout, and what is sent, decides; names of layers do not.

A form stands for a run of operations only if NxD's layer sends exactly what the table lists for them. What no form
stands for is a fault, with the entry of the table.
"""

from collections.abc import Callable, Iterator, Sequence

from autoshard.errors import Fault
from autoshard.graph.block import Block
from autoshard.graph.kinds.indexing import Lookup, Pick
from autoshard.graph.kinds.linear import Deliver, Einsum
from autoshard.graph.op import Op, Tensor
from autoshard.layout.program import Compute, Program
from autoshard.plan.nxd.experts import experts_form, starts_experts
from autoshard.plan.nxd.form import Argument, Form, FormParameter, Piece
from autoshard.plan.nxd.matching import TP, Matching, Send, Setting, sent_over, shown

_LOSS = ("max", "subtract", "exp", "sum", "log", "pick", "subtract")  # kinds, after the cast to FP32


def forms_of(block: Block, program: Program, setting: Setting) -> tuple[tuple[Form, ...], tuple[Fault, ...]]:
    """Return the forms of a block in the order of its operations, or the entries for which there is none."""
    computes = {
        entry.op.name: entry
        for entry in program.instructions
        if isinstance(entry, Compute) and entry.op.pass_ == "F" and not entry.op.again
    }
    sent = sent_over(program, frozenset(setting.atoms))
    found = Matching(block=block, program=program, setting=setting, computes=computes, sent=sent)
    forms = tuple(_forms(found))
    for entry in sorted(sent.keys() - found.claimed):
        found.faults.append(Fault(where=entry, message=f"no layer of NxD sends {shown(sent[entry])} here"))
    return forms, tuple(found.faults)


def _forms(found: Matching) -> Iterator[Form]:
    done: set[str] = set()
    for op in found.operations():
        if op.name in done:
            continue
        form = _matcher(op, found)(found, op)
        if form is not None:
            done.update(form.leaves)
            yield form


def _matcher(op: Op, found: Matching) -> "Callable[[Matching, Op], Form | None]":
    """Choose by what an operation is and where tp cuts it."""
    weights = found.weights(op)
    if not weights:
        return _loss if _starts_loss(op, found) else _unweighted
    if starts_experts(found, op):
        return experts_form
    cuts = found.cuts(op, weights[0])
    if isinstance(op.kind, Lookup) and cuts:
        return _embedding
    if isinstance(op.kind, Einsum) and cuts:
        return _column if set(cuts) <= set(found.block.tensors[op.outputs[0]].dims) else _row
    return _leaf


def _unweighted(found: Matching, op: Op) -> None:
    """Nothing to replace; what is sent around it is claimed by others, or by none."""


def _leaf(found: Matching, op: Op) -> Form:
    """Keep the decoder's own module."""
    parameters = tuple(_leaf_parameter(found, op, weight) for weight in found.weights(op))
    return Form(layer="leaf", leaves=(op.name,), arguments={}, parameters=parameters)


def _leaf_parameter(found: Matching, op: Op, weight: Tensor) -> FormParameter:
    """The plan tells who has parts of a gradient; beside keys that ranks hold alike, NxD sums later than the plan."""
    cuts, dims = found.cuts(op, weight), found.block.tensors[op.outputs[0]].dims
    pending = set(TP).intersection(found.program.results[f"{weight.name}.sum"].layout.sums)
    beside_keys = "rep" in found.setting.atoms and "kv_heads" in dims and "q_group" not in dims
    split = next((axis for axis, dim in enumerate(weight.dims) if dim in cuts), None)
    return FormParameter(
        name=weight.name.rpartition(".")[2],
        pieces=(Piece(tensor=weight.name, dims=weight.dims, axes=tuple((dim,) for dim in weight.dims), cuts=cuts),),
        split=split,
        summed=split is None and bool(pending or beside_keys),
    )


def _embedding(found: Matching, op: Op) -> Form:
    weight, setting = found.weights(op)[0], found.setting
    sequence = _collects(found, op, "ParallelEmbedding")
    return Form(
        layer="ParallelEmbedding",
        leaves=(op.name,),
        arguments={
            "num_embeddings": setting.sizes[weight.dims[0]],
            "embedding_dim": setting.sizes[weight.dims[1]],
            "dtype": setting.dtype,
            "sequence_parallel_enabled": sequence,
        },
        parameters=(_weight(found, [op], "weight", split=0),),
    )


def _row(found: Matching, op: Op) -> Form:
    weight = found.weights(op)[0]
    made, read = _sides(found, op, weight)
    sequence = _collects(found, op, "RowParallelLinear")
    arguments: dict[str, Argument] = {"input_size": found.setting.size(read), "output_size": found.setting.size(made)}
    arguments |= {"bias": False, "input_is_parallel": True, **_common(found, sequence)}
    parameters = (_weight(found, [op], "weight", split=1),)
    return Form(layer="RowParallelLinear", leaves=(op.name,), arguments=arguments, parameters=parameters)


def _column(found: Matching, op: Op) -> Form | None:
    """Products of one input go together: queries, keys and values; the two halves of a gated MLP; one alone."""
    mates = [one for one in found.operations() if isinstance(one.kind, Einsum) and one.inputs[0] == op.inputs[0]]
    sequence = _gathers(found, op, "ColumnParallelLinear")
    sides = [_sides(found, one, found.weights(one)[0]) for one in mates]
    read = sides[0][1]
    if any("kv_heads" in made for made, _ in sides):
        return _attention_inputs(found, mates, sequence)
    if len({made for made, _ in sides}) > 1 or any(_matcher(one, found) is not _column for one in mates):
        names = ", ".join(one.name for one in mates)
        found.faults.append(Fault(where=op.name, message=f"no layer of NxD makes {names} of one input"))
        return None
    arguments: dict[str, Argument] = {
        "input_size": found.setting.size(read),
        "output_size": sum(found.setting.size(made) for made, _ in sides),
        "stride": len(mates),
        "bias": False,
        "gather_output": False,
        **_common(found, sequence),
    }
    names = tuple(one.name for one in mates)
    parameters = (_weight(found, mates, "weight", split=0),)
    return Form(layer="ColumnParallelLinear", leaves=names, arguments=arguments, parameters=parameters)


def _attention_inputs(found: Matching, mates: Sequence[Op], sequence: bool) -> Form | None:
    """Fused where each rank has its own keys; apart where several hold the same, so that the norm counts them once."""
    setting, made = found.setting, [_sides(found, one, found.weights(one)[0])[0] for one in mates]
    copies = setting.atoms.get("rep", 1)
    if [("q_group" in dims) for dims in made] != [True, False, False]:
        message = "NxD makes queries, keys and values at once, of one input"
        found.faults.append(Fault(where=mates[0].name, message=message))
        return None
    _claim_keys(found)
    names = ("q", "k", "v")
    parameters = (
        (_weight(found, mates, "weight_qkv", split=0),)
        if copies == 1
        else tuple(
            _weight(found, [one], f"weight_{name}", split=0, copies=1 if name == "q" else copies)
            for name, one in zip(names, mates, strict=True)
        )
    )
    common = {name: value for name, value in _common(found, sequence).items() if name != "sequence_dimension"}
    arguments: dict[str, Argument] = {
        "input_size": setting.sizes["hidden"],
        "output_sizes": (setting.size(made[0]), setting.size(made[1])),
        "bias": False,
        "gather_output": False,
        "kv_size_multiplier": copies,
        "fuse_qkv": copies == 1,
        **common,
    }
    leaves = tuple(one.name for one in mates)
    return Form(layer="GQAQKVColumnParallelLinear", leaves=leaves, arguments=arguments, parameters=parameters)


def _claim_keys(found: Matching) -> None:
    """Where ranks hold the same keys, the layer sums what they send back for them."""
    shared = [Send("all_reduce", None, ("rep",))] if "rep" in found.setting.atoms else []
    for op in found.block.select("micro_batch", "F"):
        dims = found.block.tensors[op.inputs[0]].dims
        if isinstance(op.kind, Deliver) and op.kind.rename and "kv_heads" in dims:
            found.claim(op.name, "GQAQKVColumnParallelLinear", I=shared)


def _starts_loss(op: Op, found: Matching) -> bool:
    """Tell the first operation on logits: what it reads is cut along the vocabulary, and it has no weights."""
    reads = [found.block.tensors[name] for name in op.inputs]
    return any(found.cuts(op, tensor).get("vocab") for tensor in reads)


def _loss(found: Matching, op: Op) -> Form | None:
    """The run from the logits to the loss of every token."""
    operations, setting = found.operations(), found.setting
    rest = operations[operations.index(op) :]
    start = 0 if rest[0].kind.label == _LOSS[0] else 1
    run = rest[: start + len(_LOSS)]
    if tuple(one.kind.label for one in run[start:]) != _LOSS:
        found.faults.append(Fault(where=op.name, message="no layer of NxD computes this of a cut vocabulary"))
        return None
    for one in run:
        kind, name = one.kind, found.after(one)
        layout = found.computes[one.name].writes[0].layout
        if layout.maxima:
            found.claim(name, "parallel_cross_entropy", F=[setting.whole("all_reduce_max")])
        elif layout.sums or isinstance(kind, Pick):
            found.claim(name, "parallel_cross_entropy", F=[setting.whole("all_reduce")])
    return Form(
        layer="parallel_cross_entropy",
        leaves=tuple(one.name for one in run),
        arguments={"label_smoothing": 0},
        parameters=(),
    )


def _sides(found: Matching, op: Op, weight: Tensor) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the dims that a product makes, and those over which it sums."""
    made = found.block.tensors[op.outputs[0]].dims
    return tuple(dim for dim in weight.dims if dim in made), tuple(dim for dim in weight.dims if dim not in made)


def _weight(found: Matching, ops: Sequence[Op], name: str, *, split: int, copies: int = 1) -> FormParameter:
    """Return a matrix of NxD, [out, in], made of our weights behind each other."""
    pieces: list[Piece] = []
    for op in ops:
        weight = found.weights(op)[0]
        is_table = isinstance(op.kind, Lookup)
        axes = tuple((dim,) for dim in weight.dims) if is_table else _sides(found, op, weight)
        pieces.append(Piece(tensor=weight.name, dims=weight.dims, axes=axes, cuts=found.cuts(op, weight)))
    return FormParameter(name=name, pieces=tuple(pieces), split=split, copies=copies)


def _common(found: Matching, sequence: bool) -> dict[str, Argument]:
    """Return what all linear layers take; sums travel in the format of the activations (see the docs of the engine)."""
    dtype = found.setting.dtype
    where: dict[str, Argument] = {"sequence_dimension": 0} if sequence else {}
    return {"sequence_parallel_enabled": sequence, **where, "dtype": dtype, "reduce_dtype": dtype}


def _gathers(found: Matching, op: Op, what: str) -> bool:
    """Claim the entry before a column layer; say whether the sequence is cut there."""
    entry, whole = found.before(op), found.setting.whole
    if entry in found.claimed:
        return found.is_sequence(entry)
    if found.is_sequence(entry):
        gather = [whole("all_gather", "seq")]
        found.claim(entry, what, F=gather, I=[whole("reduce_scatter", "seq")], W=gather)
        return True
    found.claim(entry, what, I=[whole("all_reduce")])
    return False


def _collects(found: Matching, op: Op, what: str) -> bool:
    """Claim the entry after a layer that leaves sums pending; say whether the sequence is cut there."""
    entry, whole = found.after(op), found.setting.whole
    if found.is_sequence(entry):
        gather = [whole("all_gather", "seq")]
        back = [] if _is_gathered_elsewhere(found, entry, gather[0]) else gather
        found.claim(entry, what, F=[whole("reduce_scatter", "seq")], I=back)
        return True
    found.claim(entry, what, F=[whole("all_reduce")])
    return False


def _is_gathered_elsewhere(found: Matching, entry: str, gather: Send) -> bool:
    """Beside a parallel residual two products take one gradient: the table lists one gather, which NxD repeats."""
    return not found.sent[entry].get("I") and any(
        lists.get("I") == (gather,) and lists.get("F") == found.sent[entry].get("F")
        for other, lists in found.sent.items()
        if other != entry
    )
