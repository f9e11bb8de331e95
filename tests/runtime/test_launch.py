"""Ranks are forked, watched and ended together: by failure, by signal, and by the death of their parent."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoshard.errors import InputError, RunFailed
from autoshard.runtime.launch import Placing, first_node, given_rank, launch
from autoshard.runtime.meeting import GivenRank, agreed_start
from autoshard.runtime.watchdog import Watch
from tests.runtime import cases
from tests.runtime.cases import children_of, environment, is_alive, started, tiny_plan, wait_until, write_tiny

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "71234"}


def run(num_ranks, body, folder):
    said = []
    return launch(None, num_ranks, body, show=said.append, placing=Placing(folder=folder)), said


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_all_ranks_run_and_the_first_answers(num_ranks: int, tmp_path: Path) -> None:
    def body(say):
        total = torch.tensor(dist.get_rank() + 1)
        dist.all_reduce(total)
        sys.stdout.write(f"I am {dist.get_rank()}\n")
        say(f"rank {dist.get_rank()} has {total}")
        return int(total), torch.get_num_threads(), os.environ["GLOO_SOCKET_IFNAME"]

    total = num_ranks * (num_ranks + 1) // 2
    answer, said = run(num_ranks, body, tmp_path)
    assert answer == (total, 1, "lo")
    assert said == [f"rank 0 has {total}"], "only the first rank is heard"
    logs = sorted((tmp_path / "logs").iterdir())
    assert [log.name for log in logs] == [f"rank-{rank}.log" for rank in range(num_ranks)]
    assert [log.read_text().splitlines()[-1] for log in logs] == [f"I am {rank}" for rank in range(num_ranks)]


def raises() -> None:
    raise ZeroDivisionError("of all things")


def dies() -> None:
    sys.stdout.write("the last words\n")
    os.kill(os.getpid(), signal.SIGKILL)


def refuses() -> None:
    raise InputError.of("cp_order", "is not executed yet")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("act", "says"),
    [
        (raises, ("ZeroDivisionError: of all things", "in raises")),
        (dies, ("it was killed by SIGKILL. Perhaps memory ran out", "the last words")),
        (lambda: os._exit(7), ("it ended with exit code 7",)),
    ],
)
def test_the_rank_that_failed_first_is_named_with_the_cause(act, says: tuple[str, ...], tmp_path: Path) -> None:
    def body(_):
        if dist.get_rank() == 1:
            act()
        dist.barrier()  # fails too, because rank 1 is gone

    with pytest.raises(RunFailed, match="rank 1 of 3 failed") as caught:
        run(3, body, tmp_path)
    message = str(caught.value)
    assert all(text in message for text in says)
    assert message.splitlines()[-1] == f"its log: {tmp_path}/logs/rank-1.log"


@pytest.mark.ranks
def test_what_the_user_can_mend_stays_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^cp_order: is not executed yet$"):
        run(2, lambda _: refuses(), tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "whom", "code", "says"),
    [
        (signal.SIGINT, "all", 130, "stopped by Ctrl-C after step "),  # as Ctrl-C in a terminal
        (signal.SIGKILL, "parent", -9, ""),
        pytest.param(signal.SIGTERM, "parent", 143, "stopped by SIGTERM", marks=pytest.mark.thorough),
        pytest.param(signal.SIGKILL, "rank 1", 3, "rank 1 of 2 failed, the others", marks=pytest.mark.thorough),
    ],
)
def test_a_signal_ends_all(number: signal.Signals, whom: str, code: int, says: str, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with started(tmp_path, "run", "tiny.json", "--steps", "100000", TMPDIR=str(temporary)) as process:
        steps = tmp_path / "runs" / "tiny" / "metrics.jsonl"
        wait_until(lambda: (steps.is_file() and steps.stat().st_size > 0) or process.poll() is not None, "a step")
        ranks = children_of(process.pid)
        assert len(ranks) == 2
        if whom == "all":
            os.killpg(process.pid, number)
        else:
            os.kill({"parent": process.pid, "rank 1": ranks[1]}[whom], number)
        wait_until(lambda: not any(map(is_alive, ranks)), "no rank is left")
        errors = process.stderr.read() if process.stderr else ""
        assert process.wait(10) == code
    assert says in errors and "Traceback" not in errors
    assert not list(temporary.iterdir())


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGTERM, ("it has ended with exit code 143", "stopped by SIGTERM")),
        (0, ("it runs\nrank 0 (", "train.py", " in on_forks\n")),
    ],
)
def test_a_test_that_waits_in_vain_says_where_the_run_stood(
    number: int, says: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path)
    with pytest.raises(AssertionError) as caught, started(tmp_path, "run", "tiny.json", "--steps", "9999") as process:
        steps = tmp_path / "runs" / "tiny" / "metrics.jsonl"
        wait_until(lambda: steps.is_file() and steps.stat().st_size > 0, "a step", process)
        os.kill(process.pid, number)
        monkeypatch.setattr(cases, "PATIENCE_S", cases.PATIENCE_S if number else 1.0)
        wait_until(lambda: False, "what never comes", process)
    (note,) = caught.value.__notes__
    assert all(words in note for words in says), note


def world(num_ranks: int) -> dict[str, str]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(one.getsockname()[1])}
    return {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), **where}


@pytest.mark.slow
@pytest.mark.ranks
def test_torchrun_starts_one_process_a_rank(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    words, two_ranks = ("run", "tiny.json", "--steps", "3"), world(2)
    with (
        started(tmp_path, *words, RANK="0", **two_ranks) as one,
        started(tmp_path, *words, RANK="1", **two_ranks) as two,
    ):
        first, second = one.communicate(timeout=cases.PATIENCE_S), two.communicate(timeout=120)
    assert (one.returncode, two.returncode) == (0, 0), (first, second)
    assert "step 3/3" in first[0] and second == ("", "")
    assert len((tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--out full --resume never", "--out full: already holds files"),
        pytest.param(
            "--steps 2 --profile 9", "--profile: the run has 2 steps, so step 9 is none of them",
            marks=pytest.mark.thorough,
        ),
    ],
)  # fmt: skip
def test_ranks_that_were_started_one_by_one_hear_at_once_what_the_first_refuses(
    words: str, said: str, tmp_path: Path
) -> None:
    write_tiny(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    line, two_ranks = ("run", "tiny.json", *words.split()), world(2)
    with started(tmp_path, *line, RANK="1", **two_ranks) as two:
        loads = Path(f"/proc/{two.pid}/maps")  # the first waits 30 s for others: on a busy machine torch takes longer
        wait_until(lambda: not loads.exists() or "libtorch" in loads.read_text(), "the second loads torch")
        with started(tmp_path, *line, RANK="0", **two_ranks) as one:
            (_, refusal), (_, heard) = one.communicate(timeout=cases.PATIENCE_S), two.communicate(timeout=120)
    assert (one.returncode, two.returncode) == (2, 3) and said in refusal
    refused = f"autoshard: rank 0 does not take the run up: {said}"  # torch may warn before
    assert any(line.startswith(refused) for line in heard.splitlines()) and "Traceback" not in heard


def test_ranks_that_are_started_again_agree_in_a_store_that_holds_the_start_before() -> None:
    stores: Any = dist  # which its types leave out
    store = stores.HashStore()
    for _ in range(3):
        with ThreadPoolExecutor() as pool:  # those that come before rank 0 read the name of the start before
            agreeing = [pool.submit(agreed_start, store, rank, 3, 60.0) for rank in (1, 2)]
            time.sleep(0.1)
            starts = {agreed_start(store, 0, 3), *(answer.result() for answer in agreeing)}
        assert len(starts) == 1
    with pytest.raises(RunFailed, match="rank 1 has waited 0 s for rank 0 to begin"):
        agreed_start(store, 1, 2, 0.2)


@pytest.mark.slow
@pytest.mark.ranks
def test_torchrun_starts_ranks_again_after_one_was_killed(tmp_path: Path) -> None:
    write_tiny(tmp_path, "tp=2,pp=1,dp=1")
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    run = ["--nproc-per-node", "2", "-m", "autoshard.cli", "run", "tiny.json", "--steps", "60", "--out", "run"]
    more, lines = ["--checkpoint.every-steps", "2"], tmp_path / "run" / "metrics.jsonl"
    command = [*agent, *run, *more]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: lines.exists() and lines.read_text().count("\n") > 5, "some steps are done")
        os.kill(max(children_of(process.pid)), signal.SIGKILL)
        _, said = process.communicate(timeout=cases.PATIENCE_S)
    assert process.returncode == 0, said
    assert [record["step"] for record in cases.read_metrics(lines)] == [*range(1, 61)]
    starts = [json.loads(line) for line in (tmp_path / "run" / "attempts.jsonl").read_text().splitlines()]
    assert [record["from"] > 0 for record in starts if "from" in record] == [False, True]


def test_a_full_folder_of_temporary_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def body(_):
        raise dist.DistStoreError("No space left on device")

    with pytest.raises(RunFailed, match=rf"{tmp_path}, where ranks meet: no space .* let TMPDIR name"):
        run(1, body, tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(RunFailed, match="ranks meet in a temporary file: No such file or directory"):
        run(1, body, tmp_path)


def test_a_port_that_another_program_has_is_named(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        meeting = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        first = GivenRank(by="Slurm", rank=0, num_ranks=2, meeting=meeting, alone=True)
        with pytest.raises(
            RunFailed, match=r"port \d+ of this machine, at which ranks meet, is taken. Set MASTER_PORT"
        ):
            launch(first, 2, lambda _: None, show=lambda _: None, placing=Placing(folder=tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_world_of_another_size_is_refused_once(rank: str, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    with started(tmp_path, "run", "tiny.json", RANK=rank, **world(3)) as process:
        output, errors = process.communicate(timeout=400)
    assert process.returncode == 2 and not output
    said = "autoshard: WORLD_SIZE: torchrun started 3 processes, but tiny.json is for 2 ranks."
    assert errors.startswith(said) if rank == "0" else not errors


@pytest.mark.ranks
def test_a_rank_of_torchrun_that_fails_says_so_itself(tmp_path: Path) -> None:
    settings = {"RANK": "0", **world(1)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        with pytest.raises(RunFailed, match="rank 0 of 1 failed: ZeroDivisionError: of all things"):
            launch(given_rank(settings), 1, lambda _: raises(), show=print, placing=Placing(folder=tmp_path))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "given",
    [{}, {"LOCAL_RANK": "1", "SLURM_JOB_ID": "1"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, environment()],
)
def test_nobody_has_started_ranks(given: dict[str, str]) -> None:
    assert given_rank(given) is None


@pytest.mark.parametrize(
    ("given", "rank", "num_ranks", "meeting", "alone", "local_rank"),
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, 1, 2, "env://", True, 1),
        (TORCHRUN | {"LOCAL_RANK": "0"}, 1, 2, "tcp://here:29500", False, 0),
        (SLURM | {"SLURM_STEP_NODELIST": "trn[007-008]"}, 3, 8, "tcp://trn007:21234", False, 3),
        (SLURM | {"SLURM_LOCALID": "1", "MASTER_ADDR": "a"}, 3, 8, "tcp://a:21234", False, 1),
        (SLURM | {"SLURM_NNODES": "1", "MASTER_PORT": "5"}, 3, 8, "tcp://127.0.0.1:5", True, 3),
    ],
)
def test_torchrun_and_slurm_say_which_rank_this_is(given, rank, num_ranks, meeting, alone, local_rank) -> None:
    found = given_rank(given)
    assert found and found.by == ("Slurm" if "SLURM_PROCID" in given else "torchrun")
    assert (found.rank, found.num_ranks, found.meeting) == (rank, num_ranks, meeting)
    assert (found.alone, found.local_rank) == (alone, local_rank)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE: missing, though RANK is set. Start the ranks with torchrun, or unset RANK"),
        (TORCHRUN | {"RANK": "x"}, "RANK: must be a whole number, not 'x'"),
        (TORCHRUN | {"RANK": "2"}, "RANK: is 2, but there are only 2 ranks"),
        (SLURM | {"SLURM_PROCID": "8"}, "SLURM_PROCID: is 8, but there are only 8 ranks"),
        (SLURM | {"SLURM_STEP_ID": ""}, "SLURM_NTASKS: this job has 8 tasks, but .* Type srun autoshard run"),
        (SLURM | {"SLURM_STEP_ID": "4294967291"}, "this process is none that srun started"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(environment: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        given_rank(environment)


def test_the_wrong_number_of_tasks_is_refused() -> None:
    given = given_rank(SLURM)
    assert given
    with pytest.raises(InputError, match=r"SLURM_NTASKS: Slurm started 8 .* for 4 ranks. Type srun --ntasks 4"):
        given.refuse_other_size(4, "plan.json")
    given.refuse_other_size(8, "plan.json")


@pytest.mark.parametrize(("nodes", "first"), [("a1", "a1"), ("a-[1,3]", "a-1"), ("q[08-09]", "q08"), ("", "localhost")])
def test_rank_0_is_on_the_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.ranks
def test_a_rank_of_torchrun_that_cannot_write_into_the_folder_of_the_run_names_it(tmp_path: Path) -> None:
    (folder := tmp_path / "file").touch()
    rank = GivenRank(by="torchrun", rank=1, num_ranks=2, meeting="env://")
    placing = Placing(folder=folder, watch=Watch(folder, tiny_plan("tp=1,pp=1,dp=2"), here=False))
    with pytest.raises(InputError, match=r"--out .*file: cannot be written: Not a directory"):
        launch(rank, 2, lambda _: None, show=print, placing=placing)
