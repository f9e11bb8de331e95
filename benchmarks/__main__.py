"""``python -m benchmarks [NAME] [--json] [--wandb]`` and other options: run one benchmark, or all; show drifts."""

import argparse
import datetime
import importlib.util
import inspect
import json
import pkgutil
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.table import Column, Table

from autoshard import __version__
from autoshard.commands.output import write_text
from autoshard.errors import AutoshardError, InputError, nearest
from benchmarks import BENCHMARKS, LONG, SUITES
from benchmarks.guarded import Setting, Suite, measure
from benchmarks.history import (
    HISTORY,
    Occasion,
    append,
    drifts_of,
    history_json,
    history_table,
    occasion,
    read_history,
)
from benchmarks.history_page import history_page, results_page
from benchmarks.result import Result

_USES = {"rows": "measured rows", "count": "a number of questions", "write": "tables on pages"}
_FIELDS = ("name", "value", "unit", "bar", "holds")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; a bar that does not hold is a finding, not a failure."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if suite := next((word for word in given if word in SUITES), None):
        return measure(SUITES[suite], given)
    options = _parser().parse_args(given)
    try:
        if options.name == "history":
            return _show_history(as_json=options.json, html=options.html)
        used = {name: getattr(options, name) for name in _USES if getattr(options, name)}
        runs = _selected(options.name, used)
        results, notes = list[Result](), list[str]()
        printed = _printed(_measured(runs), results, as_json=options.json)
        if options.record:
            printed = _recorded(printed, occasion(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"))
        if options.wandb:
            notes = _logged(printed, results)
        for _ in printed:
            pass
        notes += _left_out() if options.name == "all" else []
    except AutoshardError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.html:
        write_text(results_page(results), options.html, "--html")
    if not options.json:
        Console().print(*_shown(results), sep="\n")
    for note in notes:
        print(note, file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure autoshard here.")
    names = f"all, history, or one of {', '.join((*BENCHMARKS, *SUITES))}"
    parser.add_argument("name", nargs="?", default="all", help=names)
    parser.add_argument("--json", action="store_true", help="print one JSON object per benchmark and line")
    parser.add_argument("--wandb", action="store_true", help="log every result to Weights & Biases as well")
    parser.add_argument("--record", action="store_true", help="append every result to benchmarks/history.jsonl")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the results, or the history, as a page")
    parser.add_argument("--rows", type=Path, metavar="FOLDER", help="more measured rows, for accuracy")
    parser.add_argument("--count", type=int, metavar="N", help="how many questions, for certificate")
    parser.add_argument("--write", action="store_true", help="write the tables that it has on pages")
    return parser


def _show_history(*, as_json: bool, html: Path | None) -> int:
    """Print how each benchmark changed; a drift is a finding, not a failure."""
    drifts = drifts_of(read_history(HISTORY))
    if html:
        write_text(history_page(drifts), html, "--html")
    if as_json:
        print(json.dumps(history_json(drifts)))
    elif drifts:
        Console().print(history_table(drifts))
    else:
        print(f"there is no history in {HISTORY}. Type make bench, or python -m benchmarks NAME --record")
    return 0


def _selected(name: str, options: Mapping[str, Any]) -> dict[str, Callable[[], Result]]:
    """Return what runs each benchmark that was asked for."""
    if name not in ("all", *BENCHMARKS):
        raise InputError.of("name", f"there is no benchmark {name!r}. {nearest(name, ['all', *BENCHMARKS, *SUITES])}")
    names = [one for one in BENCHMARKS if one not in LONG] if name == "all" else [name]
    runs = {one: pkgutil.resolve_name(BENCHMARKS[one]) for one in names}
    for option, value in options.items():
        takes = [one for one, run in runs.items() if option in inspect.signature(run).parameters]
        if not takes:
            raise InputError.of(f"--{option}", f"{name} has no use for {_USES[option]}; leave it out")
        runs |= {one: partial(runs[one], **{option: value}) for one in takes}
    return runs


def _left_out() -> list[str]:
    """Say of each suite why it was not measured: there is nothing to measure it on, or it is a command of its own."""
    minutes = "was left out, since it takes minutes: type python -m benchmarks"
    notes = [f"{name} {minutes} {name}" for name in LONG]
    for name, where in SUITES.items():
        suite = cast(Suite, pkgutil.resolve_name(where))
        try:
            suite.parts(Setting(folder=Path(), dry=False, machine=None))
            notes.append(f"{name} {minutes} {name}")
        except AutoshardError as error:
            notes.append(f"{name} was skipped: {error}")
    return notes


def _measured(runs: Mapping[str, Callable[[], Result]]) -> Iterator[Result]:
    for name, run in runs.items():
        print(f"measuring {name} ...", file=sys.stderr)
        yield run()


def _printed(found: Iterable[Result], results: list[Result], *, as_json: bool) -> Iterator[Result]:
    """Yield results as they come, print them where JSON is asked for, and keep them."""
    for result in found:
        if as_json:
            print(result.as_json(), flush=True)
        results.append(result)
        yield result


def _recorded(found: Iterable[Result], where: Occasion) -> Iterator[Result]:
    """Yield results, and append each to the history as soon as it is there."""
    for result in found:
        append(result, where, HISTORY)
        yield result


def _logged(printed: Iterable[Result], results: Sequence[Result]) -> list[str]:
    """Show results on W&B as a sweep shows its points: a group, a run for each, a table; return notes."""
    if importlib.util.find_spec("wandb") is None:
        raise InputError.of("--wandb", "needs the wandb extra: pip install 'autoshard[wandb]'")
    from autoshard.sweep.on_wandb import ShownRun, WandbGroup

    name = f"benchmarks-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    config = {"autoshard": __version__, "python": platform.python_version(), "machine": platform.platform()}
    group = WandbGroup(
        project="autoshard", name=name, folder=folder, kind="benchmark", charts={"values": ("name", "value")}
    )
    runs = (ShownRun(key=one.name, name=one.name, config=config, summary=one.row()) for one in printed)
    return group.show(runs, lambda: [one.row() for one in results])


def _shown(results: Sequence[Result]) -> Iterator[RenderableType]:
    """Yield a table of the values, and below it what helps to understand each."""
    short = [Column(name, no_wrap=name != "unit") for name in _FIELDS]  # figures stay whole, words are folded
    table = Table(*short, title="autoshard benchmarks on this machine")
    for result in results:
        row = result.row()
        table.add_row(*(_cell(row[name]) for name in _FIELDS))
    yield table
    for result in results:
        if result.extras:
            extras = [f"{name} {_cell(value)}" for name, value in result.extras.items()]
            yield Columns(extras, title=result.name, column_first=True, equal=True, padding=(0, 2))


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
