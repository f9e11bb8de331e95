"""A plan of a decoder's own code on one rank: its blocks, run by the engine of plans."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from autoshard.engine.programs import BlockProgram, PlanPrograms, split_passes
from autoshard.engine.torch.agreeing import AgreeingEngine, agreeing
from autoshard.engine.torch.engine import TorchEngine
from autoshard.engine.torch.fake import count_rank
from autoshard.engine.torch.formats import Formats
from autoshard.engine.tying import with_tied_sums
from autoshard.layout.table import Table
from autoshard.modules.training.graph import CodeGraph
from autoshard.modules.training.inputs import CodeInputs
from autoshard.modules.training.layouts import code_programs
from autoshard.modules.training.planning import made_code
from autoshard.modules.training.reading import TracedCode
from autoshard.modules.training.weights import shared_code, shared_weights
from autoshard.plan.plan import Plan, Stage
from autoshard.plan.recompute import Recompute
from autoshard.plan.tables import table_name
from autoshard.run.protocol import Run
from autoshard.run.reports import Measured


def build_code(plan: Plan, run: Run) -> TorchEngine | AgreeingEngine:
    """Build this rank's share of a plan whose code is executed, with the numbers that the code gives its weights."""
    code, formats = shared_code(plan, run.training.seed), Formats(device=torch.device(run.device))
    programs = programs_of_planned(plan, code, run.training.seed)
    weights: Mapping[str, Any] = shared_weights(code, plan, programs)
    engine = TorchEngine(plan, weights.__getitem__, formats, run, programs=programs)
    engine.write_functions(run.folder / "generated")
    return agreeing(plan, run, engine)


def code_counter() -> Callable[[Plan, int], Measured]:
    """Return a function that counts what a rank would hold and send, without the others and without numbers.

    The code is traced once: what is counted are ranks of one plan, with few micro-batches or many.
    """
    traced: list[TracedCode] = []

    def count(plan: Plan, rank: int) -> Measured:
        if not traced:
            traced.append(made_code(plan, None))
        return count_rank(plan, rank, programs_of_planned(plan, traced[0], 0))

    return count


def programs_of_planned(plan: Plan, code: TracedCode, seed: int) -> PlanPrograms:
    """Return the programs that a plan has for its code."""
    assert plan.code, "a plan of code says how its blocks are cut"
    return programs_of_code(code.graph, plan, plan.code.strategies, code.inputs(seed))


def programs_of_code(
    code: CodeGraph, plan: Plan, tables: Mapping[str, Table], inputs: CodeInputs | None
) -> PlanPrograms:
    """Return the programs of all stages, as the lines of tables say."""
    blocks = code.table_blocks([drop for _, drop in plan.layers])
    programs = with_tied_sums(code.graph, code_programs(code, plan, tables))
    parts = {name: split_passes(blocks[name], program) for name, program in programs.items()}
    stages = tuple(dict(_contents(code, plan, stage, parts)) for stage in plan.stages)
    return PlanPrograms(graph=code.graph, stages=stages, inputs=inputs)


def _contents(
    code: CodeGraph, plan: Plan, stage: Stage, parts: Mapping[str, BlockProgram]
) -> Iterator[tuple[str, BlockProgram]]:
    """Yield the blocks that a stage runs, in order."""
    if stage is plan.stages[0]:
        yield "embed.0", parts["embed"]
    for number in range(stage.num_layers):
        place = stage.first_layer + number
        again = stage.recompute.of_layer(number).kind != "none"
        kind = code.graph.order[place]
        yield f"layer.{place}", parts[table_name(kind, Recompute(kind="full")) if again else kind]
    if stage is plan.stages[-1]:
        yield "head.0", parts["head"]
