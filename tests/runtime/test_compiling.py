"""Graphs compiled before a run: what the vendor's tool prints, and a tool of the test in its place."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.cost.predict import MOST_INSTRUCTIONS, most_instructions
from autoshard.errors import InputError, RunFailed
from autoshard.plan.codec import dump
from autoshard.runtime.compiling import Compiled, FailedGraph, compiled_of, streamed
from autoshard.runtime.launch import node_words, only_extracts
from autoshard.runtime.machine import COMPILER, refuse_without_compiler
from autoshard.runtime.meeting import GivenRank
from tests.plan.nxd.test_match import planned
from tests.runtime.cases import is_alive, started, wait_until, write_tiny

WORKDIR = "/" + "tmp/no-user/neuroncc_compile_workdir"
CACHE = "/var/tmp/neuron-compile-cache/neuronxcc-2.16.372.0+4a9b2326"
STAMP = "2025-01-17 01:16:07.000981:  32201"
ONE, TWO = "MODULE_9993940051196728623+3cc9a3cb", "MODULE_7470829644182149778+3cc9a3cb"


def reported(**status: bool) -> str:
    """The tool's own report of graphs, as JSON between lines of its log."""
    modules = {"one": ONE, "two": TWO}
    graphs = {
        f"{CACHE}/{modules[name]}/model.hlo_module.pb": {"status": good, "retry": 0, "compile_time": 9.77}
        for name, good in status.items()
    }
    text = json.dumps({"compilation_summary": {}, "compilation_report": graphs, "start_time": 1.5}, indent=4)
    return f"{STAMP}  INFO ||NEURON_PARALLEL_COMPILE||: {text}\n"


def totals(graphs: int, failed: int) -> str:
    counts = (("graphs", graphs), ("successful compilations", graphs - failed), ("failed compilations", failed))
    return "".join(f"{STAMP}  INFO ||NEURON_PARALLEL_COMPILE||: Total {name}: {count}\n" for name, count in counts)


def command(module: str, folder: str) -> str:
    """How the compiler is quoted where it has failed."""
    file = f"{WORKDIR}/{folder}/model.{module}"
    return f"Failed compilation with {['neuronx-cc', 'compile', f'{file}.hlo_module.pb', '--output', f'{file}.neff']}"


WHERE = f"{STAMP}  INFO ||NEURON_CACHE||: Compile cache path: /var/tmp/neuron-compile-cache\n"
TICKET = " - Please open a support ticket at https://github.com/aws-neuron/aws-neuron-sdk/issues/new"
TOO_MANY = "[XTP002] Number of instructions (8658944) is over the threshold (5000000)."
# Issue 987 of aws-neuron-sdk, with the lines around it as in issues 947 and 948.
REFUSED = f"{STAMP}  ERROR ||NEURON_CC_WRAPPER||: {command(ONE, '174522cf')}: 2024-08-15T14:01:19Z {TOO_MANY}{TICKET}\n"
# Issue 1299: the compiler passes, its wrapper does not, and only the number of a process is told.
NONE_TYPE = "stat: path should be string, bytes, os.PathLike or integer, not NoneType"
SOFT = f"Compiler status PASS\nSubprocess 17296 encountered error: {NONE_TYPE}\n"
# Issue 94 of aws-neuron-samples: a worker is gone, and its graphs are in no sum.
DIED = f"{STAMP}  INFO ||NEURON_PARALLEL_COMPILE||: sub-process 1 got exception: None\n"
# Issues 881 and 1023, and the documentation: failures of another time.
CACHED = (
    f"{STAMP}  ERROR ||NEURON_CC_WRAPPER||: Got a cached failed neff at {CACHE}/{TWO}/model.neff. "
    f"Will skip compilation, please set --retry_failed_compilation for recompilation: \n {command(TWO, '0a25')}: "
    f"2024-04-30T20:50:00Z [TEN404] Internal tensorizer error{TICKET}\n"
)
NOTHING_NEW = "No todo hlos found in cache or hlo_tasklist, parallel_compile return before spawning workers....\n"
LOG_ONE, LOG_TWO = f"{CACHE}/{ONE}/model.log", f"{CACHE}/{TWO}/model.log"
SOFT_FAILURES = [(TWO, "", LOG_TWO), ("", f"Subprocess 17296 encountered error: {NONE_TYPE}", "")]


@pytest.mark.parametrize(
    ("text", "graphs", "failed", "failures"),
    [
        (reported(one=True, two=True) + totals(2, 0), 2, 0, []),
        (NOTHING_NEW, 0, 0, []),
        (
            REFUSED + reported(one=False, two=True) + totals(2, 1), 2, 1,
            [(ONE, TOO_MANY, LOG_ONE)],
        ),
        (reported(one=False).replace("\n", "\nINFO: ") + totals(1, 1), 1, 1, [(ONE, "", LOG_ONE)]),
        (SOFT + reported(one=True, two=False) + totals(2, 1), 2, 1, SOFT_FAILURES),
        (DIED + totals(1, 0), 1, 1, [("", "sub-process 1 got exception: None", "")]),
        (CACHED + NOTHING_NEW, 0, 1, [(TWO, "[TEN404] Internal tensorizer error", LOG_TWO)]),
        (totals(300, 256), 300, 256, []),  # exit code 0, and no report
    ],
)  # fmt: skip
def test_what_became_of_graphs_is_read(text: str, graphs: int, failed: int, failures: list[tuple[str, ...]]) -> None:
    named = tuple(FailedGraph(graph=graph, cause=cause, log=log) for graph, cause, log in failures)
    cache = "/var/tmp/neuron-compile-cache"
    assert compiled_of(WHERE + text) == Compiled(num_graphs=graphs, num_failed=failed, failures=named, cache=cache)


def test_without_a_summary_nothing_is_known() -> None:
    whole = reported(one=False) + totals(12, 1)
    assert not any(compiled_of(whole[:end]) for end in range(0, len(whole) - 2, 7))
    assert compiled_of("ERROR ||NEURON_PARALLEL_COMPILE||: There was an error in the training script.\n") is None


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "")  # restored at the end, whatever the command sets
    monkeypatch.delenv("NEURON_COMPILE_CACHE_URL")
    return tmp_path


def tool(folder: Path, body: str) -> str:
    """A tool in the place of the vendor's, first on the path."""
    file = folder / "bin" / COMPILER
    file.parent.mkdir()
    file.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    file.chmod(0o755)
    return f"{file.parent}{os.pathsep}{os.environ['PATH']}"


def write_plan(folder: Path, text: str = "tp=8,pp=4,dp=1") -> None:
    (folder / "plan.json").write_text(dump(planned("llama3-8b", "trn1.32xlarge", text)), encoding="utf-8")


def test_a_short_run_is_extracted_and_compiled(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(here)
    (here / "said").write_text(WHERE + reported(one=True, two=True) + totals(2, 0), encoding="utf-8")
    record = 'echo "$@" > given; echo "$NEURON_COMPILE_CACHE_URL" > cache; cat said'
    monkeypatch.setenv("PATH", tool(here, record))
    assert main(["run", "plan.json", "--compile-only", "--seed", "3", "--learning-rate", "1e-3"]) == 0
    said = capsys.readouterr().out
    assert "Total graphs: 2" in said and "2 graphs compiled, cache: /var/tmp/neuron-compile-cache" in said
    assert "warning" not in said
    folder = "runs/plan-compiled"
    short = f"run plan.json --steps 10 --out {folder}/short --seed 3 --learning-rate 0.001 --checkpoint.to none"
    start = f"-m torch.distributed.run --standalone --nproc-per-node 32 -m autoshard.cli {short}"
    work = ["--parallel_compile_workdir", str(here / folder / "work")]
    assert (here / "given").read_text().split() == [*work, sys.executable, *start.split()]
    assert (here / "cache").read_text().strip() == str(here / folder / "cache")
    assert (here / folder / "compile.log").read_text() == (here / "said").read_text()
    assert main(["run", "plan.json", "--compile-only"]) == 2
    assert "Type --out runs/plan-compiled-2" in capsys.readouterr().err


def test_a_graph_that_fails_is_named_with_its_log(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(here, "tp=8,pp=1,dp=4,recompute=full")
    (here / "said").write_text(REFUSED + reported(one=False, two=True) + totals(2, 1), encoding="utf-8")
    monkeypatch.setenv("PATH", tool(here, "cat said; exit 1"))
    assert main(["run", "plan.json", "--compile-only", "--out", "a"]) == 1
    said = capsys.readouterr().out
    assert "warning: the largest graph, of stage 0, takes at least 4.11 M instructions" in said
    assert f"failed: {ONE}: {TOO_MANY}\n  More pp or tp" in said
    assert f"  log: {LOG_ONE}\n" in said and "1 of 2 graphs failed. Full output: a/compile.log" in said
    assert main(["run", "plan.json", "--compile-only", "--out", "b", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["graphs"], found["failed"], found["failures"][0]["graph"]) == (2, 1, ONE)
    assert found["warnings"] and found["log"] == "b/compile.log"


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("echo half a summ; kill -9 $$", "was ended by signal 9 before"),
        ("echo Total failed compilations: 0; exit 3", "ended with exit code 3 before"),
        ("exit 0", "ended with exit code 0 before"),
    ],
)
def test_a_tool_that_ends_early_is_a_failed_run(
    body: str, how: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(here)
    monkeypatch.setenv("PATH", tool(here, body))
    assert main(["run", "plan.json", "--compile-only"]) == RunFailed.exit_code
    errors = capsys.readouterr().err
    assert how in errors and "its output: runs/plan-compiled/compile.log" in errors


def test_output_is_shown_as_it_comes_and_whoever_stops_it_stops_all(here: Path) -> None:
    write_plan(here)
    body = "printf 'first half'; sleep 60 & echo $! > sleeper; wait"
    with started(here, "run", "plan.json", "--compile-only", PATH=tool(here, body)) as process:
        assert process.stdout
        assert process.stdout.readline().startswith("compiling the graphs of llama3-8b")
        assert process.stdout.read(10) == "first half"  # no line has ended
        wait_until(lambda: (here / "sleeper").exists() and (here / "sleeper").read_text().endswith("\n"), "it sleeps")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    wait_until(lambda: not is_alive(int((here / "sleeper").read_text())), "what the tool had started has ended")


def test_a_command_runs_to_its_end(tmp_path: Path) -> None:
    said: list[str] = []
    code = streamed(["sh", "-c", "printf '\\303'; sleep 0.1; printf '\\244!'; exit 5"], tmp_path / "log", said.append)
    assert code == 5 and "".join(said) == "ä!" and (tmp_path / "log").read_text(encoding="utf-8") == "ä!"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("tiny.json",), "--compile-only: the torch engine runs this plan without compiling ahead."),
        (("plan.json",), "--compile-only: neuron_parallel_compile starts the compiler, and comes with torch-neuronx"),
        (("plan.json", "--steps", "4"), "--steps: must be at least 5, so that every graph occurs, not 4"),
        (("plan.json", "--dry-run"), "--compile-only: cannot be combined with --rehearse or --dry-run."),
    ],
)
def test_what_is_not_compiled_is_refused(
    words: tuple[str, ...], says: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(here)
    write_tiny(here)
    monkeypatch.setenv("PATH", "")
    assert main(["run", *words, "--compile-only"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"autoshard: {says}") and not (here / "runs").exists()
    assert ("--rehearse 8" in line) == ("torch-neuronx" in line)


def test_every_node_starts_its_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("llama3-70b", "trn1.32xlarge", "tp=32,pp=8,dp=2")
    monkeypatch.setenv("PATH", tool(here, "exit 0"))
    refuse_without_compiler(plan, "plan.json", 16)
    for num_started in (1, 512):
        with pytest.raises(InputError, match=r"one process for every node.*srun --nodes 16 --ntasks-per-node 1"):
            refuse_without_compiler(plan, "plan.json", num_started)
    meeting = ["--nnodes", "16", "--node-rank", "3", "--master-addr", "trn003", "--master-port", "21235"]
    by_slurm = GivenRank(by="Slurm", rank=3, num_ranks=16, meeting="tcp://trn003:21234")
    by_torchrun = GivenRank(by="torchrun", rank=3, num_ranks=16, meeting="env://")
    outside = {"MASTER_ADDR": "trn003", "MASTER_PORT": "21234"}
    for node in (by_slurm, by_torchrun):
        assert node_words(node, 16, 32, outside) == [*meeting, "--nproc-per-node", "32"]


@pytest.mark.ranks
def test_a_run_that_only_extracts_leaves_no_row_to_learn_from(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not only_extracts({})
    write_tiny(here, "tp=1,pp=1,dp=1")
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
    assert main(["run", "tiny.json", "--steps", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("graphs were extracted but not run")
    assert not list(here.rglob("measured.jsonl"))


@pytest.mark.parametrize(("text", "near"), [("tp=8,pp=1,dp=4", True), ("tp=8,pp=4,dp=1", False)])
def test_the_largest_graph_is_the_work_of_a_rank_over_that_of_one_instruction(text: str, near: bool) -> None:
    plan = planned("llama3-8b", "trn1.32xlarge", text)
    stage, count = most_instructions(plan)
    share, lone = plan.mesh.size("tp") * plan.mesh.size("pp"), plan.mesh.size("pp") == 1
    products = 3 * 2 * plan.model.num_parameters * plan.workload.seq_len / share / (2 * 128 * 128 * 512)
    assert (count > MOST_INSTRUCTIONS / 2) == near and stage in range(len(plan.stages))
    low, high = (1.0, 1.5) if lone else (0.6, 1.2)  # forward, backward and attention, or backward of the largest stage
    assert low * products < count < high * products
