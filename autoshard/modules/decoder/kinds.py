"""The kinds of layers that a decoder has: which of its layers are alike, and what the model says of all."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.errors import require
from autoshard.graph.kinds.attention import Attend
from autoshard.modules.capture import Captured
from autoshard.modules.decoder.layers import KindNames, WrittenPart, written_layer
from autoshard.modules.decoder.masks import ScoreTerms, Sight
from autoshard.modules.decoder.naming import Roles
from autoshard.modules.decoder.pieces import Piece
from autoshard.modules.decoder.segments import Segment, Stack
from autoshard.modules.dims import Dim
from autoshard.modules.program import Traced
from autoshard.spec.model import LAYER, LayerKind
from autoshard.spec.repeats import compress

_BIASED = (
    "layer: what makes the numbers that are added to the scores of attention is not in the plan; attention is planned "
    "by a kernel that reads these, and skips nothing"
)
_DENSE = "dense"  # layers beside those with experts
_USUAL: Mapping[str, Any] = {
    "norm": "layer", "norm_eps": 1e-6, "activation": "silu", "gated_mlp": False, "rotary_fraction": 1.0,
}  # fmt: skip
# What blocks of one model share, because its dims have one size: of attention, and of experts.
_SHARED: Mapping[str, str] = {
    "num_heads": "query heads", "num_kv_heads": "heads of keys and values", "head_dim": "numbers in a head",
    "num_experts": "experts", "experts_per_token": "experts for a token",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WrittenKinds:
    """The lines of each kind of layers, by name, in the order in which they first occur."""

    order: tuple[str, ...]  # the kind of each layer
    parts: Mapping[str, WrittenPart]
    numbers: Mapping[str, tuple[int, ...]]  # the layers of each kind
    windows: Sequence[int | None]  # of all layers with attention
    sees_all: bool  # whether tokens see what comes after them
    notes: tuple[str, ...]

    @property
    def traits(self) -> Mapping[str, Any]:
        """Fields of ModelSpec."""
        traits = _common_traits(self.parts.values(), self.parts[LAYER])
        windows = {*self.windows}
        traits |= {"window": self.windows[0] if len(windows) == 1 else None}
        if "num_heads" not in traits:
            traits |= {"num_heads": 1, "num_kv_heads": 1, "head_dim": 2}
        if len(self.parts) > 1:
            kinds = (self._kind(name, part, traits) for name, part in self.parts.items() if name != LAYER)
            traits |= {"kinds": tuple(kinds), "order": compress(self.order)}
        return traits

    def _kind(self, name: str, part: WrittenPart, traits: Mapping[str, Any]) -> LayerKind:
        ffn = part.traits.get("ffn", traits["ffn"])
        beside_experts = "num_experts" in traits and "num_experts" not in part.traits
        differs = beside_experts or ffn != traits["ffn"]
        return LayerKind(name=name, dense_ffn=ffn if differs else None, lines=part.lines)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of dims that no card has."""
        return {dim: size for part in self.parts.values() for dim, size in part.sizes.items()}


def written_kinds(
    captured: Captured, stack: Stack, layers: Sequence[Sequence[Piece]], dims: Mapping[Dim, str]
) -> WrittenKinds:
    """Write down each kind of layers, which differ in their lines; refuse layers that differ in what all must share."""
    each = list(zip(layers, stack.layers, strict=True))
    sights = _sights(captured, stack, each)
    biased = {number for number, sight in sights.items() if sight.is_biased}
    unfused = {number for number, pieces in enumerate(layers) if any(map(_is_unfused, pieces))}
    plain = [
        written_layer(*layer, dims, Attend(biased=number in biased, unfused=number in unfused), KindNames())
        for number, layer in enumerate(each)
    ]
    windows, sees_all = {number: sight.window for number, sight in sights.items()}, _all_are_seen(stack, sights)
    notes = [_BIASED] if biased else []
    notes += [] if sights else ["no layer has attention: what brings tokens together is planned by its work alone"]
    groups: dict[frozenset[str], list[int]] = {}
    for number, part in enumerate(plain):
        groups.setdefault(_said(part), []).append(number)
    numbers = _named([tuple(group) for group in groups.values()], plain)
    _refuse_unlike(plain, numbers[LAYER][0], stack.layers)
    parts: dict[str, WrittenPart] = {}
    traits = _common_traits([plain[its[0]] for its in numbers.values()], plain[numbers[LAYER][0]])
    for name in sorted(numbers, key=lambda kind: kind != LAYER):
        seen = Counter(windows[number] for number in numbers[name] if number in windows)
        names = KindNames(
            name=name, ffn=traits["ffn"],
            other_sizes={dim: size for part in parts.values() for dim, size in part.sizes.items()},
        )  # fmt: skip
        first = numbers[name][0]
        attend = replace(_attend(seen, sees_all=sees_all), biased=first in biased, unfused=first in unfused)
        parts[name] = written_layer(*each[first], dims, attend, names)
        notes += _mean_windows(seen, name, "tokens to either side" if sees_all else "tokens")
    return WrittenKinds(
        order=tuple(name for number in range(len(plain)) for name, its in numbers.items() if number in its),
        parts={name: parts[name] for name in numbers}, numbers=numbers, windows=[*windows.values()], sees_all=sees_all,
        notes=tuple(notes),
    )  # fmt: skip


def _is_unfused(piece: Piece) -> bool:
    return piece.kind == "attend" and bool(piece.attention and piece.attention.is_unfused)


def _said(part: WrittenPart) -> frozenset[str]:
    """Return all that lines and sizes say of a layer; names of dims that no card has may come of its number."""
    places = {dim: f"dim_{place}" for place, dim in enumerate(part.sizes)}
    lines = (re.sub(r"\w+", lambda word: places.get(word[0], word[0]), line) for line in part.lines)
    sizes = {**part.traits, **{places[dim]: size for dim, size in part.sizes.items()}}
    return frozenset((*lines, *(f"{name} = {value}" for name, value in sizes.items())))


def _named(groups: Sequence[tuple[int, ...]], plain: Sequence[WrittenPart]) -> Mapping[str, tuple[int, ...]]:
    """Name groups of equal layers; the one of which a model speaks has all that others lack, or most layers."""

    def rank(group: tuple[int, ...]) -> tuple[bool, bool, bool, int]:
        traits = plain[group[0]].traits
        return "num_experts" in traits, "num_heads" in traits, "ffn" in traits, len(group)

    first, named, counts = max(groups, key=rank), dict[str, tuple[int, ...]](), Counter([LAYER])
    has_experts = "num_experts" in plain[first[0]].traits
    for group in groups:
        base = _DENSE if has_experts and "num_experts" not in plain[group[0]].traits else LAYER
        counts[base] += group is not first
        other = base if counts[base] == 1 else f"{base}_{counts[base]}"
        named[LAYER if group is first else other] = group
    return named


def _common_traits(parts: Iterable[WrittenPart], layer: WrittenPart) -> dict[str, Any]:
    """Return what a model says of its layers: what the kind says that it describes, and of what this lacks, others."""
    traits: dict[str, Any] = dict(_USUAL)
    for part in (*reversed([*parts]), layer):
        traits |= part.traits
    return traits


def _refuse_unlike(plain: Sequence[WrittenPart], first: int, segments: Sequence[Segment]) -> None:
    """Refuse a layer with other heads or other experts than the one of which the model speaks."""
    due, name = plain[first].traits, segments[first].name
    for part, segment in zip(plain, segments, strict=True):
        its, both = part.traits, "num_experts" in due and "num_experts" in part.traits
        for field, what in (*_SHARED.items(), *([("ffn", "numbers inside of an expert")] if both else [])):
            message = f"has {its.get(field)} {what}, and {name} has {due.get(field)}. All layers must have as many"
            require((field not in its or its[field] == due.get(field), segment.name, message))


def _sights(captured: Captured, stack: Stack, layers: Sequence[tuple[Sequence[Piece], Segment]]) -> Mapping[int, Sight]:
    """Return what each layer with attention sees, by its number."""
    by_terms, sights = dict[tuple[Traced, ...], Sight](), dict[int, Sight]()
    batch, (tokens,) = stack.carried[:2]
    for number, (pieces, segment) in enumerate(layers):
        attend = Roles.of(pieces, segment.name, tokens).attend
        if attend is None:
            continue
        assert attend.attention, "attention is known"
        terms = ScoreTerms(captured=captured, attention=attend.attention, batch=batch, name=segment.name)
        if not terms.values:
            sights[number] = Sight(window=None, is_of_all=not attend.attention.is_causal)
            continue
        if terms.values not in by_terms:  # layers share them
            by_terms[terms.values] = terms.sight()
        sights[number] = by_terms[terms.values]
    return sights


def _all_are_seen(stack: Stack, sights: Mapping[int, Sight]) -> bool:
    """Say whether tokens see what comes after them: in all layers, or in none. Without attention that is not known."""
    first, sees_all = next(((number, sight.is_of_all) for number, sight in sights.items()), (0, False))
    name = stack.layers[first].name
    does, does_not = ("does", "does not")[:: -1 if sees_all else 1]
    message = f"{does} see what comes after a token, and {name} {does_not}. All layers must, or none"
    require(*((sight.is_of_all == sees_all, stack.layers[number].name, message) for number, sight in sights.items()))
    return sees_all


def _attend(seen: Mapping[int | None, int], *, sees_all: bool) -> Attend:
    """Return attention through these windows, each with the number of its layers."""
    if len(seen) > 1:
        return Attend(windows=tuple(seen.items()), sees_all=sees_all)
    return Attend(window=next(iter(seen), None), sees_all=sees_all)


def _mean_windows(seen: Mapping[int | None, int], name: str, what: str) -> Iterator[str]:
    """Say that layers of one kind have several windows."""
    if len(seen) > 1:
        all_of_them = f"{sum(seen.values())} layers{'' if name == LAYER else f' of kind {name}'}"
        parts = (f"{count} of {all_of_them} see only {window} {what}" for window, count in seen.items() if window)
        yield f"{' and '.join(parts)}; each layer is planned with the mean time of all"
