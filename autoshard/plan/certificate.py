"""What a search looked at before it answered, so that the answer can be judged."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """How many layouts a Rule refused, and what it says about one of them."""

    rule_id: str
    num_layouts: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A finite space, how much of it was legal and fitted; a layout counts for every Rule that refuses it.

    A candidate is a legal layout with one kind of recompute for all stages.
    """

    num_layouts: int
    refusals: tuple[Refusal, ...]
    num_legal_layouts: int
    num_candidates: int
    num_fitting: int

    @property
    def claim(self) -> str:
        """Say in words what was proven."""
        return (
            f"the fastest by this cost model of {self.num_candidates} legal candidates, all of them priced, of which "
            f"{self.num_fitting} fit in memory"
        )

    def plus(self, other: "Certificate") -> "Certificate":
        """Return the certificate of both spaces together."""
        return Certificate(
            num_layouts=self.num_layouts + other.num_layouts,
            refusals=(*self.refusals, *other.refusals),
            num_legal_layouts=self.num_legal_layouts + other.num_legal_layouts,
            num_candidates=self.num_candidates + other.num_candidates,
            num_fitting=self.num_fitting + other.num_fitting,
        )


NOTHING_LOOKED_AT = Certificate(num_layouts=0, refusals=(), num_legal_layouts=0, num_candidates=0, num_fitting=0)
