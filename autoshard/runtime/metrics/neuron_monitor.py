"""What ``neuron-monitor`` reports of the NeuronCores of a node, beside the steps of a run.

It prints a JSON object a line, every 5 s unless it is configured otherwise; fields as the Neuron Monitor User Guide of
Neuron 2.29 describes them (awsdocs-neuron.readthedocs-hosted.com, tools/neuron-sys-tools).
"""

import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.spec.files import json_line

TOOL = "neuron-monitor"
_GRACE_S = 5.0
# The outcomes of executions that are errors; error_summary counts the same by cause.
_BAD_OUTCOMES = ("timed_out", "incorrect_input", "failed_to_queue")
_UNCORRECTED = ("mem_ecc_uncorrected", "sram_ecc_uncorrected")


def _counted(line: str) -> dict[str, Any] | None:
    """Sum a report over the processes that use NeuronCores; None if a line is no report, or of another form.

    What a report lacks counts as nothing.
    """

    def part(value: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
        for name in names:
            value = value.get(name) or {}
        return value

    try:
        report: Any = json_line(line)
        processes, system = report["neuron_runtime_data"] or (), part(report, "system_data")
        runtimes = [part(process, "report") for process in processes]
        cores = [part(runtime, "neuroncore_counters", "neuroncores_in_use") for runtime in runtimes]
        used = [part(runtime, "memory_used", "neuron_runtime_used_bytes") for runtime in runtimes]
        devices = part(system, "neuron_hw_counters").get("neuron_devices") or ()
        groups = [group or {} for owner in (*runtimes, system) for group in owner.values()]
        faulty = (*processes, *groups, part(report, "neuron_hardware_info"))
        errors: Counter[str] = Counter()
        for runtime in runtimes:
            causes, outcomes = (
                part(runtime, "execution_stats", name) for name in ("error_summary", "execution_summary")
            )
            errors.update({name: int(causes.get(name) or 0) for name in causes})
            errors.update({name: int(outcomes.get(name) or 0) for name in _BAD_OUTCOMES})
        return {
            "core_use": [
                (core.get("neuroncore_utilization") or 0) / 100 for in_use in cores for core in in_use.values()
            ],
            "device_bytes": sum(int(memory.get("neuron_device") or 0) for memory in used),
            "host_bytes": sum(int(memory.get("host") or 0) for memory in used),
            "ecc_uncorrected": sum(int(device.get(name) or 0) for device in devices for name in _UNCORRECTED),
            "errors": +errors,  # those that happened
            "fault": next((section["error"] for section in faulty if section.get("error")), ""),
        }
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
        return None


def neuron_record(lines: Sequence[str]) -> dict[str, Any] | None:
    """Join the reports since the last step into the fields of ``metrics.jsonl``; None if there is none.

    Errors are those since the report before; ``fault`` is what the tool could not find out, in its words.
    """
    reports = [counted for line in lines if (counted := _counted(line))]
    if not reports:
        return None
    errors: Counter[str] = sum((report["errors"] for report in reports), Counter())
    use = [share for report in reports for share in report["core_use"]]
    record = {
        "core_use": sum(use) / len(use) if use else 0.0,
        "least_core_use": min(use, default=0.0),
        "num_cores": max(len(report["core_use"]) for report in reports),
        **{name: max(report[name] for report in reports) for name in ("device_bytes", "host_bytes", "ecc_uncorrected")},
        "errors": dict(sorted(errors.items())),
    }
    fault = next((report["fault"] for report in reports if report["fault"]), "")
    return {**record, "fault": fault} if fault else record


class NeuronMonitor:
    """The tool as a process whose lines a thread reads; where it is not installed, nothing happens."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._started = False

    def taken(self) -> list[str]:
        """Return the reports since the last time; the first time starts the tool."""
        if not self._started:
            self._started = True
            if path := shutil.which(TOOL):
                nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
                self._process = subprocess.Popen([path], stdin=nothing, stdout=pipe, stderr=nothing, text=True)
                threading.Thread(target=self._read, args=(self._process,), name=TOOL, daemon=True).start()
        with self._lock:
            lines, self._lines = self._lines, []
        return lines

    def close(self) -> None:
        """End the tool."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout
        with process.stdout as lines:
            for line in lines:
                with self._lock:
                    self._lines.append(line)
