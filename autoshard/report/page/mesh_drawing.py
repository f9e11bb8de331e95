"""The mesh on its nodes: a square for every rank with its place on an axis, and its groups to point at."""

from collections.abc import Sequence

from autoshard.plan.plan import Plan
from autoshard.report.page.elements import Markup, figure_of, section, table, tag
from autoshard.report.page.shown import AXES
from autoshard.report.page.timeline import shown_ranks
from autoshard.report.sheet import Cell, Column, Node, Table, sheet_rows

MOST_RANKS = 640
_WORDS = {"tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline", "dp": "data"}


def mesh_section(name: str, plan: Plan, data: Node) -> Markup:
    """Return the axes with their groups and links, and the nodes."""
    columns: dict[str, Column] = {
        "axis": lambda axis: f"{axis['axis'].value} ({_WORDS[axis['axis'].value]})",
        ">ranks in a group": "size",
        "spread": lambda axis: _spread(axis["num_nodes"]),
        "slowest link crossed": "link",
        ">its rate": "bandwidth_bytes_per_s",
        ">busiest rank sends in a step": "sent_bytes",
        "group of rank 0": lambda axis: _listed(axis["neighbours"].value, axis["size"].value),
    }
    rows = sheet_rows(data["axes"], columns)
    about = "Ranks that share a group exchange data. Point at a rank to see its group on the axis that is chosen."
    axes = table(Table("Axes of the mesh", [*columns], rows)) if rows else tag("p", "One rank: nothing is sent.")
    return section(name, "Mesh", axes, _nodes(plan), about=about)


def _listed(ranks: Sequence[int], count: int) -> str:
    return ", ".join(map(str, ranks)) + (", ..." if count > len(ranks) else "")


def _spread(nodes: Node) -> Cell:
    return "inside a node" if nodes.value == 1 else ("over ", nodes.figure(str), " nodes")


def _nodes(plan: Plan) -> Markup:
    """Return the first nodes, a square for each rank; as many as are drawn at once."""
    cluster, mesh = plan.cluster, plan.mesh
    axes = [axis for axis in AXES if mesh.size(axis) > 1]
    count = max(1, min(cluster.num_nodes, MOST_RANKS // cluster.ranks_per_node))
    coloured = "pp" if "pp" in axes else axes[0] if axes else ""
    boxes: list[Markup] = []
    for node in shown_ranks(cluster.num_nodes, count):
        ranks = range(node * cluster.ranks_per_node, min((node + 1) * cluster.ranks_per_node, mesh.num_ranks))
        cells: list[Markup] = []
        for rank in ranks:
            places = _places(plan, rank, axes)
            place = places[axes.index(coloured)] if axes else 0
            cells.append(tag("i", str(place), class_=f"k{place}", data_rank=rank, data_at=".".join(map(str, places))))
        boxes.append(tag("div", tag("span", f"node {node}"), tag("div", cells, class_="cells"), class_="node"))
    choices = (
        tag("label", tag("input", type="radio", name="axis", value=place, checked=axis == coloured), f" {axis}")
        for place, axis in enumerate(axes)
    )
    left_out = cluster.num_nodes - count
    note = f"{count} of {cluster.num_nodes} nodes are drawn, at equal distances." if left_out else None
    return figure_of(
        tag(
            "span",
            f"Ranks on {'nodes' if count > 1 else 'the node'}; the number is the place on ",
            choices,
            class_="axes",
        ),
        tag("style", Markup(_colours(mesh.size(coloured) if coloured else 1))),
        tag("div", boxes, class_="nodes", data_axes=" ".join(axes)),
        tag("p", note, class_="about") if note else None,
    )


def _colours(count: int) -> str:
    """Return the colours of places on an axis: neighbours differ in hue and in lightness."""
    return "".join(f".k{place}{{--turn:{place / count:.3g};--light:{'70%' if place % 2 else '87%'}}}"
                   for place in range(count))  # fmt: skip


def _places(plan: Plan, rank: int, axes: list[str]) -> list[int]:
    """Return the place of a rank in its group along each axis."""
    at, sizes = plan.mesh.coordinates(rank), dict(plan.mesh.axes)
    places = list[int]()
    for axis in axes:
        place = 0
        for atom in plan.mesh.atoms_of(axis):
            place = place * sizes[atom] + at[atom]
        places.append(place)
    return places
