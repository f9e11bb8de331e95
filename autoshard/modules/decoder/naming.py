"""The names that the planner's tables and Rules know: of dims by what attends and what is multiplied, of operations."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.errors import require
from autoshard.graph.op import Dims
from autoshard.modules.decoder.pieces import Piece, shape
from autoshard.modules.decoder.segments import Segment
from autoshard.modules.dims import Dim, Position, factors, size_of
from autoshard.modules.program import Traced


@dataclass(frozen=True, eq=False, kw_only=True)
class Roles:
    """The pieces of a layer that have a part of their own: attention, and what leads to and from it."""

    attend: Piece | None  # some layers are an MLP alone
    chains: Mapping[str, tuple[Piece, ...]]  # of q, k and v, from the product on
    out: Piece | None  # the first product of what was attended
    of_keys: frozenset[Piece]  # the products that keys and values are made of: without a group of queries
    of_queries: frozenset[Piece]  # what is done to the queries alone, behind their product

    @classmethod
    def of(cls, pieces: Sequence[Piece], name: str, tokens: Dim) -> "Roles":
        """Find attention, and what leads to and from it; without any, no softmax may bring ``tokens`` together."""
        attends = [piece for piece in pieces if piece.kind == "attend"]
        forms = "softmax(q k) v in two products of two tensors each, or scaled_dot_product_attention"
        message = f"brings tokens together by a softmax that is no attention as it is recognised ({forms})"
        without = _keeps_tokens_apart(pieces, tokens) or not _weighs(pieces)
        require((bool(attends) or without, name, message))
        if not attends:
            return cls(attend=None, chains={}, out=None, of_keys=frozenset(), of_queries=frozenset())
        by_value = {piece.makes: piece for piece in pieces}
        chains = {letter: _chain(by_value, value) for letter, value in zip("qkv", attends[0].reads, strict=True)}
        query, *keys = attends[0].reads
        of_query, of_keys = _up_to_products(by_value, [query]), _up_to_products(by_value, keys)
        attended, out = {attends[0].makes}, None
        for piece in pieces:
            if attended & {*piece.reads} and out is None:
                if piece.kind == "product":
                    out = piece
                elif {*piece.dims} <= {*attends[0].dims}:
                    attended.add(piece.makes)  # a gate, or a norm, of what was attended
        return cls(
            attend=attends[0], chains=chains, out=out,
            of_keys=frozenset(piece for piece in of_keys if piece.kind == "product"),
            of_queries=frozenset(piece for piece in of_query - of_keys if piece.kind != "product"),
        )  # fmt: skip

    def heads(self, tokens: Sequence[Dim]) -> Mapping[str, Position]:
        """Return which dims are KV heads, the queries of each, and a head of keys and of values."""
        if self.attend is None:
            return {}
        query, key = self.attend.reads[:2]
        assert self.attend.attention, "attention is known"
        head, value_head = factors(self.attend.attention.head), factors(self.attend.attention.value_head)
        assert size_of(head) == size_of(value_head), "attention with other values is planned by its work alone"
        heads = [dim for dim in query.dims if dim not in (*head, *tokens)]
        return {
            "kv_heads": tuple(dim for dim in heads if dim in key.dims),
            "q_group": tuple(dim for dim in heads if dim not in key.dims),
            "head_dim": head,
            "values": value_head,
        }


def _up_to_products(by_value: Mapping[Traced, Piece], values: Sequence[Traced]) -> set[Piece]:
    """Return the pieces that make some values, up to the products that these begin with."""
    pieces, waiting = set[Piece](), [*values]
    while waiting:
        if piece := by_value.get(waiting.pop()):
            pieces.add(piece)
            waiting += () if piece.kind == "product" else piece.reads
    return pieces


def _weighs(pieces: Sequence[Piece]) -> bool:
    """Say whether some piece could be attention that is not recognised."""
    unknown = (piece for piece in pieces if not piece.attention)
    return any("softmax" in function or "attention" in function for piece in unknown for function in piece.functions)


def _keeps_tokens_apart(pieces: Sequence[Piece], tokens: Dim) -> bool:
    """Say whether each token's part of a result is made of that token's parts alone."""
    steps = (step for piece in pieces for step in piece.steps)
    reading = (step for step in steps if any(tokens in shape(read.positions) for read in step.reads))
    return all(tokens in step.makes.dims and tokens not in step.whole_leaves() for step in reading)


def _chain(by_value: Mapping[Traced, Piece], value: Traced) -> tuple[Piece, ...]:
    """Return the pieces that lead from a product to a value, in order; none where no product leads to it."""
    chain: list[Piece] = []
    while (piece := by_value.get(value)) and piece.kind in _CHAINED and len(piece.reads) == 1:
        chain.insert(0, piece)
        if piece.kind == "product":
            return tuple(chain)
        value = piece.reads[0]
    return ()


_CHAINED = {"product": "", "shift": "_shift", "norm": "_norm", "rotary": "_rotary", "opaque": "_own", "unary": "_act"}


def layer_names(pieces: Sequence[Piece], roles: Roles, segment: Segment) -> Mapping[Piece, str]:
    """Name the operations of a layer as a card would."""
    names: dict[Piece, str] = {roles.attend: "attend"} if roles.attend else {}
    for letter, chain in roles.chains.items():
        names |= {piece: f"{letter}{_CHAINED[piece.kind]}" for piece in chain if piece not in names}
    readers: dict[Traced, list[Piece]] = {}
    for piece in pieces:
        for value in piece.reads:
            readers.setdefault(value, []).append(piece)
    adds = [piece for piece in pieces if piece.kind == "add" and {*piece.dims} == {*segment.gives.dims}]
    before = pieces.index(roles.out) if roles.out else len(pieces) if roles.attend else -1
    after = [piece for piece in adds if pieces.index(piece) > before]
    if roles.out:
        names[roles.out] = "o"
        names |= {piece: "o_shift" for piece in readers.get(roles.out.makes, ()) if piece.kind == "shift"}
    if after and roles.attend:
        names[after[0]] = "attn_add"
    names |= {after[-1]: "mlp_add"} if len(after) > bool(roles.attend) else {}
    prefix = "shared_" if any(piece.kind == "experts" for piece in pieces) else ""
    for piece in pieces:
        if piece not in names:
            names[piece] = _role(piece, names, readers, segment, prefix)
    return _distinct(names)


def _role(
    piece: Piece, names: Mapping[Piece, str], readers: Mapping[Traced, Sequence[Piece]], segment: Segment, prefix: str
) -> str:
    """Name an operation by what reads it."""
    hidden, by = {*segment.gives.dims}, readers.get(piece.makes, ())
    if piece.kind == "norm" and {*piece.dims} == hidden:
        if any(names.get(reader) in ("q", "k", "v") for reader in by):
            return "attn_norm"
        if any(reader.kind in ("product", "experts") for reader in by):
            return "mlp_norm"
        added = next((names[reader] for reader in by if names.get(reader, "").endswith("_add")), "")
        return f"{added.removesuffix('add')}post_norm"
    if piece.kind == "product":
        if {*piece.dims} == hidden:
            return f"{prefix}down"
        shifted = [again for reader in by if reader.kind == "shift" for again in readers.get(reader.makes, ())]
        activated = [reader for reader in (*by, *shifted) if reader.kind in ("unary", "opaque")]
        gates = any(again.kind == "multiply" for reader in activated for again in readers.get(reader.makes, ()))
        return f"{prefix}{'gate' if gates else 'up'}"
    if piece.kind == "shift":
        of = next((name for maker, name in names.items() if maker.makes is piece.reads[0]), "own")
        return f"{of}_shift"
    usual = {"unary": f"{prefix}act", "multiply": f"{prefix}product"}
    return own_name(piece) if piece.kind == "opaque" else usual.get(piece.kind, piece.kind)


def own_name(piece: Piece) -> str:
    """Name an operation that no card has by its functions; no entry of a table of kernels matches it."""
    functions = list(dict.fromkeys(re.sub(r"\W", "", name) for name in piece.functions))
    return "_".join([*functions[:3], "own"])


def _distinct(names: Mapping[Piece, str]) -> Mapping[Piece, str]:
    """Number the names that several operations have, after the first."""
    distinct: dict[Piece, str] = {}
    counts = Counter[str]()
    for piece, name in names.items():
        counts[name] += 1
        distinct[piece] = name if counts[name] == 1 else f"{name}_{counts[name]}"
    return distinct


def in_order(dims: Sequence[str]) -> Dims:
    """Put dims into the order of cards: tokens, heads, the others."""
    first = ("batch", "seq", "kv_heads", "q_group", "head_dim")
    return tuple(sorted(dims, key=lambda dim: first.index(dim) if dim in first else len(first)))
