"""Event files and offline runs, written by the packages that write them and read without these."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from autoshard.errors import InputError
from autoshard.imports.logs.log import TrainingLog
from autoshard.imports.logs.reading import holds_log, logs_in, read_log
from autoshard.imports.logs.tensorboard import is_event_file
from autoshard.imports.logs.wire import BrokenMessage, signed, wire_fields
from tests.runtime.metrics.offline import wandb_environment

WRITES_EVENTS = """
import sys
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter(sys.argv[1])
for step in range(1, 31):
    writer.add_scalar("iteration-time", 2.5 if step > 1 else 9.0, step)
    writer.add_scalar("iteration-time vs samples", 2.5, step * 64)
    writer.add_scalar("batch-size", 64, step)
    writer.add_scalar("mem-max-allocated-bytes", 3.0 * 2**30, step)
writer.add_text("tensor_model_parallel_size", "8", global_step=0)
writer.add_text("bf16", "True", global_step=0)
writer.close()
"""
WRITES_RUN = """
import sys
import wandb
config = {"parallelism": {"tensor_parallel_degree": 2}, "note": "y" * 40000}  # more than a block of the file
wandb.init(project="p", dir=sys.argv[1], config=config, mode="offline")
for step in range(1, 41):
    wandb.log({"throughput(tps)": 1000.0 + step, "memory/max_reserved(GiB)": 40.5, "loss": 1.0}, step=step)
wandb.finish()
"""


def written(folder: Path, code: str, pattern: str) -> Path:
    """The file that a package writes in a process of its own."""
    environment = wandb_environment(folder, WANDB_SILENT="true", PYTHONWARNINGS="ignore")
    subprocess.run([sys.executable, "-c", code, str(folder)], env=environment, check=True, capture_output=True)
    return next(iter(sorted(folder.rglob(pattern))))


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("events"), WRITES_EVENTS, "events.out.*")


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("run"), WRITES_RUN, "run-*.wandb")


def test_an_event_file_is_read_without_its_package(events: Path) -> None:
    assert holds_log(events)
    log = read_log(events)
    assert (log.program, len(log.steps), log.remarks) == ("Megatron-LM", 30, ())
    assert [step.time_s for step in log.steps][:2] == [9.0, 2.5] and {step.batch for step in log.steps} == {64}
    assert log.config == {"tensor_model_parallel_size": 8, "bf16": True}
    assert log.memory[0].gib == 3.0 and log.date is not None and log.date.startswith("20")


def test_an_offline_run_is_read_without_its_package(offline_run: Path) -> None:
    assert holds_log(offline_run)
    log = read_log(offline_run)
    assert (log.program, len(log.steps), log.remarks) == ("torchtitan", 40, ())
    assert [step.rate for step in log.steps][:2] == [1001.0, 1002.0] and log.memory[0].gib == 40.5
    assert log.config["parallelism.tensor_parallel_degree"] == 2 and len(log.config["note"]) == 40000
    assert all(step.stamp_s for step in log.steps)


def test_a_folder_stands_for_the_logs_in_it(tmp_path: Path, events: Path, offline_run: Path) -> None:
    inner = tmp_path / "runs" / "latest-run"
    inner.mkdir(parents=True)
    (inner / "notes.txt").write_text("step 7", encoding="utf-8")
    with pytest.raises(InputError, match=r"runs: is a folder without a log\. Logs of Megatron-LM, torchtitan"):
        logs_in(tmp_path / "runs")
    kept = [inner / events.name, inner / offline_run.name]
    for source, copy in zip((events, offline_run), kept, strict=True):
        copy.write_bytes(source.read_bytes())
    assert logs_in(tmp_path / "runs") == sorted(kept) and logs_in(kept[0]) == kept[:1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1), of_wandb=st.booleans())
def test_a_file_that_is_cut_anywhere_is_read_up_to_there(
    tmp_path: Path, events: Path, offline_run: Path, share: float, of_wandb: bool
) -> None:
    source = offline_run if of_wandb else events
    whole, data = read_log(source), source.read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(data[: round(share * len(data))])
    try:
        log = read_log(cut)
    except InputError as error:
        assert "holds no report" in str(error)
        return
    assert [step.number for step in log.steps] == [step.number for step in whole.steps][: len(log.steps)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.integers(12, 10**6), max_size=8), byte=st.integers(0, 255), of_wandb=st.booleans())
def test_a_damaged_file_stops_no_reader(
    tmp_path: Path, events: Path, offline_run: Path, places: list[int], byte: int, of_wandb: bool
) -> None:
    data = bytearray((offline_run if of_wandb else events).read_bytes())
    for place in places:
        data[12 + place % (len(data) - 12)] = byte
    path = tmp_path / "damaged"
    path.write_bytes(bytes(data))
    try:
        assert isinstance(read_log(path), TrainingLog)
    except InputError as error:
        assert "holds no report" in str(error)


def test_messages_that_end_too_soon_are_refused() -> None:
    for data in (b"\x08", b"\x08\xff" * 9, b"\x12\x05hi", b"\x0b", b"\x09\x00"):
        with pytest.raises(BrokenMessage):
            list(wire_fields(data))
    assert signed(b"") == 0 and not is_event_file(b"") and not is_event_file(struct.pack("<QI", 24, 7))


def test_names_that_no_program_writes_make_no_log(tmp_path: Path, offline_run: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(offline_run.read_bytes().replace(b"throughput(tps)", b"throughput(abc)")
                     .replace(b"max_reserved", b"max_reserveX"))  # fmt: skip
    with pytest.raises(InputError, match=r"holds no report of a step that is known\. Logs of Megatron-LM, torchtitan"):
        read_log(path)
