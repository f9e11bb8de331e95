"""The page of a torch module without a card: what its layouts take, every operation, and every parameter."""

import math
from collections.abc import Iterator

from autoshard.layout.table import Strategy
from autoshard.plan.module_plan import proof
from autoshard.report.page.document import document
from autoshard.report.page.elements import Content, Markup, Node, facts, section, table, tag
from autoshard.units import format_bytes, format_seconds

_PASSES = {"F": "forward", "I": "gradients of inputs", "W": "gradients of weights"}


def module_page(data: Node) -> str:
    """Return the page of a module's plan, drawn from its JSON."""
    found = [
        ("blocks", "Operations", _operations(data["strategies"])),
        ("parameters", "Parameters", _parameters(data)),
    ]
    if data["kept_whole"].value:
        lines = (tag("li", tag("code", line.value)) for line in data["kept_whole"])
        about = "Nothing is known of these operations, so every rank computes them whole."
        found.append(("whole", "Kept whole", section("whole", "Kept whole", tag("ul", lines), about=about)))
    title = f"{data['module'].value} on {data['mesh'].value} of {data['cluster'].value}"
    return document(title, found, head=[tag("h1", title), _figures(data)])


def _figures(data: Node) -> Markup:
    ranks = math.prod(int(part.partition("=")[2]) for part in data["mesh"].value.split(","))
    batch = f"the batch is cut over {data['batch'].value}" if data["batch"].value else "the batch is whole"
    pairs: list[tuple[str, Content]] = [
        (
            "forward and backward",
            (data["time_s"].figure(format_seconds), tag("small", data["gap"].figure(proof))),
        ),
        ("memory of a rank", data["memory_bytes"].figure(format_bytes)),
        ("ranks", (str(ranks), tag("small", data["mesh"].value))),
        ("format", (data["precision"].value, tag("small", batch))),
    ]
    return facts(pairs)


def _operations(lines: Node) -> Markup:
    about = (
        "How every operation reads and makes its tensors. In colour what is sent: a change of layout between the "
        "operation that makes a tensor and those that read it."
    )
    rows = (row for name, line in lines for row in _rows(name.value, Strategy.parse(line.value)))
    return section("blocks", "Operations and what they send", table(("operation", "reads", "makes"), rows), about=about)


def _rows(name: str, line: Strategy) -> Iterator[tuple[Content, ...]]:
    """Yield a row for an operation, and one for each of its collectives; a tensor that only passes on has none."""
    sent = [(pass_, change) for pass_, chains in line.lists.items() for chain in chains for change in chain]
    if len(line.inputs) > 1 or sent or not name.endswith("_out"):
        reads, makes = (", ".join(map(str, ends)) for ends in (line.inputs, line.outputs))
        yield name, reads, makes
    for pass_, change in sent:
        yield "", tag("em", str(change)), _PASSES[pass_]


def _parameters(data: Node) -> Markup:
    about = "The layout in which a parameter is used, along the axes that torch sees. [a.b] is a product of dims."
    rows = [(path, tag("code", layout.value)) for path, layout in data["parameters"].entries()]
    rests = [
        tag("p", f"Weights of {name} rest in pieces over {over.value}, and are gathered where they are used.")
        for name, over in data["rests"].entries()
    ]
    return section("parameters", "Parameters", table(("parameter", "layout"), rows), rests, about=about)
