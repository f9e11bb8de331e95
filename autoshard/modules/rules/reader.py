"""What a rule asks of the reader of a program: the tensors that a node reads, and the steps that it adds."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from autoshard.modules.dims import Position
from autoshard.modules.nodes import Node
from autoshard.modules.program import Reading, Sort, View


class Reader(Protocol):
    """A program that is read node by node, as far as rules see it."""

    views: dict[Node, View | tuple[View, ...]]  # how each node lays out a value, or several
    numbers: Iterator[int]  # of values that have none yet

    def view_of(self, node: Node) -> View:
        """Return how a node lays out a value."""
        ...

    def readings(self, node: Node) -> list[Reading]:
        """Return the tensors that a node reads, in the order of its arguments."""
        ...

    def broadcast(self, node: Node) -> tuple[list[Reading], list[Position]]:
        """Return these tensors along the positions of the node's result, and the positions."""
        ...

    def shape_of(self, reading: Reading) -> tuple[int, ...]:
        """Return the size of each position of a tensor."""
        ...

    def is_product(self, reading: Reading, axis: int) -> bool:
        """Say whether an axis is the whole output of a product with a weight."""
        ...

    def rounded(self, node: Node, view: View, dtype: torch.dtype) -> None:
        """Make a value of this format the node's result, in the node's format."""
        ...

    def formatted(self, node: Node, reading: Reading, dtype: torch.dtype, name: str = "") -> Reading:
        """Return a tensor of this format in the node's format."""
        ...

    def local(
        self,
        node: Node,
        alignment: tuple[Sequence[Reading], Sequence[Position]],
        whole: Sequence[Position] = (),
        **more: Any,
    ) -> None:
        """Add a step that each rank takes on its parts."""
        ...

    def whole(self, node: Node, **more: Any) -> None:
        """Add a step that needs every input whole."""
        ...

    def step(  # noqa: PLR0913
        self,
        node: Node,
        alignment: tuple[Sequence[Reading], Sequence[Position]],
        *,
        whole: Sequence[Position] = (),
        summed: Sequence[Position] = (),
        sort: Sort = "local",
        function: Callable[..., Any] | None = None,
        arguments: tuple[Any, ...] | None = None,
        name: str = "",
        number: int | None = None,
        products: Sequence[Sequence[Position]] = (),
        format: torch.dtype | None = None,
    ) -> View:
        """Add a step with its inputs and the positions of its result; return the result."""
        ...
