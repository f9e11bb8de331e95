"""The page of a torch module without a card: what its layouts take, every operation, and every parameter."""

import math
from collections.abc import Iterator

from autoshard.layout.table import Strategy
from autoshard.report.page.document import document
from autoshard.report.page.elements import facts, sheet_section, tag
from autoshard.report.sheet import Cell, Fact, Node, Sheet, Table, Words
from autoshard.units import format_bytes, format_seconds

_PASSES = {"F": "forward", "I": "gradients of inputs", "W": "gradients of weights"}


def module_page(data: Node) -> str:
    """Return the page of a module's plan, drawn from its JSON."""
    sections = [("Operations", _operations(data["strategies"])), ("Parameters", _parameters(data))]
    if data["kept_whole"].value:
        about = "Nothing is known of these operations, so every rank computes them whole."
        lines = [Words(line.value, "code") for line in data["kept_whole"]]
        sections.append(("Kept whole", Sheet(name="whole", title="Kept whole", about=about, notes=lines)))
    title = f"{data['module'].value} on {data['mesh'].value} of {data['cluster'].value}"
    drawn = [(sheet.name, entry, sheet_section(sheet)) for entry, sheet in sections]
    return document(title, drawn, head=[tag("h1", title), facts(_figures(data))])


def _figures(data: Node) -> list[Fact]:
    bound = data["bound_s"].figure(format_seconds)
    ranks = math.prod(int(part.partition("=")[2]) for part in data["mesh"].value.split(","))
    batch = f"the batch is cut over {data['batch'].value}" if data["batch"].value else "the batch is whole"
    return [
        Fact("forward and backward", data["time_s"].figure(format_seconds), ("none takes less than ", bound)),
        Fact("memory of a rank", data["memory_bytes"].figure(format_bytes)),
        Fact("ranks", str(ranks), data["mesh"].value),
        Fact("format", data["precision"].value, batch),
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


def _parameters(data: Node) -> Sheet:
    about = "The layout in which a parameter is used, along the axes that torch sees. [a.b] is a product of dims."
    rows = [(path, Words(layout.value, "code")) for path, layout in data["parameters"].entries()]
    rests = [
        f"Weights of {name} rest in pieces over {over.value}, and are gathered where they are used."
        for name, over in data["rests"].entries()
    ]
    table = Table("", ("parameter", "layout"), rows)
    return Sheet(name="parameters", title="Parameters", about=about, tables=[table], notes=rests)
