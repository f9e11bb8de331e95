"""What a configuration of another program states: the value between reading a file and answering it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autoshard.errors import Faults, InputError, require
from autoshard.imports.forms.documents import chosen, comment_of, parsed_documents, split_name
from autoshard.imports.forms.python import Unread
from autoshard.imports.programs.accelerate import ACCELERATE
from autoshard.imports.programs.deepspeed import DEEPSPEED
from autoshard.imports.programs.megatron import BRIDGE, MEGATRON
from autoshard.imports.programs.nxdt import NXDT
from autoshard.imports.programs.torchtitan import TORCHTITAN
from autoshard.imports.table import Facts, OtherProgram, matching, placed
from autoshard.spec.record import show_value

PROGRAMS = (NXDT, ACCELERATE, DEEPSPEED, TORCHTITAN, BRIDGE, MEGATRON)
_LONGEST = 60
_FUNCTION = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*")  # by its name no class
_OFF: tuple[object, ...] = (None, False, 0, "", "none", [], "no", "false")  # of an option that is not in use


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """The facts of one configuration, and which of its keys say nothing, or nothing that could be read."""

    program: OtherProgram
    file: str
    name: str  # of the function of a Python file; "" elsewhere
    facts: Facts = field(hash=False)
    stated: int  # keys that were read
    unread: tuple[str, ...]  # which may change time or memory
    harmless: tuple[str, ...]  # which change neither
    remarks: tuple[str, ...]
    comment: str = ""  # the first line of the file, if it is one: "a preset for 64 A100 GPUs"
    said: frozenset[str] = frozenset()  # names of facts that a key of the file states

    @property
    def hints(self) -> str:
        """The words by which people name files and functions: llama3_70b_pretrain_32gpu_h100."""
        return f"{Path(self.file).parent.name}/{Path(self.file).stem} {self.name} {self.comment}".strip()


def imported_run(typed: str) -> ImportedRun:
    """Read a configuration: a file, or FILE.py:FUNCTION."""
    path, name = split_name(typed)
    found = parsed_documents(path)
    is_plan = any({"schema", "headroom", "kernels"} <= values.keys() for values in found.values())
    require(
        (not is_plan, str(path), f"is a plan. `autoshard export {path} --to PROGRAM` writes it for another program")
    )
    programs = {key: program for key, values in found.items() if (program := other_program(values))}
    if not programs or (name in found and name not in programs):
        titles = ", ".join(program.title for program in PROGRAMS)
        advice = "Known by their keys: " + titles
        where = typed if programs else str(path)
        raise InputError.of(where, f"is no configuration of a training run that autoshard reads. {advice}")
    key, values = chosen({key: found[key] for key in programs}, path, name)
    run = replace(run_of_values(programs[key], str(path), key, values), comment=comment_of(path))
    for key, program in run.program.files.items():
        run = _with_file(run, key, values.get(key), program)
    return run


def other_program(values: Mapping[str, Any]) -> OtherProgram | None:
    """Return the first program of which a file has a key that tells it."""
    for program in PROGRAMS:
        if any(matching(path, mark) for path in values for mark in program.marks):
            return program
    return None


def _with_file(run: ImportedRun, key: str, named: object, program: OtherProgram) -> ImportedRun:
    """Add what the file of another program says that a configuration names; such a file decides."""
    if not isinstance(named, str):
        return run
    path = Path(run.file).parent / named
    if not path.is_file():
        return replace(run, unread=(*run.unread, f"{key} = {named}, which is not beside the file"))
    values = next(iter(parsed_documents(path).values()))
    said = run_of_values(replace(program, defaults={}), str(path), "", values)
    return replace(
        run,
        facts={**run.facts, **said.facts},
        said=run.said | said.said,
        stated=run.stated + said.stated,
        unread=run.unread + said.unread,
        harmless=run.harmless + said.harmless,
        remarks=run.remarks + said.remarks,
    )


def run_of_values(program: OtherProgram, file: str, name: str, values: Mapping[str, Any]) -> ImportedRun:
    """Return what keys with values state for a program."""
    read: dict[str, Any] = {}
    unread: list[str] = []
    places: dict[str, str] = {}
    for path, key in placed(program, values):
        value = values[path]
        if isinstance(value, Unread) or (isinstance(value, str) and value.startswith("$")):
            unread.append(f"{path} = {getattr(value, 'text', value)}")
        elif key not in read or read[key] is None:
            read[key], places[key] = value, path
        elif value is not None and value != read[key]:
            unread.append(f"{path} = {_short(value)}, beside {places[key]} = {_short(read[key])}")
    stated = {**program.implied, **read}
    facts, said = dict(program.defaults), set[str]()
    faults, remarks = Faults(), list[str]()
    for entry in program.entries:
        present = {key: stated[key] for key in entry.keys if key in stated}
        if present:
            try:
                meant = dict(entry.reads(present))
            except InputError as error:
                key = _at_fault(present, str(error))
                faults.extend(error.under(f"{file}: {places.get(key, key)}").faults)
                continue
            unread += meant.pop("unread", ())
            remarks += meant.pop("remarks", ())
            facts |= meant
            said |= meant.keys() if read.keys() & present.keys() else set()
    faults.refuse()
    rest = [path for path in values if path not in {place for place, _ in placed(program, values)}]
    harmless = [path for path in rest if values[path] in _OFF or program.is_harmless(path, values[path])]
    unread += [f"{path} = {_short(values[path])}" for path in rest if path not in set(harmless)]
    bases = [base for base in (values.get("call"), values.get("trainer.call")) if isinstance(base, str)]
    foreign = [base for base in bases if _FUNCTION.fullmatch(base) and base not in program.bases]
    unread += [f"{base}(), of another file, to which this adds" for base in foreign]
    return ImportedRun(
        program=program,
        file=file,
        name=name,
        facts=facts,
        stated=len(read),
        unread=tuple(unread),
        harmless=tuple(harmless),
        remarks=tuple(remarks),
        said=frozenset(said),
    )


def _at_fault(present: Mapping[str, Any], message: str) -> str:
    """Return the key of which a message shows the value; of several, the first."""

    def is_shown(value: object) -> bool:
        texts = (re.escape(text) for text in (show_value(value), repr(str(value))))
        return any(re.search(rf"(?<!\S){text}(?![^\s,.;])", message) for text in texts)

    return next((key for key, value in present.items() if is_shown(value)), next(iter(present)))


def _short(value: object) -> str:
    text = str(getattr(value, "text", value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
