"""Ranks are forked, watched and ended together: by failure, by signal, and by the death of their parent."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autoshard.errors import InputError, RunFailed
from autoshard.runtime.launch import Placing, first_node, given_rank, launch
from tests.runtime.cases import children_of, environment, is_alive, started, wait_until, write_tiny

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "71234"}


def run(num_ranks, body, folder):
    said = []
    return launch(None, num_ranks, body, show=said.append, placing=Placing(folder=folder)), said


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
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


@pytest.mark.ranks
def test_the_rank_that_failed_first_is_named_with_its_traceback(tmp_path: Path) -> None:
    def body(_):
        if dist.get_rank() == 1:
            raise ZeroDivisionError("of all things")
        dist.barrier()  # fails too, because rank 1 is gone

    with pytest.raises(RunFailed, match="rank 1 of 3 failed") as caught:
        run(3, body, tmp_path)
    message = str(caught.value)
    assert "ZeroDivisionError: of all things" in message and "in body" in message
    assert message.splitlines()[-1] == f"its log: {tmp_path}/logs/rank-1.log"
    assert "ZeroDivisionError: of all things" in (tmp_path / "logs" / "rank-1.log").read_text()


@pytest.mark.ranks
def test_a_rank_that_dies_without_a_word_is_named(tmp_path: Path) -> None:
    def body(_):
        if dist.get_rank() == 1:
            sys.stdout.write("the last words\n")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RunFailed, match="rank 1 of 2 failed") as caught:
        run(2, body, tmp_path)
    assert "it was killed by SIGKILL. Perhaps memory ran out" in str(caught.value)
    assert "the last words" in str(caught.value)


@pytest.mark.ranks
def test_a_rank_that_leaves_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"rank 0 of 1 failed.*\n.*exit code 7"):
        run(1, lambda _: os._exit(7), tmp_path)


@pytest.mark.ranks
def test_what_the_user_can_mend_stays_an_input_error(tmp_path: Path) -> None:
    def body(_):
        raise InputError.of("cp_order", "is not executed yet")

    with pytest.raises(InputError, match=r"^cp_order: is not executed yet$"):
        run(2, body, tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "whom", "code", "says"),
    [
        (signal.SIGINT, "all", 130, "interrupted"),  # as Ctrl-C in a terminal
        pytest.param(signal.SIGTERM, "parent", 143, "stopped by SIGTERM", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, "parent", -9, "", marks=pytest.mark.slow),
        (signal.SIGKILL, "rank 1", 3, "rank 1 of 2 failed, the others were stopped"),
    ],
)
def test_a_signal_ends_all(number: signal.Signals, whom: str, code: int, says: str, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    with started(tmp_path, "run", "tiny.json", "--steps", "100000") as process:
        steps = tmp_path / "runs" / "tiny" / "metrics.jsonl"
        wait_until(lambda: steps.is_file() or process.poll() is not None, "there is a step")
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


@pytest.mark.ranks
def test_torchrun_starts_one_process_a_rank(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    words = ("run", "tiny.json", "--steps", "3")
    with started(tmp_path, *words, RANK="0", **world) as one, started(tmp_path, *words, RANK="1", **world) as two:
        first, second = one.communicate(timeout=30), two.communicate(timeout=30)
    assert (one.returncode, two.returncode) == (0, 0), (first, second)
    assert "step 3/3" in first[0] and second == ("", "")
    assert len((tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_world_of_another_size_is_refused_once(rank: str, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with started(tmp_path, "run", "tiny.json", RANK=rank, **world) as process:
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 2 and not output
    told = "autoshard: WORLD_SIZE: torchrun started 3 processes, but tiny.json is for 2 ranks."
    assert errors.startswith(told) if rank == "0" else not errors


@pytest.mark.ranks
def test_a_rank_of_torchrun_that_fails_says_so_itself(tmp_path: Path) -> None:
    plan = write_tiny(tmp_path, "tp=1,pp=1,dp=1")
    (tmp_path / "runs").write_text("in the way of the folder", encoding="utf-8")
    world = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    with started(tmp_path, "run", plan.name, RANK="0", **world) as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 2 and errors == "autoshard: --out runs/tiny: cannot be made: Not a directory\n"

    def body(_):
        raise ValueError("out of luck")

    given = given_rank({"RANK": "0", **world})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", **world}.items():
            patch.setenv(name, value)
        with pytest.raises(RunFailed, match="rank 0 of 1 failed: ValueError: out of luck"):
            launch(given, 1, body, show=print, placing=Placing(folder=tmp_path))
    dist.destroy_process_group()


def _free_port() -> str:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def test_nobody_has_started_ranks() -> None:
    assert given_rank({}) is None
    assert given_rank({"LOCAL_RANK": "1", "SLURM_JOB_ID": "1"}) is None
    assert given_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None, "a batch script of one task"
    assert given_rank(environment()) is None


def test_torchrun_says_which_rank_this_is() -> None:
    given = given_rank(TORCHRUN | {"LOCAL_WORLD_SIZE": "2"})
    assert given and (given.rank, given.num_ranks, given.meeting, given.alone) == (1, 2, "env://", True)
    second = given_rank(TORCHRUN | {"LOCAL_RANK": "0"})
    assert (given.place, second and second.place) == (1, 0), "its number on its machine"


def test_slurm_says_which_rank_this_is() -> None:
    given = given_rank(SLURM | {"SLURM_STEP_NODELIST": "trn[007-008]"})
    assert given and (given.by, given.rank, given.num_ranks, given.place) == ("Slurm", 3, 8, 3)
    second = given_rank(SLURM | {"SLURM_STEP_NODELIST": "trn[007-008]", "SLURM_LOCALID": "1"})
    assert second and second.place == 1
    assert given.meeting == "tcp://trn007:21234" and not given.alone
    alone = given_rank(SLURM | {"SLURM_NNODES": "1", "MASTER_PORT": "5"})
    assert alone and alone.meeting == "tcp://127.0.0.1:5" and alone.alone


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
