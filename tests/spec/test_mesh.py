"""Meshes: which ranks form a group, compared with what neuronx-distributed documents."""

import itertools
import json
import math

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.spec.cluster import Placement
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.mesh import ATOMS, Mesh, axis_levels_bytes_per_s, level_bandwidths_bytes_per_s
from autoshard.spec.record import decode, encode

NODES = (
    ("trn1.32xlarge", None),
    ("trn2.48xlarge", 2),
    ("trn2.48xlarge", 1),
    ("trn2u.48xlarge", 2),
    ("p4d.24xlarge", None),
)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Any mesh over one or more whole nodes with any placement."""
    sizes = draw(st.lists(st.sampled_from((1, 2, 3, 4)), min_size=6, max_size=6))
    names = draw(st.permutations(ATOMS))
    total = math.prod(sizes)
    per_node = draw(st.sampled_from([size for size in range(1, min(total, 64) + 1) if total % size == 0]))
    placement = Placement(local_ranks=tuple(draw(st.permutations(range(per_node)))))
    return Mesh(axes=tuple(zip(names, sizes, strict=True)), ranks_per_node=per_node, placement=placement)


@st.composite
def names_of_axes(draw: st.DrawFn) -> list[str]:
    """Some atoms or axes, none twice."""
    chosen = draw(st.lists(st.sampled_from(("pp", "dp", "cp", "tp")), unique=True))
    parts = {"dp": ["edp", "ep"], "tp": ["rep"]}
    return [part for name in chosen for part in (parts.get(name, [name]) if draw(st.booleans()) else [name])]


@given(meshes(), names_of_axes(), st.data())
def test_groups_part_the_ranks_and_their_members_differ_only_along_the_axes(
    mesh: Mesh, names: list[str], data: st.DataObject
):
    rank = data.draw(st.integers(0, mesh.num_ranks - 1))
    group, groups = mesh.group_of(rank, names), mesh.groups(names)
    assert sorted(member for each in groups for member in each) == list(range(mesh.num_ranks))
    assert {len(each) for each in groups} == {math.prod(mesh.size(name) for name in names)}
    assert rank in group and group in groups
    along = [atom for name in names for atom in mesh.atoms_of(name)]
    places = [mesh.coordinates(member) for member in group]
    assert len({tuple(place[atom] for atom in place if atom not in along) for place in places}) == 1
    order = [tuple(place[atom] for atom in along) for place in places]
    assert order == sorted(order)


@given(meshes(), st.data())
def test_coordinates_find_their_rank_again(mesh: Mesh, data: st.DataObject):
    rank = data.draw(st.integers(0, mesh.num_ranks - 1))
    coordinates = mesh.coordinates(rank)
    assert mesh.ranks_of(coordinates) == (rank,)
    atom = data.draw(st.sampled_from(ATOMS))
    slab = mesh.ranks_of({atom: coordinates[atom]})
    assert rank in slab
    assert len(slab) == mesh.num_ranks // mesh.size(atom)


@given(meshes())
def test_text_and_json_give_the_mesh_back(mesh: Mesh):
    assert Mesh.parse(str(mesh)) == mesh
    assert decode(Mesh, json.loads(json.dumps(encode(mesh)))) == mesh


@st.composite
def laid(draw: st.DrawFn):
    """A cluster and a mesh over the whole of it."""
    name, lnc = draw(st.sampled_from(NODES))
    sizes = {axis: draw(st.sampled_from((1, 2, 3, 4))) for axis in ("pp", "dp", "cp")}
    cluster = load_cluster(name, lnc=lnc)
    sizes["tp"] = draw(st.sampled_from([tp for tp in (1, 4, 8, 32, 64, 128) if tp <= cluster.ranks_per_node]))
    total = math.prod(sizes.values())
    missing = cluster.ranks_per_node // math.gcd(total, cluster.ranks_per_node)
    sizes["dp"] *= missing
    cluster = load_cluster(name, total * missing // cluster.ranks_per_node, lnc)
    sizes["ep"] = math.gcd(sizes["dp"], 2)
    sizes["rep"] = math.gcd(sizes["tp"], draw(st.sampled_from((1, 2, 4))))
    return cluster, Mesh.laid_on(cluster, sizes)


@given(laid(), names_of_axes())
def test_one_stretch_of_the_mesh_tells_the_bandwidth_of_all(both: tuple, names: list[str]):
    cluster, mesh = both
    whole = level_bandwidths_bytes_per_s(cluster, mesh.groups(names))
    assert axis_levels_bytes_per_s(cluster, mesh, names) == pytest.approx(whole)
    repeat = cluster.repeat_ranks
    if mesh.repeats_every(repeat):
        local, _ = mesh.repeated_groups(names, repeat)
        assert cluster.link_of(local[0]) == cluster.link_of(mesh.groups(names)[0])


@given(laid(), names_of_axes())
def test_steps_say_where_the_members_of_a_group_lie(both: tuple, names: list[str]):
    _, mesh = both
    in_order = mesh.ranks_of({})
    steps = mesh.steps(names)
    places = itertools.product(*(range(size) for _, size in steps))
    members = [sum(at * distance for at, (distance, _) in zip(place, steps, strict=True)) for place in places]
    assert mesh.group_of(in_order[0], names) == tuple(in_order[member] for member in members)
    assert all(outer[0] != inner[0] * inner[1] for outer, inner in itertools.pairwise(steps)), "these are one"


def test_one_trn1_node_in_the_order_of_neuronx_distributed():
    # Example 1 of initialize_model_parallel: 32 ranks, tp 8, pp 4.
    mesh = Mesh.laid_on(load_cluster("trn1.32xlarge"), {"tp": 8, "pp": 4})
    assert mesh.groups("tp") == tuple(tuple(range(start, start + 8)) for start in (0, 8, 16, 24))
    assert mesh.groups("pp") == tuple((tp, tp + 8, tp + 16, tp + 24) for tp in range(8))
    assert mesh.groups("dp") == tuple((rank,) for rank in range(32))
    # Example 2: cp 4 in the place of pp.
    assert Mesh.laid_on(load_cluster("trn1.32xlarge"), {"tp": 8, "cp": 4}).groups("cp") == mesh.groups("pp")


def test_expert_groups_are_carved_out_of_dp_as_in_neuronx_distributed():
    # Example 3: 128 ranks, tp 8, pp 4, ep 2.
    mesh = Mesh.laid_on(load_cluster("trn1.32xlarge", 4), {"tp": 8, "pp": 4, "dp": 4, "ep": 2})
    assert mesh.groups("pp")[0] == (0, 32, 64, 96)
    assert mesh.groups("pp")[-1] == (31, 63, 95, 127)
    assert mesh.groups("dp")[0] == (0, 8, 16, 24)
    assert mesh.groups("dp")[-1] == (103, 111, 119, 127)
    assert mesh.groups("edp")[0] == (0, 16)
    assert mesh.groups("edp")[-1] == (111, 127)
    assert mesh.groups("ep")[0] == (0, 8)
    assert mesh.groups("ep")[-1] == (119, 127)
    assert mesh.groups("tp")[-1] == tuple(range(120, 128))


@pytest.mark.parametrize(
    ("name", "rep", "holds"),
    [
        ("trn1.32xlarge", 4, lambda place: place % 8),
        ("trn2.48xlarge", 4, lambda place: place // 4),
        ("h200", 2, lambda place: place // 2),
    ],
)
def test_kv_blocks_repeat_outside_on_trn1_and_inside_elsewhere(name: str, rep: int, holds):
    tp = min(32, load_cluster(name).ranks_per_node)
    cluster = load_cluster(name)
    mesh = Mesh.laid_on(cluster, {"tp": tp, "rep": rep, "dp": cluster.num_ranks // tp})
    for group in mesh.groups("tp"):
        assert [mesh.coordinates(rank)["kv"] for rank in group] == [holds(place) for place in range(tp)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tp=4", "not a mesh"),
        ("tp=4 on ", "not a run"),
        ("tp=x on 0-3", "not a mesh"),
        ("tp=4,,dp=1 on 0-3", "not a mesh"),
        ("tq=4 on 0-3", "'tq' is not an axis. Known: cp"),
        ("tp=4,tp=1 on 0-3", "appears twice"),
        ("tp=2,kv=2 on 0-3", "tp appears both as a whole and as atoms"),
        ("tp=0 on 0-3", "must be at least 1, not 0"),
        ("tp=6 on 0-3", "6 ranks do not fill nodes of 4"),
    ],
)
def test_wrong_meshes_and_axes_are_refused(text: str, says: str):
    with pytest.raises(InputError, match=says):
        Mesh.parse(text)
    for names, fault in (("dq", "'dq' is not an axis"), (["tp", "tp"], "tp is named twice")):
        with pytest.raises(InputError, match=fault):
            Mesh.parse("dp=2,tp=4 on 0-7").groups(names)


@pytest.mark.parametrize(
    ("sizes", "faults"),
    [({"tp": 8, "dp": 2, "ep": 4, "rep": 3}, ["ep", "rep", "dp"]), ({"tp": 0, "pd": 2}, ["pd", "tp"])],
)
def test_sizes_that_do_not_fit_the_cluster_are_refused_together(sizes: dict[str, int], faults: list[str]):
    with pytest.raises(InputError) as caught:
        Mesh.laid_on(load_cluster("trn1.32xlarge"), sizes)
    assert [fault.where for fault in caught.value.faults] == faults
