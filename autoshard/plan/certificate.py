"""What a search looked at before it answered, so that the answer can be judged."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """How many layouts a Rule refused, and what it says about one of them."""

    rule_id: str
    num_layouts: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A finite space, how much of it was legal and fitted; a layout counts for every Rule that refuses it.

    A candidate is a legal layout with one kind of recompute for all stages. It is priced with the best of
    ``num_tables`` tables of Strategies; a plan that is shown, with the one that was solved for it.
    """

    num_layouts: int
    refusals: tuple[Refusal, ...]
    num_legal_layouts: int
    num_candidates: int
    num_fitting: int
    num_tables: int

    @property
    def claim(self) -> str:
        """Say in words what was proven."""
        return (
            f"the fastest by this cost model of {self.num_candidates} legal candidates, each priced with the best of "
            f"{self.num_tables} solved table{'' if self.num_tables == 1 else 's'}, those shown with their own; "
            f"{self.num_fitting} fit in memory"
        )

    def plus(self, other: "Certificate") -> "Certificate":
        """Return the certificate of both spaces together."""
        return Certificate(
            num_layouts=self.num_layouts + other.num_layouts,
            refusals=_merged(self.refusals, other.refusals),
            num_legal_layouts=self.num_legal_layouts + other.num_legal_layouts,
            num_candidates=self.num_candidates + other.num_candidates,
            num_fitting=self.num_fitting + other.num_fitting,
            num_tables=self.num_tables + other.num_tables,
        )


def _merged(first: tuple[Refusal, ...], second: tuple[Refusal, ...]) -> tuple[Refusal, ...]:
    """Add up what the same Rule refused in both spaces; its example stays that of the first."""
    both: dict[str, Refusal] = {}
    for refusal in (*first, *second):
        known = both.get(refusal.rule_id)
        count = refusal.num_layouts + (known.num_layouts if known else 0)
        both[refusal.rule_id] = replace(known or refusal, num_layouts=count)
    return tuple(both.values())


NOTHING_LOOKED_AT = Certificate(
    num_layouts=0, refusals=(), num_legal_layouts=0, num_candidates=0, num_fitting=0, num_tables=0
)
