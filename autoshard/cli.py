"""The command line: one function per command; its docstring is the help."""

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoshard import __version__
from autoshard.errors import AutoshardError, Fault, InputError, NoPlan, nearest

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from autoshard.plan.candidate import Candidate
    from autoshard.plan.plan import Plan
    from autoshard.search.planner import Found, Request

Listable = Literal["models", "clusters", "engines", "schedules", "kernels", "rules"]


def plan(
    model: str,
    nodes: int = 1,
    cluster: str = "trn1.32xlarge",
    lnc: int | None = None,
    ranks: int | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Literal["bf16", "fp16", "fp32"] = "bf16",
    engine: Literal["nxd", "torch", "any"] | None = None,
    fix: str | None = None,
    at: str | None = None,
    top: int = 5,
    out: Path = Path("plan.json"),
    json: bool = False,
) -> int:
    """Find the fastest layout of a training run that fits in memory, and write it to a plan file.

    Args:
        model: A model card by name (see `autoshard list models`), or the path of a Hugging Face config.json.
        nodes: How many nodes the cluster has.
        cluster: A cluster by name (see `autoshard list clusters`), or the path of a cluster file.
        lnc: Logical NeuronCore configuration of trn2: 1 or 2. Default: 2.
        ranks: Processes on this machine, 1 to 64; only for the cluster `local`. Default: 4.
        seq_len: Tokens in a sequence. Default: the card's context, at most 8192.
        global_batch: Sequences in an optimizer step. Default: 1024, on `local` 32.
        precision: Number format of weights and activations; bf16 and fp16 keep FP32 masters.
        engine: Only what this engine runs; any lifts the restriction. Default: the cluster's own.
        fix: Pin some keys of the layout, e.g. tp=32,pp=8.
        at: Evaluate exactly this layout, even one that is refused, and say why.
        top: How many plans to show, the best one included.
        out: The plan file to write.
        json: Print one JSON object instead of tables.
    """
    from autoshard.report.structured import found_json
    from autoshard.report.terminal import make_console, plan_report
    from autoshard.search.api import request_of
    from autoshard.spec.recipe import Recipe

    if at and fix:
        raise InputError.of("--at", "already names every key; leave out --fix")
    if top < 1:
        raise InputError.of("--top", f"must be at least 1, not {top}")
    recipe = Recipe(
        model=model, nodes=nodes, cluster=cluster, lnc=lnc, ranks=ranks, seq_len=seq_len, global_batch=global_batch,
        precision=precision, engine=engine, fix=fix,
    )  # fmt: skip
    request = request_of(recipe)
    if at:
        return _plan_at(request, at, out, json)
    found = _searched(request, top)
    best = found.plans[0]
    _write(best, out)
    if json:
        _print_json(found_json(found.plans, found.certificate))
    else:
        report = plan_report(best, found.plans[1:], found.certificate, f"autoshard verify {out}")
        make_console().print(report)
        print(f"wrote {out}")
    return 0


def verify(plan: Path, json: bool = False) -> int:
    """Say every reason why a plan file cannot run on its cluster and engine; exit code 1 if there is one.

    Args:
        plan: The plan file.
        json: Print one JSON object instead of text.
    """
    from dataclasses import replace

    from autoshard.cost.predict import predicted
    from autoshard.plan.codec import fingerprint, load
    from autoshard.plan.verify import notices, verify as reasons_against
    from autoshard.report.structured import rejection_json
    from autoshard.report.terminal import make_console, rejections_report

    read = load(plan)
    edited = read.prediction is None or read.prediction.of != fingerprint(read)
    current = read
    if edited and not reasons_against(replace(read, prediction=None)):
        current = predicted(replace(read, prediction=None))
    rejections = reasons_against(current)
    remarks = [*notices(current)]
    if edited:
        remarks.insert(0, "prediction: the plan was edited after it was made, so it was predicted again here")
    if json:
        _print_json({"rejections": [rejection_json(entry) for entry in rejections], "notices": remarks})
    elif rejections:
        make_console().print(rejections_report(rejections))
    else:
        print(f"{plan}: {current.candidate} may run on {current.cluster.name} with engine {current.engine}")
    if not json:
        for remark in remarks:
            print(f"note: {remark}")
    return 1 if rejections else 0


def list_(what: Listable, json: bool = False) -> int:
    """List what can be named: models, clusters, engines, schedules, kernels or rules.

    Args:
        what: What to list.
        json: Print one JSON object instead of a table.
    """
    from autoshard.report.listing import entries, listing_text

    found = entries(what)
    if json:
        _print_json({what: found})
    else:
        print(listing_text(found))
    return 0


COMMANDS: dict[str, Callable[..., int]] = {"plan": plan, "verify": verify, "list": list_}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every fault the user can mend is one clear message, never a traceback."""
    try:
        command, options = _parse(sys.argv[1:] if arguments is None else arguments)
        return command(**options)
    except InputError as error:
        for fault in error.faults:
            print(f"autoshard: {fault}", file=sys.stderr)
        return error.exit_code
    except AutoshardError as error:
        print(f"autoshard: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("autoshard: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; there is nobody left to tell
        return 0


def _parse(arguments: Sequence[str]) -> tuple[Callable[..., int], dict[str, Any]]:
    """Read the command line; only the parser of the command that is asked for is built."""
    import docstring_parser
    from jsonargparse import ArgumentError, ArgumentParser

    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        raise SystemExit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(f"autoshard {__version__}")
        raise SystemExit(0)
    name = arguments[0]
    if name not in COMMANDS:
        raise InputError.of(name, f"not a command. {nearest(name, list(COMMANDS))}")
    command = COMMANDS[name]
    about = docstring_parser.parse(command.__doc__ or "")
    parser = ArgumentParser(prog=f"autoshard {name}", description=about.short_description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="A YAML file with any of these options.")
    help_of = {entry.arg_name: entry.description or "" for entry in about.params}
    for parameter in inspect.signature(command).parameters.values():
        _add_option(parser, parameter, help_of[parameter.name], positional=name != "plan")
    try:
        values = parser.parse_args(list(arguments[1:])).as_dict()
    except ArgumentError as error:
        raise InputError.of(f"autoshard {name}", f"{error}. See autoshard {name} --help") from None
    values.pop("config", None)
    return command, values


def _add_option(parser: "ArgumentParser", parameter: inspect.Parameter, text: str, *, positional: bool) -> None:
    """Make an option of a parameter: what has no default is required, a bool is a switch."""
    required = parameter.default is inspect.Parameter.empty
    flag = f"--{parameter.name.replace('_', '-')}"
    if parameter.annotation is bool:
        parser.add_argument(flag, action="store_true", help=text)
    elif required and positional:
        parser.add_argument(parameter.name, type=parameter.annotation, help=text)
    elif required:
        parser.add_argument(flag, type=parameter.annotation, required=True, help=text)
    else:
        parser.add_argument(flag, type=parameter.annotation, default=parameter.default, help=text)


def _overview() -> str:
    rows = [f"  {name:<8} {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    title = "autoshard: the fastest way to cut a training run over a cluster that fits in memory."
    usage = "usage: autoshard COMMAND ...      (autoshard COMMAND --help says more)"
    return "\n".join([title, "", usage, "", *rows])


def _searched(request: "Request", num_plans: int) -> "Found":
    """Search; where nothing fits, say by how much the best misses and what would help."""
    from autoshard.search.planner import search
    from autoshard.search.remedy import fixed_rejections, remedies, why_none

    found = search(request, num_plans)
    if found.plans:
        return found
    reasons = [rejection.message for rejection in fixed_rejections(request)]
    if reasons:
        raise InputError(Fault(where="--fix" if request.pins else "", message=reason) for reason in reasons)
    tries = [f"  try {remedy}" for remedy in remedies(request)]
    raise NoPlan("\n".join([why_none(request, found), *tries]))


def _plan_at(request: "Request", text: str, out: Path, json: bool) -> int:
    """Evaluate one candidate: its rejections first, then an estimate where it has a shape."""
    from autoshard.plan.candidate import Candidate
    from autoshard.plan.rules.check import rejections
    from autoshard.plan.verify import verify as reasons_against
    from autoshard.report.structured import plan_json, rejection_json
    from autoshard.report.terminal import make_console, plan_report, rejections_report
    from autoshard.search.planner import plan_at

    candidate = _at_option(lambda: Candidate.parse(text, request.cluster.num_ranks))
    engine = request.engines[0]
    refused = rejections(candidate, request.model, request.cluster, request.workload, engine)
    made, shapeless = None, ""
    try:
        made = plan_at(request, candidate)
    except InputError as error:
        if not refused:
            raise
        shapeless = str(error)
    refused = reasons_against(made) if made else refused
    if json:
        reasons = [rejection_json(entry) for entry in refused]
        _print_json({"rejections": reasons, "plan": plan_json(made) if made else None})
    else:
        console = make_console()
        console.print(rejections_report(refused))
        if made:
            console.print(plan_report(made, (), None, ""))
        else:
            print(f"no estimate: {shapeless}")
    if refused or made is None:
        return 1
    _write(made, out)
    if not json:
        print(f"wrote {out}\nnext: autoshard verify {out}")
    return 0


def _at_option(read: Callable[[], "Candidate"]) -> "Candidate":
    try:
        return read()
    except InputError as error:
        raise error.under("--at") from None


def _write(made: "Plan", out: Path) -> None:
    from autoshard.plan.codec import dump

    try:
        out.write_text(dump(made), encoding="utf-8")
    except OSError as error:
        raise InputError.of(f"--out {out}", f"cannot be written: {error.strerror or error}") from None


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value, indent=2))


if __name__ == "__main__":
    sys.exit(main())
