"""The pieces of a decoder's segments as lines of the planner's graph."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.errors import require
from autoshard.graph.builder import usual_delivery
from autoshard.graph.kinds.attention import Attend, Rotary
from autoshard.graph.kinds.experts import Combine, Dispatch, Slot, TopK
from autoshard.graph.kinds.indexing import Lookup
from autoshard.graph.kinds.linear import Deliver, Einsum
from autoshard.graph.kinds.norm import Norm, Softmax
from autoshard.graph.kinds.opaque import Opaque
from autoshard.graph.kinds.pointwise import Add, Multiply, Unary
from autoshard.graph.op import Dims, OpKind
from autoshard.graph.written import WrittenOp
from autoshard.modules.decoder.naming import Roles, in_order
from autoshard.modules.decoder.pieces import Piece, WeightPart, products_of
from autoshard.modules.decoder.segments import Segment
from autoshard.modules.dims import Dim, shown_hint, size_of
from autoshard.modules.program import Traced
from autoshard.spec.model_parts import PACKED_ROWS

_POSITIONS, _KEY_POSITIONS = "positions[seq]:int64", "key_positions[kv_seq]:int64"
_QUERY: Dims = ("batch", "seq", "kv_heads", "q_group", "head_dim")
_KEYS_ALONG = (("seq", "kv_seq"),)
_DELIVERED: Mapping[str, str] = {
    "attn_norm": "attn_in", "attend": "o_in", "attn_add": "mlp_residual", "mlp_norm": "mlp_in",
    "dispatch": "expert_in", "final_norm": "unembed_in", "combine": "mlp_out",
}  # fmt: skip
Pairs = tuple[tuple[str, str], ...]
_THETA = 10000.0  # of rotary tables, whose numbers are not read off the code: neither costs nor proofs depend on it


@dataclass(eq=False, kw_only=True)
class LineWriter:
    """Writes a segment's pieces down, one by one."""

    segment: Segment
    names: Mapping[Piece, str]
    dims: dict[Dim, str]  # what dims are called
    roles: Roles | None = None
    attend: Attend = field(default_factory=Attend)
    ops: list[WrittenOp] = field(default_factory=list[WrittenOp])
    laid: dict[Traced, tuple[str, Dims]] = field(default_factory=dict[Traced, tuple[str, Dims]])  # operation, its dims
    sizes: dict[str, int] = field(default_factory=dict[str, int])  # of dims that no card has
    other_sizes: Mapping[str, int] = field(default_factory=dict[str, int])  # of those of other kinds of layers
    counts: dict[str, int] = field(default_factory=dict[str, int])  # of the numbers of weights, in the code
    renames: dict[str, Pairs] = field(default_factory=dict[str, Pairs])  # of dims, as readers of a tensor call them

    def write(self, pieces: Sequence[Piece]) -> tuple[str, ...]:
        """Return the lines of all pieces, in order."""
        if self.segment.takes:
            arriving = ("x", self._carried())
            self.laid[self.segment.takes] = self._turned("arrive", arriving, self._named(self.segment.takes.dims))
        for piece in pieces:
            getattr(self, f"_{piece.kind}")(piece, self.names[piece])
        if self.segment.handed_on:
            self._turned("leave", self.laid[pieces[-1].makes], self._carried())
        return tuple(str(op) for op in (*self.ops, *self._delivers()))

    def _carried(self) -> Dims:
        """Return the dims of what goes from part to part."""
        if not self.segment.packed_rows:
            return ("batch", "seq", "hidden")
        self.sizes[PACKED_ROWS] = self.segment.packed_rows
        return ("batch", PACKED_ROWS, "hidden")

    def name_dims(self, dims: Iterable[Dim]) -> None:
        """Give dims names by what the code calls them, so that no width of an MLP is looked for among them."""
        for dim in dims:
            self._name(dim)

    def _turned(self, name: str, value: tuple[str, Dims], dims: Dims) -> tuple[str, Dims]:
        """Return a value along these dims; it is taken out of what parts hand on, or put there, if its own differ."""
        other_dims = {*value[1]} ^ {*dims}
        if not other_dims:
            return value
        kind = Opaque(does="packing", dims=dims, whole=tuple(sorted(other_dims)))
        self.ops.append(WrittenOp(name=name, kind=kind, operands=(value[0],)))
        return name, dims

    def _emit(self, piece: Piece, kind: OpKind, dims: Dims, *operands: str) -> None:
        name = self.names[piece]
        self.ops.append(WrittenOp(name=name, kind=kind, operands=operands))
        self.laid[piece.makes] = name, dims

    def _named(self, dims: Sequence[Dim]) -> Dims:
        return tuple(dict.fromkeys(self._name(dim) for dim in dims))  # a head may be several dims of the code

    def _name(self, dim: Dim) -> str:
        if dim not in self.dims:
            hint = shown_hint(dim)
            count = sum(name == hint or name.startswith(f"{hint}_") for name in self.sizes)
            name = f"{hint}_{count + 1}" if count or hint in self.dims.values() else hint
            while self.other_sizes.get(name, dim.size) != dim.size:
                count += 1
                name = f"{hint}_{count + 1}"
            self.dims[dim] = name
            self.sizes[name] = dim.size
        return self.dims[dim]

    def _weight(self, name: str, weight: WeightPart, dims: Dims | None = None) -> str:
        self.counts[name] = size_of(weight.dims)
        return f"{name}[{' '.join(dims or self._named(weight.dims))}]"

    def _rows(self, piece: Piece, name: str) -> None:
        (weight,) = piece.weights
        tokens = "tokens[batch seq]:int64" if name == "embed" else f"{name}.index[batch seq]:int64"
        index = _POSITIONS if name == "place" else tokens
        dims = (("seq",) if name == "place" else ("batch", "seq")) + self._named(weight.dims[1:])
        self._emit(piece, Lookup(), dims, self._weight(f"{name}.weight", weight), index)

    def _product(self, piece: Piece, name: str) -> None:
        of_weight = self._named(piece.weights[0].dims)
        x, x_dims = self._read_by_product(piece, of_weight)
        result_dims = self._named(piece.dims)
        out, contracted = (
            [dim for dim in of_weight if dim in result_dims],
            [dim for dim in of_weight if dim not in result_dims],
        )
        if self.roles and piece in self.roles.of_keys:
            out = out if "kv_heads" in out or "head_dim" not in out else ["kv_heads", *out]
        elif self.roles:
            out, contracted = _with_groups(out), _with_groups(contracted)
        missing = [dim for dim in contracted if dim not in x_dims]
        require((not missing, self.segment.name, f"{name} sums over {', '.join(missing)}, which {x} does not have"))
        dims = tuple(dict.fromkeys((*(dim for dim in x_dims if dim not in contracted), *in_order(out))))
        weight = self._weight(f"{name}.weight", piece.weights[0], (*in_order(out), *in_order(contracted)))
        self._emit(piece, Einsum(dims=dims), dims, x, weight)

    def _read_by_product(self, piece: Piece, weight_dims: Dims) -> tuple[str, Dims]:
        """Return what a product reads, whose only reader may call its dims as the weight does."""
        x, dims = self.laid[piece.reads[0]]
        pairs = [
            pair
            for step in piece.steps
            if step.sort == "product"
            for read in step.reads
            for pair in read.renamed.items()
        ]
        names = {self._name(old): self._name(new) for old, new in pairs}
        renamed = {old: new for old, new in names.items() if old in dims and new in weight_dims and new not in dims}
        if not renamed or any(x in op.operands for op in self.ops):
            return x, dims
        self.renames[x] = tuple(renamed.items())
        self.laid[piece.reads[0]] = x, tuple(renamed.get(dim, dim) for dim in dims)
        return self.laid[piece.reads[0]]

    def _shift(self, piece: Piece, name: str) -> None:
        x, x_dims = self.laid[piece.reads[0]]
        bias_dims = {*self._named(piece.weights[0].dims)}
        bias_dims |= {"q_group", "kv_heads"} & {*x_dims} if "head_dim" in bias_dims else set()
        self._emit(piece, Add(), x_dims, x, f"{name}.bias[{' '.join(dim for dim in x_dims if dim in bias_dims)}]")

    def _norm(self, piece: Piece, name: str) -> None:
        x, dims = self.laid[piece.reads[0]]
        assert piece.norm, "a norm is one"
        over = self._name(piece.norm.over)
        kind = Norm(function=piece.norm.function, over=over, eps=piece.norm.eps)
        suffixes = ("weight", "bias")[: len(piece.weights)]
        self._emit(piece, kind, dims, x, *(f"{name}.{suffix}[{over}]" for suffix in suffixes))

    def _rotary(self, piece: Piece, name: str) -> None:
        x, dims = self.laid[piece.reads[0]]
        self._emit(piece, Rotary(fraction=piece.fraction, theta=_THETA), dims, x, _POSITIONS)

    def _attend(self, piece: Piece, name: str) -> None:
        reads = [self.laid[value][0] for value in piece.reads]
        self._emit(piece, self.attend, _QUERY, *reads, _POSITIONS, _KEY_POSITIONS)

    def _add(self, piece: Piece, name: str) -> None:
        (x, dims), (y, its) = (self.laid[value] for value in piece.reads)
        first = [value for value in piece.reads if value is self.segment.takes or self.laid[value][0] == "attn_add"]
        if first and first[0] is piece.reads[1]:
            x, y = y, x
        if _in_one_order(dims, its):
            self._emit(piece, Add(), dims if len(dims) >= len(its) else its, x, y)
        else:
            self._opaque(piece, name)

    def _multiply(self, piece: Piece, name: str) -> None:
        (x, dims), (y, its) = sorted((self.laid[value] for value in piece.reads), key=lambda pair: "act" not in pair[0])
        if _in_one_order(dims, its):
            self._emit(piece, Multiply(), dims, x, y)
        else:
            self._opaque(piece, name)

    def _unary(self, piece: Piece, name: str) -> None:
        x, dims = self.laid[piece.reads[0]]
        assert piece.function, "a function that is known"
        self._emit(piece, Unary(function=piece.function), dims, x)

    def _opaque(self, piece: Piece, name: str) -> None:
        read = [self.laid[value] for value in piece.reads]
        result_dims = self._named(piece.dims)
        heads = {"kv_heads", "q_group"}  # of which one may be of size 1, and not be in the code
        same = next((dims for _, dims in read if {*dims} - heads == {*result_dims} - heads), None)
        dims = same or in_order(result_dims)
        if self.roles and piece in self.roles.of_queries and "head_dim" in dims:
            dims = in_order(_with_groups(dims))
        not_empty = [weight for weight in piece.weights if size_of(weight.dims)]
        weights = [self._weight(f"{name}.weight{number or ''}", weight) for number, weight in enumerate(not_empty)]
        inputs = [
            f"{name}.input{number or ''}[{' '.join(self._named(value.dims))}]:{'int64' if value.is_index else 'fp32'}"
            for number, value in enumerate(value for value in piece.inputs if value.dims)
        ]
        seen = {dim for _, value_dims in read for dim in value_dims} | {*dims}
        seen |= {dim for operand in (*not_empty, *piece.inputs) for dim in self._named(operand.dims)}
        whole = {self.dims[dim] for dim in piece.whole if dim in self.dims} & seen
        lost = seen - {*dims}
        products = tuple(self._named(product) for step in piece.steps for product in products_of(step))
        kind = Opaque(
            does=".".join(piece.functions), dims=dims, whole=tuple(sorted(whole | lost)),
            num_functions=max(1, len(piece.functions)), products=products,
        )  # fmt: skip
        self._emit(piece, kind, dims, *(operand for operand, _ in read), *weights, *inputs)

    def _experts(self, piece: Piece, name: str) -> None:
        x, _ = self.laid[piece.reads[0]]
        assert piece.experts, "experts are known"
        gated, inside = piece.experts.is_gated, ("experts", "slots", "ffn")
        activation = piece.experts.activation
        act = Unary(function=activation) if activation else Opaque(does="activation", dims=inside)
        into = "weight[experts ffn hidden]"
        lines: list[tuple[str, OpKind, tuple[str, ...]]] = [
            ("router", Einsum(dims=("batch", "seq", "experts")), (x, "router.weight[experts hidden]")),
            ("choose", TopK(), ("router",)),
            ("share", Softmax(over="choices"), ("choose",)),
            ("queue", Slot(), ("choose.expert",)),
            ("dispatch", Dispatch(), (x, "choose.expert", "queue")),
            *([("gate", Einsum(dims=inside), ("dispatch", f"gate.{into}"))] if gated else []),
            ("up", Einsum(dims=inside), ("dispatch", f"up.{into}")),
            ("act", act, ("gate" if gated else "up",)),
            *([("product", Multiply(), ("act", "up"))] if gated else []),
            ("down", Einsum(dims=("experts", "slots", "hidden")),
             ("product" if gated else "act", "down.weight[experts hidden ffn]")),
            ("combine", Combine(), ("down", "share", "choose.expert", "queue")),
        ]  # fmt: skip
        self.ops += [WrittenOp(name=op_name, kind=kind, operands=operands) for op_name, kind, operands in lines]
        self.laid[piece.makes] = "combine", ("batch", "seq", "hidden")

    def _delivers(self) -> Iterator[WrittenOp]:
        """Yield the names under which tensors reach their readers in the tables of cards."""
        ops_by_name, delivers = {op.name: op for op in self.ops}, dict[str, WrittenOp]()

        def name(tensor: str, delivered: str, rename: Pairs = ()) -> None:
            rename = rename or self.renames.get(tensor, ())
            if tensor not in delivers and delivered not in {deliver.name for deliver in delivers.values()}:
                delivers[tensor] = WrittenOp(name=delivered, kind=Deliver(rename=rename), operands=(tensor,))

        if self.segment.takes:
            name("x", "block_in" if self.roles else "head_in")
        for value, letter in zip(self._attended(), "qkv", strict=False):
            name(self.laid[value][0], f"{letter}_in", () if letter == "q" else _KEYS_ALONG)
        of_ops = {tensor: delivered for tensor, delivered in _DELIVERED.items() if tensor in ops_by_name}
        for tensor, delivered in of_ops.items():
            name(tensor, delivered)
        for reader, delivered in (("down", "down_in"), ("attn_add", "attn_out"), ("mlp_add", "mlp_out")):
            for branch in self._branches(reader):
                name(branch, delivered)
        if "dispatch" in ops_by_name:
            name("down", "expert_out")
        for tensor in self.renames:
            name(tensor, usual_delivery(tensor))
        yield from delivers.values()

    def _attended(self) -> Sequence[Traced]:
        """Return what attention reads, if there is any: queries, keys and values."""
        return self.roles.attend.reads if self.roles and self.roles.attend else ()

    def _branches(self, reader: str) -> Sequence[str]:
        """Return the first operand of an operation that is no residual, if there is such an operation."""
        operands = [operand for op in self.ops if op.name == reader for operand in op.operands]
        return [operand for operand in operands if operand not in ("x", "arrive", "attn_add")][:1]


def _in_one_order(dims: Dims, more: Dims) -> bool:
    """Say whether one tensor has the dims of the other in the same order, as plain sums and products ask for."""
    shared = [dim for dim in dims if dim in more]
    return shared == [dim for dim in more if dim in dims] and len(shared) == min(len(dims), len(more))


def _with_groups(dims: Sequence[str]) -> list[str]:
    """Give queries both dims of their heads, of which one may have size 1."""
    heads = {"kv_heads", "q_group"} & {*dims} or ("head_dim" in dims)
    return [*(("kv_heads", "q_group") if heads else ()), *(dim for dim in dims if dim not in ("kv_heads", "q_group"))]
