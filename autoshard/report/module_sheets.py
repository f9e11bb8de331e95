"""The sheets of a torch module without a card: what its layouts take, every operation, and every parameter."""

import math
from collections.abc import Iterator

from autoshard.layout.table import Strategy
from autoshard.plan.module_plan import proof
from autoshard.report.sheet import Cell, Fact, Node, Sheet, Table, Words

_PASSES = {"F": "forward", "I": "gradients of inputs", "W": "gradients of weights"}


def module_sheets(figures: Node) -> Iterator[Sheet]:
    """Yield the headline of a module's plan, its operations, its parameters, and what is kept whole, from its JSON."""
    title = f"{figures['module'].value} on {figures['mesh'].value} of {figures['cluster'].value}"
    yield Sheet(title=title, facts=_facts(figures))
    yield _operations(figures["strategies"])
    yield _parameters(figures)
    if figures["kept_whole"].value:
        about = "Nothing is known of these operations, so every rank computes them whole."
        lines = [Words(line.value, "code") for line in figures["kept_whole"]]
        yield Sheet(name="whole", title="Kept whole", about=about, notes=lines)


def _facts(figures: Node) -> list[Fact]:
    ranks = math.prod(int(part.partition("=")[2]) for part in figures["mesh"].value.split(","))
    batch = f"the batch is cut over {figures['batch'].value}" if figures["batch"].value else "the batch is whole"
    return [
        Fact("forward and backward", figures["time_s"].figure(), (", ", figures["gap"].figure(proof))),
        Fact("memory of a rank", figures["memory_bytes"].figure()),
        Fact("ranks", str(ranks), f", {figures['mesh'].value}"),
        Fact("format", figures["precision"].value, f", {batch}"),
    ]


def _operations(lines: Node) -> Sheet:
    about = (
        "How every operation reads and makes its tensors. In colour what is sent: a change of layout between the "
        "operation that makes a tensor and those that read it."
    )
    rows = [row for name, line in lines for row in _rows(name.value, Strategy.parse(line.value))]
    table = Table("", ("operation", "reads", "makes"), rows)
    return Sheet(name="blocks", title="Operations and what they send", about=about, tables=[table])


def _rows(name: str, line: Strategy) -> Iterator[tuple[Cell, ...]]:
    """Yield a row for an operation, and one for each of its collectives; a tensor that only passes on has none."""
    sent = [(pass_, change) for pass_, chains in line.lists.items() for chain in chains for change in chain]
    if len(line.inputs) > 1 or sent or not name.endswith("_out"):
        reads, makes = (", ".join(map(str, ends)) for ends in (line.inputs, line.outputs))
        yield name, reads, makes
    for pass_, change in sent:
        yield "", Words(str(change), "sent"), _PASSES[pass_]


def _parameters(figures: Node) -> Sheet:
    about = "The layout in which a parameter is used, along the axes that torch sees. [a.b] is a product of dims."
    rows = [(path, Words(layout.value, "code")) for path, layout in figures["parameters"].entries()]
    rests = [
        f"Weights of {name} rest in pieces over {over.value}, and are gathered where they are used."
        for name, over in figures["rests"].entries()
    ]
    table = Table("", ("parameter", "layout"), rows)
    return Sheet(name="parameters", title="Parameters", about=about, tables=[table], notes=rests)
