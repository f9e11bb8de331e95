"""Graphs that are compiled before a run: ``neuron_parallel_compile`` lets a short one extract them and compiles them.

What it prints is read as aws-neuron's torch_neuronx/parallel_compile/neuron_parallel_compile.py and the page
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

from autoshard.runtime.forked import heeding_sigterm

TOOL = "neuron_parallel_compile"
_CHUNK_BYTES = 65536
_GRACE_S = 20.0  # for ranks to end when torchrun tells them to
_TOTAL = re.compile(r"Total (graphs|successful compilations|failed compilations): (\d+)\b")
_NOTHING_NEW = "No todo hlos found in cache"
_CACHE = re.compile(r"Compile cache path: (\S+)")
_REPORTED = re.compile(r'"([^"\s]*/MODULE_[^"\s]*)":\s*\{[^{}]*?"status":\s*false')
_CACHED = re.compile(r"Got a cached failed neff at (\S+/MODULE_\S+?/model\.neff)")
_REFUSED = re.compile(r"Failed compilation with \[([^\n]*?)\]: ?([^\n]*)")
_DIAGNOSED = re.compile(r"Diagnostic logs stored in (\S+)")
_DIED = re.compile(r"sub-process \d+ got exception: ([^\n]*)")
_ERROR = re.compile(r"(?:Process \d+ failed compilation|Subprocess \d+ encountered error): ([^\n]*)")
_MODULE = re.compile(r"MODULE_\w+(?:\+\w+)?")
_PATH = re.compile(r"[^'\s]*/[^'\s/]*MODULE_[^'\s]*")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z\s*")
_TICKET = " - Please open a support ticket"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedGraph:
    """A graph that was not compiled, as far as its name is known: why, and which logs say more."""

    graph: str
    cause: str
    logs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What became of the graphs of a run that were not in the cache."""

    num_graphs: int
    num_failed: int  # as counted by the tool, or as many as were seen to fail
    failures: tuple[FailedGraph, ...]
    cache: str  # where it said that compiled graphs lie; "" if it did not


@dataclass(slots=True)
class _Failures:
    """What was said of one graph so far."""

    cause: str
    logs: dict[str, None]  # each once, in the order in which they were named


def compiled_of(text: str) -> Compiled | None:
    """Read what the tool printed; None if it ended before its summary."""
    totals = {name: int(count) for name, count in _TOTAL.findall(text)}
    if "failed compilations" not in totals and _NOTHING_NEW not in text:
        return None
    failures = tuple(_failures(text))
    caches = _CACHE.findall(text)
    return Compiled(
        num_graphs=totals.get("graphs", 0),
        num_failed=max(totals.get("failed compilations", 0), len(failures)),
        failures=failures,
        cache=caches[-1] if caches else "",
    )


def streamed(command: Sequence[str], log: Path, show: Callable[[str], None]) -> int:
    """Run a command, show what it prints as it comes and keep it in a file; return its exit code.

    Whatever ends this process ends the command too, with all that it has started.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with (
        heeding_sigterm(),
        log.open("wb") as file,
        subprocess.Popen(command, stdout=pipe, stderr=both, start_new_session=True) as process,
    ):
        try:
            while chunk := _chunk(process):
                file.write(chunk)
                file.flush()
                show(decoder.decode(chunk))
        except BaseException:
            _end(process)
            raise
    return process.returncode


def _chunk(process: "subprocess.Popen[bytes]") -> bytes:
    """Return what there is to read, as soon as there is something: dots come without ends of lines."""
    pipe: Any = process.stdout
    return pipe.read1(_CHUNK_BYTES)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask the command and what it started to end, since ranks of torchrun are only ended by torchrun; then insist."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failures(text: str) -> Iterator[FailedGraph]:
    """Yield what failed; an error that names no graph belongs to one whose cause is not known, if there is one."""
    graphs = dict[str, _Failures]()
    for path in (*_REPORTED.findall(text), *_CACHED.findall(text)):
        _seen(graphs, path).logs[f"{_folder(path)}/model.log"] = None
    for command, cause in _REFUSED.findall(text):
        seen = _seen(graphs, command)
        seen.cause = seen.cause or _cause(cause)
        folders = {_folder(path) for path in _PATH.findall(command)}
        seen.logs |= {log: None for log in _DIAGNOSED.findall(text) if _folder(log) in folders}
    errors = [_cause(cause) for cause in _ERROR.findall(text) if not _REFUSED.search(cause)]
    for seen in graphs.values():
        if not seen.cause and errors:
            seen.cause = errors.pop(0)
    yield from (FailedGraph(graph=name, cause=seen.cause, logs=tuple(seen.logs)) for name, seen in graphs.items())
    unnamed = [*errors, *(f"a compiling process died: {cause}" for cause in _DIED.findall(text))]
    yield from (FailedGraph(graph="", cause=cause) for cause in unnamed)


def _seen(graphs: dict[str, _Failures], text: str) -> _Failures:
    found = _MODULE.search(text)
    return graphs.setdefault(found[0] if found else "", _Failures("", {}))


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _cause(text: str) -> str:
    return _STAMP.sub("", text.partition(_TICKET)[0]).strip()
