"""What a start takes over from the start before, and what it refuses to change silently."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as some

from autoshard.cli import main
from autoshard.command_line.options import Stated
from autoshard.errors import InputError
from autoshard.plan.codec import dump
from autoshard.runtime.convert.converting import form_of
from autoshard.runtime.folder import count_attempt
from autoshard.runtime.restart import (
    Progress,
    StartBefore,
    refuse_strange_place,
    resume_point,
    start_before,
    start_options,
    start_point,
    training_text,
    workload_notes,
)
from autoshard.spec.training import AdamWConstants, Checkpointing, DataSpec, RateSchedule, Training
from autoshard.spec.workload import Precision
from tests.runtime.cases import tiny_plan, write_tiny
from tests.runtime.training_cases import plan_of, trained

COSINE = RateSchedule(shape="cosine", final=0.1)


def start(before: Training, done: int, **stated: object) -> tuple[Training, str]:
    """The options of a start on whose command line these stand, after so many steps; and its notes."""
    values = {name.replace("__", "."): value for name, value in stated.items()}
    options = Stated(kind=Training, values=values)
    progress = Progress(step=done, seed=before.seed) if done else None
    training, notes = start_options(options.over(before), set(values), before, progress)
    return training, "\n".join(notes)


def test_what_is_not_stated_stays_and_what_is_stated_is_named() -> None:
    data = DataSpec(sets={"/sets/a": 2.0})
    before = Training(steps=10, learning_rate=0.01, data=data, adamw=AdamWConstants(beta1=0.8))
    training, notes = start(before, 4, steps=12, data__sets={"/sets/b": 1.0})
    assert training == replace(before, steps=12, data=DataSpec(sets={"/sets/b": 1.0}))
    assert notes.splitlines() == [
        "changed since the last start: steps was 10, now 12",
        "changed since the last start: data.sets./sets/a was 2.0, now None",
        "changed since the last start: data.sets./sets/b was None, now 1.0",
        "as at the last start: learning_rate 0.01, adamw.beta1 0.8",
    ]
    assert start(before, 4) == (
        before,
        "as at the last start: steps 10, learning_rate 0.01, data.sets./sets/a 2.0, adamw.beta1 0.8",
    )


def test_a_run_that_goes_on_with_another_workload_says_so() -> None:
    before, progress = plan_of("tp=1,pp=1,dp=1"), Progress(step=3, seed=0)
    longer = replace(before.workload, seq_len=16, optimizer="sgd", precision=Precision.named("fp32"))
    after = replace(before, workload=replace(longer, expert_imbalance=0.1))
    length, *others = workload_notes(before, after, progress)
    assert length.startswith("changed since the last start: seq_len was 8, now 16. The data is cut anew")
    assert others == [
        "changed since the last start: precision was bf16, now fp32",
        "changed since the last start: optimizer was adamw, now sgd",
    ]
    assert workload_notes(before, after, None) == ["the start before has left no checkpoint: this one begins at step 1"]
    assert not workload_notes(None, after, progress) and not workload_notes(None, after, None)
    assert not workload_notes(before, plan_of("tp=1,pp=1,dp=2"), progress)


def test_paths_mean_the_same_wherever_the_next_start_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training = Training(data=DataSpec(sets={"a": 1.0}), checkpoint=Checkpointing(to="kept"), init_weights="s3://b/c")
    (tmp_path / "training.json").write_text(training_text(training))
    before = start_before(tmp_path, None).training
    assert before == training.absolute(tmp_path)
    assert before and before.checkpoint.to == str(tmp_path / "kept") and before.init_weights == "s3://b/c"
    assert start(before, 4, data__sets={"a": 1.0})[0] == before, "the same set, named from its folder"


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"seed": 9}, "--seed: the run has drawn its samples by seed 3 up to step 4"),
        ({"init_weights": "/w"}, "--init-weights: the run goes on from its checkpoint of step 4"),
    ],
)
def test_options_that_would_have_no_effect_are_refused_once_there_is_a_checkpoint(
    stated: Mapping[str, object], message: str
) -> None:
    before = Training(seed=3)
    with pytest.raises(InputError, match=message):
        start(before, 4, **stated)
    assert "changed since" in start(before, 0, **stated)[1]


def test_a_new_folder_takes_the_seed_of_the_run_that_it_goes_on_with() -> None:
    assert start_options(Training(), (), None, Progress(step=3, seed=7))[0].seed == 7
    with pytest.raises(InputError, match="--seed"):
        start_options(Training(seed=1), {"seed"}, None, Progress(step=3, seed=7))


def test_a_longer_run_keeps_its_curve_or_says_where_the_rate_jumps() -> None:
    before = Training(steps=8, learning_rate=1.0, schedule=COSINE)
    training, notes = start(before, 8, steps=16)
    assert [round(training.rate(step), 3) for step in (7, 8, 9, 16)] == [0.134, 0.1, 0.1, 0.1]
    assert "the learning rate keeps its curve over 8 steps: step 9 has 0.1. --schedule.extend rescale lays" in notes
    again, notes = start(training, 12)
    assert again == training and "curve over" not in notes
    longer, notes = start(training, 12, steps=32)
    assert longer.schedule.over_steps == 8
    whole, notes = start(training, 12, schedule__extend="rescale")
    assert whole.schedule.over_steps is None
    assert "follows its curve over 16 steps: it is 0.1 in step 12 and 0.176 in step 13" in notes
    with pytest.raises(InputError, match=r"--steps: .* is 0 after them, .*--schedule.extend rescale lays"):
        start(replace(before, schedule=RateSchedule(shape="cosine")), 8, steps=16)


def test_a_recipe_that_states_its_curve_at_every_start_keeps_it() -> None:
    before = Training(steps=8, learning_rate=1.0, schedule=COSINE)
    recipe = {"learning_rate": 1.0, **{f"schedule__{name}": getattr(COSINE, name) for name in ("shape", "final")}}
    training, notes = start(before, 8, steps=16, **recipe)
    assert training.schedule.over_steps == 8 and "keeps its curve over 8 steps" in notes
    assert start(training, 12, steps=32, **recipe)[0].schedule.over_steps == 8
    changed, notes = start(before, 8, steps=16, **{**recipe, "schedule__final": 0.5})
    assert changed.schedule.over_steps is None and "schedule.final was 0.1, now 0.5" in notes


def test_a_curve_that_was_not_used_yet_is_laid_over_the_new_steps() -> None:
    wsd = Training(steps=10, schedule=RateSchedule(shape="wsd", warm_up_steps=2))
    training, notes = start(wsd, 6, steps=20)
    assert training.schedule == wsd.schedule and "curve" not in notes
    assert start(replace(wsd, schedule=COSINE), 0, steps=20)[0].schedule == COSINE


@given(
    done=some.integers(1, 30), old=some.integers(1, 30), new=some.integers(1, 40), warm=some.integers(0, 8),
    shape=some.sampled_from(["constant", "linear", "cosine", "wsd"]), extend=some.sampled_from(["keep", "rescale"]),
)  # fmt: skip
def test_rates_that_were_used_never_change_silently(
    done: int, old: int, new: int, warm: int, shape: str, extend: str
) -> None:
    """Either every rate so far stays what it was, or a note says what the next one is."""
    done = min(done, old)
    schedule = RateSchedule(shape=shape, warm_up_steps=warm, final=0.0 if shape == "constant" else 0.1)  # type: ignore[arg-type]
    before = Training(steps=old, schedule=schedule)
    training, notes = start(before, done, steps=new, **({"schedule__extend": extend} if extend == "rescale" else {}))
    same = all(training.rate(step) == before.rate(step) for step in range(1, done + 1))
    assert same or "the learning rate follows its curve over" in notes
    if extend == "keep":
        assert same


@pytest.mark.ranks
def test_checkpoints_of_another_run_are_continued_only_when_asked(tmp_path: Path) -> None:
    shared, plan = tmp_path / "shared", plan_of("tp=1,pp=1,dp=1")
    trained(plan, tmp_path / "first", 2, to=str(shared))
    training = Training(checkpoint=Checkpointing(to=str(shared)))
    for resume in ("auto", "never"):
        with pytest.raises(InputError, match=r"holds the checkpoints of a run \(newest: step 2\).*--resume newest"):
            refuse_strange_place(tmp_path / "second", training, None, resume)
    refuse_strange_place(tmp_path / "second", training, None, "newest")
    refuse_strange_place(tmp_path / "first", training, training, "auto")
    for to in (str(tmp_path / "empty"), "none"):
        moved = replace(training, checkpoint=Checkpointing(to=to))
        with pytest.raises(InputError, match=r"lie in .*shared \(newest: step 2\), so that it would begin again"):
            refuse_strange_place(tmp_path / "first", moved, training, "auto")


def test_a_copy_of_a_run_does_not_save_into_the_checkpoints_of_the_original(tmp_path: Path) -> None:
    first, second, place = tmp_path / "first", tmp_path / "second", tmp_path / "place"
    training = Training(checkpoint=Checkpointing(to=str(place)))
    first.mkdir()
    (first / "training.json").write_text(training_text(training))
    count_attempt(first, 0, 5)
    shutil.copytree(first, second)
    with pytest.raises(InputError, match=r"second is a copy of .*first, and both would save to .*place .*--resume new"):
        refuse_strange_place(second, training, training, "auto")
    refuse_strange_place(second, training, training, "newest")
    refuse_strange_place(first, training, training, "auto")
    (tmp_path / "linked").symlink_to(first)
    refuse_strange_place(tmp_path / "linked", training, training, "auto")
    refuse_strange_place(second, Training(), Training(), "auto")  # each has its checkpoints inside
    shutil.rmtree(first)
    refuse_strange_place(second, training, training, "auto")  # the run was moved


@pytest.mark.parametrize("act", [shutil.copytree, shutil.move])
def test_checkpoints_that_lie_in_the_folder_of_a_run_are_found_where_it_lies_now(act: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    training = Training(checkpoint=Checkpointing(to=str(first / "kept" / "here")))
    first.mkdir()
    (first / "training.json").write_text(training_text(training))
    count_attempt(first, 0, 5)
    assert start_before(first, None).training == training
    act(str(first), str(second))
    found = start_before(second, None).training
    assert found and found.checkpoint.to == str(second / "kept" / "here")
    refuse_strange_place(second, found, found, "auto")
    with pytest.raises(InputError, match=r"second: is a run whose checkpoints lie in .*second/kept/here. Name that"):
        form_of(second)


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "content"), [("plan.json", '{"schema": 5, "mod'), ("training.json", "")])
def test_a_file_that_a_kill_has_cut_off_is_taken_from_the_newest_checkpoint(
    name: str, content: str, tmp_path: Path
) -> None:
    plan = plan_of("tp=1,pp=1,dp=1")
    trained(plan, tmp_path, 2, learning_rate=0.5)
    (tmp_path / name).write_text(content)
    before = start_before(tmp_path, None)
    assert before.notes[0].endswith("was cut off by a kill; it is that of the checkpoint of step 2")
    assert (before.plan == plan) if name == "plan.json" else (before.training and before.training.learning_rate == 0.5)
    (tmp_path / "checkpoints" / "step-00000002" / name).unlink()
    assert "no checkpoint has a copy of it" in start_before(tmp_path, None).notes[0]


def test_a_file_that_is_cut_off_without_any_copy_is_said(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("")
    note = "was cut off by a kill; no checkpoint has a copy of it, so that only what this command states is known"
    assert start_before(tmp_path, None) == StartBefore(notes=(f"{tmp_path / 'plan.json'} {note}",))


@pytest.mark.slow
@pytest.mark.ranks
def test_the_command_goes_on_with_what_the_run_had_and_writes_nothing_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path, "tp=1,pp=1,dp=1")
    (tmp_path / "text.txt").write_text("a text that is read again and again\n" * 40)
    first = ["--steps", "2", "--learning-rate", "0.02", "--data.set", "text.txt"]
    assert main(["run", "tiny.json", "--out", "run", *first]) == 0
    files = [tmp_path / "run" / name for name in ("plan.json", "training.json")]
    before = [path.stat().st_ino for path in files]
    assert main(["run", "tiny.json", "--out", "run"]) == 0
    assert [path.stat().st_ino for path in files] == before, "a start that changes nothing writes nothing"
    (tmp_path / "other.json").write_text(dump(tiny_plan("tp=1,pp=1,dp=2")))
    assert main(["run", "other.json", "--out", "run", "--steps", "3"]) == 0
    said = capsys.readouterr().out
    assert f"note: as at the last start: learning_rate 0.02, data.sets.{tmp_path / 'text.txt'} 1.0" in said
    assert main(["run", "other.json", "--out", "run", "--steps", "4", "--seed", "9"]) == 2
    assert "--seed: the run has drawn its samples by seed 0" in capsys.readouterr().err


def test_a_place_whose_checkpoints_are_all_damaged_is_refused_before_ranks_are_started(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "index.json").write_text("{}")
    assert resume_point(str(tmp_path), "auto") is None
    with pytest.raises(InputError, match=r"can be used: .*step-00000003/index.json: is damaged.* type another --out"):
        start_point(tmp_path, str(tmp_path), "auto")
    assert start_point(tmp_path / "new", None, "auto") is None
    assert start_point(tmp_path, str(tmp_path / "new"), "auto") is None and not any((tmp_path / "new").iterdir())


def test_a_place_into_which_nothing_can_be_written_is_refused_before_ranks_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    assert main(["run", "tiny.json", "--steps", "1", "--checkpoint.to", "/proc/nowhere"]) == 2
    said = capsys.readouterr()
    assert "checkpoint.to: cannot be used: " in said.err and not said.out
