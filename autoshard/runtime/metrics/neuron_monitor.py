"""What ``neuron-monitor`` reports of the NeuronCores of a node, beside the steps of a run.

It prints a JSON object a line, every 5 s unless it is configured otherwise; fields as the Neuron Monitor User Guide of
Neuron 2.29 describes them (awsdocs-neuron.readthedocs-hosted.com, tools/neuron-sys-tools).
"""

import json
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOOL = "neuron-monitor"
_GRACE_S = 5.0
# The outcomes of executions that are errors; error_summary counts the same by cause.
_BAD_OUTCOMES = ("timed_out", "incorrect_input", "failed_to_queue")
_UNCORRECTED = ("mem_ecc_uncorrected", "sram_ecc_uncorrected")


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronSample:
    """One report, summed over the processes that use NeuronCores."""

    core_use: tuple[float, ...]  # share of the time, of every core in use
    device_bytes: int
    host_bytes: int
    errors: Mapping[str, int] = field(hash=False)  # since the report before, by cause; only those that happened
    ecc_uncorrected: int  # of all devices, memory and SRAM
    fault: str = ""  # what the tool could not find out, in its words


def neuron_sample(line: str) -> NeuronSample | None:
    """Read a line; None if it is no report, or of another form. What a report lacks counts as nothing."""

    def part(value: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
        for name in names:
            value = value.get(name) or {}
        return value

    try:
        report = json.loads(line)
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
        return NeuronSample(
            core_use=tuple((core.get("neuroncore_utilization") or 0) / 100 for one in cores for core in one.values()),
            device_bytes=sum(int(one.get("neuron_device") or 0) for one in used),
            host_bytes=sum(int(one.get("host") or 0) for one in used),
            errors={name: count for name, count in sorted(errors.items()) if count},
            ecc_uncorrected=sum(int(one.get(name) or 0) for one in devices for name in _UNCORRECTED),
            fault=next((one["error"] for one in faulty if one.get("error")), ""),
        )
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def neuron_record(samples: Sequence[NeuronSample]) -> dict[str, Any] | None:
    """Join the reports since the last step into the fields of ``metrics.jsonl``; None if there is none."""
    if not samples:
        return None
    errors: Counter[str] = sum((Counter(sample.errors) for sample in samples), Counter())
    use = [share for sample in samples for share in sample.core_use]
    record = {
        "core_use": sum(use) / len(use) if use else 0.0,
        "least_core_use": min(use, default=0.0),
        "num_cores": max(len(sample.core_use) for sample in samples),
        "device_bytes": max(sample.device_bytes for sample in samples),
        "host_bytes": max(sample.host_bytes for sample in samples),
        "ecc_uncorrected": max(sample.ecc_uncorrected for sample in samples),
        "errors": dict(sorted(errors.items())),
    }
    fault = next((sample.fault for sample in samples if sample.fault), "")
    return {**record, "fault": fault} if fault else record


class NeuronMonitor:
    """The tool as a process whose lines a thread reads; where it is not installed, nothing happens."""

    def __init__(self) -> None:
        self._samples: list[NeuronSample] = []
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._started = False

    def taken(self) -> list[NeuronSample]:
        """Return the reports since the last time; the first time starts the tool."""
        if not self._started:
            self._started = True
            if path := shutil.which(TOOL):
                nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
                self._process = subprocess.Popen([path], stdin=nothing, stdout=pipe, stderr=nothing, text=True)
                threading.Thread(target=self._read, args=(self._process,), name=TOOL, daemon=True).start()
        with self._lock:
            samples, self._samples = self._samples, []
        return samples

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
                if sample := neuron_sample(line):
                    with self._lock:
                        self._samples.append(sample)
