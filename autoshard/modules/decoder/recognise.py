"""Which steps of a segment are the planner's own operations: products, norms, attention with positions, experts."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard.errors import InputError
from autoshard.modules.decoder.functions import NORMS, as_norm, averaged, known_function, only_turns
from autoshard.modules.decoder.pieces import (
    AttentionDetail,
    ExpertsDetail,
    Piece,
    SegmentFlow,
    WeightPart,
    is_same,
    parameters_of,
    shape,
    whole_in,
)
from autoshard.modules.dims import Position, factors, size_of
from autoshard.modules.program import Read, Traced, TracedStep, name_of
from autoshard.spec.model import Activation

_PARTS = ("select", "narrow", "slice")
_CAUSAL = 5  # the place of is_causal among the arguments of torch's attention
_TOPK_DIM = 2  # the place of dim among those of topk
_EXPERT_AXES = 3  # of a tensor that holds the weights of all experts


def recognised(flow: SegmentFlow, tokens: Position) -> tuple[Piece, ...]:
    """Return the pieces that are recognised, in no order; each step is in one of them at most.

    Attention is the planner's where the sequence is that of the stack's ``tokens``, heads are as large for keys as for
    values, and a part attends once.
    """
    pieces: list[Piece] = [*_experts(flow)]
    used_steps = {step for piece in pieces for step in piece.steps}
    for piece in (*_rows(flow), *_norms(flow, used_steps)):
        pieces.append(piece)
        used_steps |= {*piece.steps}
    pieces += (piece for piece in _products(flow) if not used_steps & {*piece.steps})
    ends = {piece.makes for piece in pieces}
    attention = (*_fused_attention(flow), *_written_attention(flow))
    is_usual = len(attention) == 1 and attention[0].is_usual(flow, tokens)
    attended = (
        _attention(flow, attention[0], ends, tokens) if is_usual else (_by_work(flow, steps) for steps in attention)
    )
    return (*pieces, *attended)


def _rows(flow: SegmentFlow) -> Iterator[Piece]:
    """Rows of a table at positions of the batch."""
    for step in flow.segment.steps:
        if name_of(step) == "embedding":
            table, index = (flow.root(read.value) for read in step.reads)
            if table.origin == "parameter" and index.origin == "input":
                dims = shape(step.reads[0].positions)
                yield Piece(
                    kind="rows", steps=(step,), reads=(), inputs=(index,), makes=step.makes, dims=step.makes.dims,
                    weights=(WeightPart(value=table, dims=dims),),
                )  # fmt: skip


def _norms(flow: SegmentFlow, used_steps: set[TracedStep]) -> Iterator[Piece]:
    """Norms over one dim with a weight of that dim: a function of torch, or all that a submodule does."""
    groups: dict[str, list[TracedStep]] = defaultdict(list)
    for step in flow.segment.steps:
        if name_of(step) in NORMS:
            groups[step.name].append(step)
        elif step not in used_steps:
            groups[step.path].append(step)
    for steps in groups.values():
        entries, exits, weights = flow.entries(steps), flow.exits(steps), list(parameters_of(steps))
        operands = [entry for entry in entries if entry.origin == "made"]
        if len(operands) != 1 or len(exits) != 1 or any(entry.origin == "input" for entry in entries):
            continue
        if (over := averaged(steps)) and weights and all({*read.dims} == over for read in weights):
            piece = Piece(
                kind="opaque", steps=tuple(steps), reads=(operands[0],), makes=exits[0], whole=frozenset(over),
                weights=tuple(WeightPart(value=read.value, dims=read.dims) for read in weights), dims=operands[0].dims,
            )  # fmt: skip
            yield as_norm(piece, flow)


def _products(flow: SegmentFlow) -> Iterator[Piece]:
    """Products with a weight, and the sums with their biases; one that is only read in parts is several."""
    for step in flow.segment.steps:
        reads = {flow.root(read.value): read for read in step.reads}
        weights = [value for value in reads if value.origin == "parameter"]
        if step.sort != "product" or len(weights) != 1 or len(reads) != 2:
            continue
        (x,) = (value for value in reads if value.origin != "parameter")
        if x.origin != "made":  # rows of a table, taken by a product with ones and zeros
            continue
        weight = WeightPart(value=weights[0], dims=shape(reads[weights[0]].positions))
        product = Piece(
            kind="product", steps=(step,), reads=(x,), makes=step.makes, weights=(weight,), dims=step.makes.dims
        )
        shift = _shift(flow, product)
        whole = [product] if shift is None else [product, shift]
        parts = list(_parts(flow, whole))
        yield from parts or whole


def _shift(flow: SegmentFlow, product: Piece) -> Piece | None:
    """Return the sum of a product with its bias, if that is all that reads it; the bias may be joined of several."""
    readers = flow.readers.get(product.makes, ())
    if len(readers) != 1 or name_of(readers[0]) not in ("add", "add_") or len(readers[0].reads) != 2:
        return None
    for bias in readers[0].reads:
        steps = flow.of_weights(bias.value)
        least = {*(product.weights[0].dims if steps else product.dims)}  # what is joined has no dims of tokens
        if steps is not None and {*bias.dims} < {*product.dims} and {*bias.dims} <= least:
            break
    else:
        return None
    weight = WeightPart(value=flow.root(bias.value), dims=bias.dims)
    return Piece(
        kind="shift", steps=(*steps, readers[0]), reads=(product.makes,), makes=readers[0].makes, weights=(weight,),
        dims=product.dims,
    )  # fmt: skip


def _parts(flow: SegmentFlow, whole: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the products that a fused one is read as: each has its part of the weight, and of the bias."""
    product, result = whole[0], whole[-1].makes
    readers = flow.readers.get(result, ())
    token_dims = [dim for dim in product.dims if dim not in product.weights[0].dims]
    fused = [name_of(step) in _PARTS and {*token_dims} <= {*step.makes.dims} for step in readers]
    if len(readers) < 2 or not all(fused) or flow.root(flow.segment.gives) is result:
        return
    if _are_joined(flow, [step.makes for step in readers]):
        return
    contracted = [dim for dim in product.weights[0].dims if dim not in product.dims]
    for step in readers:
        part_dims = tuple(dim for dim in step.makes.dims if dim not in token_dims)
        part = WeightPart(value=product.weights[0].value, dims=(*part_dims, *contracted))
        if len(whole) == 1:
            steps = (*product.steps, step)
            yield replace(product, steps=steps, makes=step.makes, dims=step.makes.dims, weights=(part,))
            continue
        before = Traced(
            number=-1, name=f"{step.makes.name}_product", positions=step.makes.positions, origin="made",
            format=step.makes.format,
        )  # fmt: skip
        yield replace(product, steps=product.steps, makes=before, dims=step.makes.dims, weights=(part,))
        bias = WeightPart(value=whole[1].weights[0].value, dims=part_dims)
        steps = (*whole[1].steps, step)
        yield replace(whole[1], steps=steps, reads=(before,), makes=step.makes, dims=step.makes.dims, weights=(bias,))


def _are_joined(flow: SegmentFlow, parts: Sequence[Traced]) -> bool:
    """Say whether parts of a tensor are put together again, as those of a head of which one part is turned."""
    ends = [*parts, *(step.makes for step in flow.segment.steps if step.sort == "product")]
    joints = [step for step in flow.segment.steps if name_of(step) in ("cat", "stack")]
    return any(
        len({read.value for step in flow.closure(joint.makes, ends) for read in step.reads} & {*parts}) > 1
        for joint in joints
    )


def _attention(flow: SegmentFlow, attention: "_AttentionSteps", ends: set[Traced], tokens: Position) -> Iterator[Piece]:
    """Attention, as one function of torch or as two products around a softmax; and the positions of its inputs."""
    reads = tuple(flow.root(read.value) for read in attention.reads)
    for root in reads:
        if turned := _rotary(flow, root, ends):
            yield turned
    extras = tuple(value for value in flow.entries(attention.steps) if value not in reads)
    masks = tuple(value for value in extras if value.origin == "input")
    as_read = dict(zip(attention.reads[0].value.dims, attention.reads[0].dims, strict=True))
    yield Piece(
        kind="attend", steps=attention.steps, reads=reads, inputs=masks, makes=attention.steps[-1].makes,
        dims=attention.steps[-1].makes.dims,
        attention=AttentionDetail(
            head=attention.head, value_head=attention.value_head, is_causal=attention.is_causal,
            is_unfused=len(attention.steps) > 1,
            extras=tuple(value for value in extras if value not in masks), beside=attention.beside,
            queries=tuple(as_read.get(dim, dim) for dim in tokens), keys=attention.keys,
        ),
    )  # fmt: skip


def _by_work(flow: SegmentFlow, attention: "_AttentionSteps") -> Piece:
    """Return attention of which a plan knows the work alone: one of several of a layer, or along another sequence."""
    entries, result = flow.entries(attention.steps), attention.steps[-1].makes
    detail = AttentionDetail(head=attention.head, value_head=attention.value_head, extras=())
    return Piece(
        kind="opaque", steps=attention.steps, reads=tuple(value for value in entries if value.origin == "made"),
        inputs=tuple(value for value in entries if value.origin == "input"), makes=result, dims=result.dims,
        weights=tuple(WeightPart(value=read.value, dims=read.dims) for read in parameters_of(attention.steps)),
        whole=whole_in(attention.steps), attention=detail,
    )  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class _AttentionSteps:
    """Steps from the scores to the mixed values, how they read queries, keys and values, and which dims are a head."""

    steps: tuple[TracedStep, ...]
    reads: tuple[Read, Read, Read]
    head: Position
    value_head: Position
    keys: Position  # in scores
    beside: tuple[Read, ...]  # what meets these before the softmax
    is_causal: bool = False

    def is_usual(self, flow: SegmentFlow, tokens: Position) -> bool:
        """Say whether it is along the tokens of the stack, of what the layer makes, with heads that nothing mixes."""
        roots = [flow.root(read.value) for read in self.reads]
        is_along = {*tokens} <= {*roots[0].dims}
        is_of_layer = all(root.origin == "made" for root in roots)  # what goes along is planned as an input
        return is_along and is_of_layer and size_of(self.head) == size_of(self.value_head) and not self._mixes()

    def _mixes(self) -> bool:
        """Say whether scores are multiplied on their way to the values, as weights mix those of heads."""
        ours = {self.steps[0].makes}
        for step in self.steps[1:-1]:
            if any(read.value in ours for read in step.reads):
                ours.add(step.makes)
                if step.sort == "product" or step.products:
                    return True
        return False


def _fused_attention(flow: SegmentFlow) -> Iterator[_AttentionSteps]:
    for step in flow.segment.steps:
        if name_of(step) == "scaled_dot_product_attention" and len(step.reads) > 2:  # of three tensors
            query, key, value = step.reads[:3]
            head, value_head = factors(query.positions[-1]), factors(value.positions[-1])
            is_causal = True in (step.keywords.get("is_causal"), *step.arguments[_CAUSAL : _CAUSAL + 1])
            yield _AttentionSteps(
                steps=(step,), reads=(query, key, value), head=head, value_head=value_head, is_causal=is_causal,
                keys=factors(key.positions[-2]), beside=step.reads[3:4],
            )  # fmt: skip


def _written_attention(flow: SegmentFlow) -> Iterator[_AttentionSteps]:
    """Yield attention that is written as two products of activations, with a softmax between them."""
    products = [
        step for step in flow.segment.steps if step.sort == "product" and len(flow.operands(step)) == len(step.reads)
    ]  # of what layers compute: no weight, trained or frozen
    for scores, mixed in itertools.permutations(products, 2):
        for number, read in enumerate(mixed.reads):
            between = flow.closure(read.value, [scores.makes])
            softmax = any(name_of(step) in ("softmax", "_softmax") for step in between)
            if softmax and any(operand.value is scores.makes for step in between for operand in step.reads):
                query, key = scores.reads
                score_dims = {*scores.makes.dims}
                yield _AttentionSteps(
                    steps=(scores, *between, mixed), reads=(query, key, mixed.reads[1 - number]),
                    head=tuple(dim for dim in shape(query.positions) if dim not in score_dims),
                    value_head=tuple(dim for dim in mixed.makes.dims if dim not in score_dims),
                    keys=tuple(dim for dim in scores.makes.dims if dim not in mixed.makes.dims),
                    beside=tuple(_met(between, scores.makes)),
                )  # fmt: skip


def _met(steps: Sequence[TracedStep], scores: Traced) -> Iterator[Read]:
    """Yield what steps read beside scores, and what they make of these, up to the softmax."""
    ours = {scores}
    for step in steps:
        if any(read.value in ours for read in step.reads):
            yield from (read for read in step.reads if read.value not in ours)
            if name_of(step) in ("softmax", "_softmax"):
                return
            ours.add(step.makes)


def _rotary(flow: SegmentFlow, value: Traced, ends: set[Traced]) -> Piece | None:
    """Return what turns queries or keys by tables of the batch's positions; None where nothing does."""
    steps = [step for step in flow.closure(value, ends) if not is_same(step)]
    entries = flow.entries(steps)
    tables = tuple(entry for entry in entries if entry.origin == "input" and not entry.is_index)
    operands = [entry for entry in entries if entry.origin == "made"]
    if not steps or len(operands) != 1 or not tables or any(entry.origin == "parameter" for entry in entries):
        return None
    head = value.dims[-1:]
    turned: dict[Traced, dict[Traced, int]] = defaultdict(dict)  # by table: what it multiplies, and how long that is
    for step in steps:
        roots = [flow.root(read.value) for read in step.reads]
        for table in {*roots} & {*tables}:
            turned[table] |= {root: root.dims[-1].size for root in roots if root is not table}
    share = max((sum(lengths.values()) for lengths in turned.values()), default=0) / head[0].size
    piece = Piece(
        kind="rotary", steps=tuple(steps), reads=(operands[0],), makes=value, dims=value.dims, fraction=min(1.0, share)
    )
    return piece if only_turns(piece, tables, flow) else None


def _experts(flow: SegmentFlow) -> Iterator[Piece]:
    """Experts whose weights lie in tensors [experts, out, in] of one submodule, and the routing of tokens to them."""
    steps = flow.segment.steps
    choices = {_chosen_among(step): step for step in steps if name_of(step) == "topk"}
    stacked = [
        (step.path, read.value)
        for step in steps
        for read in step.reads
        if read.value.origin == "parameter" and len(read.value.positions) == _EXPERT_AXES
        and _sizes(read.value)[0] in choices
    ]  # fmt: skip
    if not stacked:
        return
    path, weights = min(owner for owner, _ in stacked), list(dict.fromkeys(value for _, value in stacked))
    topk = choices[_sizes(weights[0])[0]]
    router = next((step for step in reversed(flow.closure(topk.makes, [])) if step.sort == "product"), None)
    if router is None:
        raise InputError.of(path, "has weights of several experts, but no product makes the logits of their router")
    x = next(flow.root(read.value) for read in router.reads if flow.root(read.value).origin == "made")
    inside = _of_experts(flow, path, (x, router.makes), weights)
    exits = flow.exits(inside)
    if len(exits) != 1:
        raise InputError.of(path, "has weights of several experts, but gives several tensors")
    inner_values = {step.makes for step in inside}
    routing = [
        step
        for value in flow.entries(inside)
        if value.origin == "made" and value not in inner_values
        for step in flow.closure(value, [router.makes])
        if router.makes in _sources(flow, step.makes)
    ]
    expert_steps = tuple(step for step in steps if step in {*inside, *routing, router})
    table = next(read for read in router.reads if flow.root(read.value).origin == "parameter")
    weight = WeightPart(value=table.value, dims=shape(table.positions))
    logit_dims = {*router.makes.dims}
    scored = logit_dims | {dim for step in expert_steps if name_of(step) == "topk" for dim in step.makes.dims}
    scores = [step for step in expert_steps if {*step.makes.dims} <= scored]
    of_chosen = {name_of(step) for step in scores if not {*step.makes.dims} <= logit_dims}
    (hidden,) = (dim.size for dim in weight.dims if dim in x.dims)
    width, is_gated = _width([_sizes(value) for value in weights], hidden)
    detail = ExpertsDetail(
        num_experts=_chosen_among(topk), choices=topk.makes.dims[-1].size, width=width, is_gated=is_gated,
        activation=next((function for step in inside if (function := _activation(flow, step))), None),
        is_normalised=not of_chosen.isdisjoint(("div", "softmax", "_softmax")),
        by_sigmoid=any(name_of(step) == "sigmoid" for step in scores),
    )  # fmt: skip
    yield Piece(
        kind="experts", steps=expert_steps, reads=(x,), makes=exits[0], dims=exits[0].dims, experts=detail,
        weights=(weight, *(WeightPart(value=value, dims=value.dims) for value in weights)),
    )  # fmt: skip


def _chosen_among(topk: TracedStep) -> int:
    """Return among how many numbers the largest are chosen: experts, or tokens where experts choose these."""
    axis = topk.keywords.get("dim", topk.arguments[_TOPK_DIM] if len(topk.arguments) > _TOPK_DIM else -1)
    return size_of(factors(topk.reads[0].positions[axis]))


def _of_experts(
    flow: SegmentFlow, path: str, routed: tuple[Traced, Traced], weights: Sequence[Traced]
) -> Sequence[TracedStep]:
    """Return the steps of a submodule that make the result of its experts, without those of what is added to it.

    ``routed`` are what the router takes, and its logits.
    """
    (x, logits), stacked = routed, {*weights}
    inside = [step for step in flow.segment.steps if step.path == path or step.path.startswith(f"{path}.")]
    value = end = flow.root(inside[-1].makes)
    while step := flow.maker.get(value):
        operands = {operand: _sources(flow, operand) for operand in flow.operands(step)}
        of_experts = [operand for operand, sources in operands.items() if sources & stacked]
        if len(of_experts) != 1:
            break
        (value,) = of_experts
        beside = [sources for operand, sources in operands.items() if operand is not value]
        if beside and not any(logits in sources for sources in beside) and {*value.dims} == {*x.dims}:
            end = value
    made_by = {*flow.closure(end, [x])}
    return [step for step in inside if step in made_by]


def _width(shapes: Sequence[tuple[int, ...]], hidden: int) -> tuple[int, bool]:
    """Return how wide experts are, and whether they have a gate, which may lie in one tensor with what it gates."""
    widths = [sizes[1] if sizes[2] == hidden else sizes[2] for sizes in shapes]
    is_fused = len(widths) == 2 and max(widths) == 2 * min(widths)
    return min(widths), is_fused or len(widths) > 2


def _activation(flow: SegmentFlow, step: TracedStep) -> Activation | None:
    """Return which activation a step is."""
    operands = flow.operands(step)
    alone = len(operands) == len(step.reads) == 1 and not is_same(step)
    is_plain = alone and not step.whole and {*operands[0].dims} == {*step.makes.dims} and not step.makes.is_index
    return known_function((step,), operands[0], flow) if is_plain and not operands[0].is_index else None


def _sizes(value: Traced) -> tuple[int, ...]:
    return tuple(math.prod(dim.size for dim in factors(position)) for position in value.positions)


def _sources(flow: SegmentFlow, value: Traced) -> set[Traced]:
    """Return all that a value is made of."""
    return {read.value for step in flow.closure(value, ()) for read in step.reads} | {value}
