"""The planner from Python: one verb that takes small parts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from autoshard.cost.built_in import built_in
from autoshard.cost.calibration import Calibration, load_calibration
from autoshard.errors import Fault, Faults, InputError, inside
from autoshard.layout.pin import Pin, pins_of as layout_pins
from autoshard.plan.candidate import parse_pins, pins_text
from autoshard.plan.lowering import ATOMS
from autoshard.plan.rules.columns import Engine
from autoshard.search.ask.answers import PlanResult, answers_of, num_searched
from autoshard.search.ask.arguments import (
    Brought,
    Cost as Cost,
    Search as Search,
    as_whole,
    require_choices,
    require_price,
    require_types,
    stated_name,
)
from autoshard.search.ask.choice.doubt import DOUBT
from autoshard.search.ask.no_plan import unanswered
from autoshard.search.ask.planner import search as search_all
from autoshard.search.ask.python_words import python_words
from autoshard.search.ask.vendor.defaults import default_workload
from autoshard.search.bound.request import Objective, Request
from autoshard.search.bound.space import Pins
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster, other_lnc
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.price import with_user_price
from autoshard.spec.recipe import DEFAULT_CLUSTER, HEADROOM, Pins as TextPins, QuestionOptions, sequences_of
from autoshard.spec.workload import Precision, Workload

Value = TypeVar("Value")


def plan(  # noqa: PLR0913
    model: ModelSpec | str | Path,
    cluster: Cluster | str | Path = DEFAULT_CLUSTER,
    workload: Workload | None = None,
    *,
    nodes: int | None = None,
    seq_len: int | None = None,
    global_batch: int | str | None = None,
    fix: Mapping[str, Any] | str | None = None,
    top: int = 3,
    cost: Cost | Calibration | None = None,
    search: Search | None = None,
    precision: str | None = None,
    headroom: float | None = None,
    objective: Objective = "time",
    choose: str | int | None = None,
    price: float | str | None = None,
) -> PlanResult:
    """Find the fastest layout of a training run that fits in memory, a simple one that is nearly as fast, the vendor's.

    Args:
        model: A model, the name of a card (see ``autoshard list models``), or the path of a Hugging Face config.json.
        cluster: A cluster, a name (see ``autoshard list clusters``), or the path of a cluster file.
        workload: Sequence, batch, number formats, optimizer. Without: as on the command line, in bf16.
        nodes: How many nodes a cluster that is named has; 1 if not told otherwise.
        seq_len: Tokens in a sequence, if not those of the workload.
        global_batch: Sequences in an optimizer step, or tokens: "4M"; if not those of the workload.
        fix: Keys of the layout that are pinned: ``{"tp": 32}``, or ``"tp=32,schedule=1f1b"`` as after ``--fix``.
        top: How many of the best layouts are answers, the best one included.
        cost: Constants and terms of your own.
        search: Pinned tensors, Rules and a search of your own.
        precision: Number formats as after ``--precision``, if not those of the workload.
        headroom: Which share of a rank's memory stays free; a tenth if not told otherwise.
        objective: What is minimised: time, dollars or memory.
        choose: Which answer ``result.plan`` is: fastest, simple, vendor, or the number of a runner-up.
        price: What an hour costs you in dollars, of a node, ``21.5``, or of a chip, ``"2.5/chip"``.

    The plan of the result is the simple one. Raises NoPlan where nothing fits, and InputError where the question is
    wrong; both say what to change.

    >>> import autoshard
    >>> result = autoshard.plan("tiny-llama", "local", fix={"tp": 2})
    >>> result.plan.mesh.size("tp"), [answer.name for answer in result.answers]
    (2, ['fastest', 'simple', '2', '3'])
    """
    nodes, seq_len, global_batch, top, choose = map(as_whole, (nodes, seq_len, global_batch, top, choose))
    with python_words():
        require_types(nodes=nodes, seq_len=seq_len, top=top, global_batch=global_batch)
        require_types(model=model, cluster=cluster, workload=workload, fix=fix, cost=cost, search=search)
        require_types(precision=precision, headroom=headroom, choose=choose, price=price)
        how, prices = search or Search(), cost if isinstance(cost, Cost) else Cost(calibration=cost)
        stated = QuestionOptions(seq_len=seq_len, global_batch=global_batch, precision=precision, price=price)
        pins = TextPins(fix if isinstance(fix, str) else pins_text(fix)) if fix else None
        stated = replace(stated, fix=pins, headroom=headroom, release=prices.release)
        question = how.applied(replace(stated, model=stated_name(model), cluster=stated_name(cluster)))
        require_choices(objective, choose)
        request = request_of(question, nodes, Brought.of(model, cluster, workload, prices))
        require_price(request.cluster, objective)
        request = replace(request, objective=objective, terms=prices.terms, extra_rules=how.rules)
        return _searched(request, how, top, None if choose is None else str(choose))


def _searched(request: Request, how: Search, top: int, choose: str | None) -> PlanResult:
    """Return the answers to a question; raise NoPlan where nothing fits."""
    within = None if request.objective == "memory" else DOUBT
    result = how.method(request) if how.method else search_all(request, num_searched(choose, top), simple_within=within)
    if not result.plans:
        raise unanswered(request, result)
    answers = answers_of(request, result, choose)
    with inside("--choose"):
        answers.named(answers.name)  # refused here, and not where the plan is read
    return answers


def _over(work: Workload | None, options: QuestionOptions) -> tuple[Workload, str] | None:
    """Return a workload, if there is one, with what was stated beside it, and what of it is assumed: nothing."""
    if work is None:
        return None
    length, batch = options.seq_len or work.seq_len, options.global_batch
    stated = replace(
        work,
        seq_len=length,
        global_batch=work.global_batch if batch is None else sequences_of(batch, length),
        precision=work.precision if options.precision is None else Precision.named(options.precision),
    )
    return stated, ""


def request_of(question: QuestionOptions, nodes: int | None = None, brought: Brought | None = None) -> Request:
    """Look up everything that a question names; all faults are reported at once, under the option they came from.

    What is ``brought`` along takes the place of what the question names.
    """
    faults, values = list[Fault](), brought or Brought()

    def look_up(option: str, named: Callable[[], Value]) -> Value | None:
        try:
            return named()
        except InputError as error:
            faults.extend(_option_faults(error, option))
            return None

    model = values.model or look_up("model", lambda: load_model(question.model or ""))
    pins = look_up("fix", lambda: pins_from_text(question.fix))
    name, lnc = question.cluster or DEFAULT_CLUSTER, question.lnc
    if lnc is None and pins and "lnc" in pins and not values.cluster:
        lnc = look_up("fix", lambda: _offered_lnc(name, pins["lnc"]))
    machine, size = values.cluster, 1 if nodes is None else nodes
    cluster = look_up(
        "cluster",
        lambda: _resized(machine, nodes) if machine else load_cluster(name, size, lnc=lnc, ranks=question.ranks),
    )
    path = question.calibration
    constants = look_up("calibration", lambda: load_calibration(Path(path)) if path else values.calibration)
    if cluster:
        constants = look_up("release", lambda: constants_of(cluster, constants, question.release))
    layouts = look_up("pin", lambda: layouts_of(question.pins))
    if faults or model is None or cluster is None or pins is None or layouts is None:
        raise InputError(faults)
    try:
        at_price = with_user_price(cluster, question.price)
        workload, defaults = _over(values.workload, question) or default_workload(model, at_price, question)
        return Request(
            model=model,
            cluster=at_price,
            workload=workload,
            defaults=defaults,
            engines=engines_of(cluster, question.engine or _usual_engine(model)),
            headroom=HEADROOM if question.headroom is None else question.headroom,
            pins=pins,
            layouts=layouts,
            calibration=constants,
            other_lnc=() if machine or lnc is not None else other_lnc(name, at_price),
        )
    except InputError as error:
        raise InputError(_option_faults(error, "precision")) from None


def _offered_lnc(cluster: str, lnc: int) -> int | None:
    """Return logical cores that are pinned, refused where the cluster does not offer them."""
    try:
        return load_cluster(cluster, lnc=lnc).lnc
    except InputError as error:
        refused = [fault for fault in error.faults if fault.where == "lnc"]
    if refused:  # what else is wrong with the cluster is said where that is looked up
        raise InputError(Fault(where=f"lnc={lnc}", message=fault.message) for fault in refused)
    return None


def _resized(cluster: Cluster, nodes: int | None) -> Cluster:
    """Return a cluster of as many nodes as wanted."""
    try:
        return cluster if nodes is None else replace(cluster, num_nodes=nodes)
    except InputError as error:
        raise InputError(Fault(where="nodes", message=fault.message) for fault in error.faults) from None


def constants_of(cluster: Cluster, calibration: Calibration | None, release: str | None) -> Calibration | None:
    """Return a calibration, under a release of the software if that is named; None leaves it to the cluster."""
    return (
        (calibration or built_in(cluster.name, cluster.kernels, chip=cluster.chip.name)).under_release(release)
        if release is not None
        else calibration
    )


def _option_faults(error: InputError, option: str) -> Iterator[Fault]:
    """Yield the faults of a look-up, each under the option that it is about."""
    for fault in error.faults:
        if fault.where.startswith("--"):  # it names its option itself
            yield fault
            continue
        is_option = fault.where in {field.name for field in fields(QuestionOptions)} | {"nodes"}
        name = (fault.where if is_option else option).replace("_", "-")
        yield Fault(where="" if is_option else fault.where, message=fault.message).under(f"--{name}")


def layouts_of(layouts: Mapping[str, str]) -> tuple[Pin, ...]:
    """Read the layouts of tensors that are pinned, by atoms of the mesh."""
    pins, atoms = layout_pins(layouts, "--pin"), {str(atom): 1 for atom in ATOMS}
    faults = Faults(fault.under(f"--pin {pin.tensor}") for pin in pins for fault in pin.layout.faults(atoms))
    faults.refuse()
    return pins


def pins_from_text(text: str | None) -> Pins:
    """Read what is pinned; None pins nothing."""
    pins: Pins = {} if text is None else parse_pins(text)
    if text is not None and not pins:
        raise InputError.of("", "pins nothing; write key=value, for example tp=8, or leave it out")
    if "kernels" in pins:
        load_kernels(str(pins["kernels"]))  # refuses a name that no table has
    return pins


def _usual_engine(model: ModelSpec) -> str | None:
    """Return the engine that a model needs: NxD has no layers for what is read off code."""
    return "torch" if model.traced else None


def engines_of(cluster: Cluster, engine: str | None) -> tuple[Engine, ...]:
    """Return the engines that may run a plan: the cluster's own, the one named, or any."""
    if engine == "any":
        return ("nxd", "torch") if cluster.engine == "nxd" else ("torch", "nxd")
    return (cluster.engine,) if engine is None else ("nxd",) if engine == "nxd" else ("torch",)
