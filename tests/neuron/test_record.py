"""Without NxD: plans lower to the layers that were held against the real one, and tables say what the code does."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from autoshard.engine.nxd import library
from autoshard.plan.rules import nxd_kernels
from autoshard.plan.rules.check import all_rules
from autoshard.plan.rules.rule import Rule
from tests.neuron.cases import CASES
from tests.neuron.conditions import table
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


ROOT = Path(__file__).parents[2]
CALLED = {"NxDPPModel"}  # by what NxD makes of the engine's model


def test_every_rule_of_a_kernel_stands_in_the_table_and_what_stands_there_exists() -> None:
    own = {rule.id for rule in vars(nxd_kernels).values() if isinstance(rule, Rule)}
    kept_by = {row.kept_by for row in table()}
    assert own <= kept_by
    functions = kept_by - {rule.id for rule in all_rules()}
    for name in functions:
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(f"autoshard.{module}"), function)), name


def test_every_function_of_nxd_that_launches_kernels_is_in_the_table() -> None:
    # Those of its folder of kernels, and what the forms make a layer of experts of.
    names = {name for name, module in library._MODULES.items() if module.startswith("kernels.")} | {"ExpertMLPs"}
    assert {row.called_by for row in table()} - CALLED == names <= set(library._MODULES)
