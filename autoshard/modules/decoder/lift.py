"""A decoder's code as a model that the planner searches, with what of the code the plan does not say."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from autoshard.errors import require
from autoshard.graph.block import OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.kinds.experts import TopK
from autoshard.modules.capture import Captured
from autoshard.modules.decoder.arguments import token_arguments
from autoshard.modules.decoder.clusters import Clusters
from autoshard.modules.decoder.ends import (
    LOGITS_DIMS,
    TrainedEnd,
    dims_of_samples,
    loss_notes,
    trained_end,
    up_to_logits,
)
from autoshard.modules.decoder.kinds import WrittenKinds, written_kinds
from autoshard.modules.decoder.layers import WrittenPart, opaque_notes
from autoshard.modules.decoder.naming import own_name
from autoshard.modules.decoder.pieces import Piece, SegmentFlow, parameters_of, products_of
from autoshard.modules.decoder.recognise import recognised
from autoshard.modules.decoder.segments import Segment, Stack, stack_of, with_inputs_beside
from autoshard.modules.decoder.writing import LineWriter
from autoshard.modules.dims import Dim, factors, size_of
from autoshard.modules.program import Traced
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import LAYER, ModelSpec
from autoshard.spec.model_parts import TracedDecoder
from autoshard.spec.workload import Precision, Workload

_ANY = Workload(seq_len=64, global_batch=1, precision=Precision.named("bf16"))
_MOST_SAID = 3  # differences from a card
_TABLE = "torch_engine"  # of kernels; what operations compute is the same with each


def lift_decoder(
    captured: Captured, module: torch.nn.Module, *, name: str, source: str, differences: Sequence[str] = ()
) -> ModelSpec:
    """Return a decoder whose code was captured as a model that carries its own operations.

    ``differences`` say why it is not the card of its config, if it has one.
    """
    end = trained_end(captured, token_arguments(module, captured.exported.arguments))
    samples = dims_of_samples(captured, end)
    captured = up_to_logits(captured, end)
    stack = with_inputs_beside(stack_of(captured.program, end.logits, samples))
    dims, embed, head = _ends(stack, end)
    _refuse_shared(captured, stack)
    layers = written_kinds(captured, stack, [_pieces(segment, stack) for segment in stack.layers], dims)
    leaks = "sees what comes after a token, which logits are trained to tell. Let the module return a loss of its own"
    require((end.is_loss or not layers.sees_all, stack.layers[0].name, leaks))
    positions: Any = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    length = next(dim.size for dim, name in dims.items() if name == "seq")
    traits = {"max_positions": int((not end.data and positions) or length), "ffn": embed.traits["hidden"]}
    traits |= {**embed.traits, **layers.traits, **head.traits}
    traced = TracedDecoder(
        embed=embed.lines, layer=layers.parts[LAYER].lines, head=head.lines,
        sizes={**embed.sizes, **layers.sizes, **head.sizes}, num_parameters=1, data=end.data,
    )  # fmt: skip
    model = ModelSpec(name=name, source=source, **traits, traced=traced)
    count, total = _graph(model, stack).num_parameters(), sum(parameter.numel() for parameter in module.parameters())
    of_layers = said_once(note for part in layers.parts.values() for note in part.notes)
    notes = [*embed.notes, *of_layers, *layers.notes, *head.notes]
    notes += _left_out(model, stack, (embed, head), layers)
    beside = [captured.parameters.get(value.name, value.name) for value in stack.beside]
    goes = "goes along beside the hidden state, and is planned as an input"
    goes = goes if len(beside) == 1 else "go along beside the hidden state, and are planned as inputs"
    notes += [f"{', '.join(beside)} {goes}"] if beside else []
    frozen = sum(parameter.numel() for parameter in module.parameters() if not parameter.requires_grad)
    notes += [f"{frozen:,} of {total:,} parameters are frozen, and planned as if they were trained"] if frozen else []
    notes += [f"{total - count:,} of {total:,} parameters are not in the plan"] if count < total else []
    more = (
        f"{count - total:,} parameters more than the {total:,} of the code: some are constants, or used more than once"
    )
    notes += [f"the plan has {more}, and planned for each use"] if count > total else []
    notes += [f"it is not the card of its config: {difference}" for difference in differences[:_MOST_SAID]]
    notes += [*loss_notes(end), *_drops(module)]
    return replace(model, traced=replace(traced, num_parameters=count, unlifted=tuple(notes)))


def said_once(notes: Iterable[str]) -> list[str]:
    """Return notes that begin with the part of which they are, those that several parts have as one.

    >>> said_once(["layer: q_own is", "layer: k_own is", "layer_2: k_own is"])
    ['layer: q_own is', 'layer, layer_2: k_own is']
    """
    parts: dict[str, list[str]] = {}
    for note in notes:
        part, colon, words = note.partition(": ")
        assert colon, f"a note begins with its part: {note}"
        parts.setdefault(words, []).append(part)
    return [f"{', '.join(those)}: {words}" for words, those in parts.items()]


def _drops(module: torch.nn.Module) -> Iterator[str]:
    """Say that a module drops numbers in training: what was read is what it computes without."""
    rates = {
        path: submodule.p
        for path, submodule in module.named_modules()
        if isinstance(submodule, _DropoutNd) and submodule.p
    }
    for path, rate in [*rates.items()][:1]:
        yield f"dropout in training is not in the plan ({path}: {rate:g})"


def _left_out(
    model: ModelSpec, stack: Stack, ends: tuple[WrittenPart, WrittenPart], layers: WrittenKinds
) -> Iterator[str]:
    """Say how many products of the code are not in the lines; refuse weights that have another size in the code."""
    graph = _graph(model, stack)
    segments = {"embed": [stack.embed], "head": [stack.head]}
    segments |= {name: [stack.layers[number] for number in its] for name, its in layers.numbers.items()}
    for block, part in zip(graph.blocks, (ends[0], *layers.parts.values(), ends[1]), strict=True):
        for tensor in block.parameters:
            size = math.prod(graph.sizes[dim] for dim in tensor.dims)
            count = part.counts.get(tensor.name, size)
            what = f"{tensor.name}[{' '.join(tensor.dims)}] would have {size:,} numbers, and has {count:,} in the code"
            require((size == count, block.kind, f"{what}: its dims cannot be told apart"))
    counted = [block for block in graph.blocks if not any(isinstance(op.kind, TopK) for op in block.ops)]
    ours = sum(block.repeat * block.matrix_flops("F", graph.sizes) for block in counted)
    steps = (step for block in counted for segment in segments[block.kind] for step in segment.steps)
    theirs = sum(2 * size_of(dims) for step in steps for dims in products_of(step))
    if ours != theirs:  # without experts, of which code may compute more than are chosen
        yield f"the plan counts {ours:,} FLOPs of products in a forward pass, and the code has {theirs:,}"


def _graph(model: ModelSpec, stack: Stack) -> OpGraph:
    """Return a step on the tokens that were traced: a table of positions may be as long as a sequence."""
    (batch,), (seq,) = stack.carried[:2]
    work = replace(_ANY, seq_len=seq.size, global_batch=batch.size)
    return decoder_graph(model, work, load_kernels(_TABLE), micro_batch=batch.size)


def _pieces(segment: Segment, stack: Stack) -> tuple[Piece, ...]:
    flow, tokens = SegmentFlow(segment), factors(stack.carried[1])
    return _branches_in_order(Clusters(flow, recognised(flow, tokens)).pieces(), segment)


def _branches_in_order(pieces: tuple[Piece, ...], segment: Segment) -> tuple[Piece, ...]:
    """Let a layer that adds two branches to its input at once add one after the other, as cards write it."""
    adds = {piece.makes: piece for piece in pieces if piece.kind == "add"}
    for last in adds.values():
        inner = next((adds[value] for value in last.reads if value in adds), None)
        readers = [piece for piece in pieces if inner and inner.makes in piece.reads]
        if inner and segment.takes in last.reads and segment.takes not in inner.reads and len(readers) == 1:
            places = {piece.makes: place for place, piece in enumerate(pieces)}
            first, second = sorted(inner.reads, key=lambda value: places[value])
            changed = {
                inner: replace(inner, reads=(cast(Traced, segment.takes), first)),
                last: replace(last, reads=(inner.makes, second)),
            }
            return tuple(changed.get(piece, piece) for piece in pieces)
    return pieces


def _ends(stack: Stack, end: TrainedEnd) -> tuple[Mapping[Dim, str], WrittenPart, WrittenPart]:
    """Return the embedding and the head, with the names of the dims that layers share with them."""
    embed, head = _pieces(stack.embed, stack), _pieces(stack.head, stack)
    carried = zip((factors(position)[0] for position in stack.carried), ("batch", "seq", "hidden"), strict=True)
    dims: dict[Dim, str] = dict(carried)
    attends = next((name for name, pieces in (("embed", embed), ("head", head)) if _has(pieces, "attend")), None)
    require((attends is None, "module", f"attends in its {attends} too; all layers must be in one list"))
    traits: dict[str, Any] = {"num_layers": len(stack.layers)}
    traits |= {"hidden": stack.carried[2][0].size, "positions": "rotary"}
    if end.data:
        traits |= {"vocab": 1}
        return dims, _end(stack.embed, embed, {}, dims, traits), _end(stack.head, head, {}, dims, {})
    batch = next(dim for dim, name in dims.items() if name == "batch")
    rows = [piece for piece in embed if piece.kind == "rows"]
    words = next((piece for piece in rows if batch in piece.dims), None)
    products = [piece for piece in head if piece.kind == "product"]
    require(
        (words is not None, "module", "looks no tokens up in a table of weights (nn.Embedding)"),
        (bool(products), "module", "makes the first of what it returns with no product; logits must come first"),
    )
    assert words, "it was just asked for"
    traits["tied_embeddings"] = products[-1].weights[0].value is words.weights[0].value
    logit_dims = [dim for dim in head[-1].dims if dims.get(dim) not in ("batch", "seq")]
    shape = " ".join(dims.get(dim, str(dim.size)) for dim in head[-1].dims)
    wanted = "the logits of each token, [batch seq vocabulary]"
    message = f"returns [{shape}], not {wanted}. Let it return a loss of its own"
    if end.is_loss:
        remedy = "Let its head make those of all tokens, and its labels leave some out (-100)"
        message = f"makes its loss of [{shape}], not of {wanted}. {remedy}"
    is_made = logit_dims == [dim for dim in products[-1].weights[0].dims if dim in products[-1].dims]
    require((len(head[-1].dims) == LOGITS_DIMS and is_made, "module", message))
    for dim in (*logit_dims, words.weights[0].dims[0]):
        if dim.size == logit_dims[0].size:
            dims.setdefault(dim, "vocab")
    traits["vocab"] = logit_dims[0].size
    names = {words: "embed"}
    for piece in rows:
        if piece is not words and batch not in piece.dims:
            dims.setdefault(piece.weights[0].dims[0], "positions")
            traits |= {"positions": "learned", "max_positions": piece.weights[0].dims[0].size}
            names[piece] = "place"
    return (
        dims,
        _end(stack.embed, embed, names, dims, traits),
        _end(stack.head, head, _of_logits(head, products[-1]), dims, {}),
    )


def _of_logits(head: Sequence[Piece], product: Piece) -> Mapping[Piece, str]:
    """Name the product that makes the logits, and the sum with its bias."""
    shifts = [piece for piece in head if piece.kind == "shift" and product.makes in piece.reads]
    return {product: "unembed", **dict.fromkeys(shifts, "unembed_shift")}


def _end(
    segment: Segment,
    pieces: Sequence[Piece],
    fixed_names: Mapping[Piece, str],
    dims: dict[Dim, str],
    traits: Mapping[str, Any],
) -> WrittenPart:
    """Write the embedding or the head down."""
    of_head = {"norm": "final_norm", "product": "head_product", "shift": "head_shift", "add": "embed_add"}
    of_embed = {kind: f"embed_{kind}" for kind in (*of_head, "unary", "multiply")}
    usual = of_head if segment.takes else of_embed
    names, counts = dict[Piece, str](), Counter[str]()
    for piece in pieces:
        base = fixed_names.get(piece) or usual.get(piece.kind) or own_name(piece)
        counts[base] += 1
        names[piece] = base if counts[base] == 1 else f"{base}_{counts[base]}"
    writer = LineWriter(segment=segment, names=names, dims=dims)
    notes = tuple(opaque_notes("head" if segment.takes else "embedding", names))
    return WrittenPart(lines=writer.write(pieces), traits=traits, sizes=writer.sizes, notes=notes, counts=writer.counts)


def _has(pieces: Sequence[Piece], kind: str) -> bool:
    return any(piece.kind == kind for piece in pieces)


def _refuse_shared(captured: Captured, stack: Stack) -> None:
    """Refuse layers that share a weight, of which each stage of a pipeline would have its own."""
    owners: dict[Traced, str] = {}
    for segment in stack.layers:
        for read in parameters_of(segment.steps):
            first, path = owners.setdefault(read.value, segment.name), captured.parameters[read.value.name]
            remedy = "Give each layer weights of its own, or train by a loop of your own with autoshard.shard"
            message = f"uses {path}, as {first} does. {remedy}"
            require((first == segment.name, segment.name, message))
