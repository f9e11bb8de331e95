"""The commands as functions of Python: each takes plans or paths, and returns a value that prints itself."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

from autoshard.cost.predict import CheckedPlan, check_plan
from autoshard.errors import NoPlan, RunFailed, nearest, require
from autoshard.plan.codec import load as read_plan
from autoshard.plan.plan import Plan
from autoshard.report.page.account import Account
from autoshard.report.sheet import Node
from autoshard.run.folder import RUNS
from autoshard.search.ask.answers import PlanResult
from autoshard.search.ask.python_words import python_words

PlanLike = Plan | str | Path  # a plan, or the path of its file


@python_words()
def load(path: str | Path) -> Plan:
    """Read a plan file, with a prediction of this version.

    Raises InputError where the file is no plan, and NoPlan where it cannot run.
    """
    return _checked(path).plan


@python_words()
def explain(plan: PlanLike, *, why_not: Mapping[str, Any] | str | None = None) -> Account:
    """Show where the time and memory of a plan go, every operation, and the next best plans.

    Args:
        plan: A plan, or the path of its file.
        why_not: Keys of another layout, ``{"tp": 8}`` or ``"tp=8"``: compare with the best plan that has them.

    >>> import autoshard
    >>> account = autoshard.explain(autoshard.plan("tiny-llama", "local").plan)
    >>> account.data["candidate"]
    'tp=1,pp=1,dp=4,mbs=8'
    """
    from autoshard.blocks.explain import explain as explained
    from autoshard.cost.built_in import calibration_of
    from autoshard.cost.timeline import rank_times
    from autoshard.plan.candidate import pins_text
    from autoshard.report.comparison import why_not_sheets
    from autoshard.report.explanation import explanation_sheets
    from autoshard.report.structured import explanation_json, why_not_json
    from autoshard.search.ask.what_if import alternatives, why_not as best_of
    from autoshard.spec.recipe import Pins

    stated = why_not is None or isinstance(why_not, str | Mapping)
    require((stated, "why_not", f"must be keys with values, as {{'tp': 8}} or 'tp=8', not {why_not!r}"))
    checked = _checked(plan)
    read, notes = checked.plan, [checked.remark] if checked.remark else []
    constants, times = calibration_of(read), rank_times(read)
    if why_not is None:
        parts = read, explained(read), alternatives(read, constants), times
        return Account(tuple(explanation_sheets(*parts)), explanation_json(*parts, notes))
    answer = best_of(read, Pins(why_not if isinstance(why_not, str) else pins_text(why_not)), constants)
    data = why_not_json(read, answer, notes)
    return Account(tuple(why_not_sheets(read, answer, Node(data))), data)


@python_words()
def compare(a: PlanLike, b: PlanLike) -> Account:
    """Say which of two plans is predicted to be faster, and why: ``b`` against ``a``.

    >>> import autoshard
    >>> first, second = (autoshard.plan("tiny-llama", "local", fix={"tp": tp}).plan for tp in (1, 2))
    >>> autoshard.compare(first, second).data["slower_by"] > 0
    True
    """
    from autoshard.cost.doubt import compared
    from autoshard.report.comparison import comparison_sheets
    from autoshard.report.structured import comparison_json

    checked = [_checked(plan) for plan in (a, b)]
    difference = compared(*(entry.plan for entry in checked))
    data = comparison_json(difference, [entry.remark for entry in checked if entry.remark])
    names = tuple(str(plan) if isinstance(plan, str | Path) else name for plan, name in ((a, "a"), (b, "b")))
    return Account(tuple(comparison_sheets(difference, Node(data), (names[0], names[1]))), data)


@python_words()
def verify(plan: PlanLike) -> Account:
    """Prove on virtual ranks that the sharding of a plan computes what the unsharded model computes.

    ``data["holds"]`` says whether it does. Raises NoPlan with every reason why a plan cannot run.

    >>> import autoshard
    >>> autoshard.verify(autoshard.plan("tiny-llama", "local", fix={"tp": 2}).plan).data["holds"]
    True
    """
    from autoshard.commands.verify import verdict_of

    checked = _checked(plan, to_run=True)
    misfits = [reason for reason in checked.rejections if reason.rule_id == "memory"]
    verdict = verdict_of(checked.plan, misfits, checked.remark)
    return Account(tuple(verdict.sheets("plan" if isinstance(plan, Plan) else str(plan))), verdict.figures)


@python_words()
def report(*plans: PlanLike, run: str | Path | None = None, out: str | Path = "report.html") -> Path:
    """Draw plans, and a run of the first, as one page of HTML; return its path."""
    from autoshard.commands.report import draw_page
    from autoshard.commands.writing.places import page_checks

    require((bool(plans), "plans", "must be at least one"))
    checked = [_checked(plan) for plan in plans]
    names = [str(plan) if isinstance(plan, str | Path) else f"plan {place}" for place, plan in enumerate(plans, 1)]
    require((len({*names}) == len(names), "plans", "are named twice; name each file once"))
    require(*page_checks(Path(out), "out"))
    return draw_page(dict(zip(names, checked, strict=True)), Path(run) if run else None, Path(out))


def import_(
    *files: str | Path,
    config: str | Path | None = None,
    search: bool = True,
    nodes: int | None = None,
    **options: Any,
) -> Account:
    """Predict a configuration of another program, and name a better plan; or read logs, and name what to try next.

    Args:
        files: The configuration, or ``FILE.py:FUNCTION``: it is read, and never run. Or logs, and folders with them.
        config: The configuration of the runs whose logs are read, if they do not print it.
        search: Look for a better plan, or for the layout to try after the runs.
        nodes: How many nodes the cluster has, if not those that the files say.
        options: What the files leave open, as after ``autoshard import``: ``cluster="h100"``, ``model="llama3-8b"``.

    ``data`` has all that is said; of logs also the measured rows.
    """
    from autoshard.imports.answer import answered, fitting_question
    from autoshard.imports.imported import imported_run
    from autoshard.imports.logs.answer import log_answers
    from autoshard.imports.logs.reading import holds_log, logs_in, read_log
    from autoshard.imports.question import ImportOptions
    from autoshard.imports.to_try import OPTIONS, next_answer
    from autoshard.report.interchange import import_json, import_sheets, log_sheets, logs_json
    from autoshard.search.ask.choice.doubt import DOUBT
    from autoshard.search.ask.planner import search as best

    require((bool(files), "files", "missing; name a configuration, or logs"))
    with python_words():
        paths = [path for file in files for path in logs_in(Path(file))]
        if config is None and len(paths) == 1 and not holds_log(paths[0]):
            question = fitting_question(imported_run(str(files[0])), ImportOptions(**options), nodes)
            answer = answered(question, partial(best, num_plans=1, simple_within=DOUBT) if search else None)
            data = import_json(answer)
            return Account(tuple(import_sheets(answer, Node(data), "")), data)
        run = imported_run(str(config)) if config else None
        answers = log_answers(paths, run, ImportOptions(**options), nodes, read_log)
        logged = [answer.logged for answer in answers if answer.logged is not None]
        following = next_answer(logged, None, partial(best, num_plans=OPTIONS)) if search and logged else None
    data = logs_json(answers, following)
    return Account(tuple(log_sheets(answers, Node(data), following, ("", ""))), data)


@python_words()
def export(plan: PlanLike, to: str) -> Account:
    """Return a plan as a configuration of another program; ``data["text"]`` is its file.

    Args:
        plan: A plan, or the path of its file.
        to: The program: nxdt, megatron, torchtitan, accelerate or deepspeed.
    """
    from autoshard.commands.interchange.export import ExportName
    from autoshard.exports.price import export_checks, exported
    from autoshard.imports.imported import PROGRAMS
    from autoshard.report.interchange import export_json, export_sheets

    programs = {program.name: program for program in PROGRAMS if program.name in get_args(ExportName)}
    require((to in programs, "to", f"{to!r} is not known. {nearest(str(to), tuple(programs))}"))
    checked, program = _checked(plan), programs[to]
    read = checked.plan
    require(*export_checks(read, program, "plan", "to"))
    answer = exported(read, program)
    data = export_json(answer, "", checked.remark)
    return Account(tuple(export_sheets(answer, Node(data))), data)


def run(plan: str | Path, *, out: str | Path | None = None, **options: Any) -> Path:
    """Train as a plan file or a recipe says, on ranks that start here; return the folder of the run.

    Args:
        plan: The path of a plan file, or a recipe by path or name.
        out: The folder of the run. Default: as for ``autoshard run``.
        options: Further options of ``autoshard run`` with underscores, two of them for a dot: ``steps=100``,
            ``learning_rate=1e-3``, ``data__set={"poems.txt": 1}``.

    Raises RunFailed where the run does not end well; what it printed says why.
    """
    from autoshard.command_line.options import options_of
    from autoshard.command_line.reading import read_options
    from autoshard.commands.run import run as run_command
    from autoshard.spec.files import named_file
    from autoshard.spec.recipe import RECIPES

    _require_plan(plan, (str, Path), "the path of a plan that was saved, or a recipe")
    file = named_file(Path(plan), RECIPES)
    folder = Path(out) if out is not None else Path(RUNS) / file.stem
    words = [str(file), "--out", str(folder)]
    switches = {option.flag: option.words for option in options_of(run_command)}
    for name, value in options.items():
        flag = f"--{name.replace('__', '.').replace('_', '-')}"
        if flag in switches and (value is None or (value is False and not switches[flag])):
            continue  # as where it is not stated
        value = "false" if value is False else value
        pairs = [f"{key}={entry}" for key, entry in value.items()] if isinstance(value, Mapping) else [str(value)]
        words += [flag] if value is True else [word for pair in pairs for word in (flag, pair)]
    if run_command(**read_options("run", run_command, words)):
        raise RunFailed(f"the run in {folder} did not end well")
    return folder


def _require_plan(plan: object, kinds: tuple[type, ...] = (Plan, str, Path), what: str = "a plan, or its path") -> None:
    """Refuse what is neither a plan nor its path; the result of a search holds one."""
    advice = ". Its plan is result.plan" if isinstance(plan, PlanResult) and Plan in kinds else ""
    message = f"must be {what}, not a value of {type(plan).__name__}{advice}"
    require((isinstance(plan, kinds), "plan", message))


def _checked(plan: PlanLike, *, to_run: bool = False) -> CheckedPlan:
    """Return a plan with this version's prediction; refuse one that cannot run, but for its memory."""
    _require_plan(plan)
    where = "plan" if isinstance(plan, Plan) else str(plan)
    content = plan if isinstance(plan, Plan) else read_plan(Path(plan))
    checked = check_plan(content, to_run=to_run, place=Path(where) if content is not plan else where)
    misfits = [reason.message for reason in checked.rejections if reason.rule_id != "memory"]
    if misfits:
        raise NoPlan(f"{where}: {'; '.join(misfits)}")
    return checked
