"""``autoshard plan --like`` as it is typed when nodes are gone."""

import json
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.plan.codec import load
from tests.conftest import Typed

ASKED = "plan --model llama3-8b --global-batch 256 --seq-len 4096 --optimizer sgd --fix tp=8,mbs=1,cp=1,vp=1"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("old") / "plan.json"
    assert main([*ASKED.split(), "--nodes", "4", "--out", str(path)]) == 0
    return path


@pytest.mark.slow
def test_fewer_nodes_answer_the_same_question(old: Path, typed: Typed):
    code, out, _ = typed(f"plan --like {old} --nodes 2")
    assert code == 0 and "after 4 x trn1.32xlarge: 2 x trn1.32xlarge, the same 256 sequences a step" in out
    assert "of state from a checkpoint" in out and "assumed: FSx for Lustre" in out
    left = Path("plan.json").read_bytes()
    assert typed(f"{ASKED} --nodes 2")[0] == 0 and Path("plan.json").read_bytes() == left
    found = json.loads(typed(f"plan --like {old} --nodes 3 --json")[1])
    like = found["like"]
    assert like["nodes"] == {"before": 4, "left": 3, "after": 2} and like["tried"][0]["num_nodes"] == 3
    assert like["step"]["after_s"] == found["plan"]["prediction"]["step_time_s"] > like["step"]["before_s"]
    assert like["resuming"]["state_bytes"] == 4 * load(old).model.num_parameters  # FP32 masters, no moments
    assert like["resuming"]["read_s"] == pytest.approx(like["resuming"]["state_bytes"] / 12e9)


@pytest.mark.slow
def test_nodes_that_divide_badly_stay_spare(old: Path, typed: Typed):
    typed.answer("plan --model llama3-8b --global-batch 256 --seq-len 4096 --nodes 8 --fix tp=8 --out eight.json")
    out = typed("plan --like eight.json --nodes 7")[1]
    assert "after 8 x trn1.32xlarge: 6 x trn1.32xlarge" in out and load(Path("plan.json")).cluster.num_nodes == 6
    (line,) = (line for line in out.splitlines() if "spare" in line)
    assert line.startswith("6 of 7 nodes, 1 spare, because a step takes longer on others: 7 nodes ")
    assert "odd number of nodes" not in out


@pytest.mark.slow
def test_how_to_go_on_with_a_run_is_said(old: Path, typed: Typed):
    Path("my run").mkdir()
    Path("my run", "plan.json").write_bytes(old.read_bytes())
    assert "to go on" not in typed("plan --like 'my run/plan.json' --nodes 2 --out two.json")[1]
    Path("my run", "training.json").write_text("{}", encoding="utf-8")
    out = typed("plan --like 'my run/plan.json' --nodes 2 --out two.json --force")[1]
    assert "\nto go on: autoshard run two.json --out 'my run'\n" in out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("", "--nodes: the plan is of 4 nodes. Type how many are left: --nodes 3"),
        ("--nodes 2 --model llama3-8b --seq-len 64", "--model: is part of the question of"),
        ("--nodes 2 --pareto", "--pareto: has no effect beside --like"),
        ("--nodes 2 --ranks 8", "--ranks: trn1.32xlarge always has 32 a node"),
        ("--nodes 2 --fix tp=3", "--fix tp=3"),
    ],
)
def test_what_cannot_be_asked_again_is_refused(old: Path, more: str, says: str, typed: Typed):
    assert says in typed.refusal(f"plan --like {old} {more}")


@pytest.mark.slow
def test_this_machine_has_ranks_left(typed: Typed):
    assert typed("plan --model tiny-llama --cluster local --fix tp=1,mbs=8 --out old.json")[0] == 0
    assert "--ranks: type how many ranks of this machine are left" in typed("plan --like old.json")[2]
    out = typed("plan --like old.json --ranks 2")[1]
    assert "after 4 ranks: 2 ranks, the same 32 sequences a step" in out
    assert load(Path("plan.json")).cluster.num_ranks == 2


SMALL = "plan --model tiny-llama --cluster h100 --seq-len 64 --global-batch 64"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixed", "more", "question"),
    [
        ("--fix tp=2,pp=1,dp=8,kernels=te", "", "--fix kernels=te,tp=2,pp=1"),
        ("--fix pp=2,kernels=te", "--fix tp=2,pp=1", "--fix kernels=te,tp=2,pp=1"),
        (
            "--fix tp=2,pp=1 --pin 'up=[batch/dp, seq, ffn/tp]'",
            "",
            "--fix tp=2,pp=1 --pin 'up=[batch/dp, seq, ffn/tp]'",
        ),
        ("--fix pp=1 --choose fsdp", "", "--fix pp=1 --choose fsdp"),
    ],
)
def test_what_the_question_fixed_holds_for_fewer_nodes(fixed: str, more: str, question: str, typed: Typed):
    """The kernels hold with their constants, what is typed now replaces keys, and dp follows from the nodes."""
    assert typed(f"{SMALL} --nodes 2 {fixed} --out old.json")[0] == 0
    assert typed(f"plan --like old.json --nodes 1 {more}")[0] == 0
    assert typed(f"{SMALL} --nodes 1 {question} --out asked.json")[0] == 0
    assert Path("plan.json").read_bytes() == Path("asked.json").read_bytes()


def test_what_fewer_nodes_cannot_keep_is_let_go_and_said(typed: Typed):
    assert typed(f"{SMALL} --nodes 2 --fix tp=1,cp=16,kernels=te --out old.json")[0] == 0
    code, out, _ = typed("plan --like old.json --nodes 1")
    assert code == 0 and "not kept, because no plan of so few nodes can: --fix tp=1,cp=16\n" in out
    assert load(Path("plan.json")).kernels == "te"
    code, _, err = typed("plan --like old.json --nodes 1 --fix cp=16")  # what is typed now is never let go
    assert code == 2 and "cp=16" in err


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["--choose 2", "--choose 5", "--choose fastest", "--objective memory", ""])
def test_as_many_ranks_as_before_have_the_same_answer(asked: str, typed: Typed):
    question = "plan --model tiny-llama --cluster local --fix pp=2,recompute=none"
    before = json.loads(typed(f"{question} {asked} --out old.json --json")[1])
    again = json.loads(typed("plan --like old.json --ranks 4 --out new.json --json")[1])
    for key in ("written", "plan"):
        assert again[key] == before[key]
    assert [row["candidate"] for row in again["answers"][:2]] == [row["candidate"] for row in before["answers"][:2]]
