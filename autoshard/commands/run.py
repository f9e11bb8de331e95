"""``autoshard run``: execute a plan, or plan a recipe and execute that, and say how its prediction holds."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autoshard.command_line import Counts, PlanOrRecipe
from autoshard.commands.compiling import USUAL_STEPS, compile_ahead, compiling_place
from autoshard.commands.dry import dry
from autoshard.commands.options import QuestionOptions, is_recipe, plan_of
from autoshard.commands.output import print_refused
from autoshard.commands.running import Running, free_name, run_on
from autoshard.errors import InputError, require
from autoshard.spec.training import Training

if TYPE_CHECKING:
    from autoshard.engine.base import Resume, Run
    from autoshard.plan.plan import Plan
    from autoshard.plan.rules.rule import Rejection
    from autoshard.runtime.launch import GivenRank

_RUNS = Path("runs")


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
    plan: PlanOrRecipe,
    training: Training,
    question: QuestionOptions,
    out: Path | None = None,
    resume: str = "auto",
    restarts: int = 0,
    rehearse: int | None = None,
    dry_run: bool = False,
    dry_ranks: Counts = (),
    compile_only: bool = False,
    json: bool = False,
) -> int:
    """Train as a plan or a recipe says, and put what was predicted beside what is measured.

    The ranks are forked here, unless torchrun or srun has started this process as one of them.

    Args:
        plan: A plan file, or a recipe (.yaml), which is planned first; any key of a recipe is an option too.
        training: What the run does beside its plan.
        question: What a recipe asks.
        out: The folder of the run: plan, metrics, checkpoints, logs. Default: runs/ and the name of the file.
        resume: Where to go on in a folder that holds a run: auto (the newest checkpoint), never, or a step.
        restarts: How often in a row failed ranks are started again without a newer checkpoint.
        rehearse: Run a plan of the same shape on at most so many ranks, with a model to match, e.g. 8.
        dry_run: Start nothing: try ranks of the whole plan out here one by one, without numbers, and count bytes.
        dry_ranks: Which ranks --dry-run tries, e.g. 0,37. Default: one of each that differ.
        compile_only: On Trainium, once on every node: compile all graphs into a cache in the folder of the run.
        json: Print one JSON object at the end instead of steps and tables.
    """
    from autoshard.runtime.launch import given_rank

    tried = dry_run or rehearse is not None
    first = f"takes a plan file. Type first: autoshard plan --config {plan}"
    require(
        (not (compile_only and is_recipe(plan)), "--compile-only", first),
        (rehearse is None or rehearse >= 1, "--rehearse", f"must be at least 1, not {rehearse}"),
        (restarts >= 0, "--restarts", f"must be at least 0, not {restarts}"),
        (dry_run or not dry_ranks, "--dry-ranks", "says which ranks --dry-run tries. Type --dry-run as well"),
        (not (compile_only and tried), "--compile-only", "what is only tried is not compiled. Leave one of them out"),
    )
    folder = out or _RUNS / (f"{plan.stem}-compiled" if compile_only else plan.stem)
    asked = _only_tried(folder, training) if tried else _asked(folder, training, resume, plan)
    given = given_rank()
    leads = given is None or given.rank == 0
    ready = _ready(plan_of(plan, question), rehearse, dry_run=dry_run)
    if ready.rejections:
        return print_refused(ready.rejections, json=json) if leads else 1
    if compile_only:
        return _compile(ready.plan, asked, given, str(plan), json)
    if dry_run:
        return dry(ready.plan, ready.notes, dry_ranks, json=json) if leads else 0
    ready, asked = _placed(ready, asked, given)
    if leads:
        _refuse_place(ready, plan, given, asked.device)
    elif given and given.num_ranks != ready.plan.mesh.num_ranks:
        return 2  # rank 0 says why
    running = Running(plan=ready.plan, notes=ready.notes, run=asked, tried=ready.tried, restarts=restarts, json=json)
    return run_on(running, given)


def _asked(folder: Path, training: Training, resume: str, path: Path) -> "Run":
    """Return the run that is asked for; sets of a recipe may lie beside it."""
    from autoshard.engine.base import Run

    weights = training.init_weights
    message = f"there is no folder {weights}. Name a folder of checkpoints, or one with a config.json and safetensors"
    require((weights is None or "://" in weights or Path(weights).is_dir(), "init_weights", message))
    if is_recipe(path):
        training = replace(training, data=training.data.seen_from(path.parent))
    return Run(folder=folder, training=training, resume=_where(resume))


def _only_tried(folder: Path, training: Training) -> "Run":
    """Return the run of what is only tried: its small model fits neither real tokens nor real weights."""
    from autoshard.engine.base import Run

    usual = Training()
    checkpoint = replace(usual.checkpoint, to="none")
    training = replace(training, checkpoint=checkpoint, data=usual.data, init_weights=None)
    return Run(folder=folder, training=training, resume="never")


def _where(resume: str) -> "Resume":
    """Read where a run goes on."""
    if resume == "auto" or resume == "never":
        return resume
    require((resume.isdecimal(), "--resume", f"must be auto, never or the step of a checkpoint, not {resume}"))
    return int(resume)


def _compile(plan: "Plan", asked: "Run", given: "GivenRank | None", name: str, json: bool) -> int:
    """Compile the graphs of a short run of a plan."""
    asked = replace(asked, training=replace(asked.training, steps=min(asked.training.steps, USUAL_STEPS)))
    place = compiling_place(plan, asked, given, name)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        what = "holds files already" if place.is_dir() else "is a file"
        raise InputError.of(f"--out {place}", f"{what}, and nothing is overwritten. Type --out {free_name(place)}")
    return compile_ahead(plan, asked, given, name, json=json)


def _ready(plan: "Plan", rehearse: int | None, *, dry_run: bool) -> _Ready:
    """Predict a plan again where that is needed, and shrink it if it is only rehearsed."""
    from autoshard.cost.checked import check_plan
    from autoshard.cost.predict import predicted
    from autoshard.plan.shrink import shrink

    found = check_plan(plan)
    current, notes = found.plan, [*([found.remark] if found.remark else []), *_card_notes(found.plan)]
    if found.rejections:
        return _Ready(plan=current, notes=tuple(notes), rejections=found.rejections)
    if rehearse is not None:
        small = shrink(current, rehearse)
        _refuse_uncut(current, small.plan, rehearse)
        tried_out = f"{small.plan.candidate} of a small model on synthetic tokens, predicted again"
        notes.append(f"rehearsal: {tried_out}, for {current.candidate}")
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
    from autoshard.runtime.devices import available_bytes, refuse_too_large
    from autoshard.runtime.neuron import refuse_without_neuron

    if ready.engine == "nxd":
        refuse_without_neuron(ready.plan, given, str(path))
    if given is None:
        if device == HOST:
            refuse_too_large(ready.plan, available_bytes())
    else:
        given.refuse_other_size(ready.plan.mesh.num_ranks, str(path))
