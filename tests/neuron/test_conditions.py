"""The table of kernels says what the code does: every Rule of kernels, every function, every test."""

import importlib
from pathlib import Path

from autoshard.engine.nxd import library
from autoshard.plan.rules import nxd_kernels
from autoshard.plan.rules.check import all_rules
from autoshard.plan.rules.rule import Rule
from tests.neuron.conditions import table

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
