"""What ``import`` prints, writes and refuses of logs, as a stranger types it in an empty folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.spec.cluster_catalogue import load_node_type
from autoshard.spec.record import encode
from tests.conftest import Typed
from tests.imports.logs.published import GPT_13B, LOGS, arguments, megatron

BY_NAME = {log.name: log for log in LOGS}


@pytest.fixture
def logs() -> None:
    """Two logs of one configuration, and one that is too short."""
    for name in ("titan-rowwise.log", "titan-tensorwise.log"):
        Path(name).write_text(BY_NAME[name].text, encoding="utf-8")
    Path("short.log").write_text("".join(BY_NAME["titan-rowwise.log"].text.splitlines(True)[:1]), encoding="utf-8")
    Path("float8.toml").write_text(BY_NAME["titan-rowwise.log"].config[1], encoding="utf-8")


LINE = "import titan-rowwise.log titan-tensorwise.log --config float8.toml --nodes 1 --cluster h100-96"


def test_logs_become_rows_beside_their_predictions(typed: Typed, logs: None) -> None:
    code, out, err = typed(f"{LINE} --no-search")
    assert (code, err) == (0, "") and not Path("rows.jsonl").exists()
    for words in ("titan-rowwise.log", "torchtitan", "10..30", "1.17 s", "30.9 GiB", "by the clock between reports"):
        assert words in out
    again = out.splitlines()[-1].removeprefix("next").strip()
    assert again == f"autoshard {LINE} --rows rows.jsonl"
    code, out, _ = typed(f"{again.removeprefix('autoshard ')} --no-search")
    assert code == 0 and "rows.jsonl: 2 rows added, 0 replaced" in " ".join(out.split())
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text("utf-8").splitlines()]
    assert [round(row["step_time_s"], 2) for row in rows] == [1.17, 1.07]
    assert rows[0]["source"] == {"log": "titan-rowwise.log", "steps": "10..30 of 1..30", "config": "float8.toml"}
    assert rows[0]["first_seen"] == "2025-06-04" and "most reserved" in rows[0]["published"]["peak_memory_gib"]
    code, out, err = typed("validate rows.jsonl --json")
    assert (code, err) == (0, "") and [row["id"] for row in json.loads(out)["rows"]] == [row["id"] for row in rows]


def test_a_row_is_replaced_and_other_lines_stay(typed: Typed, logs: None) -> None:
    typed(f"{LINE} --rows rows.jsonl --no-search")
    path = Path("rows.jsonl")
    others = '{"id": "mine", "platform": "a100", "seq_len": 1, "global_batch_seqs": 1, "nodes": 1}\nnot json\n'
    path.write_text(others + path.read_text("utf-8"), encoding="utf-8")
    before = path.read_text("utf-8")
    code, out, _ = typed(f"{LINE} --rows rows.jsonl --no-search")
    assert code == 0 and "0 rows added, 2 replaced" in " ".join(out.split()) and path.read_text("utf-8") == before


@pytest.mark.slow
def test_three_rows_of_a_cluster_are_fitted_to(typed: Typed, logs: None) -> None:
    Path("bf16.log").write_text(BY_NAME["titan-bf16.log"].text, encoding="utf-8")
    Path("bf16.toml").write_text(BY_NAME["titan-bf16.log"].config[1], encoding="utf-8")
    typed(f"{LINE} --rows rows.jsonl --no-search")
    _, out, _ = typed("import bf16.log --config bf16.toml --nodes 1 --cluster h100-96 --rows rows.jsonl --no-search")
    again = out.splitlines()[-1].removeprefix("next").strip()
    assert again == "autoshard calibrate rows.jsonl --cluster h100-96 --out fitted.json"
    assert typed(again.removeprefix("autoshard "))[0] == 0 and Path("fitted.json").is_file()


def test_a_log_that_is_refused_leaves_the_others(typed: Typed, logs: None) -> None:
    files = "short.log nowhere.log float8.toml titan-rowwise.log"
    code, out, err = typed(
        f"import {files} --config float8.toml --nodes 1 --cluster h100-96 --rows rows.jsonl --no-search"
    )
    lines = err.splitlines()
    assert code == 1 and len(lines) == 3 and "3 logs of 4" in " ".join(out.split())
    assert all(line.startswith("refused ") for line in lines)
    assert "short.log: is too short" in lines[0] and "nowhere.log: there is no such file" in lines[1]
    assert "float8.toml: holds no report of a step" in lines[2]
    assert len(Path("rows.jsonl").read_text("utf-8").splitlines()) == 1
    code, out, err = typed("import short.log nowhere.log --json")
    assert code == 1 and [entry["refused"] for entry in json.loads(out)["logs"]] and err.count("refused") == 2


def test_a_log_that_prints_its_arguments_needs_no_configuration(typed: Typed) -> None:
    Path("train.log").write_text(arguments(GPT_13B) + megatron([190000.0] * 8, 1024), encoding="utf-8")
    code, out, err = typed("import train.log --cluster a100-80 --no-search --json")
    (answer,) = json.loads(out)["logs"]
    assert (code, err, answer["step_time_s"]) == (0, "", 190.0)
    assert answer["row"]["candidate"] == "tp=2,pp=4,dp=1,sp=false,zero=0,recompute=full,kernels=megatron"
    assert answer["row"]["source"]["config"] == "printed in the log" and answer["inside"] in (True, False)


def test_a_cluster_of_the_users_own_goes_into_the_row(typed: Typed) -> None:
    Path("train.log").write_text(arguments(GPT_13B) + megatron([190000.0] * 8, 1024), encoding="utf-8")
    node_type = replace(load_node_type("a100-80"), name="mine")
    Path("mine.json").write_text(json.dumps(encode(node_type)), encoding="utf-8")
    typed.answer("import train.log --cluster mine.json --rows rows.jsonl --no-search")
    row = json.loads(Path("rows.jsonl").read_text("utf-8"))
    assert row["platform"] == "mine" and row["cluster"]["name"] == "mine"
    assert typed("validate rows.jsonl")[0] == 0


@pytest.mark.slow
def test_the_answer_to_logs_is_the_layout_to_try_next_and_its_plan(typed: Typed, logs: None) -> None:
    code, out, err = typed(f"{LINE} --rows rows.jsonl --json")
    following = json.loads(out)["next_layout"]
    assert (code, err, following["rows"], following["fitted"]) == (0, "", 2, False), "of one layout"
    assert following["fastest_step_time_s"] == pytest.approx(1.12, abs=0.01)
    assert following["candidate"] != following["fastest_candidate"] and 0 < following["chance"] < 1
    assert following["low_s"] < following["step_time_s"] < following["high_s"]
    assert 0 <= following["regret_after"] < following["regret"] < 0.5
    code, out, _ = typed(f"{LINE} --rows rows.jsonl --out next.json")
    words = " ".join(out.split())
    assert code == 0 and "a fit needs 3 rows of two layouts" in words and "once it is measured" in words
    assert "autoshard export next.json --to torchtitan" in words and words.endswith("wrote next.json")
    assert following["candidate"] in words and Path("next.json").is_file()
    assert typed("export next.json --to torchtitan")[0] == 0


@pytest.mark.slow
def test_three_rows_of_two_layouts_are_fitted_to_and_rows_of_other_programs_are_not(typed: Typed, logs: None) -> None:
    typed(f"{LINE} --rows rows.jsonl --no-search")
    path = Path("rows.jsonl")
    row = json.loads(path.read_text("utf-8").splitlines()[0])
    layout = "tp=2,pp=1,dp=4,zero=3,recompute=full,kernels=torch_compiled"
    third = {**row, "id": "third", "candidate": layout, "tp": 2, "dp": 4, "step_time_s": 1.5}
    foreign = {**third, "id": "foreign", "framework": "Megatron-LM", "step_time_s": 9.0}
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in (third, foreign))
    code, out, _ = typed(f"{LINE} --rows rows.jsonl --json")
    following = json.loads(out)["next_layout"]
    assert (code, following["rows"], following["fitted"]) == (0, 3, True)
    assert following["constants"] == "the rates of h100-96, and what torchtitan adds"
