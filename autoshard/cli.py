"""The command line: one function per command; its docstring is the help."""

import gc
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autoshard import __version__
from autoshard.command_line import SaidOften, read_options
from autoshard.errors import AutoshardError, InputError, nearest, require

if TYPE_CHECKING:
    from autoshard.cost.calibration import Calibration
    from autoshard.layout.pin import Pin
    from autoshard.plan.plan import Plan
    from autoshard.search.planner import Found, Request

Listable = Literal["models", "clusters", "engines", "schedules", "kernels", "rules"]

_RARELY = (200_000, 20, 20)  # measured: looking for cycles of objects takes a twentieth of a planning process
MOST_SHOWN = 100  # every plan that is shown is predicted in full, a few milliseconds each


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
    calibration: str | None = None,
    fix: str | None = None,
    pins: SaidOften = (),
    at: str | None = None,
    top: int = 3,
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
        calibration: A calibration file, made by `autoshard calibrate`. Default: what is known of the cluster.
        fix: Pin some keys of the layout, e.g. tp=32,pp=8.
        pins: Pin the layout of a tensor, e.g. 'up=[batch/dp, seq, ffn/tp]'; may be given several times.
        at: Evaluate exactly this layout, even one that is refused, and say why.
        top: How many plans to show, the best one included.
        out: The plan file to write.
        json: Print one JSON object instead of tables.
    """
    from autoshard.report.structured import found_json
    from autoshard.report.terminal import make_console, plan_report
    from autoshard.search.api import request_of
    from autoshard.spec.recipe import Recipe

    _refuse_contradictions(at, fix, top, out)
    recipe = Recipe(
        model=model, nodes=nodes, cluster=cluster, lnc=lnc, ranks=ranks, seq_len=seq_len, global_batch=global_batch,
        precision=precision, engine=engine, calibration=calibration, fix=fix,
    )  # fmt: skip
    request = request_of(recipe, _pins(pins))
    if at is not None:
        return _plan_at(request, at, out, json)
    found = _searched(request, top)
    best = found.plans[0]
    _write(best, out)
    if json:
        _print_json(found_json(found.plans, found.certificate))
    else:
        make_console().print(plan_report(best, found.plans[1:], found.certificate, _next_command(out)))
        print(f"wrote {out}")
    return 0


def verify(plan: Path, json: bool = False) -> int:
    """Say every reason why a plan file cannot run, and prove by execution that its sharding computes the same.

    A shrunk plan runs on virtual ranks, with the collectives of the plan's own table; loss and every gradient are
    compared with the unsharded model. Exit code 1 if there is a reason, or a difference.

    Args:
        plan: The plan file.
        json: Print one JSON object instead of text.
    """
    from autoshard.plan.codec import load
    from autoshard.plan.proof import prove
    from autoshard.plan.verify import notices
    from autoshard.report.proof import proof_report
    from autoshard.report.structured import rejection_json
    from autoshard.report.terminal import make_console, rejections_report
    from autoshard.search.judged import judged
    from autoshard.spec.record import encode

    found = judged(load(plan))
    current, rejections = found.plan, found.rejections
    remarks = [*([found.remark] if found.remark else []), *notices(current)]
    proof = prove(current) if current.strategies and not rejections else None
    failed = bool(rejections) or (proof is not None and not proof.holds)
    if json:
        reasons = [rejection_json(entry) for entry in rejections]
        _print_json({"rejections": reasons, "notices": remarks, "proof": encode(proof)})
        return 1 if failed else 0
    if rejections:
        make_console().print(rejections_report(rejections))
    else:
        print(f"{plan}: {current.candidate} may run on {current.cluster.name} with engine {current.engine}")
    if proof:
        make_console().print(proof_report(proof))
    for remark in remarks:
        print(f"note: {remark}")
    return 1 if failed else 0


def explain(plan: Path, calibration: Path | None = None, json: bool = False) -> int:
    """Show every operation of a plan: its layout, its time, what is sent over which link, and its second-best cut.

    Args:
        plan: The plan file.
        calibration: A calibration file, made by `autoshard calibrate`. Default: the constants that the plan carries.
        json: Print one JSON object instead of tables.
    """
    from autoshard.plan.codec import load
    from autoshard.report.explained import explanation_report
    from autoshard.report.structured import explanation_json
    from autoshard.report.terminal import make_console, rejections_report
    from autoshard.search.explain import explain as explained
    from autoshard.search.judged import judged

    read = judged(load(plan), _constants(calibration))
    misfits = tuple(reason for reason in read.rejections if reason.rule_id != "memory")
    if misfits:
        make_console().print(rejections_report(misfits))
        return 1
    found = explained(read.plan)
    if json:
        _print_json(explanation_json(read.plan, found))
    else:
        make_console().print(explanation_report(read.plan, found))
    return 0


def validate(rows: Path, calibration: Path | None = None, json: bool = False) -> int:
    """Predict measured runs from their own layouts alone, and say per data set how far that is off.

    Args:
        rows: A file with one measured run per line of JSON (see benchmarks/data), or a folder of such files.
        calibration: A calibration file, made by `autoshard calibrate`. Default: what is known of each row's cluster.
        json: Print one JSON object instead of tables.
    """
    from autoshard.report.terminal import make_console
    from autoshard.report.validated import validation_report
    from autoshard.search.validate import validate as validated
    from autoshard.spec.record import encode

    found = validated(rows, _constants(calibration))
    if json:
        _print_json(encode(found))
    else:
        make_console().print(validation_report(found))
    return 0


def calibrate(rows: Path, cluster: str, out: Path, date: str | None = None, json: bool = False) -> int:
    """Fit the constants of the cost model to measured runs, and write them to a calibration file.

    Args:
        rows: A file with one measured run per line of JSON (see benchmarks/data), all of them of this cluster.
        cluster: The cluster that the rows were run on, by name or as the path of a cluster file.
        out: The calibration file to write, for the option --calibration of the other commands.
        date: From when the rows are, if not from the newest date in them.
        json: Print one JSON object instead of text.
    """
    from autoshard.cost.calibration import calibration_text
    from autoshard.report.calibrated import calibration_report
    from autoshard.search.calibrate import calibrate as calibrated
    from autoshard.spec.record import encode

    require(*_place_checks(out))
    found = calibrated(rows, cluster, out.stem, date)
    _write_text(calibration_text(found), out)
    if json:
        _print_json(encode(found))
    else:
        print(f"{calibration_report(found)}\nwrote {out}")
    return 0


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


COMMANDS: dict[str, Callable[..., int]] = {
    "plan": plan,
    "explain": explain,
    "verify": verify,
    "validate": validate,
    "calibrate": calibrate,
    "list": list_,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every fault the user can mend is one clear message, never a traceback."""
    gc.set_threshold(*_RARELY)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what the terminal cannot show must not stop the command
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except InputError as error:
        for fault in error.faults:
            _complain(" ".join(str(fault).split()))
        return error.exit_code
    except AutoshardError as error:
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except BrokenPipeError:  # whoever read our output has gone; what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        _complain(f"{error.filename or 'the output'}: {error.strerror or error}")
        return 2


def _complain(text: str) -> None:
    print(f"autoshard: {text}", file=sys.stderr)


def _run(arguments: list[str]) -> int:
    if not arguments:
        print(_overview(), file=sys.stderr)
        return 2
    first, *rest = arguments
    if first in ("-h", "--help"):
        print(_overview())
        return 0
    if first == "--version":
        print(f"autoshard {__version__}")
        return 0
    if first not in COMMANDS:
        raise InputError.of(first, f"not a command. {nearest(first, list(COMMANDS))}")
    values = read_options(first, COMMANDS[first], rest)
    return 0 if values is None else COMMANDS[first](**values)


def _overview() -> str:
    rows = [f"  {name:<9} {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    title = "autoshard: the fastest way to cut a training run over a cluster that fits in memory."
    usage = "usage: autoshard COMMAND ...      (autoshard COMMAND --help says more)"
    return "\n".join([title, "", usage, "", *rows])


def _searched(request: "Request", num_plans: int) -> "Found":
    """Search; where nothing fits, say by how much the best misses and what would help."""
    from autoshard.search.api import unanswered
    from autoshard.search.planner import search

    found = search(request, num_plans)
    if not found.plans:
        raise unanswered(request, found, helpful=True)
    return found


def _plan_at(request: "Request", text: str, out: Path, json: bool) -> int:
    """Evaluate one candidate: its rejections first, then an estimate where it has a shape."""
    from autoshard.plan.candidate import Candidate
    from autoshard.plan.verify import verify as reasons_against
    from autoshard.report.structured import made_json
    from autoshard.report.terminal import make_console, plan_report, rejections_report
    from autoshard.search.planner import rejections_of, resolved

    try:
        candidate, engine = resolved(request, Candidate.parse(text, request.cluster.num_ranks))
    except InputError as error:
        raise error.under("--at") from None
    refused = rejections_of(request, candidate, engine)
    made, shapeless = None, ""
    try:
        made = request.plan(candidate, engine)
    except InputError as error:
        if not refused:
            raise error.under("--at") from None
        shapeless = str(error)
    refused = reasons_against(made) if made else refused
    if json:
        _print_json(made_json(made, refused))
    else:
        report = plan_report(made, (), None, "") if made else f"no estimate: {shapeless}"
        make_console().print(rejections_report(refused), report)
    if refused or made is None:
        return 1
    _write(made, out)
    if not json:
        print(f"wrote {out}\nnext: {_next_command(out)}")
    return 0


def _pins(said: SaidOften) -> "list[Pin]":
    """Read pinned layouts; one on the command line goes before one of the same name in a file."""
    from autoshard.errors import Fault
    from autoshard.layout.pin import Pin, parse_pin

    faults: list[Fault] = []
    pins: dict[str, Pin] = {}
    for one in said:
        try:
            pin = parse_pin(one.text, one.where)
        except InputError as error:
            faults.extend(error.faults)
            continue
        if pin.tensor in pins and pins[pin.tensor].origin == one.where:
            faults.append(Fault(where=f"{one.where} {pin.tensor}", message="is given twice; keep one"))
        pins[pin.tensor] = pin
    if faults:
        raise InputError(faults)
    return list(pins.values())


def _refuse_contradictions(at: str | None, fix: str | None, top: int, out: Path) -> None:
    """Find out before the search what nobody could want, and that the answer would have no place."""
    require(
        (at is None or fix is None, "--at", "already names every key; leave out --fix"),
        (1 <= top <= MOST_SHOWN, "--top", f"must be 1 to {MOST_SHOWN}, not {top}"),
        *_place_checks(out),
    )


def _place_checks(out: Path) -> list[tuple[bool, str, str]]:
    """Check that a file can stand here."""
    return [
        (not out.is_dir(), f"--out {out}", "is a folder. Name a file in it"),
        (out.parent.is_dir(), f"--out {out}", f"there is no folder {out.parent}. Make it first"),
    ]


def _constants(calibration: Path | None) -> "Calibration | None":
    from autoshard.cost.calibration import load_calibration

    return None if calibration is None else load_calibration(calibration)


def _next_command(out: Path) -> str:
    import shlex

    return f"autoshard verify {shlex.quote(str(out))}"


def _write(made: "Plan", out: Path) -> None:
    from autoshard.plan.codec import dump

    _write_text(dump(made), out)


def _write_text(text: str, out: Path) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError.of(f"--out {out}", f"cannot be written: {error.strerror or error}") from None


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value, indent=2))


if __name__ == "__main__":
    sys.exit(main())
