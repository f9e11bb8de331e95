"""The vendor's layouts beside ours: the table is what the command writes, and a layout that was overlooked shows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.errors import InputError
from autoshard.plan.plan import Plan
from benchmarks import reference_layouts
from benchmarks.aws_recipes import load_aws_recipes
from benchmarks.reference_layouts import LEAST_GAIN, PAGE, Comparison, compared, judge, page_text, run, write_page

EMPTY = "before\n<!-- reference_layouts -->\n<!-- /reference_layouts -->\nafter\n"
COMMAND = "python -m benchmarks reference_layouts --write"


def slower(plan: Plan, factor: float, part: str) -> Plan:
    """The plan with a step that takes so many times as long, all of it in one part."""
    said = plan.prediction
    assert said
    parts = {**said.time_parts, part: said.time_parts[part] + (factor - 1) * said.step_time_s}
    time_s = sum(parts.values())
    return replace(plan, prediction=replace(said, step_time_s=time_s, low_s=0.0, high_s=2 * time_s, time_parts=parts))


@pytest.mark.thorough
@pytest.mark.slow  # one test, because the searches of all recipes take a minute
def test_the_page_is_what_the_command_writes_and_no_layout_that_can_be_chosen_is_better(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = compared(load_aws_recipes())
    by_name = {entry.recipe.name.removesuffix("_config.yaml"): entry for entry in found}
    text = PAGE.read_text(encoding="utf-8")
    assert text == page_text(text, found), f"{PAGE}: run {COMMAND}"
    result = judge(found, 0.0)
    assert result.holds and result.value >= LEAST_GAIN
    assert result.extras["hf_llama3_70B.layout"] == "tp=32,pp=8,dp=2,recompute=selective[CoreAttention,LlamaMLP]"
    assert {entry.recipe.work for entry in found} == {"pretraining"}
    refused, fine = by_name["megatron_llama_70b"], by_name["hf_llama3_8B"]
    assert refused.against == ("trn1-dp",)
    better = replace(refused, ours=slower(refused.theirs, 2.0, "compute"))
    assert judge([better, fine], 0.0).holds and better.gain < 0, "what is refused is shown and does not count"
    assert not judge([replace(better, against=()), fine], 0.0).holds
    the_term_is_the_part_that_differs_most(fine)
    the_table_is_written_when_asked_for(found, monkeypatch, tmp_path / "page.md")


def the_term_is_the_part_that_differs_most(entry: Comparison) -> None:
    gained = replace(entry, theirs=slower(entry.ours, 2.0, "tp"))
    assert gained.gain == pytest.approx(0.5) and gained.term[0] == "tp" and gained.term[1] > 0
    lost = replace(entry, ours=slower(entry.theirs, 1.25, "compute"))
    assert lost.gain == pytest.approx(-0.25) and "| -25.0% | compute, -" in page_text(EMPTY, [lost])
    assert "| +0.0% | - | - |" in page_text(EMPTY, [replace(entry, ours=entry.theirs)])


def the_table_is_written_when_asked_for(
    found: Sequence[Comparison], monkeypatch: pytest.MonkeyPatch, page: Path
) -> None:
    page.write_text(EMPTY, encoding="utf-8")
    monkeypatch.setattr(reference_layouts, "compared", lambda recipes: found[:1])
    monkeypatch.setattr(reference_layouts, "write_page", lambda made: write_page(made, page))
    run()
    assert page.read_text(encoding="utf-8") == EMPTY
    run(write=True)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\nafter\n") and text.count("\n| hf_") == 1


def test_facts_are_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text('{"source": "nobody", "recipes": [{"name": "x", "colour": 3}]}', encoding="utf-8")
    with pytest.raises(InputError, match="colour"):
        load_aws_recipes(path)
