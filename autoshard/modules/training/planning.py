"""The code of a decoder in its plan: the hash of each part, and how a run cuts it."""

from collections.abc import Iterator

import torch

from autoshard.engine.torch.formats import Formats
from autoshard.errors import InputError, inside, require
from autoshard.modules.decoder.masks import NoValues
from autoshard.modules.decoder.reading import OPTION, made_decoder
from autoshard.modules.training.graph import CodeGraph
from autoshard.modules.training.layouts import code_programs, solved_tables
from autoshard.modules.training.parts import LOSS_SHARE
from autoshard.modules.training.reading import TracedCode, traced_code
from autoshard.plan.code import PlannedCode
from autoshard.plan.codec import with_planned_code
from autoshard.plan.plan import Plan
from autoshard.spec.repeats import compress

_AS_PLANNED = Formats()
_SMALL = 2**28  # weights, of a gigabyte in FP32: every rank's host has room for that
_AGAIN = f"Plan again with autoshard plan {OPTION}"


def with_code(plan: Plan, source: str) -> Plan:
    """Return a plan of a decoder that was read off its code with what a run needs of that, or why none can be run."""
    try:
        code = _planned(plan, source)
    except InputError as error:
        code = PlannedCode(source=source, unrun=str(error))
    return with_planned_code(plan, code)


def made_code(plan: Plan, seed: int | None) -> TracedCode:
    """Make a plan's decoder with its numbers, drawn from a seed, or without any; refuse code that was not planned."""
    code = plan.code
    assert code, "a plan of code that may run says where that is"
    if seed is not None:
        torch.manual_seed(seed)
    traced = traced_source(plan, code.source, on_meta=seed is None)
    require(*((False, where, message) for where, message in _changes(code, traced.graph)))
    with inside(f"{OPTION} {code.source}"):
        code_programs(traced.graph, plan, code.strategies)
    return traced


def _planned(plan: Plan, source: str) -> PlannedCode:
    _refuse_unfit(plan)
    with torch.random.fork_rng(devices=[]):  # example inputs may be drawn, and equal questions have equal plans
        torch.manual_seed(0)
        try:
            code = traced_source(plan, source, on_meta=True)
        except NoValues:
            code = traced_source(plan, source, on_meta=False)
    graph = code.graph
    return PlannedCode(
        source=source, order=compress(graph.graph.order), fingerprints=graph.fingerprints,
        strategies=solved_tables(graph, plan), own_loss=LOSS_SHARE in graph.blocks["head"].tensors, data=code.data,
    )  # fmt: skip


def traced_source(plan: Plan, source: str, *, on_meta: bool, doubles: bool = False) -> TracedCode:
    """Trace the decoder that a function makes, for a plan.

    It is made ``on_meta`` only if it is large: code may choose what it does by the device of its weights.
    """
    module, inputs = made_decoder(source, on_meta=on_meta)
    if on_meta and sum(parameter.numel() for parameter in module.parameters()) <= _SMALL:
        module, inputs = made_decoder(source, on_meta=False)
    with inside(f"{OPTION} {source}"):
        return traced_code(module, plan, _AS_PLANNED, inputs, doubles=doubles)


def _changes(code: PlannedCode, graph: CodeGraph) -> Iterator[tuple[str, str]]:
    """Yield where the code is no longer what was planned."""
    layers = len(graph.graph.order)
    if graph.graph.order != code.layer_order:
        yield "code.order", f"is {code.order}, and the code of {code.source} has {layers} layers now. {_AGAIN}"
    for kind, hash_now in graph.fingerprints.items():
        if code.fingerprints.get(kind) != hash_now:
            changed = f"is of other code than {code.source} is now, or that chooses by the device of its weights"
            yield f"code.fingerprints.{kind}", f"{changed}. {_AGAIN} {code.source}"


def _refuse_unfit(plan: Plan) -> None:
    """Refuse what a run of code does not do: it knows nothing of what the lines of a plan do beside the code."""
    work, unlike = plan.workload, "a run executes the code itself, which says nothing of it"
    moved = plan.mesh.size("cp") > 1 and plan.cp_order != "contiguous"
    zigzag = "orders sequences in a zigzag, and code of attention takes them in order. Use --fix cp_order=contiguous"
    require(
        (
            plan.engine == "torch",
            "engine",
            f"{plan.engine} does not run code that is no card. Plan with --engine torch",
        ),
        (work.documents == "joined", "documents", f"are separate, and {unlike}. Plan with --documents joined"),
        (work.expert_capacity is None, "expert_capacity", f"is given, and {unlike}. Leave it out"),
        (not work.router_training, "router", f"has losses or a bias of the plan's, and {unlike}. Leave them out"),
        (not moved, "cp_order", zigzag),
    )
