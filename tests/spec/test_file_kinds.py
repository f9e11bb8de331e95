"""A file of ours in the place of another kind is named, whichever two kinds these are."""

from itertools import permutations
from pathlib import Path

import pytest

from autoshard.errors import InputError
from autoshard.spec import file_kinds
from autoshard.spec.file_kinds import FileKind, file_kind_of, refuse_other_kinds

KINDS = [value for value in vars(file_kinds).values() if isinstance(value, FileKind)]


@pytest.mark.parametrize(("is_kind", "expected"), [*permutations(KINDS, 2)])
def test_a_file_of_another_kind_is_named_and_led_to_its_command(is_kind: FileKind, expected: FileKind) -> None:
    data = dict.fromkeys(is_kind.keys, 1)
    assert file_kind_of(data) is is_kind
    refuse_other_kinds(Path("x.json"), data, is_kind)
    with pytest.raises(InputError, match=f"x.json: is {is_kind.words}, not {expected.words}; "):
        refuse_other_kinds(Path("x.json"), data, expected)


def test_files_of_others_are_left_to_their_reader() -> None:
    assert file_kind_of({"hidden": 1}) is None and file_kind_of([1]) is None
