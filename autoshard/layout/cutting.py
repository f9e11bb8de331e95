"""How all operations of a model are cut: everything that a table of Strategies says follows from it."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.layout.layout import Cuts

Frozen = tuple[tuple[str, tuple[str, ...]], ...]  # Cuts in one order, so that equal ones are equal keys


@dataclass(frozen=True, slots=True)
class Cutting:
    """The cuts of every forward operation by block kind, and of the hidden state between blocks; made by ``of``.

    It names atoms, never their sizes: one cutting serves every mesh.

    >>> cutting = Cutting.of({"layer": {"up": {"ffn": ("kv", "rep"), "seq": ()}}}, {"seq": ("kv", "rep")})
    >>> cutting.block("layer"), cutting.only({"kv"}).block("layer")
    ({'up': {'ffn': ('kv', 'rep')}}, {'up': {'ffn': ('kv',)}})
    """

    blocks: tuple[tuple[str, tuple[tuple[str, Frozen], ...]], ...]
    between: Frozen

    @classmethod
    def of(cls, blocks: Mapping[str, Mapping[str, Cuts]], boundary: Cuts) -> "Cutting":
        """Make it of cuts in any order."""
        found = {kind: tuple((name, _frozen(cuts)) for name, cuts in ops.items()) for kind, ops in blocks.items()}
        return cls(tuple(found.items()), _frozen(boundary))

    @property
    def boundary(self) -> Cuts:
        """The cut of the hidden state between blocks."""
        return dict(self.between)

    def block(self, kind: str) -> Mapping[str, Cuts]:
        """Return the cuts of one block's operations; dims that are whole are left out."""
        return {name: dict(cuts) for name, cuts in dict(self.blocks)[kind]}

    def alone(self, kind: str) -> "Cutting":
        """Return the part about one block."""
        return Cutting(tuple(ops for ops in self.blocks if ops[0] == kind), self.between)

    def only(self, atoms: frozenset[str] | set[str]) -> "Cutting":
        """Return the part about some atoms."""
        blocks = {kind: {name: _only(cuts, atoms) for name, cuts in ops} for kind, ops in self.blocks}
        return Cutting.of(blocks, _only(self.between, atoms))


def _frozen(cuts: Cuts) -> Frozen:
    return tuple(sorted((dim, tuple(atoms)) for dim, atoms in cuts.items() if atoms))


def _only(cuts: Frozen, atoms: frozenset[str] | set[str]) -> Cuts:
    return {dim: tuple(atom for atom in cut if atom in atoms) for dim, cut in cuts}
