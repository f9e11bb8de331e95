"""Which dims an atom may cut in an operation: what is legal, what Rules allow, what pinned layouts leave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.errors import InputError
from autoshard.graph.block import Block
from autoshard.graph.op import Dims, Op
from autoshard.layout.layout import Cuts
from autoshard.layout.legal import op_dims
from autoshard.plan.rules.strategy import AtomCut, StrategyRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What pins fix of one operation: the cuts of dims, and the dims along which an atom must leave a sum pending."""

    cuts: Cuts = field(default_factory=dict[str, tuple[str, ...]])
    sums: Mapping[str, Dims] = field(default_factory=dict[str, Dims])
    origin: str = ""

    def leaves(self, atom: str, places: Sequence[str]) -> tuple[str, ...]:
        """Return which of some places pins leave to an atom; empty text stands for none."""
        wanted = [dim for dim, cut in self.cuts.items() if atom in cut]
        open_places = self.sums.get(atom, places)
        return tuple(
            place
            for place in places
            if (place in wanted if wanted else place not in self.cuts and place in open_places)
        )


def op_places(
    block: Block, op: Op, atom: str, rules: Sequence[StrategyRule] = (), held: Held | None = None
) -> tuple[str, ...]:
    """Return the dims that an atom may cut in an operation; empty text stands for none.

    Pins go before what the axes are for, but not before what an engine can run.
    """
    bound = {*op.kind.whole_dims(), *dict(op.kind.tied_dims())}
    places = (*sorted(dim for dim in op_dims(block, op) if dim not in bound), "")
    allowed = tuple(dim for dim in places if not _against(block, op, atom, dim, rules))
    if held is None:
        return allowed
    found = held.leaves(atom, allowed)
    if found:
        return found
    binding = [rule for rule in rules if not rule.yields_to_pins]
    reasons = {dim: _against(block, op, atom, dim, binding) for dim in held.leaves(atom, places)}
    if all(reasons.values()):
        told = next(iter(reasons.values()), f"{op.name} has no place left for {atom}")
        raise InputError.of(held.origin, told)
    return tuple(dim for dim, reason in reasons.items() if not reason)


def _against(block: Block, op: Op, atom: str, dim: str, rules: Sequence[StrategyRule]) -> str:
    place = AtomCut.of(block, op, atom, dim or None)
    return next((str(found) for rule in rules if (found := rule.rejection(place))), "")
