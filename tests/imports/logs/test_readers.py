"""Logs as people have them: of many ranks, cut, packed, coloured, appended to one another, very long."""

import gzip
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from autoshard.errors import InputError
from autoshard.imports.logs.log import TrainingLog
from autoshard.imports.logs.reading import holds_log, read_log
from tests.imports.logs.published import GPT_13B, LOGS, arguments, megatron, titan

SECONDS = [3.0, *[2.0] * 7]
MEMORY = (
    "[Rank 0] (after AFTER iterations) memory (MB) | allocated: 1.0 | max allocated: {} | reserved: 1.0 | "
    "max reserved: {}\n"
)
TITAN = [(f"10:00:{2 * step:02},000", step, 40.0, 8192) for step in range(1, 9)]


def log_of(folder: Path, text: str | bytes, name: str = "a.log") -> TrainingLog:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_log(path)


def numbers(log: TrainingLog) -> list[int]:
    return [step.number for step in log.steps]


def test_seconds_and_milliseconds_are_told_apart(tmp_path: Path) -> None:
    ours = log_of(tmp_path, megatron([2000.0] * 3, 8))
    theirs = log_of(tmp_path, megatron([2.0] * 3, 8).replace("iteration (ms)", "iteration (s)"))
    assert [step.time_s for step in ours.steps] == [step.time_s for step in theirs.steps] == [2.0] * 3


def test_colours_and_ranks_before_lines_do_not_matter(tmp_path: Path) -> None:
    plain = titan("2025-06-04", TITAN)
    coloured = plain.replace("step:", "\x1b[31mstep:").replace("tps:", "\x1b[38;2;180;60;60mtps:")
    assert log_of(tmp_path, coloured).steps == log_of(tmp_path, plain).steps
    for before in ("{}: ", "[rank{}]:", "[default{}]: ", "[1,{}]<stdout>:"):
        lines = [
            f"{before.format(rank)} {line}\n" for line in megatron([2000.0] * 4, 8).splitlines() for rank in (1, 0)
        ]
        assert numbers(log_of(tmp_path, "".join(lines))) == [1, 2, 3, 4]


def test_ranks_without_names_are_read_once(tmp_path: Path) -> None:
    reports = megatron([2000.0] * 5, 8).splitlines()
    late = [*reports[:2] * 2, reports[2], reports[1], *reports[2:]]  # one rank is a step behind
    log = log_of(tmp_path, "\n".join(late) + "\n")
    assert numbers(log) == [1, 2, 3, 4, 5] and not log.remarks


def test_of_several_runs_in_a_file_the_last_is_read(tmp_path: Path) -> None:
    memory = MEMORY.replace("AFTER", "10")
    first = megatron([2000.0] * 9, 8) + memory.format(4096.0, 8192.0)
    again = arguments(GPT_13B) + megatron([3000.0] * 4, 8, 6) + memory.format(2048.0, 3072.0)
    log = log_of(tmp_path, first + again)
    assert numbers(log) == [6, 7, 8, 9] and log.steps[0].time_s == 3.0
    assert log.remarks == ("2 runs in the file; the last is read, which begins at step 6",)
    assert {(peak.kind, peak.gib) for peak in log.memory} == {("allocated", 2.0), ("reserved", 3.0)}
    assert log.config["tensor_model_parallel_size"] == 2 and log.config["virtual_pipeline_model_parallel_size"] is None
    back = log_of(tmp_path, megatron([2000.0] * 9, 8) + megatron([3000.0] * 4, 8, 5))
    assert numbers(back) == [5, 6, 7, 8]


def test_memory_before_the_optimizer_has_its_states_is_left_out(tmp_path: Path) -> None:
    line = MEMORY.replace("AFTER", "1").format(2048.0, 3.0)
    log = log_of(tmp_path, megatron([2000.0] * 3, 8) + line)
    assert log.memory == () and "after 1 iteration" in log.remarks[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.sampled_from(LOGS), share=st.floats(0, 1))
def test_a_log_that_is_cut_anywhere_is_read_up_to_there(tmp_path: Path, case: object, share: float) -> None:
    text = getattr(case, "text")  # noqa: B009 (the strategy has lost the type)
    whole = log_of(tmp_path, text)
    try:
        cut = log_of(tmp_path, text[: round(share * len(text))])
    except InputError as error:
        assert "holds no report" in str(error)
        return
    assert len(cut.steps) <= len(whole.steps)
    names = ["number", "time_s", "batch", *(["rate"] if cut.rate == whole.rate else [])]  # of which it is the first
    for report, other in zip(cut.steps, whole.steps, strict=False):
        assert all(getattr(report, name) in (None, getattr(other, name)) for name in names)


def test_packed_logs_are_read_and_broken_ones_are_refused(tmp_path: Path) -> None:
    text = megatron([2000.0] * 50, 8).encode()
    packed = gzip.compress(text)
    assert log_of(tmp_path, packed).steps == log_of(tmp_path, text).steps
    assert holds_log(tmp_path / "a.log")
    with pytest.raises(InputError, match="is packed, and its end is missing"):
        log_of(tmp_path, packed[:-20])
    with pytest.raises(InputError, match="is packed"):
        log_of(tmp_path, packed[:12] + b"\xff\xff\xff" + packed[15:])


def test_a_bar_is_read_by_its_clock(tmp_path: Path) -> None:
    losses = "{'loss': 1.5, 'grad_norm': 2.0, 'learning_rate': 1e-05, 'epoch': 0.1}\n"
    training = "".join(
        f"\r{step:3}%|##   | {step}/100 [{step * 30 // 60:02}:{step * 30 % 60:02}<45:00, 30.00s/it]" + losses
        for step in range(1, 12)
    )
    evaluation = "".join(f"\r 50%|##  | {step}/7 [00:{step:02}<00:09,  1.00it/s]" for step in range(1, 7))
    loading = "Map:  10%|#   | 1000/9000 [00:01<00:08, 999.00 examples/s]\n"
    log = log_of(tmp_path, loading + training + evaluation)
    assert numbers(log) == list(range(1, 12)) and log.num_steps == 100
    assert [step.stamp_s for step in log.steps][:2] == [30.0, 60.0]
    with pytest.raises(InputError, match="holds no report"):
        log_of(tmp_path, loading + evaluation)


def test_bars_of_lightning_say_seconds_and_sequences_per_second(tmp_path: Path) -> None:
    bar = "Epoch 0:   5%|5  | {}/62 [0{}:59<58:44,  0.02it/s, v_num=8-06, reduced_train_loss=6.9, global_step=1.0, "
    nxdt = bar + "consumed_samples=32.00, throughput={}, throughput_peak=0.06, gradient_norm=8.600]\r"
    log = log_of(tmp_path, "".join(nxdt.format(step, step, 0.1 * step) for step in range(3, 9)))
    assert [step.rate for step in log.steps][:2] == pytest.approx([0.3, 0.4]) and str(log.rate).startswith("sequences")
    nemo = bar + "train_step_timing in s={}]\r"
    log = log_of(tmp_path, "".join(nemo.format(step, step, 2.5) for step in range(3, 9)))
    assert [step.time_s for step in log.steps] == [2.5] * 6 and log.rate is None


def test_the_reports_of_deepspeed_join_the_steps_that_they_follow(tmp_path: Path) -> None:
    old = "[2022-03-11 02:0{0}:58,985] [INFO] [logging.py:69:log_dist] [Rank 0] step={0}0, skipped=0, lr=[5e-05]\n"
    old += (
        "[2022-03-11 02:0{0}:58,985] [INFO] [timer.py:189:stop] 0/{0}00, SamplesPerSec=83.4, MaxMemAllocated=9.02GB\n"
    )
    log = log_of(tmp_path, "".join(old.format(step) for step in range(1, 7)))
    assert numbers(log) == [10, 20, 30, 40, 50, 60] and log.rate is None  # that rate is a mean since the start
    assert log.memory[0].gib == 9.02
    printed = (
        "[2023-08-16 16:42:39,672] [INFO] [config.py:957:print]   train_batch_size ............. 64\n"
        "[2023-08-16 16:42:39,672] [INFO] [config.py:957:print]   train_micro_batch_size_per_gpu  4\n"
        "[2023-08-16 16:42:39,672] [INFO] [config.py:957:print]   bfloat16_enabled ............. True\n"
        "[2023-08-16 16:42:39,672] [INFO] [config.py:957:print]   zero_config .................. stage=3 x=True\n"
    )
    new = "[2023-11-07 01:5{0}:23,714] [INFO] [timer.py:260:stop] epoch=0/micro_step=40/global_step={0}0, "
    new += "RunningAvgSamplesPerSec=25.0, CurrSamplesPerSec=25.7, MemAllocated=4.32GB, MaxMemAllocated=38.49GB\n"
    log = log_of(tmp_path, printed + "".join(new.format(step) for step in range(1, 7)))
    assert [step.rate for step in log.steps] == [25.7] * 6 and not log.are_means
    assert log.config == {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "bf16.enabled": True,
        "zero_optimization.stage": 3,
    }  # fmt: skip


def test_a_long_log_is_read_in_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    noise, reports = "a line of something else that nobody reads\n" * 2_000, megatron([2000.0] * 10, 8)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(100):
            file.write(noise)
        file.write("x" * 10_000_000 + "\n")  # a line without an end in sight
        file.write(reports)
    seen = list[int]()
    tracemalloc.start()
    log = read_log(path, lambda so_far: seen.append(so_far.done_bytes))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert numbers(log) == list(range(1, 11)) and peak < 4_000_000 < path.stat().st_size
    assert len(seen) > 2 and seen == sorted(seen)


def test_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    for path, says in ((tmp_path, "is not a file"), (tmp_path / "no.log", "there is no such file")):
        with pytest.raises(InputError, match=says):
            read_log(path)
        assert not holds_log(path)
