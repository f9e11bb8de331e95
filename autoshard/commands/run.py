"""``autoshard run``: execute a plan, and say how its prediction holds."""

import datetime
import itertools
import json as json_text
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoshard.command_line import Counts
from autoshard.commands.compiling import USUAL_STEPS, compile_ahead, compiling_place
from autoshard.commands.dry import dry
from autoshard.commands.output import print_json, write_plan, write_text
from autoshard.errors import InputError, require
from autoshard.spec.training import Training

if TYPE_CHECKING:
    from autoshard.engine.base import Run
    from autoshard.engine.ran import RunReport
    from autoshard.plan.plan import Plan
    from autoshard.plan.rules.rule import Rejection
    from autoshard.runtime.launch import GivenRank

_RUNS = Path("runs")
_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A plan that is about to run, what the user should know of it, and the reasons against it."""

    plan: "Plan"
    notes: tuple[str, ...]
    rejections: "tuple[Rejection, ...]" = ()
    tried: bool = False  # rehearsed, or counted only: not on the machine that it is for

    @property
    def engine(self) -> Literal["nxd", "torch"]:
        """What executes it here."""
        return "torch" if self.tried else self.plan.engine


def run(
    plan: Path,
    steps: int | None = None,
    out: Path | None = None,
    rehearse: int | None = None,
    seed: int = 0,
    learning_rate: float = 3e-4,
    dry_run: bool = False,
    dry_ranks: Counts = (),
    compile_only: bool = False,
    json: bool = False,
) -> int:
    """Train on synthetic tokens as a plan says, and put what was predicted beside what is measured.

    The ranks are forked here, unless torchrun or srun has started this process as one of them.

    Args:
        plan: The plan file.
        steps: How many optimizer steps to take. Default: 20, and 10 to find the graphs for --compile-only.
        out: The folder of the run: plan, steps, logs, a measured row. Default: runs/ and the name of the plan file.
        rehearse: Run a plan of the same shape on at most so many ranks, with a model to match, e.g. 8.
        seed: Of the weights and the tokens; the same seed gives the same losses.
        learning_rate: Of the optimizer.
        dry_run: Start nothing: try ranks of the whole plan out here one by one, without numbers, and count bytes.
        dry_ranks: Which ranks --dry-run tries, e.g. 0,37. Default: one of each that differ.
        compile_only: On Trainium, once on every node: compile all graphs into a cache in the folder of the run.
        json: Print one JSON object at the end instead of steps and tables.
    """
    from autoshard.engine.base import Run
    from autoshard.runtime.launch import given_rank

    folder = out or _RUNS / (f"{plan.stem}-compiled" if compile_only else plan.stem)
    count = (USUAL_STEPS if compile_only else _STEPS) if steps is None else steps
    asked = Run(folder=folder, training=Training(steps=count, learning_rate=learning_rate, seed=seed))
    tried = dry_run or rehearse is not None
    require(
        (rehearse is None or rehearse >= 1, "--rehearse", f"must be at least 1, not {rehearse}"),
        (dry_run or not dry_ranks, "--dry-ranks", "says which ranks --dry-run tries. Type --dry-run as well"),
        (not (compile_only and tried), "--compile-only", "what is only tried is not compiled. Leave one of them out"),
    )
    given = given_rank()
    leads = given is None or given.rank == 0
    ready = _ready(plan, rehearse, dry_run=dry_run)
    if ready.rejections:
        return _say_refused(ready.rejections, json) if leads else 1
    if compile_only:
        _refuse_used(compiling_place(ready.plan, asked, given, str(plan)))
        return compile_ahead(ready.plan, asked, given, str(plan), json=json)
    if dry_run:
        return dry(ready.plan, ready.notes, dry_ranks, json=json) if leads else 0
    ready, asked = _placed(ready, asked, given)
    if leads:
        _refuse_place(ready, plan, given, asked.device)
        _refuse_used(folder)
    elif given and given.num_ranks != ready.plan.mesh.num_ranks:
        return 2  # rank 0 says why
    if report := _executed(ready, asked, silent=json or not leads):
        _conclude(ready, report, asked, json)
    return 0


def _ready(path: Path, rehearse: int | None, *, dry_run: bool) -> _Ready:
    """Read a plan, predict it again where that is needed, and shrink it if it is only rehearsed."""
    from autoshard.cost.predict import predicted
    from autoshard.plan.codec import load
    from autoshard.plan.shrink import shrink
    from autoshard.search.judged import judged

    found = judged(load(path))
    current, notes = found.plan, [*([found.remark] if found.remark else []), *_card_notes(found.plan)]
    if found.rejections:
        return _Ready(plan=current, notes=tuple(notes), rejections=found.rejections)
    if rehearse is not None:
        small = shrink(current, rehearse)
        _refuse_uncut(current, small.plan, rehearse)
        notes.append(f"rehearsal: {small.plan.candidate} of a small model, predicted again, for {current.candidate}")
        notes += [f"not kept: {feature}" for feature in small.lost]
        current = predicted(small.plan)
    tried = rehearse is not None or dry_run
    if tried:
        notes += _elsewhere_notes(current)
    return _Ready(plan=current, notes=tuple(notes), tried=tried)


def _card_notes(plan: "Plan") -> list[str]:
    """Say in what the card of the model's name differs today from the model that the plan carries."""
    from autoshard.spec.model_catalogue import load_model, model_names

    name = plan.model.name
    if name not in model_names():
        return []
    card = load_model(name)
    names = [entry.name for entry in fields(card) if entry.name != "source"]
    pairs = {name: (getattr(plan.model, name), getattr(card, name)) for name in names}
    changed = [f"{name} {mine}, on the card {its}" for name, (mine, its) in pairs.items() if mine != its]
    if not changed:
        return []
    return [f"model: the plan's {name} is run, not the card of this name: {'; '.join(changed)}. For it, plan again"]


def _elsewhere_notes(plan: "Plan") -> list[str]:
    """Say what follows from running a plan on another machine than it was made for."""
    from autoshard.spec.cluster import LOCAL

    notes: list[str] = []
    if plan.engine == "nxd":
        notes.append("engine: nxd needs Neuron devices, so the torch engine executes the plan's table here, on the CPU")
    if plan.cluster.name != LOCAL:
        notes.append(f"prediction: its seconds are about {plan.cluster.name}, not about this machine")
    return notes


def _device_notes(plan: "Plan", device: str) -> list[str]:
    """Say on what a plan runs, where that is a question."""
    from autoshard.engine.base import HOST

    if device != HOST:
        return [f"devices: {device}, one for each rank"]
    notes, num_ranks = _elsewhere_notes(plan), plan.mesh.num_ranks
    return [f"devices: none here for {num_ranks} ranks, which take this machine's processors", *notes] if notes else []


def _refuse_uncut(large: "Plan", small: "Plan", rehearse: int) -> None:
    """Refuse to rehearse a table that cuts over tp where there is no room for tp: nothing of it would be left."""
    least = 4 if large.mesh.size("rep") > 1 else 2
    kept = large.mesh.size("tp") == 1 or small.mesh.size("tp") > 1
    message = f"{rehearse} is no room for tp={large.mesh.size('tp')}, which the table needs. Type {least} or more"
    require((kept, "--rehearse", message))


def _placed(ready: _Ready, asked: "Run", given: "GivenRank | None") -> "tuple[_Ready, Run]":
    """Decide where tensors lie, and say so; what is only tried lies with the host."""
    from autoshard.runtime.devices import XLA, device_of

    if ready.engine == "nxd":
        return ready, replace(asked, device=XLA)
    if ready.tried:
        return ready, asked
    device = device_of(ready.plan, forked=given is None)
    return replace(ready, notes=(*ready.notes, *_device_notes(ready.plan, device))), replace(asked, device=device)


def _refuse_place(ready: _Ready, path: Path, given: "GivenRank | None", device: str) -> None:
    """Refuse what this machine cannot run, and ranks of another number."""
    from autoshard.engine.base import HOST
    from autoshard.runtime.neuron import refuse_without_neuron
    from autoshard.runtime.room import available_bytes, refuse_too_large

    if ready.engine == "nxd":
        refuse_without_neuron(ready.plan, given, str(path))
    if given is None:
        if device == HOST:
            refuse_too_large(ready.plan, available_bytes())
    else:
        given.refuse_other_size(ready.plan.mesh.num_ranks, str(path))


def _refuse_used(folder: Path) -> None:
    """Refuse a folder with anything in it, and name one that is free."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    free = next(name for name in names if not name.exists())
    what = "holds files already" if folder.is_dir() else "is a file"
    raise InputError.of(f"--out {folder}", f"{what}, and a run overwrites nothing. Type --out {free}")


def _say_refused(rejections: "tuple[Rejection, ...]", json: bool) -> int:
    from autoshard.report.structured import rejection_json
    from autoshard.report.terminal import make_console, rejections_report

    if json:
        print_json({"rejections": [rejection_json(entry) for entry in rejections]})
    else:
        make_console().print(rejections_report(rejections))
    return 1


def _executed(ready: _Ready, asked: "Run", *, silent: bool) -> "RunReport | None":
    """Run the plan; None in the process of another rank than the first, which has nothing to tell."""
    from autoshard.commands.steps import StepsShown
    from autoshard.engine.nxd.environment import environment
    from autoshard.runtime.engines import builder
    from autoshard.runtime.launch import given_rank, launch, put_environment

    given, plan = given_rank(), ready.plan
    if ready.engine == "nxd":
        put_environment(environment(plan))
    build = builder(ready.engine)
    from autoshard.runtime.train import train

    if given is None or given.rank == 0:
        _begin(ready, asked.folder, given, silent=silent)
    with StepsShown(asked.folder, asked.training.steps, silent=silent) as show:
        return launch(
            given,
            plan.mesh.num_ranks,
            lambda say: train(plan, asked, build, say),
            show=show,
            folder=asked.folder,
            device=asked.device,
        )


def _begin(ready: _Ready, folder: Path, given: "GivenRank | None", *, silent: bool) -> None:
    """Make the folder with the plan in it, and say what is about to run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError.of(f"--out {folder}", f"cannot be made: {error.strerror or error}") from None
    write_plan(ready.plan, folder / "plan.json")
    if silent:
        return
    num_ranks = ready.plan.mesh.num_ranks
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    where = "of this machine" if given is None or given.alone else f"that {given.by} started"
    print(f"{ready.plan.model.name} on {ranks} {where}: {ready.plan.candidate}")
    for note in ready.notes:
        print(f"note: {note}")


def _conclude(ready: _Ready, report: "RunReport", asked: "Run", json: bool) -> None:
    """Write the measured row, and say how the prediction held."""
    from autoshard.report.ran import ran_json, ran_report
    from autoshard.report.terminal import make_console
    from autoshard.runtime.launch import only_extracts

    if only_extracts():
        print("graphs were extracted and nothing was computed: no losses, no times, no measured row")
        return
    folder, cluster = asked.folder, _platform(ready.plan, asked.device)
    rows = folder / "measured.jsonl"
    write_text(json_text.dumps(_row(ready.plan, report, cluster)) + "\n", rows)
    if json:
        print_json({"folder": str(folder), "notes": list(ready.notes), **ran_json(ready.plan, report)})
        return
    make_console().print(ran_report(ready.plan, report, cluster))
    print(f"\nwrote {folder}: plan.json, steps.jsonl, measured.jsonl\nnext: autoshard validate {rows}")
    print(
        f"or, after 3 runs of 2 layouts: autoshard calibrate {folder.parent} --cluster {cluster} --out {cluster}.json"
    )


def _platform(plan: "Plan", device: str) -> str:
    """Name what ran a plan: its own cluster, or the processors of this machine."""
    from autoshard.engine.base import HOST
    from autoshard.spec.cluster import LOCAL

    return LOCAL if device == HOST else plan.cluster.name


def _row(plan: "Plan", report: "RunReport", platform: str) -> dict[str, Any]:
    """Return the run as a measured row, without what it leaves open."""
    import torch

    from autoshard import __version__
    from autoshard.search.measured_plan import Occasion, row_of
    from autoshard.spec.record import encode

    now = datetime.datetime.now(datetime.UTC)
    ran = Occasion(
        name=f"{plan.model.name} {plan.candidate} {now:%Y-%m-%dT%H:%M:%S.%fZ}",
        step_time_s=report.step_time_s,
        date=f"{now:%Y-%m-%d}",
        versions=f"autoshard {__version__}, torch {torch.__version__}",
        platform=platform,
    )
    return {name: value for name, value in encode(row_of(plan, ran)).items() if value is not None}
