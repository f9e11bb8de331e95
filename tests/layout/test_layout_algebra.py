import itertools
import math

import pytest
from hypothesis import given, strategies as st

from autoshard.layout.layout import Layout
from autoshard.layout.shards import VirtualMesh

DIMS = ("batch", "seq", "hidden")
ATOMS = ("a", "b", "c")
MESHES = st.fixed_dictionaries(dict.fromkeys(ATOMS, st.integers(1, 4)))
SIZES = st.fixed_dictionaries(dict.fromkeys(DIMS, st.integers(1, 24)))


@st.composite
def layouts(draw):
    """A layout of three dims: every atom cuts one of them, is pending, or has no use."""
    cuts = {dim: [] for dim in DIMS}
    sums = []
    for atom in draw(st.permutations(ATOMS)):
        place = draw(st.sampled_from([*DIMS, "+", ""]))
        if place == "+":
            sums.append(atom)
        elif place:
            cuts[place].append(atom)
    return Layout(dims=tuple((dim, tuple(cut)) for dim, cut in cuts.items()), sums=tuple(sorted(sums)))


def _shapes(layout, sizes, atoms):
    """The shape of every different share, from the ranks of a virtual mesh."""
    mesh = VirtualMesh(atoms=tuple(atoms.items()))
    cutting = {atom for _, cut in layout.dims for atom in cut}
    for rank in range(mesh.num_ranks):
        if all(place == 0 for atom, place in mesh.coordinates(rank).items() if atom not in cutting):
            bounds = [mesh.bounds(rank, sizes[dim], cut) for dim, cut in layout.dims]
            yield tuple(stop - start for start, stop in bounds)


@given(layouts(), SIZES, MESHES)
def test_the_local_shape_is_that_of_the_largest_share(layout, sizes, atoms):
    largest = tuple(max(column) for column in zip(*_shapes(layout, sizes, atoms), strict=True))
    assert layout.local_shape(sizes, atoms) == largest


@given(layouts(), SIZES, MESHES)
def test_a_layout_has_a_fault_just_where_a_dim_has_fewer_elements_than_parts(layout, sizes, atoms):
    finer = [dim for dim, cut in layout.dims if math.prod(atoms[atom] for atom in cut) > sizes[dim]]
    assert [fault.where for fault in layout.faults(atoms, sizes)] == finer


def test_all_faults_are_told_at_once():
    layout = Layout.parse("[batch/dp, sec/cp, hidden/qq] +ep ^cp")
    faults = layout.faults({"edp": 2, "ep": 2, "cp": 8}, {"batch": 3, "seq": 8, "hidden": 8})
    assert [str(fault) for fault in faults] == [
        "unknown atom 'qq'. Known: cp, dp, edp, ep.",
        "an atom both cuts and is pending: ['ep', 'cp']",
        "batch: 3 cannot be cut into 4 (dp). Use atoms whose product is at most 3",
        "sec: no such dim. Did you mean seq?",
    ]


def test_an_atom_of_size_one_may_cut_and_be_pending_because_it_does_neither():
    assert (
        Layout.parse("[batch/dp, seq/cp.tp, hidden] +ep").faults(
            {"edp": 4, "ep": 1, "cp": 2, "kv": 2, "rep": 1}, {"batch": 4, "seq": 8, "hidden": 8}
        )
        == ()
    )


@pytest.mark.parametrize(("one", "two"), list(itertools.combinations(["cuts", "+", "^"], 2)))
def test_an_atom_has_one_use(one, two):
    uses = {one, two}
    dims = (("seq", ("cp",) if "cuts" in uses else ()),)
    layout = Layout(dims=dims, sums=("cp",) if "+" in uses else (), maxima=("cp",) if "^" in uses else ())
    assert [fault.message for fault in layout.faults({"cp": 2})] == ["an atom both cuts and is pending: ['cp']"]
