import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import jsonschema
import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError, require
from autoshard.spec.record import decode, encode, option
from tests.json_schema import json_schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Colour:
    """A colour with a text form."""

    name: str

    @classmethod
    def parse(cls, text: str) -> "Colour":
        require((text.isalpha(), "", f"{text!r} is not a colour"))
        return cls(name=text)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """Something round."""

    radius: float
    spokes: int | None = None

    def __post_init__(self) -> None:
        require((self.radius > 0, "radius", "must be positive"), (int(self.radius * 2) != 7, "radius", "odd"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cart:
    """Something with wheels."""

    name: str
    wheels: tuple[Wheel, ...]
    size: tuple[int, float]
    colour: Colour
    kind: Literal["hand", "horse", 3] = "hand"
    loads: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    shut: bool = False
    spare: Wheel | None = None
    gears: tuple[tuple[str, int], ...] | None = None


DATA = {
    "name": "red one", "wheels": [{"radius": 1.5, "spokes": 8}, {"radius": 2.0}], "size": [3, 4.5], "colour": "red",
    "kind": 3, "loads": {"b": 1.0, "a": 2.5}, "parts": {"x": {"y": "z"}}, "shut": True,
    "spare": {"radius": 1.0, "spokes": 6}, "gears": [["low", 1], ["high", 2]],
}  # fmt: skip


def faults(data):
    with pytest.raises(InputError) as caught:
        decode(Cart, data)
    return {fault.where: fault.message for fault in caught.value.faults}


def test_what_is_encoded_is_decoded_again():
    cart = decode(Cart, DATA)
    assert cart.wheels[1] == Wheel(radius=2.0)
    assert cart.size == (3, 4.5) and cart.gears == (("low", 1), ("high", 2))
    encoded = json.loads(json.dumps(encode(cart)))
    assert decode(Cart, encoded) == cart and encode(decode(Cart, encoded)) == encoded
    assert list(encoded) == list(DATA) and list(encoded["loads"]) == ["a", "b"], "fields in their order, keys in theirs"
    schema = json_schema(Cart)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(encoded)
    for key, wrong in {"size": [1], "kind": "cow", "gears": [["low"]], "more": 1, "shut": 0}.items():
        assert not validator.is_valid({**encoded, key: wrong}), key


@dataclass(frozen=True, slots=True, kw_only=True)
class Lamp:
    """Something that got an option after its first files were written."""

    watts: float
    dimmed: float | None = option(None)


def test_an_option_is_written_only_where_it_is_on_so_that_older_files_stay_as_they_are():
    plain, dim = Lamp(watts=5.0), Lamp(watts=5.0, dimmed=0.5)
    assert encode(plain) == {"watts": 5.0} and encode(dim) == {"watts": 5.0, "dimmed": 0.5}
    for lamp in (plain, dim):
        assert decode(Lamp, encode(lamp)) == lamp
        jsonschema.Draft202012Validator(json_schema(Lamp)).validate(encode(lamp))


def test_whole_numbers_in_fields_of_floats_are_written_as_floats():
    cart = decode(Cart, {**DATA, "loads": {"a": 2}, "wheels": [{"radius": 1}]})
    plain = Cart(name="c", wheels=(Wheel(radius=1),), size=(1, 2.0), colour=Colour(name="red"), loads={"a": 2})
    assert json.dumps(encode(cart)["loads"]) == json.dumps(encode(plain)["loads"]) == '{"a": 2.0}'
    assert json.dumps(encode(plain)["wheels"]) == '[{"radius": 1.0, "spokes": null}]'


def test_every_fault_is_reported_at_once_with_its_path():
    found = faults(
        {
            "nme": "x",
            "wheels": [{"radius": -1}, {"radius": "big", "spokes": 1.5}, 7],
            "size": [1],
            "colour": "r3d",
            "kind": "cow",
            "loads": {"a": True},
            "parts": {"x": 3},
            "shut": 1,
            "gears": [["low", 1, 2]],
        }
    )
    assert found == {
        "nme": "unknown key. Did you mean name?",
        "name": "missing",
        "wheels[0].radius": "must be positive",
        "wheels[1].radius": "expected a number, found 'big'",
        "wheels[1].spokes": "expected a whole number, found 1.5",
        "wheels[2]": "expected an object, found 7",
        "size": "expected a list of 2, found one of 1",
        "colour": "'r3d' is not a colour",
        "kind": "expected one of hand, horse, 3, found 'cow'",
        "loads.a": "expected a number, found true",
        "parts.x": "expected an object, found 3",
        "shut": "expected true or false, found 1",
        "gears[0]": "expected a list of 2, found one of 3",
    }


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("name", None, "found null"),
        ("name", {"a": 1}, "found an object"),
        ("name", [1], "found a list"),
        ("wheels", "none", "expected a list"),
        ("wheels", [{"radius": float("nan")}], "must be finite"),
        ("wheels", [{"radius": float("inf")}], "must be finite"),
        ("wheels", [{"radius": 10**400}], "too large"),
        ("wheels", [{"radius": 1e308}], "too large or too small to compute with"),
        ("wheels", [{"radius": 1, "spokes": 2**63}], "too large"),
        ("size", [10**4000, 1], "too large"),
        ("colour", 10**400, "found a huge number"),
        ("colour", 3, "expected text"),
        ("kind", True, "found true"),
        ("kind", "y" * 100, "..."),
        ("loads", {3: 1.0}, "must be text"),
        ("loads", [], "expected an object"),
    ],
)
def test_wrong_values_are_named(key, value, says):
    assert says in " ".join(faults({**DATA, key: value}).values())
    assert faults([1]) == {"": "expected an object, found a list"}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*DATA, "zzz"]), inner, max_size=4),
        max_leaves=10,
    )
)
def test_arbitrary_data_never_ends_in_anything_but_an_input_error(data):
    try:
        decode(Cart, data)
    except InputError as error:
        assert all(fault.message for fault in error.faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ride:
    """Checks that need several fields."""

    price: float | None = None
    day: str | None = None
    seats: int
    riders: int

    def __post_init__(self) -> None:
        require(
            (self.day is None or self.price is not None, "day", "is the day of a price"),
            (self.riders <= self.seats, "riders", f"are more than {self.seats} seats"),
            (self.riders >= 1, "riders", "must be at least 1"),
        )


def test_what_does_not_depend_on_a_faulty_field_is_named_with_it_and_nothing_else():
    for data, expected in (
        ({"seats": "two", "riders": 0}, {"seats", "riders"}),
        ({"seats": "two", "riders": 3}, {"seats"}),
        ({"seats": 2, "riders": 1, "price": "cheap", "day": "Monday"}, {"price"}),
        ({"seats": None, "riders": 1, "day": "Monday"}, {"seats", "day"}),
    ):
        with pytest.raises(InputError) as caught:
            decode(Ride, data)
        assert {fault.where for fault in caught.value.faults} == expected


def test_plain_data_inside_a_record_stays_what_it_is():
    data = {"links": [{"name": "a", "ports": [1, 2]}], "chip": None}
    assert encode(data) == data  # a list was written as its text, which nobody could read again
