"""Whatever number or word in a file is another one: an exit code, one clear message, no traceback and no hang."""

import json
import signal
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from autoshard.cli import main
from autoshard.plan.codec import dump
from autoshard.search.ask.api import plan as planned
from autoshard.spec.cluster_catalogue import load_cluster, load_node_type
from autoshard.spec.record import encode
from tests.calibration.measured_cases import SMALL

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")

_LIMIT_S = 60  # a hang: each of these commands takes a second
SHARE = max(2, settings().max_examples // 8)  # commands take up to a second
AT_WORK = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=SHARE
)
NUMBERS = (0, -1, 1, 3, 10**6, 2**31, 2**62, 10**30, 0.5, 1e-300, 5e-324, 1e18, 1e308, -0.0)
VALUES = st.sampled_from([*NUMBERS, None, True, "", "x", "tp=2", [], {}, [0], {"a": 1}])
CARD = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
SMALLEST = "--global-batch 4 --fix dp=1,mbs=1 --top 1 --out out.json"
RECIPE = {"model": "tiny-llama", "cluster": "local", "ranks": 2, "seq_len": 64, "global_batch": 4, "fix": "pp=2",
          "steps": 3, "schedule": {"shape": "cosine", "warm_up_steps": 1}}  # fmt: skip
QUESTIONS: dict[str, tuple[str, ...]] = {  # file -> the commands that read it
    "plan.json": ("explain plan.json", "verify plan.json", "compare plan.json plan.json"),
    "recipe.json": ("plan --config recipe.json --out out.json --top 1",),
    "cluster.json": (f"plan --model tiny-llama --cluster cluster.json --seq-len 64 {SMALLEST}",),
    "rows.jsonl": ("validate rows.jsonl",),
    "config.json": (f"plan --model config.json --cluster local --ranks 1 {SMALLEST} --seq-len 64",),
}


@cache
def whole(name: str) -> Any:
    """A file that works."""
    if name == "plan.json":
        found = planned("tiny-llama", load_cluster("local", ranks=2), fix="pp=2,mbs=1")
        return json.loads(dump(found.plan))
    node = encode(load_node_type("h100-80"))
    return {"recipe.json": RECIPE, "cluster.json": {**node, "name": "lab", "chips_per_node": 1}, "rows.jsonl": SMALL,
            "config.json": CARD}[name]  # fmt: skip


def spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value, innermost included."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from spots(value[key])


def answered(words: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Run a command: an exit code, and a message if it is not 0."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"{words} hangs")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(_LIMIT_S)
    try:
        code = main(words)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    out, err = capsys.readouterr()
    assert code in (0, 1, 2) and (code == 0 or out or err), words
    assert "Traceback" not in out + err and "Warning" not in out + err, words
    assert code != 2 or (err.startswith("autoshard: ") and not out), words
    return code


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_whole_files_are_answered(name: str, capsys: pytest.CaptureFixture[str]):
    Path(name).write_text(json.dumps(whole(name)), encoding="utf-8")
    assert [answered(words.split(), capsys) for words in QUESTIONS[name]] == [0] * len(QUESTIONS[name])


@pytest.mark.parametrize("name", QUESTIONS)
@AT_WORK
@given(data=st.data())
def test_a_mutated_file_is_answered(name: str, data: st.DataObject, capsys: pytest.CaptureFixture[str]):
    mutated = deepcopy(whole(name))
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(list(spots(mutated))))
        container[key] = data.draw(VALUES)
    Path(name).write_text(json.dumps(mutated), encoding="utf-8")
    for words in data.draw(st.sampled_from([QUESTIONS[name]])):
        answered(words.split(), capsys)


@pytest.mark.parametrize("number", [1e308, 5e-324, 1e-300])
def test_numbers_that_make_a_step_take_no_time_or_for_ever_are_refused(
    number: float, capsys: pytest.CaptureFixture[str]
):
    for key in ("latency_s", "bandwidth_bytes_per_s"):
        plan = deepcopy(whole("plan.json"))
        plan["cluster"]["links"][0][key] = number
        Path("plan.json").write_text(json.dumps(plan), encoding="utf-8")
        if key == "latency_s" and number < 1:  # no time at all is what a link may take
            continue
        assert main(["explain", "plan.json"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"plan.json: cluster.links[0].{key}: must be at" in line


@pytest.mark.parametrize("command", ["verify", "explain", "report", "compare", "launch", "run", "export", "plan"])
def test_constants_that_are_edited_wrongly_are_refused_by_the_name_of_their_file(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    right, wrong = planned("tiny-llama", "h100-80", fix="tp=2,pp=1,mbs=8").save("right.json"), Path("wrong.json")
    wrong.write_text(right.read_text().replace("matrix_efficiency=", "matrix_efficiency=x"))
    words = {"compare": [str(right)], "export": ["--to", "torchtitan"], "launch": ["--scheduler", "slurm"]}
    to = [] if command in ("verify", "explain", "compare") else ["--out", "out"]
    like = ["--like"] if command == "plan" else []
    assert main([command, *like, str(wrong), *words.get(command, []), *to, *(["--nodes", "1"] if like else [])]) == 2
    assert "wrong.json: provenance.calibration" in capsys.readouterr().err
