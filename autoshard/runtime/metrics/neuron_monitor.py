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
        runtimes = [part(one, "report") for one in processes]
        cores = [part(one, "neuroncore_counters", "neuroncores_in_use") for one in runtimes]
        used = [part(one, "memory_used", "neuron_runtime_used_bytes") for one in runtimes]
        devices = part(system, "neuron_hw_counters").get("neuron_devices") or ()
        groups = [group or {} for one in (*runtimes, system) for group in one.values()]
        faulty = (*processes, *groups, part(report, "neuron_hardware_info"))
        errors: Counter[str] = Counter()
        for one in runtimes:
            causes, outcomes = (part(one, "execution_stats", name) for name in ("error_summary", "execution_summary"))
            errors.update({name: int(causes.get(name) or 0) for name in causes})
            errors.update({name: int(outcomes.get(name) or 0) for name in _BAD_OUTCOMES})
        return {
            "core_use": [(core.get("neuroncore_utilization") or 0) / 100 for one in cores for core in one.values()],
            "device_bytes": sum(int(one.get("neuron_device") or 0) for one in used),
            "host_bytes": sum(int(one.get("host") or 0) for one in used),
            "ecc_uncorrected": sum(int(one.get(name) or 0) for one in devices for name in _UNCORRECTED),
            "errors": +errors,  # those that happened
            "fault": next((one["error"] for one in faulty if one.get("error")), ""),
        }
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
        return None


def neuron_record(lines: Sequence[str]) -> dict[str, Any] | None:
    """Join the reports since the last step into the fields of ``metrics.jsonl``; None if there is none.

    Errors are those since the report before; ``fault`` is what the tool could not find out, in its words.
    """
    reports = [found for line in lines if (found := _counted(line))]
    if not reports:
        return None
    errors: Counter[str] = sum((one["errors"] for one in reports), Counter())
    use = [share for one in reports for share in one["core_use"]]
    record = {
        "core_use": sum(use) / len(use) if use else 0.0,
        "least_core_use": min(use, default=0.0),
        "num_cores": max(len(one["core_use"]) for one in reports),
        **{name: max(one[name] for one in reports) for name in ("device_bytes", "host_bytes", "ecc_uncorrected")},
        "errors": dict(sorted(errors.items())),
    }
    fault = next((one["fault"] for one in reports if one["fault"]), "")
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
