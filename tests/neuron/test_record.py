"""Without NxD: plans still lower to the layers that were held against the real one, and the docs say what was."""

import json
from typing import Any

import pytest

from tests.neuron.features import CASES
from tests.neuron.record import BEGIN, PAGE, RECORD, layers_of, table, with_table


def recorded() -> Any:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def test_every_case_is_recorded_and_was_near() -> None:
    cases = recorded()["cases"]
    assert list(cases) == list(CASES)
    for name, found in cases.items():
        assert max(found["loss"], found["gradients"], found["norm"]) < 2e-6, name
        assert found["weights"] < (2e-6 if "SGD" in name else 0.02), name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if number % 6 else ()) for number, name in enumerate(CASES)]
)
def test_a_case_lowers_to_the_layers_that_were_verified(name: str) -> None:
    assert layers_of(CASES[name]) == recorded()["cases"][name]["layers"], "run: python -m tests.neuron.record VERSION"


def test_the_docs_show_the_record() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert BEGIN in page and with_table(page, table(recorded())) == page
