"""neuron-monitor's lines, read from a recording written after its documented format, and as a process."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from autoshard.runtime.metrics.neuron_monitor import TOOL, NeuronMonitor, neuron_record
from tests.runtime.cases import ROOT, is_alive, wait_until

RECORDING = ROOT / "tests" / "data" / "neuron_monitor.jsonl"
LINES = RECORDING.read_text(encoding="utf-8").splitlines()
FIELDS = {"core_use", "least_core_use", "num_cores", "device_bytes", "host_bytes", "ecc_uncorrected", "errors"}


def test_a_report_is_summed_over_processes() -> None:
    first, second, third, fourth = (neuron_record([line]) or {} for line in LINES)
    assert first["core_use"] == pytest.approx((0.42 + 0.63) / 2) and "fault" not in first and not first["errors"]
    assert first["device_bytes"] == 2 * 12519788544 and first["host_bytes"] == 2 * 6997643264
    assert second["errors"] == {"hardware": 1, "numerical": 2, "timed_out": 3} and second["ecc_uncorrected"] == 2
    assert third["num_cores"] == 0 and third["fault"] == "neuron driver is not running"
    assert fourth["num_cores"] == 0 and fourth["device_bytes"] == 0 and fourth["fault"] == "no counters"


def test_reports_between_two_steps_are_joined() -> None:
    assert neuron_record([]) is None
    assert neuron_record(LINES[:2]) == {
        "core_use": pytest.approx((0.42 + 0.63 + 0.21 + 0.84) / 4),
        "least_core_use": pytest.approx(0.21),
        "num_cores": 2,
        "device_bytes": 12519788544 + 12619788544,
        "host_bytes": 2 * 6997643264,
        "ecc_uncorrected": 2,
        "errors": {"hardware": 1, "numerical": 2, "timed_out": 3},
    }
    found = neuron_record(LINES[2:])
    assert found and found["core_use"] == 0.0 and found["fault"] == "neuron driver is not running"


@given(st.text('{}[]:,"0 aneuron_runtime_data'))
def test_what_is_no_report_is_left_out(text: str) -> None:
    assert neuron_record([text]) is None


@pytest.mark.parametrize(
    "text", ["[" * 5000, '{"neuron_runtime_data":' * 5000, LINES[1].replace("12519788544", "1e999")]
)
def test_a_report_that_cannot_be_computed_with_is_left_out(text: str) -> None:
    assert neuron_record([text]) is None


@given(st.data())
def test_a_report_may_lack_anything(data: st.DataObject) -> None:
    report = json.loads(LINES[1])

    def without(value: object) -> object:
        if isinstance(value, list):
            return [without(item) for item in value]
        if not isinstance(value, dict):
            return value
        gone = data.draw(st.sampled_from(["", "", *value]))
        kept = {
            name: None if name == gone and isinstance(item, dict) else without(item) for name, item in value.items()
        }
        return {name: item for name, item in kept.items() if name != gone or item is None}

    record = neuron_record([json.dumps(without(report))])
    assert record is None or record.keys() >= FIELDS, "a field that the report lacks is 0"


@pytest.mark.parametrize("ignores", ["", "trap '' TERM; "])
def test_the_tool_is_read_while_it_runs_and_ended(
    ignores: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"{ignores}echo $$ > {tmp_path}/pid; cat {RECORDING}; while true; do sleep 0.05; done"
    monkeypatch.setenv("PATH", "/nowhere")
    missing = NeuronMonitor()
    assert missing.taken() == []
    missing.close()
    monkeypatch.undo()
    monkeypatch.setattr("autoshard.runtime.metrics.neuron_monitor._GRACE_S", 0.2)
    path = tmp_path / TOOL
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monitor, found = NeuronMonitor(), list[str]()

    def heard() -> bool:
        found.extend(monitor.taken())
        return len(found) == len(LINES)

    wait_until(heard, "all of the recording was heard")
    assert [line.rstrip("\n") for line in found] == LINES and monitor.taken() == []
    pid = int((tmp_path / "pid").read_text())
    assert is_alive(pid)
    monitor.close()
    assert not is_alive(pid)
    monitor.close()
