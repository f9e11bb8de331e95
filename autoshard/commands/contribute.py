"""``autoshard contribute``: measured rows for others, with nothing private in them."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from autoshard.calibration.contribution import Contribution, contribution
from autoshard.calibration.rows import MeasuredRow
from autoshard.commands.output import print_answer, print_left_out, write_text
from autoshard.commands.writing.places import CONTRIBUTION, place_checks
from autoshard.errors import require
from autoshard.spec.record import encode
from autoshard.units import counted, format_seconds

_NOT_IN_IT = (
    "not in it: paths, names of hosts, people, data, models of your own and trackers, command lines, losses, weights. "
    "Rows are made anew from numbers and from autoshard's own words; whatever else the files of a run say is left out."
)
_SEND = (
    "to send it: read it ({0} is text, one row a line), and attach it to an issue of the project. Nothing is sent by "
    "this command. `autoshard validate {0}` shows what others learn from it"
)


def contribute(folder: Path, out: Path = Path("contribution.jsonl"), json: bool = False) -> int:
    """Write the measured rows of a run, or of a folder of runs, into one file for others, with nothing private in it.

    A row says what was run (model, layout, cluster), how long a step took, and on which software and machine.
    Rehearsals, runs that did not end, and runs on cluster files of your own are left out, each with a line that says
    why.

    Args:
        folder: The folder of a run that has ended, which autoshard run got as --out, or a folder of such runs. A file
            of rows works as well.
        out: The file to write.
        json: Print one JSON object instead of text.
    """
    require(*place_checks(out, holds=CONTRIBUTION))
    from autoshard.runtime.here import (
        installed_packages,
        machine_words,
        node_type_here,
    )  # may import torch, which takes seconds

    rows = contribution(folder, machine_words(), installed_packages(), node_type_here())
    print_left_out(rows.read.left_out_lines)
    write_text(rows.text, out)
    print_answer({"file": str(out), "rows": list(map(encode, rows.rows))} if json else _report(rows, out))
    return 1 if rows.read.num_unread else 0


def _report(rows: Contribution, out: Path) -> str:
    told = {what: _pairs((rows.rows[0].source or {})[what]) for what in ("versions", "machine")}
    lines = [f"{len(rows.rows)} measured row{'s' if len(rows.rows) > 1 else ''}:", *map(_line, rows.rows)]
    return "\n".join([
        *lines, f"software: {told['versions']}", f"machine, as this one is: {told['machine']}", _NOT_IN_IT,
        f"wrote {out}", _SEND.format(out),
    ])  # fmt: skip


def _pairs(told: object) -> str:
    return ", ".join(f"{name} {value}" for name, value in cast(Mapping[str, object], told).items())


def _line(row: MeasuredRow) -> str:
    size = f"{counted(row.seq_len, 'token')} x {row.global_batch_seqs}"
    assert row.step_time_s is not None, "a contributed row is timed"
    return f"  {row.model} on {row.platform}, {size}, {row.candidate}: {format_seconds(row.step_time_s)} a step"
