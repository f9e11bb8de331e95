"""The mesh on its nodes: a square for every rank, coloured by its place on an axis, with its groups to point at."""

from autoshard.plan.plan import Plan
from autoshard.report.page.elements import Markup, figure_of, section, table, tag
from autoshard.report.page.shown import AXES
from autoshard.report.page.timeline import shown_ranks
from autoshard.report.sheet import Cell, Node, Table
from autoshard.units import format_bytes, format_count

MOST_RANKS = 640
_COLOURS = 8
_WORDS = {"tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline", "dp": "data"}


def mesh_section(name: str, plan: Plan, data: Node) -> Markup:
    """Return the axes with their groups and links, and the nodes."""
    rows: list[tuple[Cell, ...]] = [
        (
            f"{axis['axis'].value} ({_WORDS[axis['axis'].value]})",
            axis["size"].figure(str),
            _spread(axis["num_nodes"]),
            axis["link"].value,
            axis["bandwidth_bytes_per_s"].figure(lambda rate: format_count(rate, "B/s")),
            axis["sent_bytes"].figure(format_bytes),
            ", ".join(map(str, axis["neighbours"].value)) + (", ..." if axis["size"].value > 8 else ""),
        )
        for axis in data["axes"]
    ]
    columns = ("axis", ">ranks in a group", "spread", "slowest link crossed", ">its rate",
               ">busiest rank sends in a step", "group of rank 0")  # fmt: skip
    about = "Ranks that share a group exchange data. Point at a rank to see its group on the axis that is chosen."
    axes = table(Table("Axes of the mesh", columns, rows)) if rows else tag("p", "One rank: nothing is sent.")
    return section(name, "Mesh", axes, _nodes(plan), about=about)


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
            colour = places[axes.index(coloured)] % _COLOURS if axes else 0
            cells.append(tag("i", class_=f"k{colour}", data_rank=rank, data_at=".".join(map(str, places))))
        boxes.append(tag("div", tag("span", f"node {node}"), tag("div", cells, class_="cells"), class_="node"))
    choices = (
        tag("label", tag("input", type="radio", name="axis", value=place, checked=axis == coloured), f" {axis}")
        for place, axis in enumerate(axes)
    )
    left_out = cluster.num_nodes - count
    note = f"{count} of {cluster.num_nodes} nodes are drawn, at equal distances." if left_out else None
    return figure_of(
        tag("span", f"Ranks on {'nodes' if count > 1 else 'the node'}, coloured by place on ", choices, class_="axes"),
        tag("div", boxes, class_="nodes", data_axes=" ".join(axes)),
        tag("p", note, class_="about") if note else None,
    )


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
