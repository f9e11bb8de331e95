"""``autoshard export``: a plan as the configuration of another program."""

from pathlib import Path
from typing import Literal

from autoshard.command_line.options import DEFAULT_PLAN
from autoshard.commands.output import print_answer, print_refused, write_text
from autoshard.commands.writing.places import place_checks
from autoshard.cost.predict import check_plan
from autoshard.errors import require
from autoshard.exports.price import export_checks, exported
from autoshard.exports.writing import SUFFIXES
from autoshard.imports.imported import PROGRAMS
from autoshard.plan.codec import load
from autoshard.report.interchange import export_json, export_sheets
from autoshard.report.sheet import Node

ExportName = Literal["nxdt", "megatron", "torchtitan", "accelerate", "deepspeed"]  # programs whose files are written


def export(
    plan: Path = DEFAULT_PLAN,
    *,
    to: ExportName,
    out: Path | None = None,
    force: bool = False,
    json: bool = False,
) -> int:
    """Write a plan as a configuration of another program; say what that cannot express, and the price of it.

    Args:
        plan: The plan file.
        to: The program.
        out: The file to write. Default: the name of the plan with that of the program, as in plan.nxdt.yaml.
        force: Replace a file that holds something else.
        json: Print one JSON object, with the text of the file, instead of tables.
    """
    program = next(program for program in PROGRAMS if program.name == to)
    target = out or plan.with_name(f"{plan.stem}.{to}.{SUFFIXES[program.form]}")
    require(*place_checks(target))
    read = load(plan)
    require(*export_checks(read, program, str(plan), f"--to {to}"))
    checked = check_plan(read, place=plan)
    if misfits := [reason for reason in checked.rejections if reason.rule_id != "memory"]:
        return print_refused(misfits, json=json)
    answer = exported(checked.plan, program)
    differs = target.is_file() and target.read_text(encoding="utf-8", errors="replace") != answer.text
    require((force or not differs, f"--out {target}", "holds something else, and is kept. Type --force to replace it"))
    write_text(answer.text, target)
    figures = export_json(answer, str(target), checked.remark)
    print_answer(figures if json else export_sheets(answer, Node(figures)))
    if not json:
        print(f"note: {checked.remark}\n" if checked.remark else "", f"wrote {target}", sep="")
    return 1 if answer.refused else 0
