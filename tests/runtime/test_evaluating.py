"""Runs that are judged meanwhile: by the same samples, wherever they run; the best state stays, also across starts."""

import errno
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from autoshard.cli import main
from autoshard.errors import InputError, RunFailed
from autoshard.plan.codec import load
from autoshard.run.activity import RankActivity
from autoshard.run.reports import EvaluatedStep
from autoshard.runtime import evaluating
from autoshard.runtime.checkpoint.files import RunState
from autoshard.runtime.checkpoint.shelf import Shelf
from autoshard.runtime.checkpoint.storage import Storage, StorageError
from autoshard.runtime.data.opened import source_of
from autoshard.runtime.evaluating import Evaluator, refuse_evaluation
from autoshard.spec.training import DataSpec, Evaluating, Training, Watching
from tests.runtime.cases import write_tiny
from tests.runtime.training_cases import Double, Trained, plan_of, trained

TEXT = "Wer reitet so spaet durch Nacht und Wind? Es ist der Vater mit seinem Kind. " * 20
COMPARED = Watching(collectives="every")  # every step is held to what it should begin, whatever is between steps
OTHER = "Er hat den Knaben wohl in dem Arm, er fasst ihn sicher, er haelt ihn warm. " * 20


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, dict[str, float]]:
    names = {"train": TEXT, "judge": OTHER}
    for name, text in names.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    return {name: {str(tmp_path / f"{name}.txt"): 1.0} for name in names}


def judged(sets, **options) -> dict:
    return {
        "data": DataSpec(sets=sets["train"]),
        "eval": Evaluating(sets=sets["judge"], **{"every_steps": 2, "samples": 6, **options}),
    }


def evaluations(found) -> list[EvaluatedStep]:
    return [said for said in found.said if isinstance(said, EvaluatedStep)]


class Falling:
    """An engine whose losses are known: it counts its batches, and gives the next of a list for each step's batch."""

    def __init__(self, losses: list[float]) -> None:
        self.losses, self.asked = iter(losses), []

    def evaluate(self, micro_batches):
        self.asked.append([batch["samples"].tolist() for batch in micro_batches])
        return next(self.losses)


def test_a_loss_is_the_mean_over_counted_tokens_of_the_same_samples_each_time(sets):
    plan = plan_of("tp=1,pp=1,dp=2", vocab=257)
    training = Training(**judged(sets, samples=6))
    evaluator, engine = Evaluator.of(plan, training), Falling([2.0, 4.0, 1.0, 1.5])
    num_samples = plan.workload.global_batch
    assert evaluator.num_steps == -(-6 // num_samples) == 2
    first, state = evaluator.judged(engine, RunState(step=2), RankActivity())
    assert first.loss == pytest.approx(3.0) and first.num_samples == 2 * num_samples and first.best
    assert (state.best_step, state.best_loss) == (2, first.loss)
    second, state = evaluator.judged(engine, replace(state, step=4), RankActivity())
    assert second.loss == pytest.approx(1.25) and (state.best_step, state.best_loss) == (4, 1.25)
    assert engine.asked[:2] == engine.asked[2:], "the same samples"
    assert sorted(number for asked in engine.asked[:2] for batch in asked for number in batch) == [*range(8)]


def test_a_loss_that_is_no_number_or_of_other_sets_is_not_compared(sets):
    plan = plan_of("tp=1,pp=1,dp=1", vocab=257)
    evaluator, engine = Evaluator.of(plan, Training(**judged(sets, samples=4))), Falling([float("nan"), 3.0, 4.0, 5.0])
    first, state = evaluator.judged(engine, RunState(step=1), RankActivity())
    assert not first.best and state.best_step is None, "else no later loss were below it"
    second, state = evaluator.judged(engine, replace(state, step=2), RankActivity())
    assert second.best and state.best_step == 2
    others = Evaluator.of(plan, Training(**judged({**sets, "judge": sets["train"]}, samples=4)))
    third, state = others.judged(engine, replace(state, step=3), RankActivity())
    assert third.best and (state.best_step, state.best_loss) == (3, 4.0), "judged by another set"
    fourth, _ = others.judged(engine, replace(state, step=4), RankActivity())
    assert not fourth.best


def test_losses_of_other_tokens_of_the_same_sets_are_not_compared(sets):
    plan = plan_of("tp=1,pp=1,dp=1", vocab=257)
    evaluator = Evaluator.of(plan, Training(**judged(sets, samples=4)))
    answers = replace(evaluator.training, data=replace(evaluator.training.data, loss_on="answers"))
    others = [
        replace(evaluator, training=answers),
        replace(evaluator, seq_len=2 * evaluator.seq_len),
        replace(evaluator, shape=replace(evaluator.shape, separate=True)),
        replace(evaluator, source=Evaluator.of(plan, Training(**judged({**sets, "judge": sets["train"]}))).source),
    ]
    assert all(other.judges.partition(" of ")[2] != evaluator.judges.partition(" of ")[2] for other in others[1:])
    for other in others:
        state = RunState(step=4, best_step=2, best_loss=1.0, judged_by=evaluator.judges)
        evaluated, state = other.judged(Falling([3.0]), state, RankActivity())
        assert evaluated.best and (state.best_step, state.best_loss) == (4, 3.0)


def test_masked_tokens_weigh_nothing(sets, monkeypatch):
    plan = plan_of("tp=1,pp=1,dp=1", vocab=257)
    evaluator = Evaluator.of(plan, Training(**judged(sets, samples=8)))
    real = evaluator.source.samples

    class Half:
        def samples(self, first, count):
            found = real(first, count)
            counted = found.counted.copy()
            if first:
                counted[:, 1:] = False  # of the second batch one token of each sample counts
            return replace(found, counted=counted)

    evaluator = replace(evaluator, source=Half())
    result, _ = evaluator.judged(Falling([1.0, 10.0]), RunState(step=1), RankActivity())
    whole, few = 4 * plan.workload.seq_len, 4
    assert result.loss == pytest.approx((1.0 * whole + 10.0 * few) / (whole + few))


def test_samples_of_which_no_token_counts_judge_nothing(sets):
    """A loss of 0 would be the best for good."""
    evaluator = Evaluator.of(plan_of("tp=1,pp=1,dp=1", vocab=257), Training(**judged(sets, samples=8)))
    real = evaluator.source.samples

    class Unanswered:
        def samples(self, first, count):
            found = real(first, count)
            return replace(found, counted=np.zeros_like(found.counted))

    evaluator = replace(evaluator, source=Unanswered())
    with pytest.raises(RunFailed, match=r"no token of the 8 samples of eval.set counts"):
        evaluator.judged(Falling([0.0, 0.0]), RunState(step=1), RankActivity())


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_of_another_layout_judge_alike_and_the_best_checkpoint_stays(tmp_path, sets):
    options = {**judged(sets), "build": Double, "every_steps": 3, "keep_last": 1, "learning_rate": 0.02}
    plans = {"one": plan_of("tp=1,pp=1,dp=1", vocab=257), "four": plan_of("tp=2,pp=1,dp=2", vocab=257)}
    found = {name: trained(plan, tmp_path / name, 8, **options) for name, plan in plans.items()}
    one, four = (evaluations(run) for run in found.values())
    assert [result.number for result in one] == [2, 4, 6, 8]
    assert [result.loss for result in four] == pytest.approx([result.loss for result in one], rel=1e-9)
    assert one[0].best and one[-1].loss < one[0].loss, "it learns the language"
    best = max(result.number for result in one if result.best)
    steps = Shelf(storage=Storage.of(str(tmp_path / "four" / "checkpoints"))).steps()
    assert best in steps and 8 in steps


@pytest.mark.slow
@pytest.mark.ranks
def test_a_worse_state_is_not_kept_and_the_best_one_is_known_after_a_restart(tmp_path, sets):
    """At a rate that destroys the model the first evaluation stays the best: its checkpoint outlives newer ones."""
    plan = plan_of("tp=1,pp=1,dp=2", vocab=257)
    options = {**judged(sets, every_steps=1), "every_steps": 1, "keep_last": 1, "watchdog": COMPARED}
    first = trained(plan, tmp_path, 2, **options, learning_rate=1e-2)
    best = max(result.number for result in evaluations(first) if result.best)
    second = trained(plan, tmp_path, 5, **options, learning_rate=30.0)
    assert [result.number for result in evaluations(second)] == [3, 4, 5]
    assert not any(result.best for result in evaluations(second)), "the loss before the restart is remembered"
    assert Shelf(storage=Storage.of(str(tmp_path / "checkpoints"))).steps() == [5, best]


class Signalled(Double):
    """An engine whose rank gets SIGTERM in the first batch of an evaluation."""

    def __init__(self, plan, run):
        super().__init__(plan, run)
        evaluate = self.engine.evaluate

        def signalled(micro_batches):
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return evaluate(micro_batches)

        self.evaluate = signalled


class UnreadableAfter:
    """A source of which one rank reads one batch, and no second one."""

    def __init__(self, source):
        self.source = source

    def samples(self, first, count):
        if first and dist.get_rank() == 1:
            raise OSError(errno.EIO, "Input/output error", "judge.bin")
        return self.source.samples(first, count)


class Uncounted:
    """A source without a token that counts."""

    def __init__(self, source):
        self.source = source

    def samples(self, first, count):
        samples = self.source.samples(first, count)
        return replace(samples, counted=np.zeros_like(samples.counted))


BREAKS = {  # what sources an evaluation has, and how the run ends
    "an unreadable set": (UnreadableAfter, r"judge\.bin: cannot be read: Input/output error; the state of step 2 is"),
    "a set without answers": (
        Uncounted,
        r"no token of the 8 samples of eval\.set counts.*; the state of step 2 is saved",
    ),
}


def end_of(folder: Path, step: int):
    """The state of a checkpoint and the checksums of its numbers."""
    index = Shelf(storage=Storage.of(str(folder / "checkpoints"))).open(step)
    return index.state, {name: [box.crc32 for box in tensor.boxes] for name, tensor in index.tensors.items()}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("breaks_off", ["a signal", *BREAKS])
def test_an_evaluation_that_is_broken_off_is_made_by_the_next_start(breaks_off, tmp_path, sets, monkeypatch):
    plan = plan_of("tp=1,pp=1,dp=2", vocab=257)
    options = {**judged(sets), "keep_last": 1, "learning_rate": 0.02}
    whole = trained(plan, tmp_path / "whole", 4, build=Double, **options)
    folder, first = tmp_path / "broken", Trained()
    if breaks_off == "a signal":
        trained(plan, folder, 4, build=Signalled, found=first, **options)
        assert first.report is not None and first.report.signal == signal.SIGTERM
    else:
        source, message = BREAKS[breaks_off]
        with monkeypatch.context() as patch:
            patch.setattr(evaluating, "source_of", lambda *given: source(source_of(*given)))
            with pytest.raises(RunFailed, match=message):
                trained(plan, folder, 4, build=Double, found=first, **options)
    assert first.saved_steps == [2] and not evaluations(first)
    second = trained(plan, folder, 4, build=Double, **options)
    assert [(result.number, result.loss, result.best) for result in evaluations(second)] == [
        (result.number, result.loss, result.best) for result in evaluations(whole)
    ]
    assert first.curve | second.curve == whole.curve and end_of(folder, 4) == end_of(tmp_path / "whole", 4)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_last_evaluation_is_made_up_for_and_then_known(tmp_path, sets):
    plan, options = plan_of("tp=1,pp=1,dp=2", vocab=257), {**judged(sets), "keep_last": 1}
    trained(plan, tmp_path, 2, build=Signalled, **options)
    assert end_of(tmp_path, 2)[0].unjudged
    assert [result.number for result in evaluations(trained(plan, tmp_path, 2, build=Double, **options))] == [2]
    assert end_of(tmp_path, 2)[0].best_step == 2 and not end_of(tmp_path, 2)[0].unjudged
    assert not evaluations(trained(plan, tmp_path, 2, build=Double, **options))


class Judged(Double):
    """An engine whose evaluations, of two batches each, have these losses."""

    def __init__(self, plan, run):
        super().__init__(plan, run)
        self.evaluate = Falling([3.0, 3.0, 2.0, 2.0, 9.0, 9.0]).evaluate


@pytest.mark.slow
@pytest.mark.ranks
def test_the_best_checkpoint_stays_where_a_better_one_could_not_be_saved(tmp_path, sets, monkeypatch):
    publish = Shelf.publish

    def full_after_step_4(shelf, folder):
        if "00000004" in folder:
            raise StorageError(f"{folder}: No space left on device")
        publish(shelf, folder)

    monkeypatch.setattr(Shelf, "publish", full_after_step_4)
    plan = plan_of("tp=1,pp=1,dp=2", vocab=257)
    found = trained(plan, tmp_path, 6, build=Judged, keep_last=1, **judged(sets))
    assert [result.best for result in evaluations(found)] == [True, True, False]
    assert "step 4 was not saved" in found.notes and end_of(tmp_path, 6)[0].best_step == 2
    assert Shelf(storage=Storage.of(str(tmp_path / "checkpoints"))).steps() == [6, 2]


def test_what_cannot_be_judged_is_refused(sets, tmp_path):
    plan, training = plan_of("tp=1,pp=1,dp=1", vocab=257), Training(**judged(sets))
    refuse_evaluation(plan, training, "torch")
    refuse_evaluation(plan, replace(training, eval=Evaluating()), "nxd")
    dropping = replace(plan, model=replace(plan.model, hidden_dropout=0.1))
    for bad_plan, engine, message in ((plan, "nxd", "^eval: nxd judges no run"), (dropping, "torch", "drops numbers")):
        with pytest.raises(InputError, match=message):
            refuse_evaluation(bad_plan, training, engine)
    missing = replace(training, eval=Evaluating(sets={str(tmp_path / "none.txt"): 1.0}))
    with pytest.raises(InputError, match=r"none\.txt: is neither a folder nor"):
        refuse_evaluation(plan, missing, "torch")
    with pytest.raises(InputError, match="must be above 0"):
        Evaluating(sets={"a": -1.0})


@pytest.mark.slow
@pytest.mark.ranks
def test_a_recipe_is_judged_by_its_own_set_and_the_command_says_and_keeps_how(tmp_path, sets, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write_tiny(tmp_path, "tp=1,pp=1,dp=2")
    small = {"seq_len": load(path).workload.seq_len}
    recipe = (
        f"model: tiny-llama\ncluster: local\nranks: 2\nseq_len: {small['seq_len']}\nglobal_batch: 4\nsteps: 4\n"
        "data: {sets: {train.txt: 1.0}}\neval: {sets: {judge.txt: 1.0}, every_steps: 2, samples: 4}\n"
    )
    (tmp_path / "judged.yaml").write_text(recipe, encoding="utf-8")
    assert main(["run", "judged.yaml", "--fix", "mbs=2"]) == 0
    said = capsys.readouterr().out
    assert "note: step 2: evaluation loss" in said and "note: step 4: evaluation loss" in said
    lines = [json.loads(line) for line in Path("runs/judged/evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4] and all(line["samples"] == 4 for line in lines)
    steps = [json.loads(line) for line in Path("runs/judged/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4], "what a step has is as it was"
