"""What runs on this machine teach: the next plan for it knows, and names what it knows."""

import json
from pathlib import Path

import pytest

import autoshard
from autoshard.calibration.learned import CONSTANTS, ROWS, constants_file, learn
from autoshard.calibration.rows import Occasion, row_text
from autoshard.cost.calibration import load_calibration
from autoshard.cost.predict import predict
from autoshard.errors import InputError
from autoshard.plan.codec import load
from autoshard.plan.plan import Plan
from autoshard.runtime.machine import user_folder
from tests.conftest import Typed
from tests.cost.cases import ask, plan_of

LAYOUTS = ("tp=1,pp=1,dp=4", "tp=2,pp=1,dp=2", "tp=2,pp=2,dp=1", "tp=1,pp=2,dp=2")


def local(text: str) -> Plan:
    return plan_of(ask(model_name="tiny-llama", cluster_name="local", nodes=1, seq_len=256, global_batch=8), text)


def row(text: str, slower: float, name: str = "") -> str:
    """What a run measures on a machine that takes so many times as long as is declared."""
    plan = local(text)
    occasion = Occasion(
        name=name or text, step_time_s=slower * predict(plan).step_time_s, date="2026-11-28", versions="autoshard",
        platform="local", kind="run",
    )  # fmt: skip
    return row_text(plan, occasion)


@pytest.mark.parametrize("slower", [0.25, 4.0])
def test_one_run_tells_how_fast_a_machine_is(tmp_path: Path, slower: float) -> None:
    constants = learn(tmp_path, row(LAYOUTS[0], slower))
    assert constants.interval == 0.5 and constants == load_calibration(tmp_path / CONSTANTS)
    for text in LAYOUTS:
        plan = local(text)
        again = predict(plan, constants)
        ratio = again.step_time_s / predict(plan).step_time_s
        assert ratio == pytest.approx(slower, rel=0.05 if text == LAYOUTS[0] else 0.6)
        assert again.low_s < again.step_time_s < again.high_s


@pytest.mark.slow
def test_the_last_runs_count_and_equal_runs_teach_the_same(tmp_path: Path) -> None:
    rows = [row(LAYOUTS[number % 4], 9.0 if number < 4 else 2.0, str(number)) for number in range(12)]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ROWS).write_text("\n".join(rows[:-1]) + "\n", encoding="utf-8")
        learned = learn(tmp_path / folder, rows[-1])
    lines = (tmp_path / "a" / ROWS).read_text("utf-8").splitlines()
    assert [json.loads(line)["id"] for line in lines] == [str(number) for number in range(4, 12)]
    assert (tmp_path / "a" / CONSTANTS).read_bytes() == (tmp_path / "b" / CONSTANTS).read_bytes()
    plan = local("tp=4,pp=1,dp=1")
    assert predict(plan, learned).step_time_s == pytest.approx(2 * predict(plan).step_time_s, rel=0.2)
    assert learned.interval == 0.25 and "8 rows of local (4 layouts" in learned.basis


def test_a_row_that_no_fit_can_use_is_not_kept(tmp_path: Path) -> None:
    """As of a run of a model that was read off its code: the rows before it stay, and the run says why."""
    strange = json.dumps({**json.loads(row(LAYOUTS[0], 2.0, "strange")), "model": "mine", "arch": None})
    with pytest.raises(InputError, match=r"takes no such run(.|\n)*its architecture is not known"):
        learn(tmp_path, strange)
    learned = learn(tmp_path, row(LAYOUTS[0], 2.0))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(InputError, match="takes no such run"):
        learn(tmp_path, strange)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert load_calibration(tmp_path / CONSTANTS) == learned and "which holds 0% of those" in learned.basis


@pytest.mark.slow
def test_plans_for_this_machine_alone_take_what_was_learned(
    tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "plan --model tiny-llama --seq-len 256 --global-batch 8 --fix tp=1,pp=1,mbs=2 --force"
    assert typed(f"{line} --cluster local")[0] == 0
    before = load(Path("plan.json"))
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "cache"))
    assert constants_file(user_folder()) is None
    learned = learn(tmp_path / "cache", row(LAYOUTS[0], 4.0))
    texts = []
    for _ in range(2):
        code, out, _ = typed(f"{line} --cluster local")
        assert code == 0 and "calibrated on 1 row of local (1 layout" in " ".join(out.split())
        texts.append(Path("plan.json").read_bytes())
    after = load(Path("plan.json"))
    assert texts[0] == texts[1] and after.provenance["calibration"] == learned.name
    assert before.prediction and after.prediction
    assert after.prediction.step_time_s == pytest.approx(4 * before.prediction.step_time_s, rel=0.3)
    other = line.replace("--seq-len 256", "--seq-len 512")
    assert typed(f"{other} --cluster trn1 --nodes 1")[0] in (0, 1)
    assert (
        autoshard.plan("tiny-llama", "local", seq_len=256, global_batch=8, fix="tp=1,pp=1,mbs=2").plan.provenance[
            "calibration"
        ]
        != learned.name
    )
