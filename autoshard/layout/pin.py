"""The layout of a tensor as somebody wants it, with where that was said."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.errors import Fault, InputError
from autoshard.layout.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """The layout of a tensor as somebody wants it; ``origin`` says where that was said.

    Of what a tensor awaits a pin speaks only if it names it: ``+tp`` asks that its maker sums over a dim cut over tp.
    """

    tensor: str
    layout: Layout
    origin: str = "Python"

    def __str__(self) -> str:
        """Print the text form after its origin."""
        return f"{self.origin} {self.tensor}={self.layout}"


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
    """Read pins from a mapping of names to layouts: ``pins:`` of a recipe, or a dict in Python; all faults at once."""
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
