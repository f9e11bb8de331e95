"""``autoshard run``: execute a plan, or plan a recipe and execute it, and compare prediction and measurement."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal

from autoshard.command_line.options import Counts, PlanOrRecipe, Stated, is_recipe
from autoshard.commands.output import print_answer, print_refused
from autoshard.commands.plan import plan_of
from autoshard.commands.running.compiling import compile_ahead
from autoshard.commands.running.execution import Execution, execute
from autoshard.cost.predict import check_plan, predicted
from autoshard.errors import require
from autoshard.plan.environment import environment
from autoshard.plan.plan import Plan
from autoshard.plan.proof import shrink
from autoshard.report.run import dry_json, dry_notes, dry_sheet
from autoshard.report.sheet import Node
from autoshard.run.folder import RUNS
from autoshard.run.protocol import HOST, EngineMode, Run
from autoshard.runtime.dry import dry_rank, telling_ranks
from autoshard.runtime.launch import given_rank, put_environment
from autoshard.runtime.machine import (
    XLA,
    available_bytes,
    counter,
    device_of,
    missing_compiler,
    refuse_too_large,
    refuse_without_neuron,
)
from autoshard.runtime.meeting import GivenRank, telling_refusals
from autoshard.runtime.restart import StartBefore, start_before
from autoshard.spec.cluster import LOCAL
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.recipe import QuestionOptions
from autoshard.spec.training import Checkpointing, DataSpec, Evaluating, Training
from autoshard.units import counted


def run(
    plan: PlanOrRecipe,
    training: Stated[Training],
    question: QuestionOptions,
    nodes: int | None = None,
    out: Path | None = None,
    resume: Literal["auto", "newest", "never"] | int = "auto",
    restarts: int = 0,
    rehearse: int | None = None,
    dry_run: bool = False,
    dry_ranks: Counts = (),
    compile_only: bool = False,
    engine_mode: Literal["auto", "literal", "generated", "compiled"] = "auto",
    profile: Counts = (),
    json: bool = False,
) -> int:
    """Train by a plan or a recipe, and compare the prediction with the measurement.

    All ranks are started here, unless torchrun or srun has started this process as one of them.

    Args:
        plan: A plan file or a recipe (.yaml, or a name of autoshard list recipes), whose keys are options too.
        training: Options of training. In a folder that holds a run, what is not stated stays as it was.
        question: The question of a recipe.
        nodes: How many nodes the cluster of a recipe has. Default: 1.
        out: The folder of the run: plan, metrics, checkpoints, logs. Default: runs/ and the name of the file.
        resume: Where to continue in a folder that holds a run: auto (the newest checkpoint), never, or a step;
            newest continues in a new folder too, with the run whose checkpoints checkpoint.to holds.
        restarts: How often in a row failed ranks are started again without a newer checkpoint.
        rehearse: Run a small plan of the same shape, with a small model, on at most so many ranks, e.g. 8.
        dry_run: Start no ranks: execute ranks of the plan here one by one, with shapes only, and count bytes.
        dry_ranks: Which ranks --dry-run executes, e.g. 0,37. Default: one of each kind.
        compile_only: On Trainium, on every node once: compile all graphs into a cache in the folder of the run.
        engine_mode: Run the table itself (literal), functions of it (generated, auto on CPUs), or compiled ones (GPUs).
        profile: Steps that every rank records with torch's profiler, e.g. 3,4: traces in the folder of the run.
        json: Print one JSON object at the end instead of steps and tables.
    """
    tried = dry_run or rehearse is not None
    _refuse(plan, rehearse, restarts, dry=dry_run, dry_ranks=dry_ranks, compile_only=compile_only, profile=profile)
    folder = out or Path(RUNS) / (f"{plan.stem}-compiled" if compile_only else plan.stem)
    fresh = tried or compile_only or resume == "never"
    before = StartBefore() if fresh else start_before(folder, training.values.get("checkpoint.to"))
    trained = _trained(training.over(before.training or Training()), plan, tried=tried)
    options = Run(folder=folder, training=trained, resume="never" if tried else resume, profile=profile)
    leads = (launched := given_rank()) is None or launched.rank == 0
    checked = check_plan(plan_of(plan, question, nodes), to_run=True, place=plan)
    current, notes = checked.plan, [*before.notes, *filter(None, [checked.remark]), *_card_notes(checked.plan)]
    if checked.rejections:
        return print_refused(checked.rejections, json=json) if leads else 1
    if compile_only:
        return compile_ahead(current, options, launched, str(plan), json=json)
    current, shrunk = _rehearsed(current, rehearse)
    notes += [*shrunk, *(_elsewhere_notes(current) if tried else [])]
    if dry_run:
        return _dry(current, notes, dry_ranks, json=json) if leads else 0
    execution = Execution(
        plan=current, notes=tuple(notes), run=options, tried=tried, restarts=restarts, json=json, before=before,
        stated=frozenset(training.values),
    )  # fmt: skip
    return _executed(execution, engine_mode, plan, launched)


def _executed(execution: Execution, engine_mode: str, path: Path, launched: GivenRank | None) -> int:
    """Run on the device of this machine, unless it cannot, or the number of ranks is wrong."""
    execution, leads = _in_mode(_on_device(execution, launched), engine_mode), launched is None or launched.rank == 0
    if launched is not None and leads:
        launched.refuse_other_size(execution.plan.mesh.num_ranks, str(path))
    elif launched is not None and launched.num_ranks != execution.plan.mesh.num_ranks:
        return 2  # rank 0 says why
    if leads:
        with telling_refusals(launched):
            _refuse_machine(execution, path, launched)
    return execute(execution, launched)


def _refuse(
    plan: Path,
    rehearse: int | None,
    restarts: int,
    *,
    dry: bool,
    dry_ranks: Counts,
    compile_only: bool,
    profile: Counts,
) -> None:
    """Refuse options that contradict each other, before any work."""
    tried = dry or rehearse is not None
    first = f"takes a plan file. Type first: autoshard plan --config {plan}"
    message = "cannot be combined with --rehearse or --dry-run. Leave one of them out"
    require(
        (not (compile_only and is_recipe(plan)), "--compile-only", first),
        (rehearse is None or rehearse >= 1, "--rehearse", f"must be at least 1, not {rehearse}"),
        (restarts >= 0, "--restarts", f"must be at least 0, not {restarts}"),
        (dry or not dry_ranks, "--dry-ranks", "names the ranks of --dry-run. Type --dry-run as well"),
        (not (compile_only and tried), "--compile-only", message),
        (min(profile, default=1) >= 1, "--profile", f"steps count from 1, so {min(profile, default=1)} is none"),
        (not (profile and (dry or compile_only)), "--profile", "needs steps that run. Leave the other option out"),
    )


def _trained(training: Training, path: Path, *, tried: bool) -> Training:
    """Resolve the paths of data sets beside a recipe; refuse initial weights that do not exist.

    What is only tried can use neither real tokens nor weights, and saves nothing.
    """
    if tried:
        nothing = Checkpointing(to="none")
        return replace(training, checkpoint=nothing, data=DataSpec(), eval=Evaluating(), init_weights=None)
    weights = training.init_weights
    message = f"there is no folder {weights}. Name a folder of checkpoints, or one with a config.json and safetensors"
    require((weights is None or "://" in weights or Path(weights).is_dir(), "init_weights", message))
    return training.seen_from(path.parent) if is_recipe(path) else training


def _rehearsed(plan: Plan, rehearse: int | None) -> tuple[Plan, list[str]]:
    """Return the plan shrunk to a few ranks and predicted again, if asked, and the features that it lost."""
    if rehearse is None:
        return plan, []
    of_code = (
        f"makes a small model, and {plan.model.name} was read off its code. Type --dry-run, or plan a small module"
    )
    require((plan.model.traced is None, "--rehearse", of_code))
    small, lost = shrink(plan, rehearse)
    cut, least = plan.mesh.size("tp"), 4 if plan.mesh.size("rep") > 1 else 2
    message = f"a plan with tp={cut} needs at least {least} ranks, not {rehearse}. Type --rehearse {least}"
    # without tp nothing of the table would be left
    require((cut == 1 or small.mesh.size("tp") > 1, "--rehearse", message))
    tried_out = f"{small.candidate} of a small model on synthetic tokens, predicted again"
    missing = [f"not kept: {feature}" for feature in lost]
    return predicted(small), [f"rehearsal: {tried_out}, for {plan.candidate}", *missing]


def _card_notes(plan: Plan) -> list[str]:
    """Say where the model in the plan differs from the model card of the same name."""
    name = plan.model.name
    if name not in model_names():
        return []
    card = load_model(name)
    names = [entry.name for entry in fields(card) if entry.name != "source"]
    pairs = {name: (getattr(plan.model, name), getattr(card, name)) for name in names}
    changed = "; ".join(
        f"{name} {planned}, on the card {its}" for name, (planned, its) in pairs.items() if planned != its
    )
    differs = f"the run uses {name} as the plan has it, which differs from the card: {changed}"
    return [f"model: {differs}. To use the card, plan again"] if changed else []


def _elsewhere_notes(plan: Plan) -> list[str]:
    """Say what running a plan on another machine than its own means."""
    notes: list[str] = []
    if plan.engine == "nxd":
        notes.append("engine: nxd needs Neuron devices, so here the torch engine executes the plan's table on the CPU")
    if plan.cluster.name != LOCAL:
        notes.append(f"prediction: its seconds are about {plan.cluster.name}, not about this machine")
    return notes


def _on_device(execution: Execution, launched: GivenRank | None) -> Execution:
    """Choose the device of the run and add notes about it; rehearsals run on the host's processors."""
    if execution.tried:
        return execution
    plan, notes = execution.plan, list[str]()
    put_environment(environment(plan))  # before torch loads what belongs to a device
    device = XLA if execution.engine == "nxd" else device_of(plan, forked=launched is None)
    if device not in (XLA, HOST):
        notes = [f"devices: {device}, one for each rank"]
    elif device == HOST and (elsewhere := _elsewhere_notes(plan)):
        none = (
            f"devices: none here for {counted(plan.mesh.num_ranks, 'rank')}, so the run uses this machine's processors"
        )
        notes = [none, *elsewhere]
    return replace(execution, notes=(*execution.notes, *notes), run=replace(execution.run, device=device))


def _in_mode(execution: Execution, wanted: str) -> Execution:
    """Choose how the torch engine executes the plan; without a compiler, functions run as they are."""
    device = execution.run.device
    of_torch = f"is about the torch engine, and {execution.engine} executes this plan. Leave the option out"
    require((wanted == "auto" or execution.engine == "torch", "--engine-mode", of_torch))
    compiles = wanted == "compiled" or (wanted == "auto" and device != HOST)
    mode: EngineMode = "literal" if wanted == "literal" else "compiled" if compiles else "generated"
    missing = missing_compiler(device) if mode == "compiled" and execution.engine == "torch" else ""
    if missing:
        mode, note = "generated", f"engine: {missing}, so the generated functions run without being compiled"
        execution = replace(execution, notes=(*execution.notes, note))
    return replace(execution, run=replace(execution.run, mode=mode))


def _refuse_machine(execution: Execution, path: Path, launched: GivenRank | None) -> None:
    """Refuse plans that this machine cannot run, and steps that it cannot record."""
    last, steps = max(execution.run.profile, default=0), execution.run.training.steps
    unseen = "torch's profiler sees no NeuronCore. Leave the option out, and record with neuron-profile"
    require(
        (last <= steps, "--profile", f"the run has {counted(steps, 'step')}, so step {last} is none of them"),
        (not last or execution.run.device != XLA, "--profile", unseen),
    )
    if execution.engine == "nxd":
        refuse_without_neuron(execution.plan, str(path), started=launched is not None)
    if launched is None and execution.run.device == HOST:
        refuse_too_large(execution.plan, available_bytes())


def _dry(plan: Plan, notes: Sequence[str], ranks: Sequence[int], *, json: bool) -> int:
    """Execute ranks one by one, with shapes only, and compare the counted bytes with the prediction."""
    last = plan.mesh.num_ranks - 1
    message = f"the plan has the ranks 0 to {last}"
    require(*((0 <= rank <= last, "--dry-ranks", f"{message}, not {rank}. Type 0,{last}") for rank in ranks))
    counts, tried = counter(of_code=plan.model.traced is not None), tuple(dict.fromkeys(ranks)) or telling_ranks(plan)
    if not json:
        print(f"{plan.model.name}: {plan.candidate}, dry: {len(tried)} of {last + 1} ranks, shapes without numbers")
    counted = [dry_rank(plan, rank, counts) for rank in tried]
    notes, figures = [*notes, *dry_notes(plan, counted)], dry_json(plan, counted)
    if json:
        print_answer({"notes": notes, **figures})
        return 0
    for note in notes:
        print(f"note: {note}")
    print()
    print_answer([dry_sheet(Node(figures))])
    return 0
