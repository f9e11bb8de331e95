"""Recorded steps: a trace of each rank whose actions are those of its plan, and no trace of any other step."""

import gzip
import json
from pathlib import Path

import pytest

from autoshard.plan.codec import load
from autoshard.run.folder import profile_path
from autoshard.run.protocol import Run
from autoshard.runtime.profiling import StepProfile
from autoshard.schedule.builders import Action
from autoshard.spec.training import Training
from tests.conftest import Typed
from tests.slower import rest_is_slow

PLAN = "plan tiny-llama --cluster local --global-batch 4 --seq-len 32 --fix pp=2,schedule=zb_h1"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _actions(path: Path) -> list[str]:
    """Return the names of a trace's events that are names of actions, in the order of time."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    marked = [event for event in events if event.get("cat") == "user_annotation"]
    names = [event["name"] for event in sorted(marked, key=lambda event: event["ts"])]
    return [name for name in names if name[0] in "FBIW" and name[1].isdigit()]


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_record_the_actions_of_their_plan_in_the_steps_that_are_asked_for(typed: Typed) -> None:
    assert typed(PLAN)[0] == 0
    out = typed.answer("run plan.json --steps 3 --profile 2 --out first")
    folder = Path("first")
    assert f"step 2: each rank's trace of this step lies in {folder / 'profile'}" in out
    plan = load(Path("plan.json"))
    traces = [profile_path(folder, 2, rank) for rank in range(plan.mesh.num_ranks)]
    for rank, path in enumerate(traces):
        actions = plan.schedule.action_lists()[plan.mesh.coordinates(rank)["pp"]]
        assert [Action.parse(name) for name in _actions(path)] == list(actions)
    assert {*(folder / "profile").iterdir()} == {*traces}


@pytest.mark.parametrize(
    ("options", "complaint"),
    rest_is_slow(
        [
            ("--profile 0", "--profile: steps count from 1, so 0 is none"),
            ("--profile 2,4", "--profile: the run has 3 steps, so step 4 is none of them"),
            ("--profile 2 --dry-run", "--profile: needs steps that run. Leave the other option out"),
        ],
        slow=2,
    ),
)
def test_steps_that_cannot_be_recorded_are_refused(options: str, complaint: str, typed: Typed) -> None:
    assert typed(PLAN)[0] == 0
    assert complaint in typed.refusal(f"run plan.json --steps 3 {options}") and not Path("runs").exists()


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file where the folder of traces would be")
    run = Run(folder=tmp_path, training=Training(), profile=(2,))
    with StepProfile(run, 2, 0) as recorded:
        pass
    assert recorded.write().startswith("its trace was not written: ")
    with StepProfile(run, 3, 0) as skipped:
        pass
    assert skipped.write() == ""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_step_that_was_taken_before_a_start_is_said_to_be_not_recorded(typed: Typed) -> None:
    assert typed(PLAN)[0] == 0
    assert typed("run plan.json --steps 2 --out first")[0] == 0
    code, out, _ = typed("run plan.json --steps 3 --out first --profile 1,3")
    assert code == 0 and "step 1 is not recorded: it was taken before this start" in out
    assert {path.name.split("-")[1] for path in Path("first/profile").iterdir()} == {"3"}
