"""One layer of a decoder as lines of the planner's graph, with the numbers that the planner's Rules ask for."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard.graph.kinds.attention import Attend
from autoshard.modules.decoder.naming import Roles, layer_names
from autoshard.modules.decoder.pieces import Piece, is_same
from autoshard.modules.decoder.segments import Segment
from autoshard.modules.decoder.writing import LineWriter
from autoshard.modules.dims import Dim, Position, factors, size_of
from autoshard.modules.program import TracedStep, name_of
from autoshard.spec.model import LAYER

_OF_ATTENTION = (
    "add", "bmm", "div", "einsum", "masked_fill", "matmul", "mul", "scaled_dot_product_attention", "softmax",
    "_softmax", "where",
)  # fmt: skip
_RANK = "rank"  # what a matrix of two factors has in common
_LINEAR = {"add", "div", "dropout", "mul", "narrow", "neg", "select", "slice", "sub"}
_MOST_ALIKE = 3  # operations that are named one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart:
    """The lines of a part of a decoder, what they say of the model, dims that no card has, and what they do not say."""

    lines: tuple[str, ...]
    traits: Mapping[str, Any]  # fields of ModelSpec
    sizes: Mapping[str, int]
    notes: tuple[str, ...]
    counts: Mapping[str, int]  # of the numbers of weights, in the code


@dataclass(frozen=True, kw_only=True)
class KindNames:
    """The kind of layers that is written: its name, and what dims of the kinds before it are called."""

    name: str = LAYER
    ffn: int | None = None  # the width of the model's MLPs, if another kind has set it
    other_sizes: Mapping[str, int] = field(default_factory=dict[str, int])

    def width_name(self, number: int, size: int) -> str:
        """Name the dim of a product that is inside of a layer; the first is that of its MLP or of its experts."""
        if number == 1:
            return "ffn" if self.ffn in (None, size) else f"ffn_{self.name}"
        return self.numbered("ffn", number, size)

    def numbered(self, base: str, number: int, size: int) -> str:
        """Name one of several dims, which another kind of layers may have with another size."""
        name = f"{base}_{number}"
        return name if self.other_sizes.get(name, size) == size else f"{base}_{self.name}_{number}"


def written_layer(
    pieces: Sequence[Piece], segment: Segment, shared_names: Mapping[Dim, str], attend: Attend, kind: KindNames
) -> WrittenPart:
    """Write a layer down; ``shared_names`` are those of batch, sequence, hidden size and vocabulary."""
    tokens = [dim for dim, name in shared_names.items() if name in ("batch", "seq")]
    roles, dims = Roles.of(pieces, segment.name, tokens[1]), dict(shared_names)
    heads = roles.heads(tokens)
    dims |= {dim: "head_dim" if name == "values" else name for name, position in heads.items() for dim in position}
    for chain in roles.chains.values():  # a head that is only partly turned is put together again
        head_dims = tuple(dim for dim in chain[0].dims if dims.get(dim, "head_dim") == "head_dim") if chain else ()
        dims |= dict.fromkeys(head_dims if size_of(head_dims) == size_of(heads["head_dim"]) else (), "head_dim")
    experts = next((piece.experts for piece in pieces if piece.experts), None)
    names = layer_names(pieces, roles, segment)
    writer = LineWriter(
        segment=segment, names=names, dims=dims, roles=roles, attend=attend, other_sizes=kind.other_sizes
    )
    for piece in (piece for piece in pieces if piece.attention and piece is not roles.attend):
        writer.name_dims(dim for value in (*piece.reads, piece.makes) for dim in value.dims)
    counts = _inner_dims(pieces, dims)
    ranks = [dim for dim in counts if _is_rank(dim, pieces)]
    widths = [dim for dim in counts if dim not in ranks]
    for number, dim in enumerate(widths, start=2 if experts else 1):
        dims[dim] = kind.width_name(number, dim.size)
        writer.sizes |= {dims[dim]: dim.size} if number > 1 else {}
    for number, dim in enumerate(ranks, 1):
        dims[dim] = kind.numbered(_RANK, number, dim.size)
        writer.sizes[dims[dim]] = dim.size
    return WrittenPart(
        lines=writer.write(pieces),
        traits={**_traits_of_heads(heads), **_traits_of_mlp(pieces, names, widths)},
        sizes=writer.sizes,
        counts=writer.counts,
        notes=(*_notes(roles.attend, pieces, kind.name), *opaque_notes(kind.name, names)),
    )


def _traits_of_heads(heads: Mapping[str, Position]) -> Mapping[str, Any]:
    """Return what a layer with attention says of its heads."""
    if not heads:
        return {}
    num_kv = size_of(heads["kv_heads"])
    num_heads = num_kv * size_of(heads["q_group"])
    return {"num_heads": num_heads, "num_kv_heads": num_kv, "head_dim": size_of(heads["head_dim"])}


def _traits_of_mlp(pieces: Sequence[Piece], names: Mapping[Piece, str], widths: Sequence[Dim]) -> Mapping[str, Any]:
    """Return what a layer says of the rest of a model; nothing of what it has not."""
    experts = next((piece.experts for piece in pieces if piece.experts), None)
    by_name = {name: piece for piece, name in names.items()}
    norm = next((piece.norm for piece in pieces if piece.norm), None)
    act = by_name["act"].function if "act" in by_name else None
    traits: dict[str, Any] = {"norm": norm.function, "norm_eps": norm.eps} if norm else {}
    traits |= {"rotary_fraction": by_name["q_rotary"].fraction} if "q_rotary" in by_name else {}
    if activation := act or (experts and experts.activation):
        traits["activation"] = activation
    if experts:
        traits |= {"num_experts": experts.num_experts, "experts_per_token": experts.choices}
    if experts or widths:
        gated = "product" in by_name or bool(experts and experts.is_gated)
        traits |= {"ffn": experts.width if experts else widths[0].size, "gated_mlp": gated}
    return traits


def opaque_notes(part: str, names: Mapping[Piece, str]) -> Iterator[str]:
    """Say which operations of a part the planner knows by their work alone; many that are alike are one line."""
    names_by_work: dict[str, list[str]] = {}
    for piece, name in names.items():
        if piece.kind == "opaque":
            names_by_work.setdefault(", ".join(dict.fromkeys(piece.functions)), []).append(name)
    for functions, their_names in names_by_work.items():
        first, *more = their_names
        if len(more) < _MOST_ALIKE:
            yield from (f"{part}: {name} ({functions}) is planned by its work alone" for name in their_names)
        else:
            yield f"{part}: {first} and {len(more)} more ({functions}) are planned by their work alone"


def _notes(attend: Piece | None, pieces: Sequence[Piece], kind: str) -> Iterator[str]:
    """Say what attention and experts do that the planner's own do not."""
    more = sorted({*attend.functions} - {*_OF_ATTENTION}) if attend else ()
    if more:
        yield f"{kind}: {', '.join(more)} of the scores of attention is not in the plan"
    if attend and attend.attention and attend.attention.extras:
        names = ", ".join(value.name for value in attend.attention.extras)
        yield f"{kind}: attention also reads {names}, which is not in the plan"
    for piece in pieces:
        if piece.experts and piece.experts.by_sigmoid:
            yield f"{kind}: its experts are chosen by sigmoids, and planned as if by a softmax"
        if piece.experts and not piece.experts.is_normalised:
            yield f"{kind}: the weights of the chosen experts are planned as if they were normalised"
        if piece.experts and not piece.experts.activation:
            yield f"{kind}: what experts compute between their products is planned by its work alone"


def _inner_dims(pieces: Sequence[Piece], dims: Mapping[Dim, str]) -> list[Dim]:
    """Return the dims between two products that have no name yet: heads last, those of the largest weights first."""
    counts, summed = Counter[Dim](), set[Dim]()
    for result_dims, weight_dims in _products_of(pieces):
        summed |= {*weight_dims} - {*result_dims}
        for dim in weight_dims:
            counts[dim] += 0 if dim in dims else size_of(weight_dims)
    between = [dim for dim, count in counts.most_common() if count and dim in summed]
    return sorted(between, key=lambda dim: dim not in _undivided(pieces))


def _undivided(pieces: Sequence[Piece]) -> set[Dim]:
    """Return the dims that are a dim of some matrix, which code does not divide, as it does into heads."""
    positions = (
        factors(position)
        for piece in pieces
        for step in piece.steps
        for read in step.reads
        if step.sort == "product" and read.value.origin != "made"
        for position in read.value.positions
    )
    return {position[0] for position in positions if len(position) == 1}


def _products_of(pieces: Sequence[Piece]) -> Iterator[tuple[Position, Position]]:
    """Yield the dims of the results of products, and of their weights; those that are frozen are constants."""
    for piece in pieces:
        if piece.kind == "product":
            yield piece.dims, piece.weights[0].dims
        elif piece.kind == "opaque":
            for step in piece.steps if piece.inputs else ():
                constants = (read.dims for read in step.reads if step.sort == "product" and read.value in piece.inputs)
                yield from ((step.makes.dims, weight_dims) for weight_dims in constants)


def _is_rank(dim: Dim, pieces: Sequence[Piece]) -> bool:
    """Say whether a dim is only a step between two products, narrower than what these read and make, as in LoRA.

    What an MLP computes between its products is no sum and no product with a number.
    """
    products = [(result, weight) for result, weight in _products_of(pieces) if dim in weight]
    around = [size_of(tuple(other for other in weight if other is not dim)) for _, weight in products]
    is_between = any(dim not in result for result, _ in products) and dim.size < min(around)
    return is_between and not any(_acts(piece, dim) for piece in pieces if dim in piece.dims)


def _acts(piece: Piece, dim: Dim) -> bool:
    """Say whether a piece is more than a product, a norm, or a sum of tensors each times a number."""
    if piece.kind != "opaque":
        return piece.kind in ("unary", "multiply")
    steps = (step for step in piece.steps if dim in step.makes.dims and step.sort != "product" and not is_same(step))
    return any(name_of(step) not in _LINEAR or _gates(step, dim) for step in steps)


def _gates(step: TracedStep, dim: Dim) -> bool:
    return name_of(step) == "mul" and sum(dim in read.dims for read in step.reads) > 1
