"""Without NxD: plans still lower to the layers that were held against the real one, and the docs say what was."""

import json
from typing import Any

import pytest

from tests.neuron.cases import CASES
from tests.neuron.record import BEGIN, PAGE, RECORD, layers_of, with_table
from tests.slower import rest_is_slow

RECORDED: Any = json.loads(RECORD.read_text(encoding="utf-8"))


def test_every_case_is_recorded_and_was_near_and_the_docs_show_it() -> None:
    assert list(RECORDED["cases"]) == list(CASES)
    for name, found in RECORDED["cases"].items():
        assert max(found["loss"], found["gradients"], found["norm"]) < 2e-6, name
        assert found["weights"] < (2e-6 if "SGD" in name else 0.02), name
    page = PAGE.read_text(encoding="utf-8")
    assert BEGIN in page and with_table(page, RECORDED) == page


@pytest.mark.parametrize("name", rest_is_slow(sorted(CASES, key=lambda name: "copies" not in name), 3, slow=100))
def test_a_case_lowers_to_the_layers_that_were_verified(name: str) -> None:
    assert layers_of(CASES[name]) == RECORDED["cases"][name]["layers"], "run: python -m tests.neuron.record VERSION"
