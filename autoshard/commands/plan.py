"""``autoshard plan``: the best plan, or exactly one candidate."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autoshard.command_line import SaidOften
from autoshard.commands.output import next_command, place_checks, print_json, write_plan
from autoshard.errors import InputError, require

if TYPE_CHECKING:
    from autoshard.layout.pin import Pin
    from autoshard.search.planner import Found, Request

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
    write_plan(best, out)
    if json:
        print_json(found_json(found.plans, found.certificate))
    else:
        make_console().print(plan_report(best, found.plans[1:], found.certificate, next_command(out)))
        print(f"wrote {out}")
    return 0


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
        print_json(made_json(made, refused))
    else:
        report = plan_report(made, (), None, "") if made else f"no estimate: {shapeless}"
        make_console().print(rejections_report(refused), report)
    if refused or made is None:
        return 1
    write_plan(made, out)
    if not json:
        print(f"wrote {out}\nnext: {next_command(out)}")
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
        *place_checks(out),
    )
