"""Whatever is typed, and whatever happens to the output: an exit code and a message, never a traceback."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from autoshard import cli
from autoshard.cli import main
from autoshard.command_line import reading

ROOT = Path(__file__).parents[2]
LIST = [sys.executable, "-m", "autoshard.cli", "list", "models"]
ENVIRONMENT: Any = {**os.environ, "PYTHONPATH": str(ROOT)}

OPTIONS = (
    "--model", "--nodes", "--cluster", "--lnc", "--ranks", "--seq-len", "--global-batch", "--precision", "--engine",
    "--optimizer", "--fix", "--at", "--top", "--out", "--trace", "--json", "--config", "--help", "--zork", "-x", "--",
)  # fmt: skip
WORDS = (
    "tiny-llama", "tiny-mixtral", "gpt2-xl", "local", "trn1.32xlarge", "h100-80", "1", "2", "3", "7", "64", "-1", "0",
    "1.5", "1e30", str(10**18), "", " ", ",", "=", "tp=2", "tp=8,pp=2", "tp=3", "pp=2,stages=1/3",
    "recompute=full/none", "place=3/2/1/0", "dp=99999", "vp=999999999", "kernels=te", "recompute=selective[norms]",
    "sp=true", "zero=3", "schedule=interleaved,vp=2", "cp=4,cp_kind=all_to_all", "bf16", "fp32", "nxd", "any", "torch",
    "nxdd", "\n", "[red]", "x" * 5000, "é", "a\0b", ".", "no/where", "plan.json", "models", "rules",
)  # fmt: skip
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
ARGUMENTS = st.lists(st.one_of(st.sampled_from(OPTIONS), st.sampled_from(WORDS), TEXT), max_size=8)
PAIRS = st.lists(st.tuples(st.sampled_from(OPTIONS[:15]), st.sampled_from(WORDS)), max_size=4)
COMMANDS = st.sampled_from(["plan", "explain", "verify", "compare", "validate", "list", "nonsense", ""])


def check(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code in (0, 1, 2) and (code == 0 or out or err)
    assert "Traceback" not in out + err and "Warning" not in out + err
    assert bool(err) == (code == 2) or code == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(command=COMMANDS, arguments=ARGUMENTS)
def test_any_words(command: str, arguments: list[str], capsys: pytest.CaptureFixture[str]):
    check([command, *arguments], capsys)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=PAIRS)
def test_any_options_of_a_small_question(pairs: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]):
    asked = ["plan", "--model", "tiny-llama", "--cluster", "local", "--global-batch", "8", "--top", "1"]
    check([*asked, *(word for pair in pairs for word in pair)], capsys)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_in_a_file(data: bytes, capsys: pytest.CaptureFixture[str]):
    Path("a.yaml").write_bytes(data)
    Path("a.json").write_bytes(data)
    for name in ("a.yaml", "a.json"):
        check(["plan", "--config", name], capsys)
        check(["plan", "--model", "tiny-llama", "--cluster", name], capsys)
    for words in (["plan", "--model"], ["verify"], ["compare", "a.json"], ["validate"]):
        check([*words, "a.json"], capsys)


def test_a_reader_that_leaves_early_is_no_error():
    process = subprocess.Popen(LIST, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    process.stdout.close()
    with process.stderr:
        assert (process.stderr.read(), process.wait()) == ("", 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device on this system")
@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_disk_is_said(buffered: bool):
    env = ENVIRONMENT if buffered else {**ENVIRONMENT, "PYTHONUNBUFFERED": "1"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(LIST, env=env, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "autoshard: the output: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device on this system")
def test_a_message_that_cannot_be_written_leaves_the_exit_code():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*LIST, "nothing"], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=full, check=False)
    assert done.returncode == 2


def test_a_terminal_that_knows_only_ascii_gets_an_answer(monkeypatch: pytest.MonkeyPatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["plan", "--model", "tiny-llama", "--cluster", "local", "--fix", "tp=1,mbs=8"]) == 0
    terminal.flush()
    assert b"wrote plan.json" in terminal.buffer.getvalue()  # type: ignore[attr-defined]


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "command_of", lambda _: interrupted)
    monkeypatch.setattr(reading, "read_options", lambda *_: {})
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "autoshard: interrupted\n"


SAYS_WHEN_IT_SEARCHES = """
import sys
from autoshard.cli import main
from autoshard.search.bound.priced_layouts import LayoutPricer

priced = LayoutPricer.priced

def first(*arguments, **options):
    LayoutPricer.priced = priced
    print("searching", flush=True)
    return priced(*arguments, **options)

LayoutPricer.priced = first
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_ctrl_c_in_a_long_search_ends_it():
    words = ["plan", "--model", "llama3.1-405b", "--seq-len", "131072"]
    command, pipe = [sys.executable, "-c", SAYS_WHEN_IT_SEARCHES, *words], subprocess.PIPE
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout and process.stdout.readline() == "searching\n"
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=600)
    assert "interrupted" in out + error, "at the next step of the search"
    assert "autoshard/search" not in error and "Traceback" not in error
