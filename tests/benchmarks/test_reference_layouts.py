"""The vendor's layouts beside ours: the table is what the command writes, and a layout that was overlooked shows."""

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


@pytest.fixture(scope="module")
def found() -> tuple[Comparison, ...]:
    return compared(load_aws_recipes())


def named(found: tuple[Comparison, ...], name: str) -> Comparison:
    return next(entry for entry in found if entry.recipe.name == f"{name}_config.yaml")


def slower(plan: Plan, factor: float, part: str) -> Plan:
    """The plan with a step that takes so many times as long, all of it in one part."""
    said = plan.prediction
    assert said
    parts = {**said.time_parts, part: said.time_parts[part] + (factor - 1) * said.step_time_s}
    time_s = sum(parts.values())
    return replace(plan, prediction=replace(said, step_time_s=time_s, low_s=0.0, high_s=2 * time_s, time_parts=parts))


@pytest.mark.slow
def test_the_page_is_what_the_command_writes(found: tuple[Comparison, ...]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page_text(text, found), f"{PAGE}: run {COMMAND}"


@pytest.mark.slow
def test_no_layout_that_can_be_chosen_is_better(found: tuple[Comparison, ...]) -> None:
    result = judge(found, 0.0)
    assert result.holds and result.value >= LEAST_GAIN
    assert {entry.recipe.work for entry in found} == {"pretraining"}


@pytest.mark.slow
def test_what_is_refused_is_shown_and_does_not_count(found: tuple[Comparison, ...]) -> None:
    refused = named(found, "megatron_llama_70b")
    assert refused.against == ("trn1-dp",)
    better = replace(refused, ours=slower(refused.theirs, 2.0, "compute"))
    fine = named(found, "hf_llama3_8B")
    assert judge([better, fine], 0.0).holds and better.gain < 0
    assert not judge([replace(better, against=()), fine], 0.0).holds


@pytest.mark.slow
def test_the_term_is_the_part_that_differs_most(found: tuple[Comparison, ...]) -> None:
    entry = named(found, "hf_llama3_8B")
    gained = replace(entry, theirs=slower(entry.ours, 2.0, "tp"))
    assert gained.gain == pytest.approx(0.5) and gained.term[0] == "tp" and gained.term[1] > 0
    lost = replace(entry, ours=slower(entry.theirs, 1.25, "compute"))
    assert lost.gain == pytest.approx(-0.25) and lost.term[0] == "compute" and lost.term[1] < 0
    assert "| -25.0% | compute, -" in page_text(EMPTY, [lost])
    same = replace(entry, ours=entry.theirs)
    assert "| +0.0% | - | - |" in page_text(EMPTY, [same])


@pytest.mark.slow
def test_the_json_names_both_layouts(found: tuple[Comparison, ...]) -> None:
    extras = judge(found, 0.0).extras
    assert extras["hf_llama3_70B.layout"] == "tp=32,pp=8,dp=2,recompute=selective[CoreAttention,LlamaMLP]"
    assert extras["megatron_llama_70b.against"] == "trn1-dp" and extras["hf_llama3_70B.against"] is None
    assert {"hf_llama3_70B.gain", "hf_llama3_70B.our_layout", "hf_llama3_70B.term"} <= extras.keys()


@pytest.mark.slow
def test_a_page_is_written_when_asked_for(monkeypatch: pytest.MonkeyPatch, found: tuple[Comparison, ...]) -> None:
    written: list[object] = []
    monkeypatch.setattr(reference_layouts, "compared", lambda recipes: found)
    monkeypatch.setattr(reference_layouts, "write_page", written.append)
    run()
    assert not written
    run(write=True)
    assert written == [found]


@pytest.mark.slow
def test_only_the_table_changes(tmp_path: Path, found: tuple[Comparison, ...]) -> None:
    page = tmp_path / "page.md"
    page.write_text(EMPTY, encoding="utf-8")
    write_page(found[:1], page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\nafter\n") and text.count("\n| hf_") == 1


def test_facts_are_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text('{"source": "nobody", "recipes": [{"name": "x", "colour": 3}]}', encoding="utf-8")
    with pytest.raises(InputError, match="colour"):
        load_aws_recipes(path)
