"""A form: one layer of NxD in the place of a run of the decoder's leaves, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoshard.errors import require
from autoshard.graph.op import Dims
from autoshard.layout.layout import Cuts

Layer = Literal[
    "GQAQKVColumnParallelLinear",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "ParallelEmbedding",
    "parallel_cross_entropy",
    "MoE",
    "leaf",  # the decoder's own module stays, with a rank's part of its parameters
]
Plain = int | bool | float | str | tuple[int, ...]
Argument = Plain | Mapping[str, Plain]  # of the layer, or of one that it is made of
TP = ("kv", "rep")  # the atoms of tp


@dataclass(frozen=True, slots=True, kw_only=True)
class FormPiece:
    """A rank's part of one of our tensors: a slice along the cut dims, with dims grouped into the axes of NxD's tensor.

    Which slice is a rank's follows from its place among the ranks of its tp group, in NxD's order. The dims of the axes
    may stand in another order than ``dims``, which is that of our tensor.
    """

    tensor: str
    dims: Dims
    axes: tuple[Dims, ...]
    cuts: Cuts = field(hash=False)  # by atoms of tp

    def __post_init__(self) -> None:
        """Refuse axes of other dims than the tensor has."""
        require((sorted(self.moved) == sorted(self.dims), "axes", f"must hold {', '.join(self.dims)}, each once"))

    @property
    def moved(self) -> Dims:
        """The dims in the order of the axes."""
        return tuple(dim for group in self.axes for dim in group)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormParameter:
    """A parameter of the layer: pieces behind each other along one axis, and what its gradient needs.

    ``split`` is the axis that tp cuts. ``summed`` says that ranks of tp have only parts of the gradient. ``copies`` is
    the number of ranks that hold the same values of a cut parameter; only one of them counts in the norm.
    """

    name: str
    pieces: tuple[FormPiece, ...]
    axis: int = 0
    split: int | None = None
    summed: bool = False
    copies: int = 1

    def __post_init__(self) -> None:
        """Refuse a parameter of nothing, and one that is both cut over tp and summed over it."""
        require(
            (bool(self.pieces), "pieces", "must hold at least one"),
            (self.split is None or not self.summed, "summed", f"{self.name} is cut over tp, so each rank has its own"),
            (self.split is not None or self.copies == 1, "copies", f"{self.name} is whole on every rank"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One layer, the leaves that it replaces, in order, and what it is made with."""

    layer: Layer
    leaves: tuple[str, ...]
    arguments: Mapping[str, Argument] = field(hash=False)
    parameters: tuple[FormParameter, ...]
