"""``autoshard plan --like`` as it is typed when nodes are gone."""

import json
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.plan.codec import load
from autoshard.plan.plan import Plan

ASKED = ["--model", "llama3-8b", "--nodes", "4", "--global-batch", "256", "--seq-len", "4096", "--optimizer", "sgd"]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("old") / "plan.json"
    assert main(["plan", *ASKED, "--out", str(path)]) == 0
    return path


def typed(old: Path, *more: str) -> int:
    return main(["plan", "--like", str(old), *more])


def question(plan: Plan) -> tuple[object, ...]:
    return plan.model, plan.workload, plan.engine, plan.cluster.name, plan.cluster.lnc


def test_fewer_nodes_answer_the_same_question(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "left.json"
    assert typed(old, "--nodes", "2", "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert "after 4 x trn1.32xlarge: 2 x trn1.32xlarge, the same 256 sequences a step" in said
    assert "of state from a checkpoint" in said and "assumed: FSx for Lustre" in said
    left = load(out)
    assert (left.cluster.num_nodes, question(left)) == (2, question(load(old)))
    again = tmp_path / "again.json"
    assert main(["plan", *ASKED, "--nodes", "2", "--out", str(again)]) == 0
    assert again.read_bytes() == out.read_bytes()  # what a new question for so few nodes gets


def test_json_says_what_resuming_costs(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert typed(old, "--nodes", "3", "--json", "--out", str(tmp_path / "left.json")) == 0
    found = json.loads(capsys.readouterr().out)
    like = found["like"]
    assert like["nodes"] == {"before": 4, "after": 3}
    assert like["step"]["after_s"] == found["plan"]["prediction"]["step_time_s"] > like["step"]["before_s"]
    assert like["resuming"]["state_bytes"] == 4 * load(old).model.num_parameters  # FP32 masters, no moments
    assert like["resuming"]["read_s"] == pytest.approx(like["resuming"]["state_bytes"] / 12e9)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([], "--nodes: the plan is of 4 nodes. Type how many are left: --nodes 3"),
        (["--nodes", "2", "--model", "llama3-8b", "--seq-len", "64"], "--model: is part of the question of"),
        (["--nodes", "2", "--pareto"], "--like: searches for one plan; leave out --pareto and --at"),
        (["--nodes", "2", "--ranks", "8"], "--ranks: trn1.32xlarge always has 32 a node"),
        (["--nodes", "2", "--fix", "tp=3"], "--fix tp=3"),
    ],
)
def test_what_cannot_be_asked_again_is_refused(
    old: Path, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert typed(old, *more) == 2
    assert says in capsys.readouterr().err


def test_this_machine_has_ranks_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    old, out = tmp_path / "plan.json", tmp_path / "left.json"
    assert main(["plan", "--model", "tiny-llama", "--cluster", "local", "--out", str(old)]) == 0
    assert typed(old) == 2
    assert "--ranks: type how many ranks of this machine are left" in capsys.readouterr().err
    assert typed(old, "--ranks", "2", "--out", str(out)) == 0
    assert load(out).cluster.num_ranks == 2
    assert "after 4 ranks: 2 ranks, the same 32 sequences a step" in capsys.readouterr().out
