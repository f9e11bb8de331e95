"""Measurements in parts, each in a process of its own: a part that fails is named with its reason, the others go on."""

import argparse
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from autoshard.errors import AutoshardError, InputError, nearest, require
from benchmarks.result import Result

_ROOT = Path(__file__).parents[1]
_MOST_WORDS = 600  # of a reason; the log of a part has all
_LOOK_S = 0.2  # at what a part has found


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where parts measure: on what is here, or dry, which goes through everything on the host and times nothing."""

    folder: Path  # absolute; results, logs and what a part leaves
    dry: bool
    machine: str | None  # the cluster that a dry run plays; None: that of this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a suite."""

    name: str
    measures: str  # in one line, for those who choose
    minutes: float  # that it is expected to take on the machine
    limit_minutes: float  # after which it is ended; what it has found until then stays
    run: Callable[[Setting], Iterable[Result]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Parts that are measured one after the other, of the machine of a setting."""

    name: str
    parts: Callable[[Setting], Sequence[Part]]  # an InputError of it is the answer to all: a machine that is not here
    opening: Callable[[Setting, Sequence[Part]], str]  # what is said before anything starts
    closing: Callable[[Setting, Sequence[Mapping[str, Any]]], Result] | None = None  # the last line, of all others


def measure(where: str, arguments: Sequence[str]) -> int:
    """Measure the parts of the suite that a name ``module:attribute`` leads to; return 1 if one of them failed."""
    try:
        return _measured(where, arguments)
    except AutoshardError as error:
        _say(str(error))
        return error.exit_code


def _measured(where: str, arguments: Sequence[str]) -> int:
    suite = cast(Suite, pkgutil.resolve_name(where))
    options = _parser(suite.name).parse_args(arguments)
    folder = (options.out or Path("runs", f"{suite.name}-{time.strftime('%Y%m%d-%H%M%S')}")).absolute()
    setting = Setting(folder=folder, dry=options.dry_run, machine=options.machine)
    dry = "is the machine that --dry-run plays; leave it out, or add that"
    require((setting.dry or setting.machine is None, "--machine", dry))
    parts = chosen(suite.parts(setting), options.parts)
    _say(suite.opening(setting, parts))
    folder.mkdir(parents=True, exist_ok=True)
    failed, found = dict[str, None](), list[Mapping[str, Any]]()
    for part in parts:
        _say(f"{part.name}: {part.measures} ...")
        for row in rows_of(where, part, setting):
            found.append(row)
            failed |= {part.name: None} if "failed" in row else {}
            print(json.dumps(row) if options.json else _line(row), flush=True)
            if options.json:
                _say(f"  {_line(row)}")
    if suite.closing is not None:
        last = suite.closing(setting, found).row()
        print(json.dumps(last) if options.json else _line(last), flush=True)
    _say(f"{len(parts) - len(failed)} of {len(parts)} parts ended well; all that was found is in {folder}")
    return 1 if failed else 0


def chosen(parts: Sequence[Part], names: str | None) -> Sequence[Part]:
    """Return the parts with these names, joined by commas; all if there are none.

    >>> chosen([Part(name="a", measures="", minutes=1, limit_minutes=2, run=lambda _: [])], "b")
    Traceback (most recent call last):
    autoshard.errors.InputError: --parts: there is no part 'b' here. Known: a.
    """
    known = [part.name for part in parts]
    asked = known if names is None else [name.strip() for name in names.split(",")]
    for name in asked:
        require((name in known, "--parts", f"there is no part {name!r} here. {nearest(name, known)}"))
    return [part for part in parts if part.name in asked]


def rows_of(where: str, part: Part, setting: Setting) -> Iterator[Mapping[str, Any]]:
    """Run a part in a process of its own; yield what it finds as it comes, and at the end why it failed if it did."""
    found, log = (setting.folder / f"{part.name}.{end}" for end in ("jsonl", "log"))
    found.write_text("", encoding="utf-8")
    given = json.dumps([where, part.name, str(setting.folder), setting.dry, setting.machine])
    start_s, has_failed = time.monotonic(), False
    with log.open("w", encoding="utf-8") as words, found.open(encoding="utf-8") as lines:
        command = [sys.executable, "-m", "benchmarks.guarded", given]
        quiet: dict[str, Any] = {"stdout": words, "stderr": words, "stdin": subprocess.DEVNULL}
        child = subprocess.Popen(command, cwd=_ROOT, start_new_session=True, **quiet)
        try:
            code, line = None, ""
            while code is None and time.monotonic() < start_s + part.limit_minutes * 60:
                with suppress(subprocess.TimeoutExpired):
                    code = child.wait(_LOOK_S)
                for more in lines:  # the last one may be half a line
                    line += more
                    if line.endswith("\n"):
                        row, line = cast(Mapping[str, Any], json.loads(line)), ""
                        has_failed |= "failed" in row
                        yield row
        finally:  # what it started as well, and also where this process is interrupted
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if code == 0 or (code == 1 and has_failed):
        return
    ended = f"it took more than {part.limit_minutes:g} minutes" if code is None else f"it ended with exit code {code}"
    after = f"after {time.monotonic() - start_s:.0f} s"
    yield {"name": part.name, "failed": f"{ended}, {after}. Its last words are in {log}"}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description="Measure this machine in parts.")
    parser.add_argument("name", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object for each finding and line")
    parser.add_argument("--parts", metavar="A,B", help="only these parts; the opening names all")
    parser.add_argument("--dry-run", action="store_true", help="go through every part on the host, and time nothing")
    parser.add_argument("--machine", metavar="CLUSTER", help="the machine that --dry-run plays")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where findings and logs are kept; default: in runs")
    return parser


def _line(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"{row['name']}: FAILED: {row['failed']}"
    more = ", ".join(f"{name} {value}" for name, value in row.items() if name not in ("name", "value", "unit"))
    return f"{row['name']}: {row['value']:.4g} {row['unit']} ({more})"


def _alone(given: str) -> int:
    """Run one part here; every finding is kept as soon as it is there."""
    where, name, folder, dry, machine = json.loads(given)
    setting = Setting(folder=Path(folder), dry=dry, machine=machine)
    with (setting.folder / f"{name}.jsonl").open("a", encoding="utf-8", buffering=1) as found:
        try:
            (part,) = chosen(cast(Suite, pkgutil.resolve_name(where)).parts(setting), name)
            for result in part.run(setting):
                found.write(result.as_json() + "\n")
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, InputError) else str(error)
            found.write(json.dumps({"name": name, "failed": reason[:_MOST_WORDS]}) + "\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(_alone(sys.argv[1]))
