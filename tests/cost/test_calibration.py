from dataclasses import replace

import pytest

from autoshard.cost.calibration import uncalibrated
from autoshard.errors import InputError


def test_the_nominal_constants_say_what_they_are_worth_and_where_each_is_from():
    nominal = uncalibrated()
    assert nominal.basis.startswith("uncalibrated")
    assert {"matrix_efficiency", "link_efficiency", "interval"} <= set(nominal.sources)


def test_impossible_constants_are_refused_all_at_once():
    with pytest.raises(InputError) as caught:
        replace(uncalibrated(), matrix_efficiency=1.1, link_efficiency=0.0, interval=1.0)
    assert [fault.where for fault in caught.value.faults] == ["matrix_efficiency", "link_efficiency", "interval"]


def test_a_number_without_a_source_is_refused():
    with pytest.raises(InputError, match=r"sources\.interval: say where this number is from"):
        replace(uncalibrated(), sources={**uncalibrated().sources, "interval": ""})
