"""Graphs that are compiled before a run: ``neuron_parallel_compile`` lets a short run extract them, and compiles them.

Its output is read as aws-neuron's torch_neuronx/parallel_compile/neuron_parallel_compile.py and the page
pytorch-neuron-parallel-compile of Neuron 2.29 have it, and failures as people reported them: aws-neuron-sdk issues 881,
948, 987, 1023 and 1299, aws-neuron-samples issue 94. Its exit code is the number of failures modulo 256, so that it
alone proves nothing; a worker that died is in none of its sums.
"""

import codecs
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.errors import Stopped
from autoshard.runtime.forked import handling

_CHUNK_BYTES = 65536
_GRACE_S = 20.0  # for ranks to end when torchrun tells them to
_TOTAL = re.compile(r"Total (graphs|successful compilations|failed compilations): (\d+)\b")
_NOTHING_NEW = "No todo hlos found in cache"
_CACHE = re.compile(r"Compile cache path: (\S+)")
_REPORTED = re.compile(r'"([^"\s]*/MODULE_[^"\s]*)":\s*\{[^{}]*?"status":\s*false')
_CACHED = re.compile(r"Got a cached failed neff at (\S+/MODULE_\S+?/model\.neff)")
_REFUSED = re.compile(r"Failed compilation with \[([^\n]*?)\]: ?([^\n]*)")
_ERROR = re.compile(
    r"(Process \d+ failed compilation|Subprocess \d+ encountered error|sub-process \d+ got exception): ([^\n]*)"
)
_MODULE = re.compile(r"MODULE_\w+(?:\+\w+)?")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z\s*")
_TICKET = " - Please open a support ticket"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedGraph:
    """A graph that was not compiled: its name, why, and which log says more, each "" where that is not known."""

    graph: str
    cause: str
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The result for the graphs of a run that were not in the cache."""

    num_graphs: int
    num_failed: int  # as the tool counted, or as many as were seen to fail
    failures: tuple[FailedGraph, ...]
    cache: str  # where compiled graphs lie; "" if the tool did not say it


def compiled_of(text: str) -> Compiled | None:
    """Read the output of the tool; None if it ended before its summary."""
    totals = {name: int(count) for name, count in _TOTAL.findall(text)}
    if "failed compilations" not in totals and _NOTHING_NEW not in text:
        return None
    failures, caches = tuple(_failures(text)), _CACHE.findall(text)
    num_named = sum(bool(failure.graph) for failure in failures) or len(failures)
    return Compiled(
        num_graphs=totals.get("graphs", 0),
        num_failed=max(totals.get("failed compilations", 0), num_named),
        failures=failures,
        cache=caches[-1] if caches else "",
    )


def _failures(text: str) -> Iterator[FailedGraph]:
    """Yield graphs that failed, then errors that name none."""
    logs = {
        Path(path).parent.name: str(Path(path).with_name("model.log"))
        for path in (*_REPORTED.findall(text), *_CACHED.findall(text))
    }
    causes = {
        match[0]: _cleaned(cause) for module, cause in _REFUSED.findall(text) if (match := _MODULE.search(module))
    }
    for name in dict.fromkeys((*logs, *causes)):
        yield FailedGraph(graph=name, cause=causes.get(name, ""), log=logs.get(name, ""))
    for process, cause in _ERROR.findall(text):
        if not _REFUSED.search(cause):
            yield FailedGraph(graph="", cause=f"{process}: {_cleaned(cause)}")


def _cleaned(cause: str) -> str:
    return _STAMP.sub("", cause.partition(_TICKET)[0]).strip()


def streamed(command: Sequence[str], log: Path, show: Callable[[str], None]) -> int:
    """Run a command, show its output as it comes and keep it in a file; return its exit code.

    Whatever ends this process ends the command too, with all that it has started.
    """

    def stop(number: int, _: object) -> None:
        raise Stopped(signal.Signals(number).name, number)

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with (
        handling(stop, signal.SIGTERM, signal.SIGHUP),
        log.open("wb") as file,
        subprocess.Popen(command, stdout=pipe, stderr=both, start_new_session=True) as process,
    ):
        output: Any = process.stdout
        try:
            while chunk := output.read1(_CHUNK_BYTES):  # as soon as there is something: dots have no ends of lines
                file.write(chunk)
                file.flush()
                show(decoder.decode(chunk))
        except BaseException:
            # Ranks of torchrun are only ended by torchrun: ask first, then insist.
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(_GRACE_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    return process.returncode
