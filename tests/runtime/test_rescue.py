"""A failure that one rank alone knows of: the last step is saved by all of them before the run ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoshard.cli import main
from autoshard.commands.running import execution
from autoshard.engine.torch.states.flat import Flat
from autoshard.errors import RunFailed
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Builds, Engine, Run
from autoshard.run.reports import EvaluatedStep
from autoshard.runtime.checkpoint.shelf import newest
from autoshard.runtime.checkpoint.storage import Storage
from autoshard.runtime.machine import builder
from autoshard.spec.training import DataSpec, Evaluating
from tests.runtime.cases import write_tiny
from tests.runtime.training_cases import plan_of, trained

TWO = "tp=1,pp=1,dp=2"
TEXT = "Wer reitet so spaet durch Nacht und Wind? Es ist der Vater mit seinem Kind. " * 20


def failing(ranks: set[int], error: Callable[[], Exception], call: str, at: int) -> Builds:
    """Build engines of which those of some ranks fail, at the call of this number of a method."""

    def build(plan: Plan, run: Run) -> Engine:
        engine: Any = builder("torch")(plan, run)
        real, calls = getattr(engine, call), list[int]()

        def fails(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == at and dist.get_rank() in ranks:
                raise error()
            return real(*arguments)

        setattr(engine, call, fails)
        return engine

    return build


@pytest.fixture
def judged(tmp_path: Path) -> dict[str, Any]:
    (path := tmp_path / "judge.txt").write_text(TEXT, encoding="utf-8")
    return {
        "eval": Evaluating(sets={str(path): 1.0}, every_steps=2, samples=6),
        "data": DataSpec(sets={str(path): 1.0}),
    }


def saved_step(folder: Path) -> int:
    index, _ = newest(Storage.of(str(folder / "checkpoints")))
    return index.state.step if index else 0


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [{1}, {0}, {0, 1}])
def test_an_evaluation_that_fails_loses_no_step(ranks: set[int], judged: dict[str, Any], tmp_path: Path) -> None:
    plan, folder, second = plan_of(TWO, vocab=257), tmp_path / "run", 4  # the second batch after step 4
    build = failing(ranks, lambda: ValueError("no such token"), "evaluate", second)
    with pytest.raises(RunFailed, match=r"ValueError: no such token\nthe state of step 4 was saved before\nits log"):
        trained(plan, folder, 6, watch=True, build=build, **judged)
    assert saved_step(folder) == 4
    again, undisturbed = (
        trained(plan, place, 6, to=to, **judged) for place, to in ((folder, None), (tmp_path, "none"))
    )
    assert again.curve == {step: undisturbed.curve[step] for step in (5, 6)}
    assert [said.number for said in again.said if isinstance(said, EvaluatedStep)] == [4, 6]


@pytest.mark.ranks
def test_a_step_that_finds_no_memory_loses_none_before_it(tmp_path: Path) -> None:
    build = failing({1}, lambda: torch.OutOfMemoryError("full"), "step", 4)
    with pytest.raises(RunFailed) as caught:
        trained(plan_of(TWO), tmp_path, 6, watch=True, build=build, every_steps=2)
    (line,) = str(caught.value).splitlines()
    assert "ran out of the memory of its device in step 4" in line and line.endswith(
        "the state of step 3 was saved before"
    )
    assert saved_step(tmp_path) == 3


@pytest.mark.slow
@pytest.mark.ranks
def test_a_failure_after_a_save_says_which_step_is_saved(tmp_path: Path) -> None:
    build = failing({0}, lambda: ValueError("wrong"), "step", 5)
    with pytest.raises(RunFailed, match=r"ValueError: wrong\nthe state of step 4 (is saved|was saved before)\n"):
        trained(plan_of(TWO), tmp_path, 6, watch=True, build=build, every_steps=2)
    assert saved_step(tmp_path) == 4


@pytest.mark.slow
@pytest.mark.ranks
def test_a_failure_inside_an_update_saves_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Flat.update

    def update(self: Flat, *arguments: Any) -> None:
        if arguments[1]["step_number"] == 5 and dist.get_rank() == 1:
            raise ValueError("wrong")
        real(self, *arguments)

    monkeypatch.setattr(Flat, "update", update)
    with pytest.raises(
        RunFailed, match=r"ValueError: wrong\nthe state was not saved: ranks were updating it; that of step 3 is\n"
    ):
        trained(plan_of(TWO), tmp_path, 6, watch=True, every_steps=3)
    assert saved_step(tmp_path) == 3


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_that_went_back_and_failed_goes_on_from_there(tmp_path: Path) -> None:
    plan = plan_of(TWO)
    trained(plan, tmp_path, 8, every_steps=2, keep_last=9)
    with pytest.raises(RunFailed, match="the state of step 5 was saved before"):
        trained(plan, tmp_path, 8, watch=True, resume=2, build=failing({1}, lambda: ValueError("wrong"), "step", 4))
    again = trained(plan, tmp_path, 8)
    assert again.started.step == 5, "not after step 8, from which the run went back"


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_are_started_again_from_what_was_saved_as_they_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    run = ["run", "tiny.json", "--steps", "8", "--out", "run"]
    assert main([*run, "--checkpoint.every-steps", "2", "--checkpoint.keep-last", "9"]) == 0
    build = failing({1}, lambda: ValueError("wrong"), "step", 4)  # of a start that goes on at step 5 it is none
    monkeypatch.setattr(execution, "builder", lambda *_, **__: build)
    capsys.readouterr()
    assert main([*run, "--checkpoint.every-steps", "100", "--resume", "2", "--restarts", "1"]) == 0
    begun = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: continues after step")]
    assert [line.split()[4].strip(",") for line in begun] == ["2", "5"]
