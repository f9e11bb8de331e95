"""Stacks of others: the table has a line for each, and one is killed and goes on in another pipeline."""

import pytest

from benchmarks.foreign_modules.registry import PACKAGES
from benchmarks.foreign_stacks import catalogue, table
from benchmarks.foreign_stacks.catalogue import STACKS
from benchmarks.foreign_stacks.curves import BAR, CLUSTERS, EQUAL, FAILED, REFUSED, WRONG, Outcome, tried
from benchmarks.pages import table_in

COMMAND = f"python -m benchmarks {table.NAME} --write"
LAYOUTS = dict.fromkeys(CLUSTERS, "tp=1,pp=1,dp=64")


def test_the_page_has_a_line_for_each_stack_and_each_takes_the_steps_of_the_plain_module():
    written = table.rows(table_in(table.PAGE.read_text(encoding="utf-8"), table.NAME))
    assert [*written] == [(stack.name, stack.package) for stack in STACKS], f"run {COMMAND}"
    equal = [cells for cells in written.values() if cells[2] == EQUAL]
    assert len(equal) >= table.LEAST_EQUAL and {cells[2] for cells in written.values()} <= {EQUAL, REFUSED}
    assert all(max(map(float, cells[-2:])) <= BAR and int(cells[-3]) > 0 for cells in equal)


def test_each_stack_is_of_a_package_with_a_licence_and_has_its_function():
    assert {stack.package for stack in STACKS} <= {*PACKAGES}
    assert all(callable(getattr(catalogue, stack.function)) for stack in STACKS)


def test_a_stack_that_is_wrong_or_fails_does_not_hold():
    many = [(STACKS[0], Outcome(kind=EQUAL, layouts=LAYOUTS))] * table.LEAST_EQUAL
    assert table.judge([*many, (STACKS[1], Outcome(kind=REFUSED, words="no"))], []).holds
    assert not table.judge(many[1:], []).holds
    for kind in (WRONG, FAILED):
        assert not table.judge([*many, (STACKS[1], Outcome(kind=kind))], []).holds


def test_a_page_gets_a_line_for_what_is_refused_too():
    page = f"<!-- {table.NAME} -->\n<!-- /{table.NAME} -->\n"
    equal = Outcome(kind=EQUAL, layouts=LAYOUTS, killed_at=6, losses=2e-7, back=3e-6)
    text = table.page_text(page, [(STACKS[0], equal), (STACKS[1], Outcome(kind=REFUSED, words="has two lists"))])
    assert "| ViT | timm | equal | `tp=1,pp=1,dp=64` | `tp=1,pp=1,dp=64` | 6 | 2e-07 | 3e-06 |" in text
    assert "| BEiT | timm | refused | - | - | - | - | - |" in text
    assert "- **timm: BEiT**: `has two lists`" in text


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_vision_transformer_is_killed_in_one_pipeline_and_goes_on_in_another():
    (stack,) = (stack for stack in STACKS if stack.function == "hf_vit")
    outcome = tried(stack)
    assert outcome.kind == EQUAL and outcome.killed_at > 0 and 0 < outcome.losses < BAR, outcome


@pytest.mark.slow
def test_what_is_no_stack_is_refused_with_the_words_of_the_command(monkeypatch: pytest.MonkeyPatch):
    (stack,) = (stack for stack in STACKS if stack.function == "hf_vit")
    monkeypatch.setitem(CLUSTERS, "64 H100", "--cluster h200-x --nodes 8")  # pyright: ignore[reportArgumentType]
    outcome = tried(stack)
    assert outcome.kind == REFUSED and "h200-x" in outcome.words, outcome
