"""Pins: the layouts of some tensors as a user wants them, and what they leave to an operation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.errors import Fault, InputError
from autoshard.graph.op import Dims
from autoshard.layout.layout import Cuts, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """The layout that a tensor must have; ``origin`` is the option or file that says so.

    A pending sum is pinned only where the layout names it: ``+tp`` asks that the tensor's maker sums over a dim cut
    over tp.
    """

    tensor: str
    layout: Layout
    origin: str = "Python"

    def __str__(self) -> str:
        """Print the text form after its origin."""
        return f"{self.origin} {self.tensor}={self.layout}"

    def fault(self, message: str) -> Fault:
        """Return a fault of this pin."""
        return Fault(where=f"{self.origin} {self.tensor}", message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPins:
    """What pins fix of one operation: the cuts of dims, and the dims along which an atom must leave a sum pending."""

    cuts: Cuts = field(default_factory=dict[str, tuple[str, ...]])
    sums: Mapping[str, Dims] = field(default_factory=dict[str, Dims])
    origin: str = ""

    def leaves(self, atom: str, dims: Sequence[str]) -> tuple[str, ...]:
        """Return which of some dims an atom may still cut; an empty name stands for none of them."""
        wanted = [dim for dim, cut in self.cuts.items() if atom in cut]
        if wanted:
            return tuple(dim for dim in dims if dim in wanted)
        return tuple(dim for dim in dims if dim not in self.cuts and dim in self.sums.get(atom, dims))


def parse_pin(text: str, origin: str) -> Pin:
    """Read ``NAME=[batch/dp, hidden/tp]``.

    >>> print(parse_pin("attn_in=[batch/dp, seq, hidden]", "--pin"))
    --pin attn_in=[batch/dp, seq, hidden]
    """
    name, equals, layout = text.partition("=")
    if not equals or not name.strip():
        raise InputError.of(origin, f"{text!r} is not a pin. Write it like 'NAME=[batch/dp, hidden/tp]'")
    try:
        return Pin(tensor=name.strip(), layout=Layout.parse(layout), origin=origin)
    except InputError as error:
        raise InputError(
            Fault(where=f"{origin} {name.strip()}", message=each.message) for each in error.faults
        ) from error


def pins_of(layouts: Mapping[str, str | Layout], origin: str) -> tuple[Pin, ...]:
    """Read pins from a mapping of names to layouts (``pins:`` of a recipe, a dict in Python); all faults at once."""
    pins: list[Pin] = []
    faults: list[Fault] = []
    for name, layout in layouts.items():
        try:
            pins.append(parse_pin(f"{name}={layout}", origin))
        except InputError as error:
            faults.extend(error.faults)
    if faults:
        raise InputError(faults)
    return tuple(pins)
